#include "tessera/pipeline/executor.h"

#include <algorithm>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/connect.h"
#include "tessera/comm/engine.h"
#include "tessera/core/error.h"
#include "tessera/core/events.h"
#include "tessera/memory/memory.h"

// One rank's part of a step: its actions in the schedule's order, each with the messages that it takes and gives (pipeline/itinerary.h). Which schedule it is
// makes no difference here, and nothing is decided at run time: what is received when, under which tag, follows from the list, alike on both sides.
//
// Of a micro-batch between its forward and its backward a rank keeps the leaves that it was given, which take gradients, and of what it sent no more than the
// place in autograd's graph where the gradient will enter: the value itself goes when its message has gone. A backward that is cut in two (B and W of
// zero-bubble schedules) runs the graph once, with the weights' products left for later (nn::WeightGradients). Receives are posted ahead of the action that
// takes them, so that a transfer has some computing to hide behind.

namespace tessera::pipeline {
namespace {

using schedules::Action;
using schedules::Kind;

constexpr int64_t kMostDims = 8;

/// Messages of one kind between two ranks have one tag each, so that engines that match by tags need no order.
int tag_of(const Message& message, size_t crossings, bool header = false) {
  return static_cast<int>((static_cast<size_t>(message.micro_batch) * crossings + static_cast<size_t>(message.crossing)) * 3 +
                          (header ? 2 : (message.gradient ? 1 : 0)));
}

at::Tensor header_of(const at::Tensor& tensor) {
  require(tensor.dim() <= kMostDims, "a value of ", tensor.dim(), " dimensions crosses between stages; at most ", kMostDims, " can be announced");
  std::vector<int64_t> numbers(2 + kMostDims, 0);
  numbers[0] = static_cast<int64_t>(tensor.scalar_type());
  numbers[1] = tensor.dim();
  std::ranges::copy(tensor.sizes(), numbers.begin() + 2);
  return at::tensor(numbers, at::device(at::kCPU).dtype(at::kLong));
}

TensorSpec spec_in(const at::Tensor& header) {
  const int64_t* numbers = header.const_data_ptr<int64_t>();
  return {.sizes = {numbers + 2, numbers + 2 + numbers[1]}, .dtype = static_cast<at::ScalarType>(numbers[0])};
}

/// A gradient that autograd has also taken over for a leaf, without a copy, would be written by that leaf's next one before it is taken or sent.
at::Tensor in_memory_of_its_own(const at::Tensor& gradient) {
  if (!gradient.has_storage() || gradient.storage().use_count() == 1) return gradient;
  const MemoryScope scope(MemoryCategory::Activations);
  return gradient.clone();
}

TensorSpec spec_of(const at::Tensor& tensor) { return {.sizes = tensor.sizes().vec(), .dtype = tensor.scalar_type()}; }

at::Tensor room_for(const TensorSpec& spec, at::Device device) {
  const MemoryScope scope(MemoryCategory::Activations);
  return at::empty(spec.sizes, at::TensorOptions(spec.dtype).device(device));
}

/// Says where an action, with its messages, begins and ends, to who listens.
class ActionScope {
 public:
  explicit ActionScope(const Action& action) : action_(action) { say(/*begins=*/true); }
  ~ActionScope() { say(/*begins=*/false); }
  ActionScope(const ActionScope&) = delete;
  ActionScope& operator=(const ActionScope&) = delete;

