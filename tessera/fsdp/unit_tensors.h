#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "tessera/fsdp/sharded_units.h"
#include "tessera/fsdp/slice_notes.h"

namespace torch::autograd {
struct Node;
}

namespace tessera {

/// Whose memory a tensor is: a unit's wholes, of which all views share one storage, or one parameter's slice. A parameter is known by its TensorImpl, too,
/// which shows either.
class UnitTensors {
 public:
  struct Storage {
    UnitPlace place;  ///< of wholes: the unit and the flat
    bool whole;
  };
  using Parameters = std::unordered_map<const c10::TensorImpl*, UnitPlace>;

  explicit UnitTensors(const ShardedUnits& units);
  ~UnitTensors();
  UnitTensors(const UnitTensors&) = delete;
  UnitTensors& operator=(const UnitTensors&) = delete;

  /// Looks anew where the units have taken in other memory since.
  void refresh();

  const Storage* storage_of(const at::Tensor& tensor) const;
  const UnitPlace* parameter(const at::Tensor& tensor) const;
  const Parameters& parameters() const { return parameters_; }

  /// Which parameter's slice `tensor` is, or is a handle on.
  std::optional<UnitPlace> find_slice(const at::Tensor& tensor) const;
  /// The parameter that `tensor` is, or is an alias of (data(), which optimizers take), while parameters show their whole shapes.
  std::optional<UnitPlace> find_whole(const at::Tensor& tensor) const;
  /// In which whole `tensor` lies, all of it or a part; of several, the first.
  std::optional<UnitPlace> find_in_wholes(const at::Tensor& tensor) const;
  /// Which parameter `tensor` lies in, be it the slice, in whatever shape, or the whole.
  std::optional<UnitPlace> find_memory(const at::Tensor& tensor) const;
  /// Whose gradient `tensor` is itself, and no handle on it.
  std::optional<UnitPlace> find_gradient(const at::Tensor& tensor) const;
  /// Whether it is the gradient of a parameter, or a view of one, or a list with one.
  bool is_gradient(const c10::IValue& value) const;

  /// Takes down that `made`, of its own memory, has this rank's rows (SliceNotes).
  void note_of_slices(const at::Tensor& made, const SliceNotes::Note& note);
  void note_written(const at::Tensor& written, const SliceNotes::Note& note) { notes_->add_written(written, note); }
  /// The same of all gradients that there are, which a pass has left.
  void note_gradients();
  /// No more, of a tensor or of all in a list, or in lists in it.
  void forget_of_slices(const c10::IValue& value);
  /// What was taken down of it, by whichever wrapper of this thread.
  const SliceNotes::Note* noted(const at::Tensor& tensor) const { return notes_->find(tensor); }
  /// The same of what lies in a slice of this wrapper, a parameter, too.
  const SliceNotes::Note* of_slices(const at::Tensor& tensor) const;
  bool is_of_slices(const at::Tensor& tensor) const { return of_slices(tensor) != nullptr; }
  /// Of this wrapper's.
  bool is_own(const SliceNotes::Note& note) const { return note.is_of(wrapper_); }
  bool is_of_own_slices(const at::Tensor& tensor) const;
  /// A parameter that autograd has `computed` of, while parameters were whole.
  std::optional<UnitPlace> find_behind(const at::Tensor& computed) const;

  bool are_cut() const { return units_.are_cut(); }
  const FlatParameters& flat(const UnitPlace& place) const { return units_.flats(place.unit)[place.flat]; }
  const nn::NamedParameter& named(const UnitPlace& place) const { return flat(place).parameters()[place.index]; }
  const std::string& name(const UnitPlace& place) const { return named(place).name; }
  at::IntArrayRef whole_sizes(const UnitPlace& place) const { return flat(place).layout().parameters[place.index].shape; }
  at::IntArrayRef slice_sizes(const UnitPlace& place) const { return flat(place).slice_sizes(place.index); }
  std::vector<int64_t> slice_of_rank(const UnitPlace& place, int rank) const;
  /// Of every rank's slice, by rank.
  std::vector<std::vector<int64_t>> slices_of_ranks(const UnitPlace& place) const;
  /// On this rank.
  bool has_all_rows(const UnitPlace& place) const { return slice_sizes(place) == whole_sizes(place); }
  /// The rank that has all of it, if one does: that one cannot tell its slice from the whole.
  std::optional<int> rank_with_all_rows(const UnitPlace& place) const;
  bool is_on_one_rank(const UnitPlace& place) const { return rank_with_all_rows(place).has_value(); }
  /// On every rank.
  bool same_rows(const UnitPlace& a, const UnitPlace& b) const { return tessera::same_rows(flat(a).layout(), a.index, flat(b).layout(), b.index); }

 private:
  void find_storages();

  const ShardedUnits& units_;
  std::unordered_map<const c10::StorageImpl*, Storage> storages_;
  int64_t storages_of_ = 0;  ///< ShardedUnits::times_taken_in
  Parameters parameters_;
  std::shared_ptr<SliceNotes> notes_ = SliceNotes::of_thread();
  SliceNotes::Wrapper wrapper_ = notes_->new_wrapper();
  SliceNotes::Note own_{.wrappers = {wrapper_}};
  /// Nodes, by their addresses and numbers, behind which there is no parameter: a recurrence of the program's own is walked once.
  mutable std::set<std::pair<const torch::autograd::Node*, uint64_t>> without_parameters_;
};

}  // namespace tessera
