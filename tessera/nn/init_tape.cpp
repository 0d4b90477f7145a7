#include "tessera/nn/init_tape.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/view_as_real.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"

// On meta a constructor's writes leave no values, only operators. Read backwards from one tensor, they give what it depends on: who wrote its memory last, back
// to whoever overwrote all of it, and the same of what those read. Read forwards, that often amounts to one rule, such as uniform_ and then mul_, which is
// worth much: by a rule each rank draws its own elements alone, while a recipe has to run for the whole tensor, on every rank, in host memory.
// A recipe's random operators draw from generators of their own, so that what else was built, and in which order, changes no bits. Memory that the constructor
// left undefined is filled with NaN, to find out whether any of that is left.

namespace tessera::nn {

namespace {

/// An argument as it was given, with views in place of tensors.
struct Argument {
  enum class Kind { Plain, Tensor, List, OptionalList } kind = Kind::Plain;
  c10::IValue value{};
  std::vector<std::optional<InitTape::View>> tensors{};
};

bool is_random(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

bool one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::ranges::any_of(names, [&](const char* one) { return name == one; });
}

bool leaves_undefined(const std::string& name) {
  return one_of(name, {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::empty_permuted"});
}

bool takes_generator(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.arguments(), [](const auto& argument) { return argument.name() == "generator"; });
}

/// The form of the operator that takes a generator: rand has one beside it, uniform_ is one.
c10::OperatorHandle with_generator(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (takes_generator(schema)) return op;
  const std::string overload = schema.overload_name().empty() ? "generator" : schema.overload_name() + "_generator";
  return c10::Dispatcher::singleton().findSchema({schema.name(), overload}).value_or(op);
}

std::optional<double> number(const c10::IValue& value) {
  if (value.isDouble()) return value.toDouble();
  if (value.isInt()) return static_cast<double>(value.toInt());
  if (value.isBool()) return value.toBool() ? 1 : 0;
  return std::nullopt;
}

InitRule scaled(InitRule rule, double by) {
  rule.a *= by;
  rule.b *= rule.kind == InitRule::Kind::Normal ? std::abs(by) : by;
  if (rule.kind == InitRule::Kind::Uniform && rule.a > rule.b) std::swap(rule.a, rule.b);
  return rule;
}

InitRule shifted(InitRule rule, double by) {
  rule.a += by;
  if (rule.kind == InitRule::Kind::Uniform) rule.b += by;
  return rule;
}

}  // namespace

struct InitTape::Operator {
  c10::OperatorHandle op;
  std::string name;
  std::vector<Argument> arguments;
  std::vector<std::optional<View>> results{};
  std::vector<int> creates{}, changes{};  ///< memories

