#include "tessera/fsdp/unit_tensors.h"

#include <algorithm>

#include <torch/csrc/autograd/functions/accumulate_grad.h>

namespace tessera {
namespace {

constexpr size_t kMostNodesKnown = size_t{1} << 16;

}  // namespace

UnitTensors::UnitTensors(const ShardedUnits& units) : units_(units) {
  find_storages();
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (size_t flat = 0; flat < units.flats(unit).size(); ++flat) {
      const FlatParameters& parameters = units.flats(unit)[flat];
      for (size_t index = 0; index < parameters.parameters().size(); ++index) {
        parameters_.emplace(parameters.parameters()[index].tensor.unsafeGetTensorImpl(), UnitPlace{unit, flat, index});
      }
    }
  }
  for (const auto& item : parameters_) notes_->add_parameter(item.first);
}

UnitTensors::~UnitTensors() {
  for (const auto& item : parameters_) notes_->drop_parameter(item.first);
}

void UnitTensors::find_storages() {
  storages_.clear();
  storages_of_ = units_.times_taken_in();
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (size_t flat = 0; flat < units_.flats(unit).size(); ++flat) {
      const FlatParameters& parameters = units_.flats(unit)[flat];
      storages_.emplace(parameters.whole_storage(), Storage{{unit, flat, 0}, true});
      for (size_t index = 0; index < parameters.parameters().size(); ++index) {
        storages_.emplace(parameters.slice_storage(index), Storage{{unit, flat, index}, false});
        if (are_cut()) notes_->add_slice(parameters.slice_memory(index), wrapper_);
      }
    }
  }
}

void UnitTensors::refresh() {
  if (storages_of_ != units_.times_taken_in()) find_storages();
}

const UnitTensors::Storage* UnitTensors::storage_of(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
  return found == storages_.end() ? nullptr : &found->second;
}

const UnitPlace* UnitTensors::parameter(const at::Tensor& tensor) const {
  const auto found = parameters_.find(tensor.unsafeGetTensorImpl());
  return found == parameters_.end() ? nullptr : &found->second;
}

std::optional<UnitPlace> UnitTensors::find_slice(const at::Tensor& tensor) const {
  const Storage* const storage = storage_of(tensor);
  if (!storage || storage->whole || tensor.storage_offset() != 0 || tensor.sizes() != slice_sizes(storage->place)) return std::nullopt;
  return storage->place;
}

std::optional<UnitPlace> UnitTensors::find_whole(const at::Tensor& tensor) const {
  const Storage* const storage = storage_of(tensor);
  if (!storage || !storage->whole) return std::nullopt;
  const auto index = flat(storage->place).find_whole(tensor);
  return index ? std::optional(UnitPlace{storage->place.unit, storage->place.flat, *index}) : std::nullopt;
}

std::optional<UnitPlace> UnitTensors::find_in_wholes(const at::Tensor& tensor) const {
  const Storage* const storage = storage_of(tensor);
  if (!storage || !storage->whole) return std::nullopt;
  const std::vector<UnitLayout::Entry>& entries = flat(storage->place).layout().parameters;
  const auto around =
      std::ranges::find_if(entries, [at = tensor.storage_offset()](const auto& entry) { return entry.offset <= at && at < entry.offset + entry.numel; });
  if (around == entries.end()) return std::nullopt;
  return UnitPlace{storage->place.unit, storage->place.flat, static_cast<size_t>(around - entries.begin())};
}

std::optional<UnitPlace> UnitTensors::find_memory(const at::Tensor& tensor) const {
  const Storage* const storage = storage_of(tensor);
  if (!storage) return std::nullopt;
  return storage->whole ? find_whole(tensor) : std::optional(storage->place);
}

std::optional<UnitPlace> UnitTensors::find_gradient(const at::Tensor& tensor) const {
  const auto found = std::ranges::find_if(parameters_, [&](const auto& item) { return item.first->grad().is_same(tensor); });
  return found == parameters_.end() ? std::nullopt : std::optional(found->second);
}

bool UnitTensors::is_gradient(const c10::IValue& value) const {
  const auto is = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return false;
    return std::ranges::any_of(parameters_, [&](const auto& item) {
      const at::Tensor& gradient = item.first->grad();
      return gradient.defined() && gradient.has_storage() && gradient.storage().is_alias_of(tensor.storage());
    });
  };
  if (value.isTensor()) return is(value.toTensor());
  if (!value.isTensorList()) return false;
  const std::vector<at::Tensor> list = value.toTensorVector();
  return std::ranges::any_of(list, is);
}

void UnitTensors::note_of_slices(const at::Tensor& made, const SliceNotes::Note& note) {
  if (!storage_of(made)) notes_->add_made(made, note);
}

void UnitTensors::note_gradients() {
  for (const auto& item : parameters_) notes_->add_gradient(item.first->grad(), wrapper_);
}

void UnitTensors::forget_of_slices(const c10::IValue& value) {
  if (value.isTensor()) return notes_->forget(value.toTensor());
  if (!value.isList()) return;
  for (const c10::IValue& item : value.toListRef()) forget_of_slices(item);
}

const SliceNotes::Note* UnitTensors::of_slices(const at::Tensor& tensor) const {
  const Storage* const storage = storage_of(tensor);
  if (!storage) return noted(tensor);
  return storage->whole ? nullptr : &own_;
}

bool UnitTensors::is_of_own_slices(const at::Tensor& tensor) const {
  const SliceNotes::Note* const note = of_slices(tensor);
  return note != nullptr && is_own(*note);
}

std::optional<UnitPlace> UnitTensors::find_behind(const at::Tensor& computed) const {
  using Key = decltype(without_parameters_)::key_type;
  std::vector<const torch::autograd::Node*> nodes{computed.grad_fn().get()};  // the nearest first
  std::set<Key> met;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i] == nullptr) continue;
    const Key key{nodes[i], nodes[i]->sequence_nr()};
    if (without_parameters_.contains(key) || !met.insert(key).second) continue;
    const auto* const leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(nodes[i]);
    if (const UnitPlace* const place = leaf && leaf->variable.defined() ? parameter(leaf->variable) : nullptr) return *place;
    for (const torch::autograd::Edge& edge : nodes[i]->next_edges()) nodes.push_back(edge.function.get());
  }
  if (without_parameters_.size() > kMostNodesKnown) without_parameters_.clear();
  without_parameters_.merge(met);
  return std::nullopt;
}

std::vector<int64_t> UnitTensors::slice_of_rank(const UnitPlace& place, int rank) const {
  const UnitLayout& layout = flat(place).layout();
  std::vector<int64_t> shape = layout.parameters[place.index].shape;
  const int64_t rows = rows_of(layout, place.index, rank).second;
  if (!shape.empty()) {
    shape[0] = rows;
  } else if (rows == 0) {
    shape = {0};
  }
  return shape;
}

std::vector<std::vector<int64_t>> UnitTensors::slices_of_ranks(const UnitPlace& place) const {
  std::vector<std::vector<int64_t>> slices;
  for (int rank = 0; rank < flat(place).layout().ranks; ++rank) slices.push_back(slice_of_rank(place, rank));
  return slices;
}

std::optional<int> UnitTensors::rank_with_all_rows(const UnitPlace& place) const {
  const UnitLayout& layout = flat(place).layout();
  const int64_t numel = layout.parameters[place.index].numel;
  if (!units_.are_cut() || numel == 0) return std::nullopt;
  for (int rank = 0; rank < layout.ranks; ++rank) {
    if (elements_of(layout, place.index, rank) == numel) return rank;
  }
  return std::nullopt;
}

}  // namespace tessera
