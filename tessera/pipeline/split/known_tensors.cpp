#include "tessera/pipeline/split/known_tensors.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/error.h"

// The recorder sees tensors, and a list of operators needs values: which tensor is which value is known by the TensorImpl, and where a program has two handles
// of one memory (`data()`, a tensor that was filled by hand) by storage and place. Handles are weak, storages are too: recording keeps nothing alive but the
// twins, and an address that is given out again is no old friend.
//
// What has data when it comes (buffers of a model on a device, constants) gets a twin on meta, which takes its place in the operators that are recorded: so
// nothing is computed, and nothing of the model is changed. Autograd's node of each value is remembered: a tensor that has another one when it is used has
// been through something that is no operator, and would be replayed without it.

namespace tessera::tape {

namespace {

const torch::autograd::Node* maker_of(const at::Tensor& tensor) { return tensor.is_leaf() ? nullptr : tensor.grad_fn().get(); }

bool same_place(const Form& a, const at::Tensor& b) {
  return a.sizes == b.sizes() && a.strides == b.strides() && a.offset == b.storage_offset() && a.dtype == b.scalar_type();
}

constexpr const char* kFunctionWayOut =
    "; neither a torch::autograd::Function nor torch::autograd::grad is an operator, and what they are differentiated by would be lost: put the call into a "
    "module that is declared with TESSERA_MODULE, whose call is "
    "recorded as a whole, or write it with operators";

}  // namespace

std::string Where::text() const {
  std::string text = op;
  const char* separator = " (";
  if (!module.empty()) text += std::exchange(separator, ", ") + ("in '" + module + "'");
  if (!state.empty()) text += std::exchange(separator, ", ") + ("after '" + state + "' was used");
  return *separator == ',' ? text + ")" : text;
}

bool is_same_tensor(const at::Tensor& a, const at::Tensor& b) {
  return a.is_same(b) || (a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage()) && a.sizes() == b.sizes() && a.strides() == b.strides() &&
                          a.storage_offset() == b.storage_offset());
}

int KnownTensors::storage_number(const at::Tensor& tensor) {
  require(tensor.layout() == at::kStrided && tensor.has_storage(), "pipeline: ", where_.text(), ": a tensor of layout ", tensor.layout(),
          " cannot be sent; use strided ones");
  const auto [it, is_new] = storages_.emplace(tensor.storage().unsafeGetStorageImpl(), static_cast<int>(handles_.size()));
  if (is_new) {
    kept_storages_.push_back(tensor.storage().getWeakStorageImpl());
    handles_.emplace_back();
  }
  return it->second;
}

void KnownTensors::name_tensor(const at::Tensor& tensor, int value) {
  numbers_.emplace(tensor.unsafeGetTensorImpl(), value);
  handles_[static_cast<size_t>(at(value).storage)].push_back({Weak(tensor.getIntrusivePtr()), value});
}

int KnownTensors::add(const at::Tensor& tensor, Value::Kind kind, std::string name, int maker) {
  const int value = static_cast<int>(graph_.values.size());
  Form form = form_of(tensor);
  if (kind == Value::Kind::Parameter) form.requires_grad = tensor.is_floating_point() || tensor.is_complex();
  const bool requires_grad = form.requires_grad;
  graph_.values.push_back({.kind = kind, .name = std::move(name), .storage = storage_number(tensor), .maker = maker, .forms = {{maker, std::move(form)}}});
  name_tensor(tensor, value);
  if (tensor.is_meta() && !at(value).is_state()) {
    makers_[value] = maker_of(tensor);
    note_hooks(value, tensor);
    return value;
  }
  at::Tensor twin = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
  twin.set_requires_grad(requires_grad);
  storages_.emplace(twin.storage().unsafeGetStorageImpl(), at(value).storage);
  kept_storages_.push_back(twin.storage().getWeakStorageImpl());
  name_tensor(twin, value);
  makers_[value] = nullptr;
  hooks_[value] = 0;
  twins_.emplace(tensor.unsafeGetTensorImpl(), std::move(twin));
  originals_.push_back(tensor);
  return value;
}

int KnownTensors::add_state(const at::Tensor& tensor, bool is_buffer, const std::string& name) {
  if (const auto found = numbers_.find(tensor.unsafeGetTensorImpl()); found != numbers_.end()) {
    at(found->second).aliases.push_back(name);
    return found->second;
  }
  return add(tensor, is_buffer ? Value::Kind::Buffer : Value::Kind::Parameter, name);
}

at::Tensor KnownTensors::twin(const at::Tensor& tensor) const {
  const auto found = twins_.find(tensor.unsafeGetTensorImpl());
  return found == twins_.end() ? tensor : found->second;
}

