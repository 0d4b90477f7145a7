#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/group.h"
#include "tessera/fsdp/unit_layout.h"
#include "tessera/memory/filed_tensor.h"
#include "tessera/memory/host_link.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/parameter.h"

namespace tessera {

/// Parameters of one unit that travel together: of one dtype, all trained or all frozen when they were wrapped. Owns the memory of this rank's slices, of the
/// gathered whole, and of gradients in both forms; the parameters themselves stay the model's own tensors, which are pointed at one or the other.
///
/// With a HostLink, slices of parameters and of reduced gradients lie on the host: a gather begins with a copy of this rank's slice into its part of the whole,
/// a reduction ends with a copy of the reduced slice, and both run beside the device's computing. With a TensorFile they lie in it, and a slice is read to the
/// host for that copy.
class FlatParameters {
 public:
  struct Dtypes {
    at::ScalarType gathered;  ///< of the whole parameters, while in use
    at::ScalarType summed;    ///< of whole gradients, while they wait for their reduction
    at::ScalarType reduced;   ///< of gradients on their way
    at::ScalarType kept;      ///< of this rank's slices of the reduced gradients
  };

  /// What lies beside the device. Neither: all of it is there.
  struct Beside {
    std::shared_ptr<const HostLink> host{};  ///< slices lie on the host
    std::shared_ptr<TensorFile> file{};      ///< and there in this file; only beside `host`
  };

  /// Parameters on meta get memory on `device`, undefined in content; others keep their device and their values' rows. From here on each is this rank's
  /// slice, and carries it (nn::slice_of). Not collective.
  FlatParameters(std::vector<nn::NamedParameter> parameters, comm::Group group, Dtypes dtypes, at::Device device, const Beside& beside);

  const std::vector<nn::NamedParameter>& parameters() const { return parameters_; }
  const UnitLayout& layout() const { return layout_; }
  /// What `rank` of the group has of parameter `index`.
  Slice slice_on(int rank, size_t index) const;
  /// Whether any of them had requires_grad set when follow_requires_grad was called last; `too`: or before that.
  bool trained() const { return trained_; }
  void follow_requires_grad(bool too);
  /// What parameters, and views of them, lie in: while they are whole, and, each in one of its own, while they are slices. The latter is another after take_in.
  const c10::StorageImpl* whole_storage() const { return whole_.storage().unsafeGetStorageImpl(); }
  const c10::StorageImpl* slice_storage(size_t index) const { return slice_memory(index).unsafeGetStorageImpl(); }
  const at::Storage& slice_memory(size_t index) const { return slice_storages_[index]; }
  /// Parameter `index` with its whole shape, whatever the parameter itself shows; with memory while the unit is gathered.
  const at::Tensor& whole_view(size_t index) const { return whole_views_[index]; }
  /// This rank's rows of it, whatever the parameter itself shows.
  at::Tensor slice_view(size_t index) const;
  /// The parameter that `whole` shows all of, in its whole shape; nothing for other views.
  std::optional<size_t> find_whole(const at::Tensor& whole) const;
  at::IntArrayRef slice_sizes(size_t index) const { return slice_sizes_[index]; }
  /// What reading the whole says while it has no memory.
  void set_complaint(std::string text);
  const Dtypes& dtypes() const { return dtypes_; }
  int64_t gathered_bytes() const;
  at::Device device() const { return whole_.device(); }  ///< that computes with them
  int64_t reduced_bytes() const;                         ///< of whole gradients
  int64_t local_bytes() const;
  int64_t tied_bytes() const;  ///< of the slices once more for each further name that their parameters have

  /// Whether a parameter lies in memory of neither: the program put another tensor in its place (torch::load, set_data).
  bool is_replaced() const;
  /// Then takes in what was put there: of a whole one this rank's rows, of a slice all. Parameters have to be shown anew. Aliases of a slice that the program
  /// keeps (data(), to put it back later) keep its values, in memory of their own. Throws ConfigError, by name, for another shape or dtype, and for a slice
  /// that is cut out of more than `limit` bytes, which are no slices'.
  void take_in(size_t limit);

  void show_slices();  ///< each parameter is this rank's rows
  void show_whole();   ///< each parameter has its whole shape; with memory between start_gather or allocate, and release

  /// With a file: begins to read the slices, for the gather that comes. Whoever sees the slices before that ends it.
  void begin_read();
  void let_go();        ///< with a file: nobody needs what is in it in memory for now
  void start_gather();  ///< [part] of every rank -> the whole; in flight until finish_gather, which does nothing where this ended by an exception
  void finish_gather();
  /// While gathered: throws ConfigError, by name, where ranks were given the same rows as their slices, until another tensor is taken in.
  void check_given() { refuse_one_ranks_slices(whole_); }
  void allocate();     ///< memory for the whole, undefined in content
  void release();      ///< the whole gives its memory back; the tensors, and views that autograd keeps, stay
  void keep_slices();  ///< this rank's rows <- the whole
  /// Each parameter gets memory of its own with its whole value, and the Slice that it had before. Collective. Nothing else may be called afterwards.
  void unshard();

