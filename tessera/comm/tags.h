#pragma once

/// Tags of messages between two ranks. Messages stand in no order with collectives and are matched by tag, so those of which collectives are made have tags
/// that no caller may use.
namespace tessera::comm {

/// Callers' tags are 0 .. kEndOfTags - 1. MPI says itself how far they go there, and promises 32767 alone: its engine refuses those above, and sends ours,
/// which are beyond any such limit, under small tags apart from callers' messages (backends/mpi/plugin/lane.h). So ours follow kEndOfTags and stay few.
inline constexpr int kEndOfTags = 1 << 22;

inline constexpr int kPlanTag = kEndOfTags;        ///< of all messages that a program sends (algorithms/execute.h)
inline constexpr int kHandOnTag = kEndOfTags + 1;  ///< of a reduce on two levels: from the leader of the root's host to the root

}  // namespace tessera::comm
