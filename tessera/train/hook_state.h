#pragma once

#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/group.h"
#include "tessera/data_parallel/communication_hook.h"
#include "tessera/train/inputs.h"

namespace tessera {

/// What a checkpoint's names of a communication hook's tensors begin with. Whoever wants weights alone ignores them.
inline constexpr const char* hook_prefix = "hook.";

/// What a communication hook carries from step to step, as a checkpoint keeps it: "hook.<name>". Where ranks hold different values (HookTensor::Across::Sum)
/// the logical tensor has one more dimension in front, the ranks of `data`, and each rank holds its own row. Where layers are cut over several ranks of
/// `tensor`, each has its own, "hook.<name>@tp0of2". Views; `hook` may be null.
std::vector<checkpoint::SlicedTensor> hook_tensors(const CommunicationHook* hook, const comm::Group& data, const comm::Group& tensor);

/// Fills what `hook` carries from a checkpoint of any layout. On as many ranks as saved it, each gets its own back, to the bit. On another number, the saved
/// rows are dealt over the ranks and added up, so that their sum stays. What the checkpoint does not have, or has in another shape (another rank of the
/// approximation), starts afresh. Returns what is to be said aloud, of all ranks of `tensor`, over which layers are cut and which carry other tensors each:
/// what starts afresh, and what is left unread. Collective over `tensor`.
std::vector<std::string> load_hook_state(const CommunicationHook* hook, const ResumePoint& resume, const comm::Group& data, const comm::Group& tensor,
                                         bool verify);

}  // namespace tessera
