#include "tessera/pipeline/split/program.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/pipeline/split/known_tensors.h"
#include "tessera/pipeline/split/wire.h"

// A stage's operators, to be run again with data: registers, one a value, that are emptied as soon as nobody uses them any more, so that a stage keeps what
// the module itself would have kept. The last use is found once, backward over the list, with what each operator makes for nobody. Operators are called by
// their boxed kernels through the dispatcher, so that autograd, casts and recomputation happen as they would in the module.
//
// A module that is called may give something else than it did while it was recorded, where everything behind it was told apart by what it gave then. So what
// it gives is held against the recording. Its dtype is not: wrappers that are attached later change it, and where it matters, at a cut, it is looked at.

namespace tessera::tape {

namespace {

using Registers = std::vector<at::Tensor>;

const at::Tensor& at(const Registers& registers, int value) { return registers[static_cast<size_t>(value)]; }

void push(torch::jit::Stack& stack, const Slot& slot, const Registers& registers, at::Device device) {
  switch (slot.kind) {
    case Slot::Kind::Plain:
      // It was recorded on meta; a stage runs where its tensors are.
      if (slot.plain.isDevice() && slot.plain.toDevice().is_meta()) {
        stack.emplace_back(device);
      } else {
        stack.push_back(slot.plain);
      }
      return;
    case Slot::Kind::Tensor:
      stack.emplace_back(at(registers, slot.values[0]));
      return;
    case Slot::Kind::List: {
      c10::List<at::Tensor> list;
      list.reserve(slot.values.size());
      for (const int value : slot.values) list.push_back(value < 0 ? at::Tensor() : at(registers, value));
      stack.emplace_back(std::move(list));
      return;
    }
    case Slot::Kind::OptionalList: {
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(slot.values.size());
      for (const int value : slot.values) list.push_back(value < 0 ? std::nullopt : std::optional(at(registers, value)));
      stack.emplace_back(std::move(list));
      return;
    }
  }
}

void call(const Node& node, torch::jit::Stack& stack) {
  if (node.op) {
    node.op->callBoxed(stack);
  } else {
    for (const auto& put_back : node.puts_back) put_back();
    stack = (*node.call)(std::move(stack));
  }
}

/// Uses behind the call that may mean what it was given, or what it gave: one in its own stage takes what the call gives.
bool is_ambiguous(const Graph& graph, int value, int number, int end) {
  const Value& known = graph.values[static_cast<size_t>(value)];
  if (known.maker == number || known.is_state()) return false;
  const auto weight = [&](bool is_own) { return is_own ? 1 : 2; };
  int uses = 0;
  for (int later = number + 1; later < graph.size(); ++later) {
    for_each_use(graph.nodes[static_cast<size_t>(later)], [&](int used) { uses += used == value ? weight(later < end) : 0; });
  }
  for (const int output : graph.outputs) uses += output == value ? weight(end == graph.size()) : 0;
  return uses > 1;
}

std::string kind_of(const c10::IValue& value) {
  if (value.isTensorList()) return detail::concat("a list of ", value.toTensorVector().size());
  return value.isTensor() && value.toTensor().defined() ? "a tensor" : "no tensor";
}

std::string kind_of(const Slot& slot) {
  if (slot.kind == Slot::Kind::List) return detail::concat("a list of ", slot.values.size());
  return slot.kind == Slot::Kind::Tensor ? "a tensor" : "no tensor";
}

/// Whether other stages give it terms of a gradient that does not come by this one.
bool is_torn(const Graph& graph, const Stages& stages, int stage, int value) {
  const Value& known = graph.values[static_cast<size_t>(value)];
  const StagePlan& plan = stages.stages[static_cast<size_t>(stage)];
  if (known.is_state() || !known.form_before(plan.begin).requires_grad) return false;
  for (int number = plan.begin - 1; number > known.maker; --number) {
    const Node& node = graph.nodes[static_cast<size_t>(number)];
    if (std::ranges::find(node.rebased, value) != node.rebased.end()) break;
    if (gives_term(graph, node, value)) return true;
  }
  const auto input = static_cast<int>(std::ranges::find(graph.inputs, value) - graph.inputs.begin());
  for (int later = stage + 1; later < stages.size(); ++later) {
    const std::vector<int>& fed = stages.stages[static_cast<size_t>(later)].fed;
    if (std::ranges::find(fed, input) != fed.end()) return true;
  }
  return std::ranges::any_of(
      stages.crossings, [&](const Crossing& crossing) { return crossing.value == value && crossing.from < stage && crossing.to > stage && crossing.gradient; });
}

/// What the module hooks of what other stages use as well, it has to hook when it is recorded, too: then these are sent it from there.
void check_hooks(const Node& node, const std::vector<std::pair<at::Tensor, KnownTensors::Hooks>>& torn) {
  for (const auto& [tensor, before] : torn) {
    require(
        !before.have_changed(tensor), "pipeline: the call of '", node.path, "' (", node.name,
        ") hooks a tensor that it was given (register_hook, retain_grad), and did not when it was recorded; other stages use it, too, so that the hook would "
        "be called with a part of the gradient: hook it in each pass of a mode, or a view of it (x.view_as(x)), or call record_anew() on every rank between "
        "two steps");
  }
}

/// `given`: what Program::Step::given_back were before the call. `drops_gradients`: Program::without_gradient_ has some.
void check_call(const Graph& graph, const Node& node, const std::vector<int>& given_back, const std::vector<at::Tensor>& given, bool drops_gradients,
                const torch::jit::Stack& stack) {
  const auto number = static_cast<int>(&node - graph.nodes.data());
  const auto hold = [&](bool is_so, const auto&... text) {
    require(is_so, "pipeline: the call of '", node.path, "' (", node.name, ") gives ", text...,
            "; a recording goes by what a call gave: give the same in each pass of a mode, or call record_anew() on every rank between two steps");
  };
  std::map<int, at::Tensor> one;
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].defined()) one.emplace(given_back[i], given[i]);
  }
  const auto look = [&](int value, const at::Tensor& now) {
    hold(now.defined() == (value >= 0), now.defined() ? "a tensor" : "no tensor", " in a list where it was recorded with ", value < 0 ? "none" : "one");
    if (value < 0) return;
    const Form& form = graph.values[static_cast<size_t>(value)].form_before(number + 1);
    hold(now.sizes() == at::IntArrayRef(form.sizes), "a tensor of ", now.sizes(), " where it was recorded with ", at::IntArrayRef(form.sizes));
    hold(!now.requires_grad() || form.requires_grad || !drops_gradients, "a tensor with a gradient where it was recorded with one that has none");
    require(is_same_tensor(one.emplace(value, now).first->second, now), "pipeline: the call of '", node.path, "' (", node.name,
            ") gives two tensors where it was recorded with one: it gave back what it was given then, or the same twice, and who uses which of the two is not "
            "known; give a view each time that it would be the same (x.view_as(x))");
  };
  hold(stack.size() == node.results.size(), stack.size(), " values where it was recorded with ", node.results.size());
  for (size_t r = 0; r < node.results.size(); ++r) {
    const Slot& slot = node.results[r];
    hold(kind_of(stack[r]) == kind_of(slot), kind_of(stack[r]), " where it was recorded with ", kind_of(slot));
    if (slot.kind == Slot::Kind::Tensor) look(slot.values[0], stack[r].toTensor());
    if (slot.kind != Slot::Kind::List) continue;
    const std::vector<at::Tensor> tensors = stack[r].toTensorVector();
    for (size_t k = 0; k < tensors.size(); ++k) look(slot.values[k], tensors[k]);
  }
}

}  // namespace

