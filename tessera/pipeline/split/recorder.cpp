#include "tessera/pipeline/split/recorder.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/module.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/operators.h"
#include "tessera/nn/pass_state.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/pipeline/split/known_tensors.h"
#include "tessera/pipeline/split/zeros.h"

// A forward pass becomes a list of operators by running it once on meta tensors, with a watch above autograd that sees each operator as the program calls it.
// A tracer that follows values (as torch.fx does) would need the program to be written for it; this one needs nothing of it, and sees libtorch's own modules
// from within. What cannot be repeated is refused where it happens: a value that the host reads, a shape that depends on values, a Function that is no
// operator.
//
// Autograd's graph is made while recording, too: it tells which tensors carry gradients, and whose history a write in place has changed. A module that is
// declared with TESSERA_MODULE may be kept whole: one node, whose forward runs anew each time, and may then read what it likes.

namespace tessera::tape {

namespace {

bool is_among(const std::string& name, std::initializer_list<const char*> names) {
  return std::ranges::any_of(names, [&](const char* one) { return name == one; });
}

bool is_host_read(const std::string& name) {
  return is_among(name, {"aten::item", "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::allclose"});
}

bool reads_on_host(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::data_dependent_output) || is_host_read(op.schema().name()); }

/// What a module that is recorded whole reads meanwhile: its forward runs anew with data, so this decides nothing but what its outputs look like.
c10::IValue nothing_read(const std::string& name, at::ScalarType dtype) {
  if (!is_among(name, {"aten::item", "aten::_local_scalar_dense"}) || dtype == at::kBool) return false;
  return at::isFloatingType(dtype) ? c10::IValue(0.0) : c10::IValue(0);
}

/// Indexing by integers is tagged as indexing by a mask is.
bool has_shape_of_values(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
  if (!op.hasTag(at::Tag::dynamic_output_shape)) return false;
  if (op.schema().name() == "aten::repeat_interleave") return stack.back().isNone();
  if (op.schema().name() == "aten::one_hot") return stack.back().toInt() < 0;  // as many classes as the largest value says
  if (op.schema().name() != "aten::index") return true;
  return std::ranges::any_of(stack[first + 1].toOptionalTensorVector(), [](const std::optional<at::Tensor>& index) {
    return index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
  });
}

std::string above(const std::string& name) {
  const auto dot = name.rfind('.');
  return dot == std::string::npos ? std::string() : name.substr(0, dot);
}

std::string plain_name(const std::string& name) { return name.starts_with("aten::") ? name.substr(6) : name; }

std::string first_line(const std::string& text) { return text.substr(0, text.find_first_of(".\n")); }

class Recorder final : public nn::OperatorWatcher {
 public:
  Recorder(torch::nn::Module& root, const Graph* compared) : known_(graph_, where_), compared_(compared) {
    root.apply([&](const std::string& path, torch::nn::Module& module) {
      note_pass_states(module);
      const auto name = [&](const std::string& key) { return path.empty() ? key : path + "." + key; };
      for (const auto& item : module.named_parameters(/*recurse=*/false)) add_state(item.value(), false, name(item.key()));
      for (const auto& item : module.named_buffers(/*recurse=*/false)) add_state(item.value(), true, name(item.key()));
    });
  }

  at::Tensor input(const at::Tensor& tensor) {
    const int value = known_.add(tensor, Value::Kind::Input, detail::concat("input ", graph_.inputs.size()));
    graph_.inputs.push_back(value);
    return tensor;
  }
  void output(const at::Tensor& tensor) {
    where_ = {.op = "the end of the pass"};
    graph_.outputs.push_back(known_.argument(tensor, /*writes=*/false));
  }
  Graph take() {
    known_.check_hooks();
    return std::move(graph_);
  }
  const Where& where() const { return where_; }

  void before(const c10::OperatorHandle&, torch::jit::Stack&) override {}

