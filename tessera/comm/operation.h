#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera::comm {

/// What an engine does.
enum class Operation : uint8_t { AllReduce, Reduce, AllGather, ReduceScatter, AllToAll, Broadcast, Gather, Scatter, Send, Recv, Barrier };

/// Their names in messages, records, tables and knobs.
inline constexpr std::array<std::string_view, 11> kOperationNames{"all_reduce", "reduce",  "all_gather", "reduce_scatter", "all_to_all", "broadcast",
                                                                  "gather",     "scatter", "send",       "recv",           "barrier"};
constexpr std::string_view to_string(Operation op) { return kOperationNames[static_cast<size_t>(op)]; }

/// How the elements of several ranks become one. Averaging is the caller's division: who divides, and by what, is part of a technique.
enum class Op : uint8_t { Sum, Product, Min, Max };

inline constexpr std::array<std::string_view, 4> kReductionNames{"sum", "product", "min", "max"};
constexpr std::string_view to_string(Op reduction) { return kReductionNames[static_cast<size_t>(reduction)]; }

}  // namespace tessera::comm