Program::Program(std::shared_ptr<const Graph> graph, const Stages& stages, int stage, const State& state)
    : graph_(std::move(graph)), first_registers_(graph_->values.size()), is_stored_(graph_->values.size(), true), copied_(graph_->values.size()) {
  const StagePlan& plan = stages.stages[static_cast<size_t>(stage)];
  for (const int c : plan.sends) {
    const int value = stages.crossings[static_cast<size_t>(c)].value;
    if (std::ranges::find(results_, value) == results_.end()) results_.push_back(value);
  }
  if (stage + 1 == stages.size()) results_.insert(results_.end(), graph_->outputs.begin(), graph_->outputs.end());
  std::vector<bool> kept(graph_->values.size());
  const auto keep = [&](int value) { kept[static_cast<size_t>(value)] = true; };
  std::ranges::for_each(results_, keep);
  for (const int value : plan.state) {
    keep(value);
    const Value& known = graph_->values[static_cast<size_t>(value)];
    const auto found = state.find(known.name);
    invariant(found != state.end(), "pipeline: stage ", stage, " has no '", known.name, "'");
    first_registers_[static_cast<size_t>(value)] = found->second;
  }
  for (size_t v = 0; v < graph_->values.size(); ++v) {
    if (graph_->values[v].kind != Value::Kind::Constant) continue;
    kept[v] = true;
    is_stored_[v] = false;
    first_registers_[v] = graph_->values[v].constant;
  }
  for (const int value : plan.copied) copied_[static_cast<size_t>(value)] = true;
  for (const int c : plan.receives) {
    const Crossing& crossing = stages.crossings[static_cast<size_t>(c)];
    if (crossing.form.requires_grad && !crossing.gradient) without_gradient_.push_back(crossing.value);
  }

  std::vector<bool> seen = kept;
  const std::vector<int> nodes = nodes_of(plan);
  for (size_t n = nodes.size(); n-- > 0;) {
    const Node& node = graph_->nodes[static_cast<size_t>(nodes[n])];
    Step step{.node = &node};
    const auto look = [&](int value, std::vector<int>& last) {
      if (!seen[static_cast<size_t>(value)]) last.push_back(value);
      seen[static_cast<size_t>(value)] = true;
    };
    for_each_result(node, [&](int value) { look(value, step.unused); });
    for_each_use(node, [&](int value) {
      look(value, step.dead);
      const bool is_hooked = std::ranges::find(node.hooked, value) != node.hooked.end();
      if (node.call && !is_hooked && is_torn(*graph_, stages, stage, value)) step.torn.push_back(value);
    });
    for_each_result(node, [&](int value) {
      if (node.call && is_ambiguous(*graph_, value, nodes[n], plan.end)) step.given_back.push_back(value);
    });
    steps_.push_back(std::move(step));
  }
  std::ranges::reverse(steps_);
}