  bool instead(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    const auto& schema = op.schema();
    const size_t first = stack.size() - schema.arguments().size();
    if (inside_ != nullptr) {
      if (is_host_read(op.schema().name())) {
        const at::ScalarType dtype = stack[first].toTensor().scalar_type();
        torch::jit::drop(stack, stack.size() - first);
        stack.push_back(nothing_read(op.schema().name(), dtype));
        return true;
      }
      note_statistics(op, stack, first);
      stand_in(op, stack, first);
      run_without_data(op, stack, first);
      return true;
    }
    where_.op = schema.name();
    if (schema.name() == "aten::equal") {  // MultiheadAttention asks whether query, key and value are the same tensor
      const bool same = is_same_tensor(stack[first].toTensor(), stack[first + 1].toTensor());
      torch::jit::drop(stack, 2);
      stack.emplace_back(same);
      return true;
    }
    require(!reads_on_host(op), "pipeline: ", where_.text(),
            ": the host reads a tensor's value here, and a replay would go on with the one it read first; compute with the tensor instead (torch::where), give "
            "BatchNorm a momentum, or put the read into a module that is declared with TESSERA_MODULE, whose forward runs anew each time");
    require(!has_shape_of_values(op, stack, first), "pipeline: ", where_.text(),
            ": the shape of its result depends on values, so that no stage could expect it; use masks of a fixed shape (torch::where, masked_fill)");
    record(op, stack, first);
    return true;
  }

  /// A module's call as one node.
  nn::Values call(const std::string& path, nn::Module& module, nn::Values inputs, const nn::Next& next) {
    if (inside_ != nullptr) return next(std::move(inputs));
    where_.op = "the call of '" + path + "' (" + short_name(module.name()) + ")";
    Node node{.call = next.recall(), .name = short_name(module.name()), .path = path, .grad_mode = at::GradMode::is_enabled(), .autocast = Autocast::now()};
    require(nn::SampleScope::current() == sample_, "pipeline: ", where_.text(),
            " is made in a SampleScope that the pass has opened, as SequenceParallel does around a module in which a split point lies, and a replay would not "
            "open it; open it around the pass, attach to the modules inside one by one, or split outside of the module");
    for (const nn::PassState* const state : pass_states_) node.puts_back.push_back(state->now());
    std::optional<nn::Unwatched> our_own(std::in_place);
    for (const c10::IValue& value : inputs) {
      require(!value.isCapsule() && !value.isObject(), "pipeline: ", where_.text(),
              ": an argument is an object of the program's own, which the tape cannot keep; split around its caller, or make the object inside the module");
      node.arguments.push_back(slot_of(value, /*writes=*/false));
    }
    for (const auto& item : module.named_parameters()) hold(node, item.value());
    for (const auto& item : module.named_buffers()) hold(node, item.value());
    if (std::optional<nn::Values> looks = looks_as_before(node)) return called(std::move(node), std::move(*looks));
    std::set<int> touched(node.state.begin(), node.state.end());
    for_each_use(node, [&](int value) { touched.insert(value); });
    std::map<int, int64_t> versions;
    for (const int value : touched) versions[value] = known_.version(value);

    our_own.reset();
    const nn::Values given = inputs;
    const std::vector<KnownTensors::Hooks> hooks = hooks_of(given);
    nn::Values outputs = run_inside(node, std::move(inputs), next);
    our_own.emplace();
    auto before = hooks.begin();
    for (const c10::IValue& value : given) {
      for_tensors(value, [&](const at::Tensor& tensor) {
        if (const auto number = known_.hooked_inside(tensor, *before++)) node.hooked.push_back(*number);
        return tensor;
      });
    }
    for (const auto& [value, version] : versions) {
      if (known_.version(value) != version) add_write(node, value);
    }
    return called(std::move(node), std::move(outputs));
  }

  /// A module whose insides are told apart.
  nn::Values enter(const std::string& path, nn::Values inputs, const nn::Next& next) {
    if (inside_ != nullptr) return next(std::move(inputs));
    const int begin = graph_.size();
    const std::string outer = std::exchange(where_.module, path);
    nn::Values outputs = next(std::move(inputs));
    where_.module = outer;
    graph_.spans.push_back({path, begin, graph_.size()});
    return outputs;
  }

 private:
  void add_state(const at::Tensor& tensor, bool is_buffer, const std::string& name) {
    if (tensor.defined()) state_[tensor.unsafeGetTensorImpl()] = known_.add_state(tensor, is_buffer, name);
  }

  void hold(Node& node, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto found = state_.find(tensor.unsafeGetTensorImpl());
    if (found != state_.end() && std::ranges::find(node.state, found->second) == node.state.end()) node.state.push_back(found->second);
  }

  /// Of each of their tensors.
  static std::vector<KnownTensors::Hooks> hooks_of(const nn::Values& values) {
    std::vector<KnownTensors::Hooks> hooks;
    for (const c10::IValue& value : values) {
      for_tensors(value, [&](const at::Tensor& tensor) {
        hooks.emplace_back(tensor);
        return tensor;
      });
    }
    return hooks;
  }

