#include "tessera/nn/saved_tensors.h"

#include <algorithm>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "tessera/core/ambient.h"
#include "tessera/core/error.h"
#include "tessera/nn/calls.h"

// Whoever wants to keep what autograd saves elsewhere (recompute drops it, offload moves it) is asked here, innermost first. libtorch asks its engine for the
// hooks of what is saved, and has room for one pair: so the engine is one of ours, whose hooks ask them all. It also carries the rank's ambient context to a
// device's thread, where recomputation runs forward again and saves anew.

namespace tessera::nn {

namespace {

const Ambient<std::vector<std::shared_ptr<SavedTensorHooks>>> scopes;
const Ambient<bool> is_recomputing;
const Ambient<const torch::autograd::Node*> node_recomputed_for;

/// Kept as it is. The version counter is shared, so a change in place shows.
class Kept final : public SavedTensor {
 public:
  explicit Kept(const at::Tensor& tensor) : tensor_(alias_of(tensor)), version_(tensor_._version()) {}

  at::Tensor unpack() override {
    require(tensor_._version() == version_, "a tensor of shape ", tensor_.sizes(),
            " that backward needs was changed in place after it was saved; change a copy");
    return tensor_;
  }

 private:
  at::Tensor tensor_;
  int64_t version_;
};

class Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override { saved_ = save(tensor); }
  at::Tensor call_unpack_hook() override {
    invariant(saved_ != nullptr, "a saved tensor was asked for before it was saved");
    return saved_->unpack();
  }

 private:
  std::unique_ptr<SavedTensor> saved_;
};

/// What was to be called at the end of a pass that failed.
struct Dropped {
  std::mutex mutex{};
  std::vector<std::function<void()>> callbacks{};
};
Ambient<std::shared_ptr<Dropped>> dropped_of_pass;

/// Lets go of a failed pass's callbacks on the thread that asked for the pass, before it sees the exception, and hence on its streams: whoever owns them hears
/// of the failure by that (nn/backward_pass.h). Left to libtorch a device's thread would do it, at some time after it has woken the caller.
class DropsOnItsCaller {
 public:
  DropsOnItsCaller() : dropped_(std::make_shared<Dropped>()), outer_(std::exchange(*dropped_of_pass, dropped_)) {}
  ~DropsOnItsCaller() {
    *dropped_of_pass = std::move(outer_);
    std::vector<std::function<void()>> callbacks;
    const std::lock_guard lock(dropped_->mutex);
    callbacks.swap(dropped_->callbacks);
  }
  DropsOnItsCaller(const DropsOnItsCaller&) = delete;
  DropsOnItsCaller& operator=(const DropsOnItsCaller&) = delete;

 private:
  std::shared_ptr<Dropped> dropped_, outer_;
};

class HookedEngine final : public torch::autograd::Engine {
 public:
  ~HookedEngine() override { stop(); }
  static Engine& get() {
    static HookedEngine engine;
    return engine;
  }
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots, const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad, const torch::autograd::edge_list& outputs) override {
    if (accumulate_grad) detail::arm_expected_calls();
    const DropsOnItsCaller drops;
    const CarryAmbient carried;
    return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  /// On the thread of the node that failed, before the pass's caller is woken.
  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& pass, const c10::intrusive_ptr<torch::autograd::Node>& node,
                           std::exception& error) override {
    if (const auto dropped = *dropped_of_pass) {
      const std::scoped_lock lock(dropped->mutex, pass->final_callbacks_lock_);
      std::ranges::move(pass->final_callbacks_, std::back_inserter(dropped->callbacks));
      pass->final_callbacks_.clear();
    }
    Engine::thread_on_exception(pass, node, error);
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return scopes->empty() ? nullptr : std::make_unique<Hooks>();
  }
};

/// When the library loads, hence before the first backward: an engine that has begun to work must not be replaced.
const bool installed = [] {
  torch::autograd::set_default_engine_stub(&HookedEngine::get);
  return true;
}();

}  // namespace

at::Tensor alias_of(const at::Tensor& tensor) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

SavedTensorScope::SavedTensorScope(std::shared_ptr<SavedTensorHooks> hooks) {
  invariant(hooks != nullptr, "SavedTensorScope: no hooks given");
  scopes->push_back(std::move(hooks));
}

SavedTensorScope::~SavedTensorScope() { scopes->pop_back(); }

std::unique_ptr<SavedTensor> save(const at::Tensor& tensor) {
  // By index and owning: hooks may themselves open a scope.
  for (size_t i = scopes->size(); i > 0; --i) {
    const auto hooks = (*scopes)[i - 1];
    if (auto saved = hooks->pack(alias_of(tensor))) return saved;
  }
  return std::make_unique<Kept>(tensor);
}

const void* innermost_saved_tensor_scope() { return scopes->empty() ? nullptr : scopes->back().get(); }

bool saved_tensors_are_computed_again() {
  return std::ranges::any_of(*scopes, [](const auto& hooks) { return hooks->computes_again(); });
}

bool recomputing() noexcept { return *is_recomputing; }

const torch::autograd::Node* recomputed_for() noexcept { return *node_recomputed_for; }

RecomputingScope::RecomputingScope()
    : before_(std::exchange(*is_recomputing, true)), before_for_(std::exchange(*node_recomputed_for, torch::autograd::get_current_node().get())) {}
RecomputingScope::~RecomputingScope() {
  *is_recomputing = before_;
  *node_recomputed_for = before_for_;
}

}  // namespace tessera::nn
