#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "tessera/comm/group.h"

/// Timing collectives: what to run (workload.h), for how long (measure.h), and how to show it (row.h, plot.h). `tessera bench comm` is made of these.
namespace tessera::bench {

/// Where a workload's tensors live.
enum class Buffers {
  Plain,   ///< ordinary memory: an engine between processes has to copy them
  Shared,  ///< comm::empty: memory in which the engine can reduce in place, where it has such memory; ordinary otherwise
};

/// What to run.
struct Case {
  std::string op;                     ///< one of operation_names()
  int64_t bytes = 0;                  ///< size of the whole: the reduced tensor, the gathered result, what is scattered or dealt, the message
  at::ScalarType dtype = at::kFloat;  ///< of the elements
  Buffers buffers = Buffers::Plain;
  at::Device device = at::kCPU;  ///< where its tensors lie
};

/// all_reduce, reduce, all_gather, reduce_scatter, all_to_all, broadcast, gather, scatter; send (rank 0 to rank 1, the others idle) and
/// send_recv (every rank to the next, at once). Roots are rank 0.
std::vector<std::string> operation_names();

/// Bytes that cross a rank's link, over the bytes of the whole, in the best algorithm (the bus bandwidth of nccl-tests): it makes the bandwidths of
/// different operations and world sizes comparable with the link's.
///   all_reduce                                                         2 (n-1)/n
///   all_gather, reduce_scatter, all_to_all, gather, scatter              (n-1)/n
///   reduce, broadcast, send, send_recv                                      1
/// Throws InternalError for an unknown op.
double bus_factor(const std::string& op, int ranks);

struct Measured;

/// One collective on tensors of its own, to be run again and again. All ranks of the group make the same workloads and the same calls on them.
/// Memory: the whole once or twice, as the op needs; `check` needs the result once more.
class Workload {
 public:
  /// Where the parts of n ranks matter, the whole is rounded down to n equal parts, of one element at least. Throws InternalError for an unknown op.
  Workload(const comm::Group& group, const Case& what);

  /// One call.
  void run();

  /// Runs it once on data whose sums are exact in every dtype of one byte or more (up to 31 ranks), and compares every element of this rank's result.
  /// Collective. Throws CommError on every rank where any rank's is wrong, naming op, group, rank, element and both values. Leaves zeros behind, so that runs
  /// after it neither overflow nor meet subnormal numbers.
  void check();

  /// Bytes of the whole after rounding.
  int64_t whole_bytes() const { return whole_ * element_bytes_; }

 private:
  comm::Group group_;
  const Measured& operation_;
  at::Device device_;
  int64_t element_bytes_;
  int64_t part_, whole_;  ///< elements
  at::Tensor in_, out_;   ///< the same tensor where the op works in place; undefined on ranks that have none
};

}  // namespace tessera::bench
