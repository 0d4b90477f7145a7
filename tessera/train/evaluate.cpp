#include "tessera/train/evaluate.h"

#include <ATen/ops/full.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/host_read.h"
#include "tessera/data/sequential_loader.h"

namespace tessera {

Evaluation evaluate(ForwardEngine engine, std::shared_ptr<const data::Corpus> corpus, int64_t seq_len, int64_t micro_size, const comm::Group& group) {
  data::SequentialLoader loader(std::move(corpus), seq_len, micro_size, group.rank(), group.size());
  double sum = 0;
  while (auto micro = loader.next()) sum += host_read(engine.loss_sum(micro->tokens, micro->labels), 0.0);
  const at::Tensor total = at::full({1}, sum, at::dtype(at::kDouble));
  comm::all_reduce(group, total);
  const double nats = host_read(total, 0.0);
  return {.loss = nats / static_cast<double>(loader.global_valid_tokens()),
          .bits_per_byte = data::bits_per_byte(nats, loader.global_bytes()),
          .tokens = loader.global_valid_tokens()};
}

}  // namespace tessera