  bool writes(int memory) const { return std::ranges::find(creates, memory) != creates.end() || std::ranges::find(changes, memory) != changes.end(); }
  /// Overwrites every element of the memory without reading it.
  bool overwrites() const {
    static const std::set<std::string> kFills{"aten::uniform_", "aten::normal_", "aten::fill_",       "aten::zero_",
                                              "aten::copy_",    "aten::random_", "aten::exponential_"};
    return kFills.contains(name) && arguments[0].tensors[0] && arguments[0].tensors[0]->covers;
  }
  template <class F>
  void for_each_input(F&& visit) const {
    for (const auto& argument : arguments) {
      for (const auto& view : argument.tensors) {
        if (view) visit(*view);
      }
    }
  }
  const View* tensor(size_t argument) const {
    return argument < arguments.size() && arguments[argument].kind == Argument::Kind::Tensor && arguments[argument].tensors[0]
               ? &*arguments[argument].tensors[0]
               : nullptr;
  }
};

/// Storages are kept while recording, so that an address means one of them.
struct InitTape::Memories {
  std::unordered_map<const c10::StorageImpl*, int> numbers;
  std::vector<c10::Storage> kept;
  /// What was made, as far as it lives: where a part of a model is among them, it may be written once more after the recording.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> made;
};

namespace {
thread_local const InitTape* recorded_now = nullptr;
}

InitTape::InitTape() : memories_(std::make_unique<Memories>()) { recorded_now = this; }
InitTape::~InitTape() {
  if (recorded_now == this) recorded_now = nullptr;
}

bool written_since(const at::Tensor& tensor) {
  const auto origin = origin_of(tensor);
  return origin && origin->version && !tensor.is_inference() && tensor._version() != *origin->version;
}

void forget_version(const at::Tensor& tensor) {
  const auto origin = origin_of(tensor);
  if (origin && origin->version) set_origin(tensor, std::make_shared<const Origin>(Origin{origin->tape, origin->view, std::nullopt}));
}

size_t tape_position() { return recorded_now ? recorded_now->size() : std::numeric_limits<size_t>::max(); }

size_t InitTape::size() const { return operators_.size(); }

void InitTape::close() {
  if (memories_) {
    for (const auto& weak : memories_->made) {
      auto impl = weak.lock();
      if (!impl) continue;
      const at::Tensor tensor(std::move(impl));
      const auto origin = origin_of(tensor);
      if (origin && origin->tape.get() == this && !tensor.is_inference()) {
        set_origin(tensor, std::make_shared<const Origin>(Origin{origin->tape, origin->view, tensor._version()}));
      }
    }
  }
  memories_.reset();
  if (recorded_now == this) recorded_now = nullptr;
}

InitTape::View InitTape::view_of(const at::Tensor& tensor) {
  View view{.sizes = tensor.sizes().vec(), .dtype = tensor.scalar_type(), .conjugate = tensor.is_conj(), .negative = tensor.is_neg()};
  if (!tensor.is_meta() || !tensor.has_storage()) {
    view.outside = tensor;
    return view;
  }
  view.strides = tensor.strides().vec();
  view.offset = tensor.storage_offset();
  const auto* const storage = tensor.storage().unsafeGetStorageImpl();
  view.covers = tensor.is_contiguous() && !view.conjugate && !view.negative && view.offset == 0 && static_cast<size_t>(tensor.nbytes()) == storage->nbytes();
  const auto known = memories_->numbers.find(storage);
  if (known != memories_->numbers.end()) {
    view.memory = known->second;
  } else if (origin_of(tensor) == nullptr) {
    view.memory = -2;  // nobody knows
  } else {
    view.outside = tensor;  // of an earlier tape
  }
  return view;
}

std::shared_ptr<InitTape::Operator> InitTape::begin(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  auto noted = std::make_shared<Operator>(Operator{.op = op, .name = schema.name(), .arguments = {}});
  const size_t first = stack.size() - schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::IValue& value = stack[first + i];
    Argument argument;
    const auto add = [&](const at::Tensor& tensor) { argument.tensors.push_back(tensor.defined() ? std::optional(view_of(tensor)) : std::nullopt); };
    if (value.isTensor()) {
      argument.kind = Argument::Kind::Tensor;
      add(value.toTensor());
    } else if (value.isTensorList()) {
      argument.kind = Argument::Kind::List;
      for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
    } else if (value.isOptionalTensorList()) {
      argument.kind = Argument::Kind::OptionalList;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) add(tensor.value_or(at::Tensor()));
    } else {
      argument.value = value;
    }
    const auto* const alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite()) {
      for (const auto& view : argument.tensors) {
        if (view && view->memory >= 0) noted->changes.push_back(view->memory);
      }
    }
    noted->arguments.push_back(std::move(argument));
  }
  return noted;
}

void InitTape::end(const std::shared_ptr<InitTape>& tape, std::shared_ptr<Operator> noted, const torch::jit::Stack& stack) {
  auto& memories = *tape->memories_;
  const size_t results = noted->op.schema().returns().size();
  const auto add = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_meta() || !tensor.has_storage()) {
      noted->results.emplace_back();
      return;
    }
    const auto* const storage = tensor.storage().unsafeGetStorageImpl();
    if (const auto [it, is_new] = memories.numbers.emplace(storage, static_cast<int>(memories.kept.size())); is_new) {
      memories.kept.push_back(tensor.storage());
      noted->creates.push_back(it->second);
    }
    View view = tape->view_of(tensor);
    if (origin_of(tensor) == nullptr) memories.made.emplace_back(tensor.getIntrusivePtr());
    set_origin(tensor, std::make_shared<const Origin>(Origin{tape, view, std::nullopt}));
    noted->results.emplace_back(std::move(view));
  };
  for (size_t i = stack.size() - results; i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      add(stack[i].toTensor());
    } else if (stack[i].isTensorList()) {
      for (const at::Tensor& tensor : stack[i].toTensorVector()) add(tensor);
    }
  }
  if (noted->creates.empty() && noted->changes.empty()) return;  // a view says all of itself
  tape->writers_.resize(memories.kept.size());
  for (const auto* written : {&noted->creates, &noted->changes}) {
    for (const int memory : *written) {
      auto& writers = tape->writers_[static_cast<size_t>(memory)];
      if (writers.empty() || writers.back() != tape->operators_.size()) writers.push_back(tape->operators_.size());
    }
  }
  tape->operators_.push_back(std::move(noted));
}