  /// Adds a whole gradient of parameter `index` (any floating-point dtype) to what waits for the reduction; nothing to do where it was computed in its place.
  void take_up(size_t index, const at::Tensor& gradient);

  /// Whether a gradient of parameter `index` may be computed where it is reduced; not where another one lies, or is being computed, there.
  bool offers_place(size_t index) const;
  /// That place, of the parameter's whole shape, undefined in content.
  at::Tensor place(size_t index);

  /// What was taken up for parameter `index` since the last reduction does not count.
  void forget(size_t index);

  /// Sum over the group of what was taken up (zeros where nothing was) -> this rank's slices, added to those of earlier reductions of the step. What is taken
  /// up from here on waits for the next one. Slices are scaled by `scale` here, where their sum is of fp16 and might overflow, or else by finish_step.
  void start_reduction(double scale);
  void finish_reduction();
  /// Sum of the slices over `replicas`, in place: once a step, after the last reduction.
  void start_replica_sum(const comm::Group& replicas);
  /// With a host, where slices are only added up there: begins to copy the reduced slice to it, behind finish_reduction.
  void start_return();
  /// Waits for that copy, or the sum over replicas, and frees what it took on the device. Nothing to do without a host.
  void finish_return();
  /// Whether finish_return would not wait.
  bool returned() const { return arrived_.defined() && return_.done(); }
  /// After the last reduction of a step. `scale`: that of start_reduction.
  void finish_step(double scale);

  /// The reduced gradient of parameter `index`, in the shape of its slice, no view as far as autograd knows; undefined before the first reduction of a step.
  at::Tensor local_gradient(size_t index) const;
  /// Waits for what is under way and drops what was taken up and what was reduced; what `grad()` of the parameters holds stays.
  void clear_sums();

 private:
  void cut();
  void keep_rows(size_t index, const at::Tensor& whole) const;
  bool is_replaced(size_t index) const;
  void refuse_one_ranks_slices(const at::Tensor& whole);
  at::Tensor local_rows(const at::Tensor& flat, size_t index) const;
  at::Tensor padded(const at::Tensor& whole) const;
  void unpad(const at::Tensor& parts, const at::Tensor& whole) const;
  void hold_gradients();
  bool is_place_awaited() const;
  bool scales_terms() const { return dtypes_.reduced == at::kHalf; }
  void leave_places();
  void zero_untouched();
  void convert_sum(MemoryCategory category);
  void add_to_slices();
  void add_to_waiting();
  at::Tensor sendable_slices();
  at::Tensor read_slices();
  void drop_read();
  void keep_sum();

  std::vector<nn::NamedParameter> parameters_;
  comm::Group group_;
  Dtypes dtypes_;
  std::shared_ptr<const HostLink> host_;  ///< null: slices lie on the device
  std::shared_ptr<TensorFile> file_;      ///< null: and not in a file
  UnitLayout layout_;
  std::vector<Slice> before_;         ///< of the parameters as they were given
  std::vector<Slice> cut_;            ///< as they are since
  std::vector<size_t> given_slices_;  ///< taken in as slices, and not found to be the ranks' own since
  std::vector<std::vector<int64_t>> slice_sizes_;
  std::string complaint_;
  bool trained_;
  std::unique_ptr<FiledTensor> filed_;                         ///< with a file: what slices_ is
  std::vector<std::unique_ptr<FiledTensor>> filed_gradients_;  ///< of which local_gradients_ is one; a second where passes add to what lies in the first
  at::Tensor slices_;                                          ///< [part], this rank's rows one behind the other
  std::vector<at::Storage> slice_storages_;                    ///< per parameter, over its part of slices_
  std::vector<at::Tensor> whole_views_;
  at::Tensor whole_;  ///< [size], without memory unless gathered

  comm::Pending gather_;
  at::Tensor sent_, received_;  ///< of the gather: the slices in the gathered dtype; [ranks * part] where the parts are uneven
  at::Tensor cast_;             ///< with a host: the slices in the gathered dtype, where that is another, while parameters are whole; without a file
  at::Tensor read_;             ///< with a file: the slices on the host, on their way or there, for the next gather
  CopyStream::Point brought_;   ///< the copy of the slices to the device

  /// Where a whole gradient is.
  enum class Arrival : char { None, InPlace, Taken };
  std::vector<Arrival> arrivals_;       ///< per parameter; InPlace: somebody has the place and it has not come
  at::Tensor whole_gradients_;          ///< [size], what waits for the next reduction
  at::Tensor sent_gradients_, summed_;  ///< of the reduction under way: [ranks * part], [part]
  at::Tensor local_gradients_;          ///< [part]
  at::Tensor crossing_;                 ///< [part], the same on its way between replicas, where it crosses in another dtype
  comm::Pending reduction_;
  at::Tensor arrived_;        ///< [part], where summed_ is being copied to on the host
  CopyStream::Point return_;  ///< that copy
};

}  // namespace tessera