 private:
  void say(bool begins) const {
    if (EventStream* const listener = EventStream::current()) listener->add({.what = ActionEvent{.action = schedules::to_string(action_), .begins = begins}});
  }
  const Action& action_;
};

/// Rethrows with the action before the text, as the same kind of error where it is one of ours.
[[noreturn]] void rethrow_naming(const std::string& action) {
  try {
    throw;
  } catch (const CommError& error) {
    throw CommError(action + ": " + error.what());
  } catch (const ConfigError& error) {
    throw ConfigError(action + ": " + error.what());
  } catch (const InternalError&) {
    throw;
  } catch (const Error& error) {
    throw Error(action + ": " + error.what());
  } catch (const c10::OutOfMemoryError&) {
    throw;  // whoever counts memory knows more of it
  } catch (const c10::Error& error) {
    throw Error(action + ": " + error.what_without_backtrace());
  }
}

}  // namespace

int end_of_tags(int micro_batches, const Crossings& crossings) { return tag_of({.micro_batch = micro_batches}, crossings.size()); }

std::string describe(const Action& action) {
  return detail::concat("stage ", action.stage, ", ", schedules::words_of(action.kind), action.kind == Kind::Update ? " behind" : " of", " micro-batch ",
                        action.micro_batch);
}

Executor::Executor(const schedules::Schedule& schedule, Crossings crossings, std::map<int, Stage*> stages, ExecutorOptions options)
    : schedule_(schedule), crossings_(std::move(crossings)), stages_(std::move(stages)), options_(std::move(options)) {
  invariant(schedule.ranks() == options_.ranks.size(), "a schedule of ", schedule.ranks(), " ranks on ", options_.ranks.size());
  check_crossings(crossings_, schedule.stages());
  for (const Crossing& crossing : crossings_) {
    invariant(!crossing.announced || options_.ranks.ahead.matches_tags(), "a value from stage ", crossing.from, " to stage ", crossing.to,
              " is announced by a message of its own, which the engine would take for the next value: say its shape (Stage::input_spec)");
  }
  legs_ = itinerary(schedule, crossings_, options_.ranks.rank());
  for (const Leg& leg : legs_) {
    invariant(stages_.contains(leg.action.stage), "rank ", options_.ranks.rank(), " does not hold stage ", leg.action.stage);
    const bool updatable = options_.update && options_.weights.contains(leg.action.stage);
    invariant(leg.action.kind != Kind::Update || updatable, "the schedule '", schedule.name, "' updates stage ", leg.action.stage,
              ", and nobody said what that changes, or how");
    if (leg.action.kind == Kind::BackwardWeight) splits_.insert({leg.action.stage, leg.action.micro_batch});
    names_.push_back(schedule.stages() > 1 ? describe(leg.action) : "");
    for (const Message& message : leg.needs) taker_of_[{message.crossing, message.micro_batch, message.gradient}] = names_.back();
  }
  refuse_one_way();
}

/// Both ends of a pair post receives ahead of what they send: in one group, in which messages meet by their order alone, they would wait for each other.
void Executor::refuse_one_way() const {
  const Channels& ranks = options_.ranks;
  if (ranks.ahead.matches_tags() || ranks.ahead.engine() != ranks.back.engine()) return;
  std::set<int> sends, receives;
  for (const Leg& leg : legs_) {
    for (const Message& message : leg.sends) sends.insert(message.peer);
    for (const Message& message : leg.needs) receives.insert(message.peer);
  }
  const auto both = std::ranges::find_if(sends, [&](int peer) { return receives.contains(peer); });
  require(
      both == sends.end(), "pipeline: ranks ", ranks.rank(), " and ", both == sends.end() ? 0 : *both, " of group '", ranks.ahead.name(),
      "' send to each other under the schedule '", schedule_.name, "', and the group's engine (", ranks.ahead.engine()->name(),
      ") carries out their messages in the order of the calls, so that both would wait to receive; give ExecutorOptions::ranks a group for each direction: ",
      "Channels(mesh[\"pp\"], mesh.another(\"pp\", \"back\"), {})");
}

/// In each of the groups, the ranks that meet there.
void Executor::connect() {
  if (std::exchange(connected_, true)) return;
  const comm::CallSite site("pipeline.connect");
  std::set<int> ahead, back;
  for (const Leg& leg : legs_) {
    for (const Message& message : leg.sends) (options_.ranks.rank() < message.peer ? ahead : back).insert(message.peer);
    for (const Message& message : leg.needs) (message.peer < options_.ranks.rank() ? ahead : back).insert(message.peer);
  }
  comm::connect(options_.ranks.ahead, ahead, options_.device);
  comm::connect(options_.ranks.back, back, options_.device);
}

/// An earlier step, of whatever executor, that ended in its midst has left messages which this one's receives would match.
void Executor::refuse_what_is_left() const {
  if (options_.ranks.size() == 1 || options_.ranks.ahead.engine()->left_messages().empty()) return;
  throw Error(
      detail::concat("pipeline: an earlier step between the ranks of group '", options_.ranks.ahead.name(), "' ended in its midst (",
                     options_.ranks.ahead.engine()->left_messages(),
                     "), and what they had sent each other is still on its way, where this step would take it for its own; go on from a checkpoint in a "
                     "new process"));
}

void Executor::run(StepTimes* times) {
  refuse_what_is_left();
  connect();
  if (times) *times = {.schedule = schedule_.name, .micro_batches = schedule_.micro_batches, .rank_of = schedule_.rank_of};
  arrivals_.clear();
  leaving_.clear();
  alive_.clear();
  sending_.clear();  // what a step left that failed
  versions_.clear();
  for (const auto& [stage, weights] : options_.weights) {
    if (schedule_.is_asynchronous()) versions_.emplace(stage, WeightVersions(weights, schedule_.actions[static_cast<size_t>(options_.ranks.rank())], stage));
  }
  for (size_t i = 0; i < legs_.size(); ++i) {
    const Leg& leg = legs_[i];
    const std::string& name = names_[i];
    const comm::CallSite site(name);
    options_.ranks.ahead.set_place(name);
    const ActionScope bracket(leg.action);
    try {
      for (const Message& message : leg.posts) post(message);
      std::optional<LapTaker> lap;
      if (times) lap.emplace(*times, leg.action, options_.device);
      for (const Message& message : leg.needs) wait_for(message);
      lap ? lap->compute([&] { carry_out(leg.action); }) : carry_out(leg.action);
      for (const Message& message : leg.sends) send(message);
      drop_sent();
    } catch (...) {
      if (options_.ranks.size() > 1) options_.ranks.ahead.engine()->leave_messages(describe(leg.action));
      if (name.empty()) throw;
      rethrow_naming(name);
    }
  }
  options_.ranks.ahead.set_place("");
  const comm::CallSite site("pipeline.end");
  for (auto& pending : sending_) pending.wait();
  sending_.clear();
  invariant(arrivals_.empty(), "a value came that no action of the schedule '", schedule_.name, "' takes");
}

void Executor::carry_out(const Action& action) {
  const auto body = [&] {
    const auto versions = versions_.find(action.stage);
    if (versions == versions_.end()) return compute(action);
    if (action.kind == Kind::Update) return versions->second.update([&] { options_.update(action.stage); });
    versions->second.with(action.version, [&] { compute(action); });
  };
  options_.around ? options_.around(action, body) : body();
}

void Executor::compute(const Action& action) {
  switch (action.kind) {
    case Kind::Forward:
      return forward(action);
    case Kind::Backward:
      return backward(action, /*whole=*/true);
    case Kind::BackwardInput:
      return backward(action, /*whole=*/false);
    case Kind::BackwardWeight:
      alive(action).later->compute();
      alive_.erase({action.stage, action.micro_batch});
      return;
    default:
      invariant(false, describe(action), " is none that a rank computes");
  }
}

void Executor::forward(const Action& action) {
  const bool recording = at::GradMode::is_enabled();
  Alive now;
  if (leaves_weights(action)) now.later = std::make_shared<nn::WeightGradients>();
  for (size_t c = 0; c < crossings_.size(); ++c) {
    const Crossing& crossing = crossings_[c];
    if (crossing.to != action.stage) continue;
    at::Tensor input = take({static_cast<int>(c), action.micro_batch, false});
    if (recording && crossing.takes_gradient) input.requires_grad_(true);
    now.inputs.resize(std::max(now.inputs.size(), static_cast<size_t>(crossing.input) + 1));
    now.inputs[static_cast<size_t>(crossing.input)] = std::move(input);
  }
  StageOutputs made;
  {
    const nn::LeaveWeightGradients leave(now.later);
    made = stages_.at(action.stage)->forward(action.micro_batch, now.inputs);
  }
  for (size_t c = 0; c < crossings_.size(); ++c) {
    const Crossing& crossing = crossings_[c];
    if (crossing.from != action.stage) continue;
    invariant(static_cast<size_t>(crossing.output) < made.values.size(), "stage ", action.stage, " gave ", made.values.size(), " values, and its number ",
              crossing.output, " crosses");
    const at::Tensor& value = made.values[static_cast<size_t>(crossing.output)];
    const bool differentiable = crossing.takes_gradient && value.requires_grad();
    now.outputs[static_cast<int>(c)] = {spec_of(value), differentiable ? torch::autograd::impl::gradient_edge(value) : torch::autograd::Edge()};
    leaving_[{static_cast<int>(c), action.micro_batch, false}] = value.detach();
  }
  if (!recording) return;
  now.loss = std::move(made.loss);
  alive(action) = std::move(now);
}

void Executor::backward(const Action& action, bool whole) {
  Alive& now = alive(action);
  torch::autograd::edge_list roots;
  torch::autograd::variable_list gradients;
  if (now.loss.defined() && now.loss.requires_grad()) {
    roots.push_back(torch::autograd::impl::gradient_edge(now.loss));
    gradients.push_back(at::ones_like(now.loss));
    now.loss.reset();
  }
  for (auto& [crossing, output] : now.outputs) {
    if (!crossings_[static_cast<size_t>(crossing)].takes_gradient) continue;
    at::Tensor gradient = take({crossing, action.micro_batch, true});
    if (!output.second.is_valid()) continue;  // nothing before it is trained
    roots.push_back(std::move(output.second));
    gradients.push_back(std::move(gradient));
  }
  now.outputs.clear();
  if (!roots.empty()) {
    torch::autograd::Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
  }
  roots.clear();
  gradients.clear();
  for (size_t c = 0; c < crossings_.size(); ++c) {
    const Crossing& crossing = crossings_[c];
    if (crossing.to != action.stage || !crossing.takes_gradient) continue;
    const at::Tensor& input = now.inputs[static_cast<size_t>(crossing.input)];
    leaving_[{static_cast<int>(c), action.micro_batch, true}] = input.grad().defined() ? in_memory_of_its_own(input.grad()) : at::zeros_like(input.detach());
  }
  now.inputs.clear();
  if (now.later) now.later->own();
  if (whole) alive_.erase({action.stage, action.micro_batch});
}

void Executor::post(const Message& message) {
  const Crossing& crossing = crossings_[static_cast<size_t>(message.crossing)];
  Arrival& arrival = arrivals_[{message.crossing, message.micro_batch, message.gradient}];
  arrival.is_header = crossing.announced && !message.gradient;
  if (arrival.is_header) {
    arrival.tensor = at::empty({2 + kMostDims}, at::device(at::kCPU).dtype(at::kLong));
  } else if (message.gradient) {
    arrival.tensor = room_for(alive_.at({crossing.from, message.micro_batch}).outputs.at(message.crossing).first, options_.device);
  } else {
    const auto spec = stages_.at(crossing.to)->input_spec(message.micro_batch, crossing.input);
    invariant(spec.has_value(), "stage ", crossing.to, " does not know the shape of its input ", crossing.input, ", which is not announced");
    arrival.tensor = room_for(*spec, options_.device);
  }
  const comm::CallSite site(taker_of_.at({message.crossing, message.micro_batch, message.gradient}));
  arrival.pending = comm::recv_async(from(message.peer), arrival.tensor, message.peer, tag_of(message, crossings_.size(), arrival.is_header));
}

void Executor::wait_for(const Message& message) {
  Arrival& arrival = arrivals_.at({message.crossing, message.micro_batch, message.gradient});
  arrival.pending.wait();
  if (!std::exchange(arrival.is_header, false)) return;
  arrival.tensor = room_for(spec_in(arrival.tensor), options_.device);
  comm::recv(from(message.peer), arrival.tensor, message.peer, tag_of(message, crossings_.size()));
}

void Executor::send(const Message& message) {
  const auto made = leaving_.extract({message.crossing, message.micro_batch, message.gradient});
  invariant(!made.empty(), "nothing to send");
  const at::Tensor value = made.mapped().contiguous();
  require(value.is_meta() || value.device().type() == options_.device.type(), "pipeline: stage ", crossings_[static_cast<size_t>(message.crossing)].from,
          " gave a value on ", value.device(), " that crosses to another rank, and what comes from others is put on ", options_.device,
          "; say ExecutorOptions::device");
  if (crossings_[static_cast<size_t>(message.crossing)].announced && !message.gradient) {
    sending_.push_back(comm::send_async(to(message.peer), header_of(value), message.peer, tag_of(message, crossings_.size(), /*header=*/true)));
  }
  sending_.push_back(comm::send_async(to(message.peer), value, message.peer, tag_of(message, crossings_.size())));
}

/// What came, or was made here for another stage of this rank.
at::Tensor Executor::take(const Value& value) {
  auto found = arrivals_.extract(value);
  if (!found.empty()) return std::move(found.mapped().tensor);
  const auto made = leaving_.extract(value);
  invariant(!made.empty(), "the schedule '", schedule_.name, "' takes a value of micro-batch ", std::get<1>(value), " that has not been made");
  return made.mapped();
}

void Executor::drop_sent() {
  while (!sending_.empty() && sending_.front().done()) {
    sending_.front().wait();
    sending_.pop_front();
  }
}

}  // namespace tessera::pipeline