  void note_pass_states(const torch::nn::Module& module) {
    const auto* const ours = dynamic_cast<const nn::Module*>(&module);
    if (ours == nullptr || !ours->intercepted()) return;
    for (const auto& interceptor : *ours->chain()) {
      const auto* const state = dynamic_cast<const nn::PassState*>(interceptor.get());
      if (state != nullptr && std::ranges::find(pass_states_, state) == pass_states_.end()) pass_states_.push_back(state);
    }
  }

  nn::Values called(Node node, nn::Values outputs) {
    for (const c10::IValue& value : outputs) node.results.push_back(result_slot(value));
    graph_.spans.push_back({node.path, graph_.size(), graph_.size() + 1});
    finish(std::move(node));
    return outputs;
  }

  /// What the call gave in the pass that this one is compared with, in looks: what a module counts, or draws on the host, goes on as if nobody had looked.
  /// Nothing where the module has to run: there is no such pass, it gives numbers, or it changes what it is given.
  std::optional<nn::Values> looks_as_before(Node& node) const {
    if (compared_ == nullptr || graph_.size() >= compared_->size()) return std::nullopt;
    const Node& then = compared_->nodes[static_cast<size_t>(graph_.size())];
    const bool is_same =
        then.call && then.path == node.path && then.state == node.state && std::ranges::equal(then.arguments, node.arguments, {}, &Slot::values, &Slot::values);
    if (!is_same || std::ranges::any_of(then.writes, [&](int value) { return !compared_->values[static_cast<size_t>(value)].is_state(); })) return std::nullopt;
    std::map<int, at::Tensor> made, memory;
    nn::Values looks;
    for (const Slot& slot : then.results) {
      for (const int value : slot.values) {
        if (value < 0 || made.contains(value)) continue;
        const at::Tensor look = look_of(value, memory);
        if (!look.defined()) return std::nullopt;
        made.emplace(value, look);
      }
      const auto look = [&](int value) { return value < 0 ? at::Tensor() : made.at(value); };
      if (slot.kind == Slot::Kind::Tensor) {
        looks.emplace_back(look(slot.values[0]));
      } else if (slot.kind == Slot::Kind::List) {
        std::vector<at::Tensor> tensors;
        for (const int value : slot.values) tensors.push_back(look(value));
        looks.emplace_back(std::move(tensors));
      } else if (slot.plain.isNone() || slot.plain.isTensor()) {  // one that is undefined
        looks.push_back(slot.plain);
      } else {
        return std::nullopt;
      }
    }
    node.writes = then.writes;
    node.hooked = then.hooked;
    return looks;
  }

  /// A tensor that is there already, a view of one, or of new memory, which goes into `memory`, by its number; undefined where none is like it.
  at::Tensor look_of(int value, std::map<int, at::Tensor>& memory) const {
    const int number = graph_.size();
    const Value& then = compared_->values[static_cast<size_t>(value)];
    const auto there = [&](int one) { return one < static_cast<int>(graph_.values.size()) ? known_.tensor_of(one) : at::Tensor(); };
    if (then.maker != number) return there(value);
    const Form& form = then.form_before(number + 1);
    bool is_new = true;
    at::Tensor base;
    for (size_t v = 0; v < compared_->values.size() && !base.defined(); ++v) {
      const Value& other = compared_->values[v];
      if (other.storage != then.storage || other.maker >= number) continue;
      is_new = false;
      base = there(static_cast<int>(v));
    }
    if (is_new) {
      at::Tensor& made = memory[then.storage];
      if (!made.defined()) made = new_memory(then.storage, form.dtype);
      base = made;
    }
    if (!base.defined() || base.scalar_type() != form.dtype) return {};
    const at::Tensor look = base.as_strided(form.sizes, form.strides, form.offset);
    return look.requires_grad() == form.requires_grad ? look : form.requires_grad ? at::Tensor() : look.detach();
  }

  /// For all that the call made in it.
  at::Tensor new_memory(int storage, at::ScalarType dtype) const {
    const int number = graph_.size();
    int64_t elements = 0;
    bool requires_grad = false;
    for (const Value& value : compared_->values) {
      if (value.storage != storage || value.maker != number) continue;
      const Form& form = value.form_before(number + 1);
      int64_t last = form.offset;
      for (size_t d = 0; d < form.sizes.size(); ++d) last += std::max<int64_t>(form.sizes[d] - 1, 0) * form.strides[d];
      elements = std::max(elements, last + 1);
      requires_grad |= form.requires_grad;
    }
    at::Tensor made = at::empty({elements}, at::device(at::kMeta).dtype(dtype));
    if (requires_grad) torch::autograd::create_gradient_edge(made, c10::make_intrusive<torch::autograd::Error>("a pass that is compared has no backward"));
    return made;
  }