namespace {

/// What a memory holds, as far as that is one rule. Undefined is no rule, and not unknown either.
struct Held {
  bool written = false;
  std::optional<InitRule> rule{};
  std::optional<size_t> draw{};
  std::optional<int> blank{};
  at::ScalarType dtype = at::ScalarType::Undefined;  ///< of the numbers that the rule makes; Undefined: whatever they are kept in
};

constexpr Held kNoRule{.written = true};

/// `made`, as it is kept in numbers of `dtype`. A rule makes real numbers, which 16 bits round; of whole numbers, of those of 8 bits, and of complex ones that
/// were drawn as such, it would make others than the constructor does.
Held kept_in(Held made, at::ScalarType dtype) {
  const auto from = std::exchange(made.dtype, dtype);
  if (!made.rule) return made;
  const bool is_bit = made.rule->kind == InitRule::Kind::Constant && (made.rule->a == 0 || made.rule->a == 1);
  const bool is_drawn = made.draw && from == at::ScalarType::Undefined;
  const bool is_other = at::isComplexType(dtype) ? is_drawn : !at::isFloatingType(dtype) || c10::elementSize(dtype) < 2;
  made.rule->is_real = at::isComplexType(dtype);
  if (is_other && !is_bit) made.rule.reset();
  return made;
}

/// What a rule is made from: an operator, and what its operands hold.
struct RuleInputs {
  const InitTape::Operator& op;
  size_t position;                  ///< of the operator on the tape
  const std::map<int, Held>& held;  ///< by memory
  const Held* before = nullptr;     ///< what the first operand held, where the operator changes that

