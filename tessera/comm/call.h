#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/operation.h"

namespace tessera::comm {

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
  std::optional<Op> asked{};                           ///< of truth values, whose bytes are reduced: the reduction that the caller asked for; else empty
  bool async = true;                                   ///< false: the caller waits at once
  std::optional<std::chrono::milliseconds> timeout{};  ///< of this call alone, for engines that take one (gloo, mpi, nccl); empty: the group's

  bool is_message() const { return op == Operation::Send || op == Operation::Recv; }
  bool has_splits() const { return !in_splits.empty() || !out_splits.empty(); }
  /// Whether it is work of an accelerator, behind which the host goes on.
  bool is_on_device() const { return tensor().defined() && !tensor().is_cpu() && !tensor().is_meta(); }
  /// What moves, or its first part; undefined for barrier.
  const at::Tensor& tensor() const;
  c10::ScalarType dtype() const { return tensor().defined() ? tensor().scalar_type() : c10::ScalarType::Undefined; }
  /// What messages and records say of the call, in its caller's words.
  std::optional<Op> named_reduction() const { return asked ? asked : reduction; }
  c10::ScalarType named_dtype() const { return asked ? c10::ScalarType::Bool : dtype(); }
  /// Shape of the whole in a group of `ranks`: the reduced tensor, the gathered result, what is scattered or dealt; {0} for barrier.
  std::vector<int64_t> whole(int ranks) const;
  /// Bytes of the whole.
  int64_t bytes(int ranks) const;
};

}  // namespace tessera::comm
