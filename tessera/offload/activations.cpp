#include "tessera/offload/activations.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "tessera/config/offload_rules.h"
#include "tessera/config/patterns.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/dry_sizes.h"
#include "tessera/nn/module.h"
#include "tessera/nn/saved_tensors.h"
#include "tessera/offload/parked_storage.h"

// The plan is a list: of each module that is named, where its activations go (place_modules). What happens in a step follows from the calls alone. A call opens
// a scope of saved tensors, and what operators save in it is a Departure: storages that are parked together. The first of them that backward asks for says that
// the module's backward begins: that is the clock, and it sets off the fetch of those of the modules before it. "Before" is the module that stands before it
// in the model, in the same pass: the call just before this one, if it was that module's. So passes of several micro-batches may be alive, in any order.

namespace tessera {

namespace offload {
namespace {

/// Where the activations of a module go.
struct PlacedModule {
  std::string path;
  std::shared_ptr<nn::Module> module;
  size_t position;                    ///< among all that are moved, as they stand in the model
  std::optional<OffloadPlace> place;  ///< nothing: they stay
};

/// Modules, and which of the patterns names each most closely.
struct NamedModule {
  const OffloadedModules* by;
  std::shared_ptr<nn::Module> module;
};

std::map<std::string, NamedModule> name_modules(torch::nn::Module& root, const ActivationOffloadOptions& options) {
  std::map<std::string, NamedModule> named;
  for (const auto& where : options.where) {
    for (const auto& [path, module] : nn::interceptable_modules(root, where.modules)) {
      const OffloadedModules*& by = named.try_emplace(path, NamedModule{&where, module}).first->second.by;
      const auto stars = std::ranges::count(where.modules, '*'), others = std::ranges::count(by->modules, '*');
      require(stars != others || where.place == by->place, "offload.activations: '", path, "' is named by two patterns, '", by->modules, "' and '",
              where.modules, "', one as closely as the other; give both one place, or name it by its path");
      if (stars < others) by = &where;
    }
  }
  return named;
}

/// A module that stays: whether another pattern moves it, or one around it.
bool is_exception(const std::string& path, const ActivationOffloadOptions& options) {
  const std::vector<std::string> around = paths_to(path);
  return std::ranges::any_of(options.where, [&](const OffloadedModules& where) {
    return where.place && std::ranges::any_of(around, [&](const std::string& one) { return path_matches(where.modules, one); });
  });
}

std::vector<PlacedModule> place_modules(torch::nn::Module& root, const ActivationOffloadOptions& options) {
  const std::map<std::string, NamedModule> named = name_modules(root, options);
  std::map<std::string, PlacedModule> placed;
  for (const auto& where : options.where) {
    std::vector<std::string> own;  // paths, in the order of the model
    for (const auto& [path, module] : nn::interceptable_modules(root, where.modules)) {
      if (named.at(path).by == &where) own.push_back(path);
    }
    const auto excepted = [&](const std::string& path) { return is_exception(path, options); };
    require(where.place || std::ranges::any_of(own, excepted), idle_exception("offload.activations", where.modules));
    if (where.place) own.resize(static_cast<size_t>(std::llround(options.fraction * static_cast<double>(own.size()))));
    for (const std::string& path : own) placed.emplace(path, PlacedModule{path, named.at(path).module, 0, where.place});
  }
  size_t moved = 0;
  std::vector<PlacedModule> in_order;
  root.apply([&](const std::string& path, torch::nn::Module&) {
    const auto found = placed.find(path);
    if (found == placed.end()) return;
    if (found->second.place) found->second.position = moved++;
    in_order.push_back(found->second);
  });
  return in_order;
}

/// What a call of a module has parked.
class Departure {
 public:
  Departure(std::shared_ptr<Departure> before, int64_t prefetch) : before_(before), prefetch_(prefetch), context_(MemoryContext::current()) {}

  void add(const std::shared_ptr<ParkedStorage>& parked) { parked_.push_back(parked); }

  /// Its backward asks for one of them.
  const at::Storage& restored(ParkedStorage& parked) {
    const MemoryContext::Guard guard(context_);
    if (!std::exchange(begun_, true) && prefetch_ > 0) {
      fetch();
      auto before = before_.lock();
      for (int64_t n = 0; before && n < prefetch_; ++n) {
        before->fetch();
        before = before->before_.lock();
      }
    }
    return parked.restored();
  }

