#include "tessera/recompute/kept_outputs.h"

#include <algorithm>

#include <ATen/core/Formatting.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>

#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/nn/not_repeated.h"
#include "tessera/recompute/kept_values.h"

// Kept outputs stand in for calls by their order alone, which holds for the same reason as that of saved tensors, and as with those every shape is compared: an
// operator such as aten::add is called everywhere. What is kept are aliases: the output itself carries the graph, and would keep itself alive. After forward
// they become saved tensors like any others, so that whatever disposes of those, a recomputation around this one say, disposes of these as well.

namespace tessera {

namespace {

/// Attention draws random numbers only where this argument asks for it, which each call shows.
constexpr const char* kDropout = "dropout_p";

bool has_own_outputs(const c10::FunctionSchema& schema) {
  const auto aliases = [](const c10::Argument& argument) { return argument.alias_info() != nullptr; };
  return !schema.returns().empty() && std::none_of(schema.arguments().begin(), schema.arguments().end(), aliases) &&
         std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) { return *result.type() == *c10::TensorType::get(); });
}

/// A copy that changes the device alone: where that is the CPU, nothing runs in its place.
bool goes_to_a_device(const nn::OperatorCall& operation) {
  if (operation.name() != "aten::_to_copy") return false;
  const auto given = [&](const char* name) { return operation.arguments().at(static_cast<size_t>(operation.schema().argumentIndexWithName(name).value())); };
  const at::Tensor& self = operation.arguments()[0].toTensor();
  const c10::IValue device = given("device"), dtype = given("dtype");
  return device.isDevice() && device.toDevice() != self.device() && (dtype.isNone() || dtype.toScalarType() == self.scalar_type());
}

std::vector<c10::OperatorHandle> overloads_of(const std::string& name) {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::OperatorHandle> found;
  for (const auto& known : dispatcher.getAllOpNames()) {
    if (known.name != name) continue;
    if (const auto op = dispatcher.findSchema(known)) found.push_back(*op);
  }
  return found;
}

[[noreturn]] void refuse_unknown(const std::string& name) {
  std::vector<std::string> known;
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) known.push_back(op.name);
  std::sort(known.begin(), known.end());
  throw ConfigError("recompute.keep: there is no operator '" + name + "'; did you mean '" + nearest(name, known) + "'?");
}

}  // namespace

std::set<std::string> keepable_operators(const std::vector<std::string>& names) {
  std::set<std::string> result;
  for (const auto& given : names) {
    const std::string name = given.find("::") == std::string::npos ? "aten::" + given : given;
    const auto overloads = overloads_of(name);
    if (overloads.empty()) refuse_unknown(name);
    require(name.find("empty") == std::string::npos, "recompute.keep: '", name, "' makes memory that is written later; keep operators that compute");
    const bool own = std::any_of(overloads.begin(), overloads.end(), [](const auto& op) { return has_own_outputs(op.schema()); });
    require(own, "recompute.keep: '", name, "' makes no tensor of its own (it is a view or works in place); keep operators that compute, such as aten::mm");
    const bool composite =
        std::any_of(overloads.begin(), overloads.end(), [](const auto& op) { return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd); });
    require(!composite, "recompute.keep: '", name, "' is made of other operators, which are what runs; keep those (of aten::linear: aten::mm and aten::addmm)");
    const bool random = std::any_of(overloads.begin(), overloads.end(),
                                    [](const auto& op) { return op.hasTag(at::Tag::nondeterministic_seeded) && !op.schema().argumentIndexWithName(kDropout); });
    require(!random, "recompute.keep: '", name, "' draws random numbers, which have to be drawn again in their order; leave it out");
    result.insert(name);
  }
  return result;
}

class KeptOutputs::Recorder final : public nn::OperatorHooks {
 public:
  explicit Recorder(KeptOutputs& kept) : kept_(kept) {}

