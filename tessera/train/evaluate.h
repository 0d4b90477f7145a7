#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "tessera/comm/group.h"
#include "tessera/data/corpus.h"
#include "tessera/train/forward_engine.h"

namespace tessera {

struct Evaluation {
  double loss = 0;           ///< mean nats per target, over all windows
  double bits_per_byte = 0;  ///< of the text that the targets stand for
  int64_t tokens = 0;        ///< targets
};

/// Loss of a model on every window of `corpus`, dealt over `group`, the ranks that hold the same of it; equal on all ranks. Collective. The model is put into
/// evaluation mode meanwhile (no dropout) and keeps no graph. Ranks that hold its stages read what their stages take, those that sequences are cut over
/// their columns, and no stage waits between micro-batches. Traffic: one all-reduce of a number over either, one broadcast of it to the stages, and what
/// forward passes send.
Evaluation evaluate(ForwardEngine& engine, std::shared_ptr<const data::Corpus> corpus, int64_t seq_len, int64_t micro_size, const comm::Group& group);

/// The same, unless `given_up` says that nobody needs it any more: then nothing. It is asked before each round of micro-batches, as often on every rank, and
/// says the same on all of them before the same round.
std::optional<Evaluation> evaluate(ForwardEngine& engine, std::shared_ptr<const data::Corpus> corpus, int64_t seq_len, int64_t micro_size,
                                   const comm::Group& group, const std::function<bool()>& given_up);

}  // namespace tessera