  static void add_write(Node& node, int value) {
    if (std::ranges::find(node.writes, value) == node.writes.end()) node.writes.push_back(value);
  }

  nn::Values run_inside(Node& node, nn::Values inputs, const nn::Next& next) {
    struct Inside {
      Inside(Recorder& recorder, Node& node) : recorder(recorder) { recorder.inside_ = &node; }
      ~Inside() {
        recorder.inside_ = nullptr;
        recorder.shadows_.clear();
      }
      Recorder& recorder;
      comm::ShapesAlone shapes_alone{};
    } inside(*this, node);
    nn::Values outputs = next(std::move(inputs));
    // Memory that the module made and wrote into has its history on what stands in for it.
    for (c10::IValue& value : outputs) value = for_tensors(value, [this](const at::Tensor& tensor) { return stand_in(tensor); });
    return outputs;
  }

  Slot slot_of(const c10::IValue& value, bool writes) {
    Slot slot;
    const auto use = [&](const at::Tensor& tensor) { slot.values.push_back(tensor.defined() ? known_.argument(tensor, writes) : -1); };
    if (value.isTensor() && value.toTensor().defined()) {
      slot.kind = Slot::Kind::Tensor;
      use(value.toTensor());
    } else if (value.isTensorList()) {
      slot.kind = Slot::Kind::List;
      for (const at::Tensor& tensor : value.toTensorVector()) use(tensor);
    } else if (value.isOptionalTensorList()) {
      slot.kind = Slot::Kind::OptionalList;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) use(tensor.value_or(at::Tensor()));
    } else {
      slot.plain = value;
    }
    return slot;
  }

  Slot result_slot(const c10::IValue& value, bool unwritten = false) {
    Slot slot;
    const auto add = [&](const at::Tensor& tensor) { slot.values.push_back(tensor.defined() ? known_.result(tensor, graph_.size(), unwritten) : -1); };
    if (value.isTensor() && value.toTensor().defined()) {
      slot.kind = Slot::Kind::Tensor;
      add(value.toTensor());
    } else if (value.isTensorList()) {
      slot.kind = Slot::Kind::List;
      for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
    } else {
      require(!value.isCapsule() && !value.isObject(), "pipeline: ", where_.text(),
              ": it returns an object of the program's own, which the tape cannot keep; return tensors");
      slot.plain = value;
    }
    return slot;
  }

  at::Tensor stand_in(const at::Tensor& tensor) {
    at::Tensor twin = known_.twin(tensor);
    if (twin.is_meta()) return twin;
    // Of a module that is recorded whole: nobody else sees it.
    auto& [original, shadow] = shadows_[tensor.unsafeGetTensorImpl()];
    if (!shadow.defined()) {
      original = tensor;
      shadow = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
      shadow.set_requires_grad(tensor.requires_grad());
    }
    return shadow;
  }

  /// Twins in place of what has data, and meta where an operator that takes tensors, or draws, is asked for a device.
  void stand_in(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first) {
    bool any = false;
    for (size_t i = first; i < stack.size(); ++i) {
      stack[i] = for_tensors(stack[i], [&](const at::Tensor& tensor) {
        any = true;
        return stand_in(tensor);
      });
    }
    const auto& arguments = op.schema().arguments();
    const bool random = op.hasTag(at::Tag::nondeterministic_seeded);  // nothing is drawn while recording
    for (size_t i = 0; (any || random) && i < arguments.size(); ++i) {
      if (arguments[i].name() == "device" && (random || stack[first + i].isDevice())) stack[first + i] = c10::Device(c10::kMeta);
      if (arguments[i].name() == "pin_memory") stack[first + i] = c10::IValue();
    }
  }

  void note_statistics(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
    const at::ArrayRef<c10::IValue> arguments(stack.data() + first, stack.size() - first);
    if (!nn::updates_statistics(op.schema().name(), arguments)) return;
    for (const size_t i : nn::kStatistics) {
      const auto found = arguments[i].isTensor() ? state_.find(arguments[i].toTensor().unsafeGetTensorImpl()) : state_.end();
      if (found != state_.end()) add_write(*inside_, found->second);
    }
  }

