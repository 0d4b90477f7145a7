#include "tessera/nn/shared_memory.h"

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <ATen/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StorageImpl.h>

#include "tessera/core/error.h"
#include "tessera/nn/backward_pass.h"
#include "tessera/nn/operands.h"
#include "tessera/nn/operator_watch.h"

namespace tessera::nn {

std::pair<int64_t, int64_t> bytes_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto width = static_cast<int64_t>(tensor.element_size());
  return {tensor.storage_offset() * width, (tensor.storage_offset() + last + 1) * width};
}

namespace {

/// Where a tensor lies in its storage.
struct Extent {
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  int64_t width;       ///< bytes of an element
  int64_t begin, end;  ///< bytes, with the gaps between its elements
};

bool lies_somewhere(const at::Tensor& tensor) { return tensor.defined() && tensor.has_storage() && tensor.numel() > 0; }

Extent extent_of(const at::Tensor& tensor) {
  const auto [begin, end] = bytes_of(tensor);
  return {.sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .offset = tensor.storage_offset(),
          .width = static_cast<int64_t>(tensor.element_size()),
          .begin = begin,
          .end = end};
}

struct Place {
  std::string name;
  bool is_buffer;
  const void* storage;
  Extent extent;
};

void add_place(std::vector<Place>& places, const std::string& name, const at::Tensor& tensor, bool is_buffer) {
  if (!lies_somewhere(tensor)) return;
  places.push_back({.name = name, .is_buffer = is_buffer, .storage = tensor.storage().unsafeGetStorageImpl(), .extent = extent_of(tensor)});
}

/// Of two in one storage. Extents may overlap where elements do not: one may lie in the gaps of the other, as columns of a table do.
bool share_elements(const Extent& one, const Extent& other) {
  if (one.begin >= other.end || other.begin >= one.end) return false;
  if (one.width != other.width) return true;
  const int64_t first = std::min(one.begin, other.begin) / one.width;
  const at::Tensor marks = at::zeros({std::max(one.end, other.end) / one.width - first}, at::device(at::kCPU).dtype(at::kBool));
  const auto of = [&](const Extent& extent) { return marks.as_strided(extent.sizes, extent.strides, extent.offset - first); };
  of(one).fill_(true);
  return of(other).any().item<bool>();
}

[[noreturn]] void refuse(const std::string& technique, const Place& one, const Place& other) {
  if (one.is_buffer) refuse(technique, other, one);
  throw ConfigError(tessera::detail::concat(
      technique, other.is_buffer ? ": parameter '" : ": parameters '", one.name, other.is_buffer ? "' and buffer '" : "' and '", other.name,
      "' share memory, and would not any more once parameters lie in memory that is sharded; ",
      other.is_buffer ? "give the buffer its own (clone), or use the parameter in its place" : "give each its own (clone), or register one tensor twice"));
}

}  // namespace

void refuse_shared_memory(const std::string& technique, const torch::nn::Module& module, const std::vector<NamedParameter>& parameters) {
  const at::NoGradGuard no_grad;
  std::vector<Place> places;
  for (const auto& [name, tensor, aliases] : parameters) add_place(places, name, tensor, /*is_buffer=*/false);
  for (const auto& buffer : module.named_buffers()) add_place(places, buffer.key(), buffer.value(), /*is_buffer=*/true);
  std::ranges::stable_sort(places, {}, [](const Place& place) { return std::tuple(place.storage, place.extent.begin); });
  for (size_t i = 0; i < places.size(); ++i) {
    for (size_t j = i + 1; j < places.size() && places[j].storage == places[i].storage && places[j].extent.begin < places[i].extent.end; ++j) {
      const bool moves = !places[i].is_buffer || !places[j].is_buffer;
      if (moves && share_elements(places[i].extent, places[j].extent)) refuse(technique, places[i], places[j]);
    }
  }
}

/// Who holds memory cannot be told, and need not use it; what an operator is given can. A storage that nobody holds any more is known by its weak pointer,
/// whose address no other takes meanwhile.
class FormerMemory::Watcher final : public OperatorWatcher {
 public:
  Watcher(std::string technique, const std::vector<NamedParameter>& parameters) : technique_(std::move(technique)) {
    for (const auto& [name, tensor, aliases] : parameters) {
      if (!lies_somewhere(tensor) || tensor.is_meta()) continue;
      Former& former = formers_.try_emplace(tensor.storage().unsafeGetStorageImpl(), Former{tensor.storage().getWeakStorageImpl(), {}}).first->second;
      former.parameters.push_back({name, WeakTensor(tensor.getIntrusivePtr()), extent_of(tensor)});
    }
  }

  void before(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    if (++calls_ % kBetweenLooks == 0) forget_freed();
    if (backward_pass() >= 0) return;  // of a forward that was before, when its values were right
    const size_t count = op.schema().arguments().size();
    for_each_operand(at::ArrayRef<c10::IValue>(stack.data() + (stack.size() - count), count),
                     [&](const at::Tensor& tensor, const OperandPlace&) { check(op.schema().name(), tensor); });
  }

  bool done() const override { return formers_.empty(); }

  void forget_freed() {
    std::erase_if(formers_, [](const auto& item) { return item.second.alive.expired(); });
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Parameter {
    std::string name;
    WeakTensor tensor;
    Extent extent;
  };
  struct Former {
    c10::weak_intrusive_ptr<c10::StorageImpl> alive;
    std::vector<Parameter> parameters;
  };
  static constexpr int64_t kBetweenLooks = 256;

  void check(const std::string& op, const at::Tensor& given) const {
    if (!lies_somewhere(given)) return;
    const auto found = formers_.find(given.storage().unsafeGetStorageImpl());
    if (found == formers_.end()) return;
    for (const auto& [name, weak, extent] : found->second.parameters) {
      const auto parameter = weak.lock();
      const bool follows = !parameter || parameter.get() == given.unsafeGetTensorImpl() || at::Tensor(parameter).is_alias_of(given);
      if (follows || !parameter->requires_grad() || !share_elements(extent, extent_of(given))) continue;
      throw ConfigError(tessera::detail::concat(
          technique_, ": ", op, " was given a view of '", name, "' that was made before the parameter moved to memory of its own, such as a member ",
          "that the module's constructor made by t(), view(), select() or detach(): it has the values of then, and follows no update. Make it in forward, of ",
          "the parameter, or register one tensor twice; to keep the values of then, clone() them before"));
    }
  }

  std::string technique_;
  std::unordered_map<const c10::StorageImpl*, Former> formers_;
  int64_t calls_ = 0;
};

FormerMemory::FormerMemory(std::string technique, const std::vector<NamedParameter>& parameters)
    : watcher_(std::make_shared<Watcher>(std::move(technique), parameters)) {}

FormerMemory::~FormerMemory() = default;

void FormerMemory::refuse_use() {
  watcher_->forget_freed();
  if (!watcher_->done()) watch_until_done(watcher_);
}

}  // namespace tessera::nn