std::vector<at::Tensor> Program::run(const std::vector<Given>& fed) const {
  Registers registers = first_registers_;
  std::optional<at::Device> device;
  const bool gradients = at::GradMode::is_enabled();
  for (const auto& [value, tensor] : fed) {
    // Who takes a gradient now, and did not, is found out.
    const bool is_marked = gradients && !tensor.requires_grad() && std::ranges::find(without_gradient_, value) != without_gradient_.end();
    const at::Tensor given = is_marked ? tensor.detach().requires_grad_() : tensor;
    registers[static_cast<size_t>(value)] = copied_[static_cast<size_t>(value)] ? copy_of(given) : given;
    device = tensor.device();
  }
  for (size_t v = 0; v < registers.size(); ++v) {
    if (!registers[v].defined()) continue;
    if (copied_[v] && graph_->values[v].kind == Value::Kind::Constant) registers[v] = copy_of(registers[v]);
    if (graph_->values[v].is_state()) device = registers[v].device();
  }
  Autocast autocast = Autocast::now();
  std::optional<AutocastSwitch> autocast_switch;
  torch::jit::Stack stack;
  for (const auto& [node, dead, unused, given_back, torn] : steps_) {
    stack.clear();
    for (const Slot& slot : node->arguments) push(stack, slot, registers, device.value_or(at::kCPU));
    std::vector<at::Tensor> given;
    for (const int value : given_back) given.push_back(at(registers, value));
    std::vector<std::pair<at::Tensor, KnownTensors::Hooks>> hooks;
    for (const int value : torn) hooks.emplace_back(at(registers, value), at(registers, value));
    for (const int value : dead) registers[static_cast<size_t>(value)].reset();  // the stack holds what the operator takes
    if (node->autocast != autocast) {
      if (!autocast_switch) autocast_switch.emplace();
      autocast_switch->set(autocast = node->autocast);
    }
    if (node->grad_mode || !gradients) {
      call(*node, stack);
    } else {
      const at::NoGradGuard no_grad;
      call(*node, stack);
    }
    if (node->call) {
      check_call(*graph_, *node, given_back, given, gradients && !without_gradient_.empty(), stack);
      check_hooks(*node, hooks);
    }
    for (size_t r = 0; r < node->results.size(); ++r) {
      const Slot& slot = node->results[r];
      if (slot.kind == Slot::Kind::Tensor) {
        if (is_stored_[static_cast<size_t>(slot.values[0])]) registers[static_cast<size_t>(slot.values[0])] = std::move(stack[r]).toTensor();
      } else if (slot.kind == Slot::Kind::List) {
        std::vector<at::Tensor> tensors = stack[r].toTensorVector();
        for (size_t k = 0; k < slot.values.size(); ++k) {
          if (slot.values[k] >= 0 && is_stored_[static_cast<size_t>(slot.values[k])]) registers[static_cast<size_t>(slot.values[k])] = std::move(tensors[k]);
        }
      }
    }
    for (const int value : unused) registers[static_cast<size_t>(value)].reset();
  }
  std::vector<at::Tensor> results;
  for (const int value : results_) results.push_back(at(registers, value));
  return results;
}

int Program::result_number(int value) const { return static_cast<int>(std::ranges::find(results_, value) - results_.begin()); }

}  // namespace tessera::tape
