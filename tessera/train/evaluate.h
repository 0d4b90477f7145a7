#pragma once

#include <cstdint>
#include <memory>

#include "tessera/comm/group.h"
#include "tessera/data/corpus.h"
#include "tessera/train/engine.h"

namespace tessera {

struct Evaluation {
  double loss = 0;           ///< mean nats per target, over all windows
  double bits_per_byte = 0;  ///< of the text that the targets stand for
  int64_t tokens = 0;        ///< targets
};

/// Loss of `model` on every window of `corpus`, dealt over `group`; equal on all ranks. Collective. The model is put into evaluation mode
/// meanwhile (no dropout) and keeps no graph. Traffic: one all-reduce of a number.
Evaluation evaluate(ForwardEngine engine, std::shared_ptr<const data::Corpus> corpus, int64_t seq_len, int64_t micro_size, const comm::Group& group);

}  // namespace tessera
