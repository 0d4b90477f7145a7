#pragma once

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/group.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/narrow_sum.h"
#include "tessera/nn/parameter.h"
#include "tessera/zero/shard_layout.h"
#include "tessera/zero/sharded_data_parallel.h"

/// The memory of ShardedDataParallel. Not part of the public surface.
namespace tessera {

/// Memory in which the buckets of a step take turns: what one gives back the next one fills, where it is large enough. Shared memory would otherwise be taken
/// from the system, and cleared by it, for every bucket of every step.
class GradientMemory {
 public:
  explicit GradientMemory(comm::Group group) : group_(std::move(group)) {}

  at::Tensor take(int64_t numel, const at::TensorOptions& options);  ///< [numel or more], undefined in content
  void give_back(at::Tensor block) { spare_.push_back(std::move(block)); }
  void clear();  ///< what was given back goes to the system

 private:
  comm::Group group_;
  std::vector<at::Tensor> spare_;
};

/// How a bucket holds gradients, and sends them.
struct GradientForm {
  at::ScalarType dtype = at::kFloat;           ///< held in, and added up
  std::optional<at::ScalarType> network = {};  ///< cross the network in, where that is narrower
  bool keeps_whole = false;  ///< they stay whole from step to step, and this rank's part is a view of them; else it has its own memory, and they come and go
  bool passes_on = false;    ///< this rank's part, too: it goes elsewhere as soon as it is summed
};

/// One bucket of a rank: parameters, of which all ranks hold all, and gradients, of which a rank keeps its part.
class FlatBucket {
 public:
  /// Moves the bucket's parameters into one flat tensor, row-major, and makes them views of it. Gradients lie in `memory`, and what crosses is counted in
  /// `statistics`: both must outlive the bucket.
  FlatBucket(const ShardLayout& layout, const ShardLayout::Bucket& bucket, const std::vector<nn::NamedParameter>& parameters, const ShardGroups& groups,
             GradientForm form, GradientMemory& memory, SynchronizationStatistics& statistics);

  /// Makes room for this rank's part of the gradients, where there is none; of buckets that are trained at once, the constructor does.
  void hold_part();

  /// Makes room for whole gradients, where there is none. Padding is zero: it is summed, too.
  void hold_gradients();

  /// Where the gradient of a slot's parameter belongs; makes room.
  at::Tensor place(size_t slot);
  /// Brings the gradient of a slot's parameter to its place, and makes it a view of that: zeros where there is none. Whether those of other slots moved, too.
  bool take_gradient(size_t slot);
  /// Zeros in the place of a parameter that has no part in this step, and keeps its own.
  void leave_out(size_t slot);

  /// Whether the slot's parameter lies elsewhere by now: torch::load, set_data and vector_to_parameters give it another storage.
  bool is_replaced(size_t slot) const;
  /// Takes its values in, which have the form of those before, and makes it a view of the bucket again. Aliases that the program keeps of what it was there
  /// keep its values.
  void take_parameter(size_t slot);

  /// Starts the sum over the group. `add`: this rank's part is added to what it holds; otherwise it is replaced. `last`: of the step.
  void start_reduce(bool add, bool last);
  /// Waits for what is under way; whole gradients go, where they do not stay. Of the last sum of a step the part then goes on to meet those of the other
  /// replicas, if there are any: false, and it is to be called again. `before_replicas` is called before it goes.
  bool advance_reduce(const std::function<void()>& before_replicas = {});
  /// Lets go of this rank's part, which was taken elsewhere.
  void release_part() { release_scratch(gradient_part_); }
  /// Lets go of it without waiting, and of the memory in which the engine may still write: hold_part before there is another.
  void drop_reduce();

  const ShardLayout::Bucket& plan() const { return bucket_; }
  const at::Tensor& parameters() const { return parameters_; }        ///< [part * ranks]
  at::Tensor parameter_part() const { return part_of(parameters_); }  ///< [part], a view
  const at::Tensor& gradient_part() const { return gradient_part_; }  ///< [part]; undefined before hold_part
  const at::TensorOptions& gradient_options() const { return gradient_options_; }

 private:
  at::Tensor part_of(const at::Tensor& whole) const { return whole.narrow(0, group_.rank() * bucket_.part, bucket_.part); }
  at::Tensor parameter_view(size_t slot) const;
  void move_parameters();
  void leave_places();
  void release_gradients();
  const at::Tensor& crossing(const at::Tensor& terms, const comm::Group& group);

  ShardLayout::Bucket bucket_;
  int64_t numel_;
  std::vector<at::Tensor> tensors_;  ///< the parameters, by slot
  std::vector<std::vector<int64_t>> sizes_;
  std::vector<at::Storage> storages_;  ///< theirs, over the bucket
  comm::Group group_, replicas_;
  GradientForm form_;
  GradientMemory* memory_;
  SynchronizationStatistics* statistics_;
  at::TensorOptions gradient_options_;
  at::Tensor parameters_, gradients_, gradient_part_;
  at::Tensor block_;                 ///< what gradients_ is the beginning of
  std::vector<at::Tensor> views_;    ///< of gradients_, by slot
  std::optional<NarrowSum> narrow_;  ///< of the reduction under way
  comm::Pending reduction_;
  bool adding_ = false, last_ = false;  ///< it
  bool across_ = false;                 ///< it is that of the replicas
};

}  // namespace tessera