  void call(nn::OperatorCall& operation) override {
    if (!kept_.keeps(operation)) return operation.run(/*watch_inside=*/operation.composite());
    const auto dropout = operation.schema().argumentIndexWithName(kDropout);
    require(!dropout || operation.arguments()[*dropout].toDouble() == 0, "recompute '", kept_.path_, "': ", operation.name(),
            " drops at random, which has to be drawn again; leave it out of recompute.keep");
    Call made{.name = operation.name(), .arguments = arguments_of(operation), .outputs = {}};
    operation.run(/*watch_inside=*/false);
    for (const auto& result : operation.results()) {
      // An alias: the tensor itself will carry the graph, which would then hold itself.
      const at::Tensor& output = result.toTensor();
      made.outputs.push_back(output.defined() ? Output{.tensor = nn::alias_of(output), .version = output._version(), .saved = nullptr} : Output{});
    }
    kept_.calls_.push_back(std::move(made));
  }

 private:
  KeptOutputs& kept_;
};

class KeptOutputs::Replayer final : public nn::OperatorHooks {
 public:
  explicit Replayer(const KeptOutputs& kept) : kept_(kept) {}

  void call(nn::OperatorCall& operation) override {
    if (!kept_.keeps(operation)) return operation.run(/*watch_inside=*/operation.composite());
    const Call now{.name = operation.name(), .arguments = arguments_of(operation), .outputs = {}};
    const bool same = next_ < kept_.calls_.size() && kept_.calls_[next_].name == now.name && kept_.calls_[next_].arguments == now.arguments;
    require(same, "recompute '", kept_.path_, "': computed again, it calls ", now.text(), " where the first forward pass called ",
            next_ < kept_.calls_.size() ? kept_.calls_[next_].text() : "no further operator of recompute.keep",
            "; its forward must do the same each time: take what changes out of the module, or ", now.name, " out of recompute.keep");
    const Call& made = kept_.calls_[next_++];
    torch::jit::drop(operation.stack(), operation.schema().arguments().size());
    for (const auto& output : made.outputs) {
      // A forward that differentiates needs what it saved before it is over: kept outputs are not saved tensors by then.
      operation.stack().emplace_back(output.saved              ? nn::alias_of(output.saved->unpack())
                                     : output.tensor.defined() ? nn::alias_of(output.tensor)
                                                               : at::Tensor());
    }
  }

 private:
  const KeptOutputs& kept_;
  size_t next_ = 0;
};

bool KeptOutputs::keeps(const nn::OperatorCall& operation) const {
  return operators_->contains(operation.name()) && has_own_outputs(operation.schema()) && !nn::NotRepeated::now() && !reading_on_host() &&
         !goes_to_a_device(operation);
}

std::vector<KeptOutputs::Argument> KeptOutputs::arguments_of(const nn::OperatorCall& operation) {
  std::vector<Argument> found;
  for (const c10::IValue& argument : operation.arguments()) {
    nn::map_tensors(argument, [&](const at::Tensor& tensor) {
      found.push_back({.sizes = tensor.sizes().vec(), .dtype = tensor.scalar_type()});
      return tensor;
    });
  }
  return found;
}

std::string KeptOutputs::Call::text() const {
  std::string text = name;
  for (const Argument& argument : arguments) {
    text += detail::concat(&argument == &arguments.front() ? " of " : ", ", c10::toString(argument.dtype), " ", at::IntArrayRef(argument.sizes));
  }
  return text;
}

std::shared_ptr<nn::OperatorHooks> KeptOutputs::recorder() { return std::make_shared<Recorder>(*this); }
std::shared_ptr<nn::OperatorHooks> KeptOutputs::replayer() const { return std::make_shared<Replayer>(*this); }

void KeptOutputs::forward_done() {
  for (auto& call : calls_) {
    for (auto& output : call.outputs) {
      if (!output.tensor.defined()) continue;
      require(output.tensor._version() == output.version, "recompute '", path_, "': the output of ", call.name,
              " is changed in place later in forward, so it cannot be kept; leave the operator out of recompute.keep");
      output.saved = nn::save(output.tensor);
      output.tensor = at::Tensor();
    }
  }
}

}  // namespace tessera