  std::optional<double> number_at(size_t argument) const { return argument < op.arguments.size() ? number(op.arguments[argument].value) : std::nullopt; }
  /// What an operand that is all of its memory holds.
  const Held* whole(size_t argument) const {
    const InitTape::View* view = op.tensor(argument);
    if (view == nullptr || !view->covers) return nullptr;
    const auto it = held.find(view->memory);
    return it == held.end() || !is_of(it->second, *view) ? nullptr : &it->second;
  }
  /// What the operator computes from: in place or not.
  const Held* first() const { return before == nullptr ? whole(0) : is_of(*before, *op.tensor(0)) ? before : nullptr; }
  /// Whether the view takes the memory for what it holds: not a complex number for two real ones, nor the other way round.
  static bool is_of(const Held& held, const InitTape::View& view) { return held.dtype == at::ScalarType::Undefined || held.dtype == view.dtype; }
};

namespace rules {

Held zeros(const RuleInputs& /*inputs*/) { return {.written = true, .rule = InitRule::zeros()}; }
Held ones(const RuleInputs& /*inputs*/) { return {.written = true, .rule = InitRule::ones()}; }

template <size_t argument>
Held constant(const RuleInputs& inputs) {
  const auto value = inputs.number_at(argument);
  return value ? Held{.written = true, .rule = InitRule::constant(*value)} : kNoRule;
}

template <InitRule (*rule)(double, double)>
Held standard(const RuleInputs& inputs) {
  return {.written = true, .rule = rule(0, 1), .draw = inputs.position};
}

template <InitRule (*rule)(double, double)>
Held drawn(const RuleInputs& inputs) {
  const auto a = inputs.number_at(1), b = inputs.number_at(2);
  return a && b ? Held{.written = true, .rule = rule(*a, *b), .draw = inputs.position} : kNoRule;
}

Held copied(const RuleInputs& inputs) {
  const Held* from = inputs.whole(0);
  return from == nullptr ? kNoRule : *from;
}

Held overwritten(const RuleInputs& inputs) {
  const Held* from = inputs.whole(1);
  return from != nullptr && inputs.op.tensor(1)->sizes == inputs.op.tensor(0)->sizes ? *from : kNoRule;
}

/// What a number makes of a rule. One that leaves out a row does not say of that row what it becomes.
Held computed(const RuleInputs& inputs, InitRule (*rule)(InitRule, double), std::optional<double> by) {
  const Held* from = inputs.first();
  return by && from != nullptr && from->rule && !from->rule->zero_row
             ? Held{.written = true, .rule = rule(*from->rule, *by), .draw = from->draw, .dtype = from->dtype}
             : kNoRule;
}

/// The other term of a sum; none where it is scaled.
std::optional<double> term(const RuleInputs& inputs) { return inputs.number_at(2) == 1 ? inputs.number_at(1) : std::nullopt; }

Held multiplied(const RuleInputs& inputs) { return computed(inputs, scaled, inputs.number_at(1)); }
Held divided(const RuleInputs& inputs) {
  if (inputs.op.arguments.size() > 2 && inputs.op.arguments[2].value.isString()) return kNoRule;  // rounded
  return computed(inputs, [](InitRule rule, double by) { return scaled(std::move(rule), 1 / by); }, inputs.number_at(1));
}
Held added(const RuleInputs& inputs) { return computed(inputs, shifted, term(inputs)); }
Held subtracted(const RuleInputs& inputs) {
  return computed(inputs, [](InitRule rule, double by) { return shifted(std::move(rule), -by); }, term(inputs));
}

}  // namespace rules

using RuleOf = Held (*)(const RuleInputs&);
using Rules = std::map<std::string, RuleOf>;

/// Of a memory that an operator makes.
const Rules& rules_of_makers() {
  static const Rules table{{"aten::zeros", rules::zeros},
                           {"aten::zeros_like", rules::zeros},
                           {"aten::new_zeros", rules::zeros},
                           {"aten::ones", rules::ones},
                           {"aten::ones_like", rules::ones},
                           {"aten::new_ones", rules::ones},
                           {"aten::full", rules::constant<1>},
                           {"aten::full_like", rules::constant<1>},
                           {"aten::scalar_tensor", rules::constant<0>},
                           {"aten::rand", rules::standard<InitRule::uniform>},
                           {"aten::rand_like", rules::standard<InitRule::uniform>},
                           {"aten::randn", rules::standard<InitRule::normal>},
                           {"aten::randn_like", rules::standard<InitRule::normal>},
                           {"aten::clone", rules::copied},
                           {"aten::_to_copy", rules::copied},
                           {"aten::to", rules::copied},
                           {"aten::contiguous", rules::copied},
                           {"aten::mul", rules::multiplied},
                           {"aten::div", rules::divided},
                           {"aten::add", rules::added},
                           {"aten::sub", rules::subtracted}};
  return table;
}

/// Of a memory that an operator changes, all of it.
const Rules& rules_of_changes() {
  static const Rules table{{"aten::zero_", rules::zeros},
                           {"aten::fill_", rules::constant<1>},
                           {"aten::uniform_", rules::drawn<InitRule::uniform>},
                           {"aten::normal_", rules::drawn<InitRule::normal>},
                           {"aten::copy_", rules::overwritten},
                           {"aten::mul_", rules::multiplied},
                           {"aten::div_", rules::divided},
                           {"aten::add_", rules::added},
                           {"aten::sub_", rules::subtracted}};
  return table;
}

Held rule_of(const Rules& table, const RuleInputs& inputs) {
  const auto rule = table.find(inputs.op.name);
  return rule == table.end() ? kNoRule : rule->second(inputs);
}

/// What an operator makes of memory `memory`.
Held made_by(const RuleInputs& inputs, int memory) {
  if (leaves_undefined(inputs.op.name)) return {.blank = memory};
  Held made = rule_of(rules_of_makers(), inputs);
  for (const auto& result : inputs.op.results) {
    if (result && !result->covers) made.rule.reset();
    if (result && result->memory == memory) made = kept_in(std::move(made), result->dtype);
  }
  return made;
}

/// One row of `target` set to zero: the padding of an embedding.
Held with_zero_row(const RuleInputs& inputs, const InitTape::View& target) {
  const Held& before = *inputs.before;
  if (!before.rule || before.rule->zero_row || !target.covers || inputs.op.tensor(0)->dtype != target.dtype || target.sizes.empty() || target.sizes[0] <= 0)
    return kNoRule;
  const InitTape::View& self = *inputs.op.tensor(0);
  const bool zeros = inputs.op.name == "aten::zero_" || (inputs.op.name == "aten::fill_" && inputs.number_at(1) == 0.0);
  const int64_t row = c10::multiply_integers(target.sizes) / target.sizes[0];
  const bool is_row = self.sizes == std::vector<int64_t>(target.sizes.begin() + 1, target.sizes.end()) && row > 0 && self.offset % row == 0 &&
                      self.strides == std::vector<int64_t>(target.strides.begin() + 1, target.strides.end());
  if (!zeros || !is_row) return kNoRule;
  Held held{.written = true, .rule = before.rule, .draw = before.draw, .dtype = before.dtype};
  held.rule->zero_row = self.offset / row;
  return held;
}

/// What an operator makes of memory `memory`, which held `inputs.before`.
Held changed_by(const RuleInputs& inputs, int memory, const InitTape::View& target) {
  const InitTape::View* self = inputs.op.tensor(0);
  if (self == nullptr || self->memory != memory) return kNoRule;
  if (self->covers) return kept_in(rule_of(rules_of_changes(), inputs), self->dtype);
  return target.memory == memory ? with_zero_row(inputs, target) : kNoRule;
}

}  // namespace