at::Tensor KnownTensors::tensor_of(int value) const {
  for (const Handle& handle : handles_[static_cast<size_t>(graph_.values[static_cast<size_t>(value)].storage)]) {
    if (handle.value != value) continue;
    if (auto impl = handle.tensor.lock()) return twin(at::Tensor(std::move(impl)));
  }
  return {};
}

int64_t KnownTensors::version(int value) const {
  const at::Tensor tensor = tensor_of(value);
  return !tensor.defined() || tensor.is_inference() ? 0 : tensor._version();
}

void KnownTensors::check_history(int value, const at::Tensor& tensor) const {
  const Value& known = graph_.values[static_cast<size_t>(value)];
  if (known.kind != Value::Kind::Result) return;
  const auto* const maker = maker_of(tensor);
  require(makers_.at(value) == maker, "pipeline: ", where_.text(), " is given a tensor that '", maker ? maker->name() : "nothing",
          "' has made of what an operator gave", kFunctionWayOut);
  require(tensor.requires_grad() == known.last_form().requires_grad, "pipeline: ", where_.text(),
          " is given a tensor whose requires_grad was changed by hand (set_requires_grad), which no operator repeats; use detach(), or NoGradGuard around what "
          "makes it");
  require(hooks_of(tensor) == hooks_.at(value), "pipeline: ", where_.text(),
          " is given a tensor with a hook (register_hook), which a replay would not call; put the call into a module that is declared with TESSERA_MODULE, or "
          "the hook on a parameter of one stage");
}

// Those of C++ are one hook of autograd's, which has a list.
size_t KnownTensors::hooks_of(const at::Tensor& tensor) {
  const auto* const meta = tensor.defined() ? torch::autograd::impl::get_autograd_meta(tensor) : nullptr;
  return meta == nullptr ? 0 : meta->hooks_.size() + (meta->cpp_hooks_list_ ? meta->cpp_hooks_list_->size() : 0);
}

KnownTensors::Hooks::Hooks(const at::Tensor& tensor) {
  const auto* const meta = tensor.defined() ? torch::autograd::impl::get_autograd_meta(tensor) : nullptr;
  if (meta == nullptr) return;
  list = meta->cpp_hooks_list_;
  listed = list ? list->size() : 0;
  node = tensor.grad_fn();
  of_node = node ? node->tensor_pre_hooks().size() : 0;
  retained = tensor.retains_grad();
}

// A write gives a tensor another history, and leaves its hooks with the one that it had.
bool KnownTensors::Hooks::have_changed(const at::Tensor& tensor) const {
  const Hooks now(tensor);
  const auto behind = list_behind(now);
  const bool is_hooked = behind ? behind->size() != listed : now.node != node && node && node->tensor_pre_hooks().size() != of_node;
  return is_hooked || now.retained != retained;
}

/// A module's call runs anew, and with it what that hooks to what it returns.
void KnownTensors::note_hooks(int value, const at::Tensor& tensor) {
  hooks_[value] = hooks_of(tensor);
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta != nullptr && meta->cpp_hooks_list_) lists_[meta->cpp_hooks_list_.get()] = {meta->cpp_hooks_list_, meta->cpp_hooks_list_->size()};
  if (const auto node = tensor.grad_fn()) nodes_[node.get()] = {node, node->tensor_pre_hooks().size()};
}

namespace {
/// By a node that gives it a term of its gradient, since another made its values anew.
bool is_used(const Graph& graph, int value) {
  for (int number = graph.size() - 1; number >= 0 && number != graph.values[static_cast<size_t>(value)].maker; --number) {
    const Node& node = graph.nodes[static_cast<size_t>(number)];
    if (std::ranges::find(node.rebased, value) != node.rebased.end()) return false;
    if (gives_term(graph, node, value)) return true;
  }
  return false;
}
}  // namespace

std::optional<int> KnownTensors::hooked_inside(const at::Tensor& tensor, const Hooks& before) {
  const auto found = before.have_changed(tensor) ? numbers_.find(tensor.unsafeGetTensorImpl()) : numbers_.end();
  if (found == numbers_.end()) return std::nullopt;
  require(
      !is_used(graph_, found->second), "pipeline: ", where_.text(),
      " hooks a tensor that it was given (register_hook, retain_grad), and others were given it before: where these lie in another stage, it would be called "
      "with a part of the gradient; give it a view of its own (h.view_as(h))");
  if (const auto list = before.list_behind(Hooks(tensor))) lists_.insert_or_assign(list.get(), std::pair(list, list->size()));
  if (const auto node = nodes_.find(before.node.get()); node != nodes_.end()) node->second.second = node->second.first->tensor_pre_hooks().size();
  hooks_[found->second] = hooks_of(twin(tensor));  // whoever uses it behind the call
  return found->second;
}

