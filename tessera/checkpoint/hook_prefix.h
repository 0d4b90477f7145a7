#pragma once

namespace tessera::checkpoint {

/// What the names of a communication hook's tensors begin with in a checkpoint (train/hook_state.h). Whoever wants weights and optimizer state ignores them.
inline constexpr const char* kHookPrefix = "hook.";

}  // namespace tessera::checkpoint
