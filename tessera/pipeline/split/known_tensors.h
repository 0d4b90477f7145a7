#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/function.h>

#include "tessera/pipeline/split/graph.h"

namespace torch::autograd {
struct Node;
}

namespace tessera::tape {

/// Where in the pass the recording is, for messages.
struct Where {
  std::string op{};      ///< the operator at hand
  std::string module{};  ///< the innermost module that announced itself and is under way
  std::string state{};   ///< the parameter or buffer that was used last

  std::string text() const;  ///< "aten::mul (in 'layers.0', after 'layers.0.fc.bias' was used)"
};

/// Or the same place of the same memory.
bool is_same_tensor(const at::Tensor& a, const at::Tensor& b);

/// Which value of the graph each tensor of the program is, while a pass is recorded; and what was done to tensors behind the back of all operators, which a
/// replay would not repeat: it is refused by name (ConfigError).
///
/// A pass is recorded without memory and without arithmetic: what has data is stood in for by a meta tensor (its twin), which operators take in its place.
/// Parameters and buffers have twins also where they are on meta themselves, so that the pass leaves them as they are. Those of parameters take gradients also
/// where the parameter is frozen for now: what crosses and what comes back is what could, whoever freezes and unfreezes a part of the model, and when.
class KnownTensors {
 public:
  KnownTensors(Graph& graph, const Where& where) : graph_(graph), where_(where) {}

  int add(const at::Tensor& tensor, Value::Kind kind, std::string name, int maker = -1);
  /// A further name of one that is known, or a new one.
  int add_state(const at::Tensor& tensor, bool is_buffer, const std::string& name);

  /// The number of what an operator is given. `writes`: the operator writes into it.
  int argument(const at::Tensor& tensor, bool writes);
  /// The number of what node number `node` gives. `unwritten`: memory without values, which the program may fill by hand.
  int result(const at::Tensor& tensor, int node, bool unwritten);
  /// Node number `node` wrote into it: everything that shows the same memory may have another history now.
  void written(int value, int node);
  /// Those that have another one since the last call.
  std::vector<int> take_rebased() { return std::exchange(rebased_, {}); }

  /// What is hooked to a tensor, and to what made it.
  struct Hooks {
    explicit Hooks(const at::Tensor& tensor);
    /// Whether the tensor has others since then, where nothing but the call at hand has looked at it.
    bool have_changed(const at::Tensor& tensor) const;
    /// The list in which those lie: a write gives the tensor another.
    std::shared_ptr<torch::autograd::hooks_list> list_behind(const Hooks& now) const { return list || now.node != node ? list : now.list; }

    std::shared_ptr<torch::autograd::hooks_list> list{};
    c10::intrusive_ptr<torch::autograd::Node> node{};
    size_t listed = 0, of_node = 0;
    bool retained = false;  ///< retain_grad()
  };
  /// A call that will run anew as a whole, the node behind all that the graph has, has returned: what that has hooked to `tensor`, which it was given, it hooks
  /// anew. `before`: when it was given. Its number, if it was hooked. Throws ConfigError where others were given the tensor before.
  std::optional<int> hooked_inside(const at::Tensor& tensor, const Hooks& before);
  /// When the pass is over: refuses hooks that nobody's use has shown. Throws ConfigError.
  void check_hooks() const;

  /// The tensor itself, or what stands in for it.
  at::Tensor twin(const at::Tensor& tensor) const;

  /// A value's tensor, or what stands in for it; undefined where the program has let go of it.
  at::Tensor tensor_of(int value) const;
  /// How often a value's tensor was written into, as libtorch counts.
  int64_t version(int value) const;

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Handle {
    Weak tensor;  ///< keeps the address from being used again, and not the memory
    int value;
  };

  int storage_number(const at::Tensor& tensor);
  void name_tensor(const at::Tensor& tensor, int value);
  void look_again(int value, const at::Tensor& tensor, int node);
  int unknown(const at::Tensor& tensor);
  int detached(int value, const at::Tensor& tensor);
  void become_constant(int value, const at::Tensor& tensor);
  void check_history(int value, const at::Tensor& tensor) const;
  static size_t hooks_of(const at::Tensor& tensor);
  void note_hooks(int value, const at::Tensor& tensor);
  Value& at(int value) { return graph_.values[static_cast<size_t>(value)]; }

  Graph& graph_;
  const Where& where_;
  std::unordered_map<const c10::TensorImpl*, int> numbers_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> twins_;
  std::unordered_map<const c10::StorageImpl*, int> storages_;
  std::vector<std::vector<Handle>> handles_;                      ///< by number of the storage; the last list: of tensors that have none
  std::unordered_map<int, const torch::autograd::Node*> makers_;  ///< grad_fn as the last operator left it
  std::unordered_map<int, size_t> hooks_;                         ///< that it had when it was made
  // Until the pass is over, with how many hooks they had when they were last made:
  std::unordered_map<const torch::autograd::hooks_list*, std::pair<std::shared_ptr<torch::autograd::hooks_list>, size_t>> lists_;
  std::unordered_map<const torch::autograd::Node*, std::pair<c10::intrusive_ptr<torch::autograd::Node>, size_t>> nodes_;
  std::unordered_set<int> unwritten_;
  std::vector<int> rebased_;
  std::vector<at::Tensor> originals_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> kept_storages_;
};

}  // namespace tessera::tape
