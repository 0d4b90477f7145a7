#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include "tessera/nn/interceptor.h"
#include "tessera/pipeline/split/autocast.h"

/// What one forward pass did, as a value: the operators and calls of modules in their order, and the tensors between them.
///
/// Tensors are numbered as registers are, not as single assignments: a tensor that an operator writes into keeps its number, so that views and writes in place
/// are repeated as they were, and what they look like is a matter of the position in the list.
namespace tessera::tape {

/// What a tensor looks like from some position on.
struct Form {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = false;

  bool operator==(const Form&) const = default;
  int64_t bytes() const;  ///< of its elements, those that an expanded dimension repeats once each
};
Form form_of(const at::Tensor& tensor);
std::string to_string(const Form& form);                      ///< "float32 [4, 3]"
bool lies_alike(const at::Tensor& tensor, const Form& form);  ///< of the same sizes: in memory, too

/// A tensor of the pass.
struct Value {
  enum class Kind : uint8_t { Input, Parameter, Buffer, Constant, Result };
  struct Change {
    int node;  ///< after it; -1: from the start
    Form form;
  };

  Kind kind = Kind::Result;
  std::string name{};                  ///< of a parameter or buffer, its path; of an input, "input 0"
  std::vector<std::string> aliases{};  ///< further names, where it is tied
  at::Tensor constant{};
  int storage = -1;             ///< values with the same number show the same memory
  int maker = -1;               ///< the node that makes it; -1: it is there before
  std::vector<Change> forms{};  ///< ascending

  bool is_state() const { return kind == Kind::Parameter || kind == Kind::Buffer; }
  /// As nodes from `position` on find it.
  const Form& form_before(int position) const;
  const Form& last_form() const { return forms.back().form; }
  bool is_called(const std::string& path) const;  ///< by one of its names, or something above one of them
};

/// An argument or result: something that is no tensor, a tensor, or a list of tensors, by their numbers (-1: none).
struct Slot {
  enum class Kind : uint8_t { Plain, Tensor, List, OptionalList };
  Kind kind = Kind::Plain;
  c10::IValue plain{};
  std::vector<int> values{};
};

/// An operator, or the call of a module as a whole.
struct Node {
  std::optional<c10::OperatorHandle> op{};
  std::optional<nn::Recall> call{};
  std::string name{};  ///< "addmm", or what kind of module is called
  std::string path{};  ///< of the module that is called, or whose parameters the operator uses; empty: of none
  std::vector<Slot> arguments{}, results{};
  std::vector<int> state{};   ///< what a called module holds
  std::vector<int> writes{};  ///< values that it writes into
  /// Whose history, as autograd keeps it, goes through it from then on: of what it writes into, the values that are or show the same memory as views.
  std::vector<int> rebased{};
  std::vector<int> hooked{};                       ///< what a module that is called hooks of what it is given
  std::vector<std::function<void()>> puts_back{};  ///< before a module is called: what calls before it have left (nn::PassState)
  bool grad_mode = true;
  Autocast autocast{};
};

/// When a module was entered and left: nodes [begin, end).
struct Span {
  std::string path;
  int begin, end;
};

struct Graph {
  std::vector<Value> values;
  std::vector<Node> nodes;
  std::vector<int> inputs, outputs;  ///< values
  std::vector<Span> spans;           ///< of modules that announce their calls (nn::Module), in the order of their ends

  int size() const { return static_cast<int>(nodes.size()); }
};

/// Every tensor that `node` takes, and the state of the module that it calls.
template <class F>
void for_each_use(const Node& node, F&& visit) {
  for (const Slot& slot : node.arguments) {
    for (const int value : slot.values) {
      if (value >= 0) visit(value);
    }
  }
  for (const int value : node.state) visit(value);
}
template <class F>
void for_each_result(const Node& node, F&& visit) {
  for (const Slot& slot : node.results) {
    for (const int value : slot.values) {
      if (value >= 0) visit(value);
    }
  }
}

bool uses_state(const Graph& graph, int node);
/// Whether the node gives `value`, which it takes, a term of its gradient.
bool gives_term(const Graph& graph, const Node& node, int value);
/// Memory, by its number, of which reshape and its like show a part or take a copy, by how it lies, and where it matters, since either is written into behind.
std::set<int> storages_by_layout(const Graph& graph);
bool is_under(const std::string& name, const std::string& path);  ///< is it, or lies below it

std::string short_name(const std::string& type);  ///< "Net" of "my::NetImpl"

/// The graph line by line, values by number: for whoever looks for why two differ.
std::string to_string(const Graph& graph);

/// The first operator in which `now` is not `before`, with the module before it: "after 'a': aten::mul.Scalar(%4, 2) in place of aten::mul.Scalar(%4, 1)".
std::string first_difference(const Graph& before, const Graph& now);

}  // namespace tessera::tape
