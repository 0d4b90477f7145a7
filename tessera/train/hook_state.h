#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/group.h"
#include "tessera/train/compose.h"
#include "tessera/train/inputs.h"

namespace tessera {

/// Hooks, and whose gradients they compress. A loop of one's own whose model is whole: `{.parts = {{hook.get(), 0}}}`.
struct HookShares {
  struct Part {
    const CommunicationHook* hook;
    int stage;
  };
  std::vector<Part> parts{};  ///< of the model on this rank
  comm::Group layers{};       ///< ranks that layers are cut over
  comm::Group pipeline{};     ///< ranks that hold the other stages
  bool tied_copies = false;   ///< the first and the last stage have a copy each of the embedding
  std::map<std::string, std::string>
      experts{};                           ///< of parameters that are dealt over those ranks otherwise than by the layers' cut: what tells this rank's part
  std::optional<double> gradient_scale{};  ///< what the gradients that the hooks see are multiplied by (precision::LossScale::value); none: what it was
};
HookShares hook_shares(const Composition& run);

/// What the communication hooks of a run's parts carry from step to step, as a checkpoint keeps it: "hook.<name>". Where ranks hold different values
/// (HookTensor::Across::Sum, Mean) the logical tensor has one more dimension in front, the ranks of `data`, and each rank holds its own row. Names are the
/// parameters', so it does not matter which stage has them; of what the first and the last stage both have (tied embeddings) there is a row for each copy, and
/// what all ranks of one copy hold alike is the last stage's under "hook.<name>@last". Where layers are cut over several ranks, each has its own,
/// "hook.<name>@tp0of2", of experts with what tells its part of them behind a point. Views.
std::vector<checkpoint::SlicedTensor> hook_tensors(const HookShares& hooks, const comm::Group& data);

/// Fills what the hooks carry from a checkpoint of any layout. On as many ranks as saved it, each gets its own back, to the bit. On another number, the saved
/// rows are dealt over the ranks and added up, so that their sum stays, or where gradients are averaged their mean. Of rows that were carried under another
/// loss scale (progress.loss_scale of the checkpoint, LossScale::state) the sum is multiplied by the quotient. What the checkpoint does not have, or has
/// in another shape (another rank of the approximation), starts afresh. Returns what is to be said aloud, of all ranks that hold other parts of the model: what
/// starts afresh, and what is left unread. Collective over the ranks of the pipeline and those that layers are cut over.
std::vector<std::string> load_hook_state(const HookShares& hooks, const ResumePoint& resume, const comm::Group& data, bool verify);

}  // namespace tessera
