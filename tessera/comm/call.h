#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"

namespace tessera::comm {

/// What an engine does.
enum class Operation { AllReduce, Reduce, AllGather, ReduceScatter, AllToAll, Broadcast, Gather, Scatter, Send, Recv, Barrier };

/// Their names in messages, records, tables and knobs: all_reduce, reduce, all_gather, reduce_scatter, all_to_all, ...
inline constexpr std::array<std::string_view, 11> kOperationNames{"all_reduce", "reduce",  "all_gather", "reduce_scatter", "all_to_all", "broadcast",
                                                                  "gather",     "scatter", "send",       "recv",           "barrier"};
constexpr std::string_view to_string(Operation op) { return kOperationNames[static_cast<size_t>(op)]; }

/// sum, product, min, max.
constexpr std::string_view to_string(Op reduction) { return std::array<std::string_view, 4>{"sum", "product", "min", "max"}[static_cast<size_t>(reduction)]; }

/// One call of an engine: all that a collective or a message says of itself on its way down.
struct Call {
  Operation op = Operation::Barrier;
  std::vector<at::Tensor> inputs{};   ///< what this rank gives; of a scatter's root, a tensor for each rank
  std::vector<at::Tensor> outputs{};  ///< what this rank gets; the same tensor where the op works in place; of a gather's root, a tensor for each rank
  int peer = -1;                      ///< root, destination or source, in the group; -1 where there is none
  int tag = 0;
  std::vector<int64_t> in_splits{};                    ///< rows to each rank (all_to_all); empty means equal parts
  std::vector<int64_t> out_splits{};                   ///< rows from each rank (all_to_all); empty means equal parts
  std::optional<Op> reduction{};                       ///< of the ops that reduce
  bool async = true;                                   ///< false: the caller waits at once
  std::optional<std::chrono::milliseconds> timeout{};  ///< of this call alone, for engines that take one (gloo, mpi, nccl); empty: the group's

  bool is_message() const { return op == Operation::Send || op == Operation::Recv; }
  /// What moves, or its first part; undefined for barrier.
  const at::Tensor& tensor() const;
  c10::ScalarType dtype() const { return tensor().defined() ? tensor().scalar_type() : c10::ScalarType::Undefined; }
  /// Shape of the whole in a group of `ranks`: the reduced tensor, the gathered result, what is scattered or dealt; {0} for barrier.
  std::vector<int64_t> whole(int ranks) const;
  /// Bytes of the whole.
  int64_t bytes(int ranks) const;
};

}  // namespace tessera::comm