// Who has a hook may be gone: its list and its maker are not.
void KnownTensors::check_hooks() const {
  const bool as_noted = std::ranges::all_of(lists_, [](const auto& item) { return item.second.first->size() == item.second.second; }) &&
                        std::ranges::all_of(nodes_, [](const auto& item) { return item.second.first->tensor_pre_hooks().size() == item.second.second; });
  require(as_noted,
          "pipeline: a tensor was given a hook (register_hook) behind its last use, which a replay would not call; put the call into a module that is declared "
          "with TESSERA_MODULE, or the hook on a parameter of one stage");
}

int KnownTensors::argument(const at::Tensor& tensor, bool writes) {
  const auto found = numbers_.find(tensor.unsafeGetTensorImpl());
  const int value = found == numbers_.end() ? unknown(tensor) : found->second;
  check_history(value, twin(tensor));
  if (unwritten_.erase(value) > 0 && !writes) become_constant(value, tensor);
  require(!writes || at(value).kind != Value::Kind::Constant || at(value).maker >= 0, "pipeline: ", where_.text(),
          " writes into a tensor that is no parameter and no buffer, and was there before the pass; register it as a buffer");
  return value;
}

void KnownTensors::become_constant(int value, const at::Tensor& tensor) {
  at(value).kind = Value::Kind::Constant;
  at(value).constant = tensor;
}

int KnownTensors::unknown(const at::Tensor& tensor) {
  require(!tensor.grad_fn(), "pipeline: ", where_.text(), " is given a tensor that no operator made: it comes from '",
          tensor.grad_fn() ? tensor.grad_fn()->name() : std::string(), "'", kFunctionWayOut);
  const auto memory = tensor.has_storage() ? storages_.find(tensor.storage().unsafeGetStorageImpl()) : storages_.end();
  if (memory != storages_.end()) {
    // The same memory by another handle, as torch::zeros makes one, and data().
    const auto& handles = handles_[static_cast<size_t>(memory->second)];
    for (size_t i = handles.size(); i-- > 0;) {
      const int value = handles[i].value;
      if (!same_place(at(value).last_form(), tensor)) continue;
      if (unwritten_.erase(value) > 0) {
        become_constant(value, tensor);
        name_tensor(tensor, value);
        return value;
      }
      return detached(value, tensor);
    }
    require(false, "pipeline: ", where_.text(),
            " is given a part of a tensor's memory that no operator has cut out (a view that is kept from an earlier pass?); make it anew in each forward");
  }
  require(!tensor.is_meta(), "pipeline: ", where_.text(),
          " is given a tensor on meta that is no parameter, no buffer and no input, so that nobody would give it values (one that an earlier pass has left in "
          "a member?); register it as a buffer");
  require(!tensor.requires_grad(), "pipeline: ", where_.text(),
          " is given a tensor that requires gradients, and is no parameter, so that no stage would own it; register it as a parameter");
  const int value = add(tensor, Value::Kind::Constant, "");
  become_constant(value, tensor);
  return value;
}

int KnownTensors::detached(int value, const at::Tensor& tensor) {
  static const auto detach = c10::Dispatcher::singleton().findSchemaOrThrow("aten::detach", "");
  const int node = graph_.size();
  const int made = add(tensor, Value::Kind::Result, "", node);
  const auto slot = [](int number) { return Slot{.kind = Slot::Kind::Tensor, .values = {number}}; };
  graph_.nodes.push_back({.op = detach, .name = "detach", .arguments = {slot(value)}, .results = {slot(made)}, .autocast = Autocast::now()});
  return made;
}

int KnownTensors::result(const at::Tensor& tensor, int node, bool unwritten) {
  if (const auto found = numbers_.find(tensor.unsafeGetTensorImpl()); found != numbers_.end()) {
    look_again(found->second, twin(tensor), node);
    note_hooks(found->second, twin(tensor));
    return found->second;
  }
  const int value = add(tensor, Value::Kind::Result, "", node);
  if (unwritten && !tensor.is_meta()) unwritten_.insert(value);
  return value;
}

void KnownTensors::look_again(int value, const at::Tensor& tensor, int node) {
  Value& known = at(value);
  if (const auto* const maker = maker_of(tensor); std::exchange(makers_[value], maker) != maker) {
    rebased_.push_back(value);
    note_hooks(value, tensor);  // those that it had are its old history's
  }
  Form now = form_of(tensor);
  if (now != known.last_form()) known.forms.push_back({node, std::move(now)});
}

void KnownTensors::written(int value, int node) {
  for (const Handle& handle : handles_[static_cast<size_t>(at(value).storage)]) {
    auto impl = handle.tensor.lock();
    if (!impl) continue;
    const at::Tensor tensor(std::move(impl));
    if (tensor.is_meta() && !twins_.contains(tensor.unsafeGetTensorImpl())) look_again(handle.value, tensor, node);
  }
}

}  // namespace tessera::tape