// Backwards: who wrote the memory last, back to whoever overwrote or made it, and the same of what they read. By a list of what is still to be looked at, for a
// table that is filled element by element would go as deep as it has elements.
std::vector<size_t> InitTape::writers_of(const View& target) const {
  std::set<size_t> used;
  std::set<std::pair<int, size_t>> walked;
  std::vector<std::pair<int, size_t>> needs{{target.memory, operators_.size()}};  // a memory, as it is before an operator
  const auto use = [&](size_t i) {
    const Operator& op = *operators_[i];
    if (!used.insert(i).second) return;
    op.for_each_input([&](const View& view) {
      if (!op.overwrites() || view.memory != op.arguments[0].tensors[0]->memory) needs.emplace_back(view.memory, i);
    });
  };
  while (!needs.empty()) {
    const auto [memory, before] = needs.back();
    needs.pop_back();
    if (memory < 0) continue;
    const auto& writers = writers_.at(static_cast<size_t>(memory));
    for (auto it = std::ranges::lower_bound(writers, before); it != writers.begin();) {
      const size_t i = *--it;
      if (!walked.emplace(memory, i).second) break;
      use(i);
      if (!operators_[i]->overwrites()) continue;
      use(writers.front());  // its memory has to be there
      break;
    }
  }
  return {used.begin(), used.end()};
}

InitTape::Recipe InitTape::recipe_for(const View& target) const {
  Recipe recipe;
  recipe.operators = writers_of(target);
  // Forwards: what each memory holds.
  std::map<int, Held> held;
  for (const size_t i : recipe.operators) {
    const Operator& op = *operators_[i];
    if (is_random(op.op)) recipe.random.push_back(i);
    if (!op.creates.empty()) {
      const RuleInputs inputs{.op = op, .position = i, .held = held};
      for (const int memory : op.creates) held[memory] = made_by(inputs, memory);
    }
    for (const int memory : op.changes) {
      const Held before = std::exchange(held[memory], kNoRule);
      held[memory] = changed_by({.op = op, .position = i, .held = held, .before = &before}, memory, target);
    }
    if (op.writes(target.memory)) recipe.last = i + 1;
  }
  if (const auto it = held.find(target.memory); it != held.end()) {
    const Held& last = it->second;
    recipe.written = last.written;
    if (target.covers && RuleInputs::is_of(last, target)) recipe.rule = last.rule;
    if (recipe.rule) recipe.draw = last.draw;
    if (target.covers && !last.written && last.blank != target.memory) recipe.blank = last.blank;
  }
  return recipe;
}