 private:
  /// In the order of backward.
  void fetch() {
    for (auto one = parked_.rbegin(); one != parked_.rend(); ++one) {
      if (const auto parked = one->lock()) parked->fetch();
    }
    parked_.clear();
  }

  std::vector<std::weak_ptr<ParkedStorage>> parked_;
  std::weak_ptr<Departure> before_;
  int64_t prefetch_;
  MemoryContext context_;
  bool begun_ = false;
};

/// In the graph, in place of a saved tensor: which view of which parked storage.
class ParkedTensor final : public nn::SavedTensor {
 public:
  ParkedTensor(std::shared_ptr<Departure> departure, std::shared_ptr<ParkedStorage> parked, const at::Tensor& tensor)
      : departure_(std::move(departure)),
        parked_(std::move(parked)),
        sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        offset_(tensor.storage_offset()),
        dtype_(tensor.dtype()),
        keys_(tensor.key_set()) {}

  at::Tensor unpack() override {
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(departure_->restored(*parked_)), keys_, dtype_);
    auto* const impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_offset(offset_);
    impl->set_sizes_and_strides(sizes_, strides_);
    return tensor;
  }

 private:
  std::shared_ptr<Departure> departure_;
  std::shared_ptr<ParkedStorage> parked_;
  std::vector<int64_t> sizes_, strides_;
  int64_t offset_;
  caffe2::TypeMeta dtype_;
  c10::DispatchKeySet keys_;
};

/// What the offloaded modules of a rank share.
struct Activations {
  Activations(at::Device device, const ActivationOffloadOptions& options)
      : depot(std::make_shared<Depot>(device, options.budget_bytes)), min_bytes(std::max<int64_t>(options.min_bytes, 1)), prefetch(options.prefetch) {}

  std::shared_ptr<Depot> depot;
  int64_t min_bytes, prefetch;
  std::map<const c10::StorageImpl*, std::weak_ptr<ParkedStorage>> known{};  ///< by the storage that they were on
  std::weak_ptr<Departure> last{};                                          ///< of the latest call
  size_t last_position = 0;
  bool stay = false;  ///< what is saved now, by the innermost module that is named
};

/// While it lives, what is saved stays, or not.
class StayScope {
 public:
  StayScope(Activations& shared, bool stay) : shared_(shared), former_(std::exchange(shared.stay, stay)) {}
  ~StayScope() { shared_.stay = former_; }
  StayScope(const StayScope&) = delete;
  StayScope& operator=(const StayScope&) = delete;

 private:
  Activations& shared_;
  bool former_;
};

/// Serves one call.
class Parks final : public nn::SavedTensorHooks {
 public:
  Parks(Activations& shared, const std::vector<at::Tensor>& stay, std::shared_ptr<Departure> departure, bool on_disk)
      : shared_(shared), stay_(stay), departure_(std::move(departure)), on_disk_(on_disk) {}

  std::unique_ptr<nn::SavedTensor> pack(const at::Tensor& tensor) override {
    if (shared_.stay || !tensor.has_storage() || tensor.layout() != at::kStrided || tensor.device().type() != shared_.depot->link.device.type()) return nullptr;
    const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    const auto bytes = static_cast<int64_t>(storage->nbytes());
    const int64_t least = nn::DrySizesScope::now() == nn::DrySizes::Least ? 1 : shared_.min_bytes;  // it may be larger, and go
    if (bytes < least || lies_there_anyway(storage)) return nullptr;
    std::shared_ptr<ParkedStorage> parked;
    if (const auto known = shared_.known.find(storage); known != shared_.known.end()) parked = known->second.lock();
    if (!parked || !parked->holds(tensor)) {
      if (!shared_.depot->has_room(bytes)) return nullptr;
      parked = std::make_shared<ParkedStorage>(shared_.depot, tensor, on_disk_);
      if (nn::DrySizesScope::now() == nn::DrySizes::Most) parked->leave_behind(shared_.min_bytes - 1);  // it may be smaller, and stay
      shared_.known[storage] = parked;
      departure_->add(parked);
    }
    return std::make_unique<ParkedTensor>(departure_, std::move(parked), tensor);
  }