  /// Made or seeded in each pass, it would go on from one to the next.
  void refuse_generator(const c10::IValue& value) const {
    if (!value.isGenerator() || !value.toGenerator().defined()) return;
    const at::Generator generator = value.toGenerator();
    require(
        generator == at::globalContext().defaultGenerator(generator.device()), "pipeline: ", where_.text(),
        " is given a generator of the program's own: where forward makes or seeds it in each pass, a replay would draw on from the last one; draw in a module "
        "that is declared with TESSERA_MODULE, or from libtorch's generator");
  }

  void record(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first) {
    const auto& schema = op.schema();
    Node node{.op = op, .name = plain_name(schema.name()), .grad_mode = at::GradMode::is_enabled(), .autocast = Autocast::now()};
    const at::ArrayRef<c10::IValue> arguments(stack.data() + first, stack.size() - first);
    std::optional<std::string> state;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const bool writes = nn::writes_argument(schema, arguments, i);
      refuse_generator(arguments[i]);
      node.arguments.push_back(slot_of(arguments[i], writes));
      for (const int value : node.arguments.back().values) {
        if (value < 0) continue;
        if (writes) add_write(node, value);
        const Value& used = graph_.values[static_cast<size_t>(value)];
        if (used.is_state() && !state) state = used.name;
      }
    }
    if (state) {
      node.path = above(*state);
      where_.state = *state;
    }
    stand_in(op, stack, first);
    run_without_data(op, stack, first);
    const bool unwritten = schema.name().starts_with("aten::empty") || schema.name().starts_with("aten::new_empty");
    for (size_t i = stack.size() - schema.returns().size(); i < stack.size(); ++i) node.results.push_back(result_slot(stack[i], unwritten));
    finish(std::move(node));
  }

  void finish(Node node) {
    const int number = graph_.size();
    for (const int value : node.writes) known_.written(value, number);
    node.rebased = known_.take_rebased();
    graph_.nodes.push_back(std::move(node));
  }

  Graph graph_;
  Where where_;
  KnownTensors known_;
  const Graph* compared_;  ///< null: nothing
  nn::SampleContext sample_ = nn::SampleScope::current();
  std::vector<const nn::PassState*> pass_states_;
  std::unordered_map<const c10::TensorImpl*, int> state_;
  std::unordered_map<const c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> shadows_;
  Node* inside_ = nullptr;  ///< the module whose call is under way as a whole
};

/// Tells the recorder of a module's calls.
class CallsOf final : public nn::Interceptor {
 public:
  CallsOf(std::shared_ptr<Recorder> recorder, std::string path, bool whole) : recorder_(std::move(recorder)), path_(std::move(path)), whole_(whole) {}
  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    return whole_ ? recorder_->call(path_, module, std::move(inputs), next) : recorder_->enter(path_, std::move(inputs), next);
  }

 private:
  std::shared_ptr<Recorder> recorder_;
  std::string path_;
  bool whole_;
};

}  // namespace

Graph record(torch::nn::Module& root, const Forward& forward, const std::vector<at::Tensor>& inputs, const std::function<bool(const std::string& path)>& inside,
             const Graph* compared) {
  const auto recorder = std::make_shared<Recorder>(root, compared);
  Attachment attached;
  std::set<const torch::nn::Module*> seen;
  root.apply([&](const std::string& path, torch::nn::Module& module) {
    auto* const ours = dynamic_cast<nn::Module*>(&module);
    if (ours && seen.insert(ours).second) attached.add(nn::attach(*ours, std::make_shared<CallsOf>(recorder, path, !inside(path))));
  });
  std::vector<at::Tensor> given, outputs;
  for (const at::Tensor& input : inputs) {
    require(input.defined(), "pipeline: example input ", given.size(), " is undefined; give a tensor of the shape and dtype that the pass gets");
    at::Tensor shape = at::empty_strided(input.sizes(), input.strides(), input.options().device(at::kMeta).requires_grad(false));
    given.push_back(recorder->input(shape.set_requires_grad(input.requires_grad())));
  }
  {
    nn::OperatorWatch watch(recorder);
    watch.wake();
    try {
      outputs = forward(given);
    } catch (const c10::NotImplementedError& error) {
      require(false, "pipeline: ", recorder->where().text(), ": it has no kernel for meta tensors, and none that could be tried on zeros (",
              first_line(error.what_without_backtrace()), "); use an operator that makes a new, strided tensor");
    }
  }
  require(!outputs.empty(), "pipeline: the forward of ", short_name(root.name()), " returns no tensor; return what the last stage gives");
  for (const at::Tensor& output : outputs) recorder->output(output);
  return recorder->take();
}

}  // namespace tessera::tape
