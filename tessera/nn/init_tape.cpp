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

/// The form of the operator that takes a generator: rand has one beside it, uniform_ is one.
c10::OperatorHandle with_generator(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (std::ranges::any_of(schema.arguments(), [](const auto& argument) { return argument.name() == "generator"; })) return op;
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
  View view{.sizes = tensor.sizes().vec(), .dtype = tensor.scalar_type()};
  if (!tensor.is_meta() || !tensor.has_storage()) {
    view.outside = tensor;
    return view;
  }
  view.strides = tensor.strides().vec();
  view.offset = tensor.storage_offset();
  const auto* const storage = tensor.storage().unsafeGetStorageImpl();
  view.covers = tensor.is_contiguous() && view.offset == 0 && static_cast<size_t>(tensor.nbytes()) == storage->nbytes();
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

InitTape::Recipe InitTape::recipe_for(const View& target) const {
  Recipe recipe;
  // Backwards: who wrote the memory last, back to whoever overwrote or made it, and the same of what they read. By a list of what is still to be looked at, for
  // a table that is filled element by element would go as deep as it has elements.
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
  recipe.operators.assign(used.begin(), used.end());

  // Forwards: what each memory holds, as far as that is one rule. Undefined is no rule, and not unknown either.
  struct Held {
    bool written = false;
    std::optional<InitRule> rule{};
    std::optional<size_t> draw{};
    std::optional<int> blank{};
  };
  std::map<int, Held> held;
  for (const size_t i : recipe.operators) {
    const Operator& op = *operators_[i];
    if (is_random(op.op)) recipe.random.push_back(i);
    const auto argument = [&](size_t n) { return n < op.arguments.size() ? number(op.arguments[n].value) : std::nullopt; };
    const auto whole_input = [&](size_t n) -> const Held* {
      const View* view = op.tensor(n);
      if (view == nullptr || !view->covers) return nullptr;
      const auto it = held.find(view->memory);
      return it == held.end() ? nullptr : &it->second;
    };
    Held made{.written = true};
    if (!op.creates.empty()) {
      if (leaves_undefined(op.name)) made = {};
      if (one_of(op.name, {"aten::zeros", "aten::zeros_like", "aten::new_zeros"})) made.rule = InitRule::zeros();
      if (one_of(op.name, {"aten::ones", "aten::ones_like", "aten::new_ones"})) made.rule = InitRule::ones();
      if (one_of(op.name, {"aten::full", "aten::full_like"}) && argument(1)) made.rule = InitRule::constant(*argument(1));
      if (op.name == "aten::scalar_tensor" && argument(0)) made.rule = InitRule::constant(*argument(0));
      if (one_of(op.name, {"aten::rand", "aten::rand_like"})) made.rule = InitRule::uniform(0, 1);
      if (one_of(op.name, {"aten::randn", "aten::randn_like"})) made.rule = InitRule::normal(0, 1);
      if (made.rule && is_random(op.op)) made.draw = i;
      if (one_of(op.name, {"aten::clone", "aten::_to_copy", "aten::to", "aten::contiguous"})) {
        if (const Held* from = whole_input(0)) made = *from;
      }
      const Held* from = whole_input(0);
      if (from && from->rule && !from->rule->zero_row && argument(1)) {
        if (op.name == "aten::mul") made.rule = scaled(*from->rule, *argument(1));
        if (op.name == "aten::div") made.rule = scaled(*from->rule, 1 / *argument(1));
        if (op.name == "aten::add" && argument(2) == 1) made.rule = shifted(*from->rule, *argument(1));
        if (op.name == "aten::sub" && argument(2) == 1) made.rule = shifted(*from->rule, -*argument(1));
        if (made.rule) made.draw = from->draw;
      }
      for (const auto& result : op.results) {
        if (result && !result->covers) made.rule.reset();
      }
      for (const int memory : op.creates) {
        held[memory] = made;
        if (leaves_undefined(op.name)) held[memory].blank = memory;
      }
    }
    for (const int memory : op.changes) {
      Held& now = held[memory];
      const Held before = std::exchange(now, {.written = true});
      const View* self = op.tensor(0);
      if (self == nullptr || self->memory != memory) continue;
      if (self->covers) {
        if (op.name == "aten::zero_") now.rule = InitRule::zeros();
        if (op.name == "aten::fill_" && argument(1)) now.rule = InitRule::constant(*argument(1));
        if (op.name == "aten::uniform_" && argument(1) && argument(2)) now.rule = InitRule::uniform(*argument(1), *argument(2));
        if (op.name == "aten::normal_" && argument(1) && argument(2)) now.rule = InitRule::normal(*argument(1), *argument(2));
        if (now.rule && is_random(op.op)) now.draw = i;
        if (op.name == "aten::copy_") {
          const Held* from = whole_input(1);
          if (from && op.tensor(1)->sizes == self->sizes) now = *from;
        }
        if (before.rule && !before.rule->zero_row && argument(1)) {
          if (op.name == "aten::mul_") now.rule = scaled(*before.rule, *argument(1));
          if (op.name == "aten::div_") now.rule = scaled(*before.rule, 1 / *argument(1));
          if (op.name == "aten::add_" && argument(2) == 1) now.rule = shifted(*before.rule, *argument(1));
          if (op.name == "aten::sub_" && argument(2) == 1) now.rule = shifted(*before.rule, -*argument(1));
          if (one_of(op.name, {"aten::mul_", "aten::div_", "aten::add_", "aten::sub_"})) now.draw = before.draw;
        }
      } else if (before.rule && !before.rule->zero_row && target.memory == memory && target.covers && !target.sizes.empty() && target.sizes[0] > 0) {
        // One row set to zero: the padding of an embedding.
        const bool zeros = op.name == "aten::zero_" || (op.name == "aten::fill_" && argument(1) == 0.0);
        const int64_t row = c10::multiply_integers(target.sizes) / target.sizes[0];
        const bool is_row = self->sizes == std::vector<int64_t>(target.sizes.begin() + 1, target.sizes.end()) && row > 0 && self->offset % row == 0 &&
                            self->strides == std::vector<int64_t>(target.strides.begin() + 1, target.strides.end());
        if (zeros && is_row) {
          now.rule = before.rule;
          now.rule->zero_row = self->offset / row;
          now.draw = before.draw;
        }
      }
    }
    if (op.writes(target.memory)) recipe.last = i + 1;
  }
  if (const auto it = held.find(target.memory); it != held.end()) {
    const Held& last = it->second;
    recipe.written = last.written;
    if (target.covers) recipe.rule = last.rule;
    if (recipe.rule) recipe.draw = last.draw;
    if (target.covers && !last.written && last.blank != target.memory) recipe.blank = last.blank;
  }
  return recipe;
}

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
    return at::empty({0}, at::device(at::kCPU).dtype(view.dtype)).set_(memory->second, view.offset, view.sizes, view.strides);
  };
  for (const size_t i : recipe.operators) {
    const Operator& op = *operators_[i];
    const auto generator = is_random(op.op) ? std::optional(at::detail::createCPUGenerator(seed_of(i))) : std::nullopt;
    const auto callee = generator ? with_generator(op.op) : op.op;
    const auto& declared = callee.schema().arguments();
    const bool adds_generator = declared.size() > op.arguments.size();
    torch::jit::Stack stack;
    bool takes_generator = false;
    for (size_t a = 0, next = 0; a < declared.size(); ++a) {
      if (declared[a].name() == "generator" && adds_generator) {
        takes_generator = true;
        stack.emplace_back(*generator);
        continue;
      }
      const Argument& given = op.arguments[next++];
      const auto tensor = [&](const std::optional<View>& view) { return view ? tensor_at(*view) : at::Tensor(); };
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
      if (declared[a].name() == "device") value = c10::Device(c10::kCPU);
      if (declared[a].name() == "generator") {
        takes_generator = true;
        if (generator) value = *generator;
      }
      stack.push_back(std::move(value));
    }
    const bool uniform = op.name == "aten::rand_like", normal = op.name == "aten::randn_like";
    if (uniform || normal) {
      const View& made = *op.results.at(0);
      at::Tensor drawn = at::empty_strided(made.sizes, made.strides, at::dtype(made.dtype));
      uniform ? drawn.uniform_(0, 1, generator) : drawn.normal_(0, 1, generator);
      stack = {drawn};
    } else {
      require(
          !generator || takes_generator, "materialize: '", name, "' is drawn by ", op.name,
          ", which takes no generator, so its values would depend on the layout; draw it by normal_ or uniform_, or give it a rule with tessera::nn::set_init");
      callee.callBoxed(stack);
    }
    size_t next = 0;
    const auto keep = [&](at::Tensor made) {
      const auto& view = op.results.at(next++);
      if (!view || memories.contains(view->memory)) return;
      if (made.strides() != at::IntArrayRef(view->strides)) made = at::empty_strided(view->sizes, view->strides, made.options()).copy_(made);
      if (leaves_undefined(op.name) && at::isFloatingType(made.scalar_type())) made.fill_(std::numeric_limits<double>::quiet_NaN());
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
  require(!at::isFloatingType(made.scalar_type()) || !at::isnan(made).any().item<bool>(), "materialize: the constructor leaves part of '", name,
          "' without values; fill it there, or give it a rule with tessera::nn::set_init");
  return made;
}

}  // namespace tessera::nn