namespace {

/// What an operator was given, with tensors that have values, on the CPU; a random one draws from `generator`, which stands in `callee` beside that or in its
/// place.
torch::jit::Stack arguments_for(const InitTape::Operator& op, const c10::FunctionSchema& callee, const std::optional<at::Generator>& generator,
                                const std::function<at::Tensor(const InitTape::View&)>& tensor_at) {
  const auto& declared = callee.arguments();
  const bool adds_generator = declared.size() > op.arguments.size();
  const auto tensor = [&](const std::optional<InitTape::View>& view) { return view ? tensor_at(*view) : at::Tensor(); };
  torch::jit::Stack stack;
  size_t next = 0;
  for (const auto& parameter : declared) {
    if (parameter.name() == "generator" && adds_generator) {
      stack.emplace_back(*generator);
      continue;
    }
    const Argument& given = op.arguments[next++];
    c10::IValue value = given.value;
    if (given.kind == Argument::Kind::Tensor) value = tensor(given.tensors[0]);
    if (given.kind == Argument::Kind::List) {
      std::vector<at::Tensor> list;
      for (const auto& view : given.tensors) list.push_back(tensor(view));
      value = std::move(list);
    }
    if (given.kind == Argument::Kind::OptionalList) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& view : given.tensors) list.push_back(view ? std::optional(tensor(view)) : std::nullopt);
      value = std::move(list);
    }
    if (parameter.name() == "device") value = c10::Device(c10::kCPU);
    if (parameter.name() == "generator" && generator) value = *generator;
    stack.push_back(std::move(value));
  }
  return stack;
}

}  // namespace

at::Tensor InitTape::run(const View& target, const Recipe& recipe, const std::string& name, const std::function<uint64_t(size_t)>& seed_of) const {
  MemoryTracker unread;  // what is kept of it is counted where it is kept
  const TrackMemory track(unread);
  const at::NoGradGuard no_grad;
  std::map<int, c10::Storage> memories;
  const auto tensor_at = [&](const View& view) -> at::Tensor {
    if (view.memory == -1) {
      require(!view.outside.is_meta(), "materialize: '", name, "' is made from a tensor of another on_meta; build both in one");
      return view.outside;
    }
    const auto memory = memories.find(view.memory);
    require(memory != memories.end(), "materialize: '", name, "' is made from a tensor on meta that was not built in this on_meta");
    const at::Tensor tensor = at::empty({0}, at::device(at::kCPU).dtype(view.dtype)).set_(memory->second, view.offset, view.sizes, view.strides);
    tensor._set_conj(view.conjugate);
    tensor._set_neg(view.negative);
    return tensor;
  };
  for (const size_t i : recipe.operators) {
    const Operator& op = *operators_[i];
    const auto generator = is_random(op.op) ? std::optional(at::detail::createCPUGenerator(seed_of(i))) : std::nullopt;
    const auto callee = generator ? with_generator(op.op) : op.op;
    torch::jit::Stack stack = arguments_for(op, callee.schema(), generator, tensor_at);
    const bool uniform = op.name == "aten::rand_like", normal = op.name == "aten::randn_like";
    if (uniform || normal) {
      const View& made = *op.results.at(0);
      at::Tensor drawn = at::empty_strided(made.sizes, made.strides, at::dtype(made.dtype));
      uniform ? drawn.uniform_(0, 1, generator) : drawn.normal_(0, 1, generator);
      stack = {drawn};
    } else {
      require(
          !generator || takes_generator(callee.schema()), "materialize: '", name, "' is drawn by ", op.name,
          ", which takes no generator, so its values would depend on the layout; draw it by normal_ or uniform_, or give it a rule with tessera::nn::set_init");
      callee.callBoxed(stack);
    }
    size_t next = 0;
    const auto keep = [&](at::Tensor made) {
      const auto& view = op.results.at(next++);
      if (!view || memories.contains(view->memory)) return;
      invariant(made.scalar_type() == view->dtype, op.name, " makes ", made.scalar_type(), ", and on meta ", view->dtype);
      if (made.strides() != at::IntArrayRef(view->strides)) made = at::empty_strided(view->sizes, view->strides, made.options()).copy_(made);
      if (leaves_undefined(op.name) && !c10::isIntegralType(made.scalar_type(), /*includeBool=*/true)) {
        (made.is_complex() ? at::view_as_real(made) : made).fill_(std::numeric_limits<double>::quiet_NaN());
      }
      memories.emplace(view->memory, made.storage());
    };
    for (const c10::IValue& result : stack) {
      if (result.isTensor()) {
        keep(result.toTensor());
      } else if (result.isTensorList()) {
        for (const at::Tensor& tensor : result.toTensorVector()) keep(tensor);
      }
    }
  }
  at::Tensor made = tensor_at(target).clone();
  require(c10::isIntegralType(made.scalar_type(), /*includeBool=*/true) || !at::isnan(made).any().item<bool>(), "materialize: the constructor leaves part of '",
          name, "' without values; fill it there, or give it a rule with tessera::nn::set_init");
  return made;
}

}  // namespace tessera::nn
