#include "tessera/train/evaluate.h"

#include <utility>
#include <vector>

#include <ATen/ops/full.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/host_read.h"
#include "tessera/data/sequential_loader.h"

namespace tessera {
namespace {

/// The next micro-batches of this rank, at most so many.
std::vector<data::MicroBatch> next_of(data::SequentialLoader& loader, size_t most) {
  std::vector<data::MicroBatch> found;
  while (found.size() < most) {
    auto micro = loader.next();
    if (!micro) break;
    found.push_back(std::move(*micro));
  }
  return found;
}

}  // namespace

Evaluation evaluate(ForwardEngine& engine, std::shared_ptr<const data::Corpus> corpus, int64_t seq_len, int64_t micro_size, const comm::Group& group) {
  return *evaluate(engine, std::move(corpus), seq_len, micro_size, group, [] { return false; });
}

std::optional<Evaluation> evaluate(ForwardEngine& engine, std::shared_ptr<const data::Corpus> corpus, int64_t seq_len, int64_t micro_size,
                                   const comm::Group& group, const std::function<bool()>& given_up) {
  data::SequentialLoader loader(std::move(corpus), seq_len, micro_size, group.rank(), group.size(), engine.reads(), engine.columns().share());
  double sum = 0;  // of the micro-batches one by one, so that it does not depend on how many are on their way at once
  for (auto micro_batches = next_of(loader, engine.in_flight()); !micro_batches.empty(); micro_batches = next_of(loader, engine.in_flight())) {
    if (given_up()) return std::nullopt;
    for (const double loss : host_read_all(engine.loss_sums(micro_batches), 0.0)) sum += loss;
  }
  const at::Tensor total = at::full({1}, sum, at::device(at::kCPU).dtype(at::kDouble));
  comm::all_reduce(group, total);
  comm::all_reduce(engine.columns().group, total);
  engine.share(total);
  const double nats = host_read(total, 0.0);
  return Evaluation{.loss = nats / static_cast<double>(loader.global_valid_tokens()),
                    .bits_per_byte = data::bits_per_byte(nats, loader.global_bytes()),
                    .tokens = loader.global_valid_tokens()};
}

}  // namespace tessera
