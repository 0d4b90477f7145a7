#include "tessera/nn/part_watch.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>

#include "tessera/nn/backward_pass.h"
#include "tessera/nn/gradient_guard.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/part_operators.h"
#include "tessera/nn/shared_memory.h"

namespace tessera::nn {
namespace {

class PartWatcher final : public OperatorWatcher {
 public:
  PartWatcher(std::string technique, const std::vector<NamedParameter>& parts) : technique_(std::move(technique)) {
    for (const auto& [name, tensor, aliases] : parts) parts_.emplace(tensor.unsafeGetTensorImpl(), Part{WeakTensor(tensor.getIntrusivePtr()), name});
  }

  void before(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    if (backward_pass() >= 0) return;
    const c10::FunctionSchema& schema = op.schema();
    const size_t count = schema.arguments().size();
    const at::ArrayRef<c10::IValue> arguments(stack.data() + (stack.size() - count), count);
    if (norms_.is_one(schema, arguments, [&](const c10::IValue& value) { return is_gradient(value); })) refuse_local_norm(technique_, schema);
    const LocalDraws::Kind kind = draws_.kind_of(schema, arguments);
    const at::Tensor drawn = kind == LocalDraws::Kind::None ? LocalDraws::drawn_out(schema, arguments) : arguments[0].toTensor();
    if (!drawn.defined() || drawn.is_meta()) return;
    if (const Part* const part = find(drawn, /*handles=*/kind == LocalDraws::Kind::Copied)) {
      refuse_local_draw(technique_, schema, kind, part->name, "before " + technique_);
    }
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Part {
    WeakTensor tensor;
    std::string name;
  };

  static bool lies_somewhere(const at::Tensor& tensor) { return tensor.defined() && tensor.has_storage() && tensor.numel() > 0; }

  /// Neighbours in a bucket of gradients are none.
  static bool is_alias(const at::Tensor& one, const at::Tensor& other) {
    if (!lies_somewhere(one) || !lies_somewhere(other) || !one.storage().is_alias_of(other.storage())) return false;
    const auto [begin, end] = bytes_of(one);
    const auto [other_begin, other_end] = bytes_of(other);
    return begin < other_end && other_begin < end;
  }

  /// One that somebody shards further, whose slices it watches, is left to him.
  template <class Is>
  const Part* find_if(const Is& is) const {
    const auto found = std::ranges::find_if(parts_, [&](const auto& item) {
      auto impl = item.second.tensor.lock();
      if (!impl) return false;
      const at::Tensor parameter(std::move(impl));
      return is(parameter) && !keeps_memory(parameter);
    });
    return found == parts_.end() ? nullptr : &found->second;
  }

  const Part* find(const at::Tensor& drawn, bool handles) const {
    if (handles) return find_if([&](const at::Tensor& parameter) { return is_alias(parameter, drawn); });
    return parts_.contains(drawn.unsafeGetTensorImpl()) ? find_if([&](const at::Tensor& parameter) { return parameter.is_same(drawn); }) : nullptr;
  }

  bool is_gradient(const c10::IValue& value) const {
    const auto is = [&](const at::Tensor& tensor) {
      return find_if([&](const at::Tensor& parameter) { return is_alias(parameter.grad(), tensor) && !is_gradient_guard(parameter.grad()); }) != nullptr;
    };
    if (value.isTensor()) return is(value.toTensor());
    return value.isTensorList() && std::ranges::any_of(value.toTensorVector(), is);
  }

  std::string technique_;
  std::unordered_map<const c10::TensorImpl*, Part> parts_;
  LocalNorms norms_;
  LocalDraws draws_;
};

}  // namespace

Attachment watch_parts(std::string technique, const std::vector<NamedParameter>& parts) {
  const auto watch = std::make_shared<OperatorWatch>(std::make_shared<PartWatcher>(std::move(technique), parts));
  watch->wake();
  return Attachment([watch] { watch->sleep(); });
}

}  // namespace tessera::nn