 private:
  /// Of a module's parameters and a model's buffers nothing is freed by moving what an operator saved of them.
  bool lies_there_anyway(const c10::StorageImpl* storage) const {
    return std::ranges::any_of(stay_, [&](const at::Tensor& one) { return one.has_storage() && one.storage().unsafeGetStorageImpl() == storage; });
  }

  Activations& shared_;
  const std::vector<at::Tensor>& stay_;
  std::shared_ptr<Departure> departure_;
  bool on_disk_;
};

class Offload final : public nn::Interceptor {
 public:
  Offload(std::shared_ptr<Activations> shared, const PlacedModule& place, std::vector<at::Tensor> buffers)
      : shared_(std::move(shared)), position_(place.position), on_disk_(place.place == OffloadPlace::Disk), stay_(std::move(buffers)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    const bool keeps = at::GradMode::is_enabled() && module.is_training() && !nn::recomputing() && !nn::saved_tensors_are_computed_again();
    if (!keeps) return next(std::move(inputs));
    if (!std::exchange(knows_parameters_, true)) {  // they have their memory, and their pieces of it, by the first call
      for (auto& parameter : module.parameters()) stay_.push_back(std::move(parameter));
    }
    std::erase_if(shared_->known, [](const auto& entry) { return entry.second.expired(); });
    const bool follows = position_ > 0 && shared_->last_position + 1 == position_;
    const auto departure = std::make_shared<Departure>(follows ? shared_->last.lock() : nullptr, shared_->prefetch);
    shared_->last = departure;
    shared_->last_position = position_;
    const StayScope leaves(*shared_, /*stay=*/false);
    const nn::SavedTensorScope scope(std::make_shared<Parks>(*shared_, stay_, departure, on_disk_));
    return next(std::move(inputs));
  }

 private:
  std::shared_ptr<Activations> shared_;
  size_t position_;
  bool on_disk_, knows_parameters_ = false;
  std::vector<at::Tensor> stay_;
};

/// An exception from what a module around it says.
class Stay final : public nn::Interceptor {
 public:
  explicit Stay(std::shared_ptr<Activations> shared) : shared_(std::move(shared)) {}

  nn::Values call(nn::Module& /*module*/, nn::Values inputs, const nn::Next& next) override {
    const StayScope stays(*shared_, /*stay=*/true);
    return next(std::move(inputs));
  }

 private:
  std::shared_ptr<Activations> shared_;
};

void check(const ActivationOffloadOptions& options) {
  require(options.fraction >= 0 && options.fraction <= 1, "offload.fraction = ", options.fraction, ": expected a share, from 0 to 1");
  require(options.min_bytes >= 0, "offload.min_bytes = ", options.min_bytes, ": expected 0 or more");
  require(options.budget_bytes >= 0, "offload.budget_bytes = ", options.budget_bytes, ": expected 0 (no limit) or more");
  require(options.prefetch >= 0, "offload.prefetch = ", options.prefetch, ": expected 0 (none) or more");
}

}  // namespace
}  // namespace offload

Attachment offload_activations(torch::nn::Module& root, at::Device device, const ActivationOffloadOptions& options) {
  offload::check(options);
  const auto shared = std::make_shared<offload::Activations>(device, options);
  const auto placed = offload::place_modules(root, options);
  if (std::ranges::any_of(placed, [](const auto& one) { return one.place == OffloadPlace::Disk; })) {
    shared->depot->file = std::make_unique<offload::SpillFile>(options.dir, "offload.dir", options.disk, device.is_meta());
  }
  Attachment attached;
  for (const auto& place : placed) {
    std::shared_ptr<nn::Interceptor> interceptor;
    if (place.place) {
      interceptor = std::make_shared<offload::Offload>(shared, place, root.buffers());
    } else {
      interceptor = std::make_shared<offload::Stay>(shared);
    }
    attached.add(nn::attach(*place.module, std::move(interceptor)));
    attached.add(nn::expect_call(*place.module, "offload.activations"));
  }
  return attached;
}

}  // namespace tessera
