#include "tessera/plan/rank_clock.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "tessera/plan/operator_time.h"
#include "tessera/plan/read_events.h"
#include "tessera/train/engine.h"

namespace tessera::plan {
namespace {

double last_of(const std::array<double, 2>& ways) { return std::max(ways[0], ways[1]); }

}  // namespace

RankClock::RankClock(const Machine& machine, std::function<Placement(const std::string&)> place, std::vector<std::string> channels, bool updates_later)
    : machine_(machine), place_(std::move(place)), channels_(std::move(channels)), updates_later_(updates_later) {}

void RankClock::read(const Event& event) {
  if (const auto* ran = std::get_if<OperatorEvent>(&event.what)) run(*ran, event);
  if (const auto* change = std::get_if<MemoryChange>(&event.what); change != nullptr && change->bytes > 0 && !copies_.empty()) {
    for (const int64_t storage : event.writes) copies_.erase(storage);  // a new one, and of another micro-batch where a number comes again
  }
  if (const auto* call = std::get_if<CollectiveEvent>(&event.what)) start(*call, event);
  if (std::holds_alternative<WaitEvent>(event.what)) wait(event);
  if (std::holds_alternative<HostReadEvent>(event.what)) host_ = std::max(host_, device_);
  if (const auto* action = std::get_if<ActionEvent>(&event.what)) turn(*action);
}

/// Layers repeat each other: what an operator takes is worked out once.
const RankClock::Cost& RankClock::cost_of(const OperatorEvent& ran) {
  const auto [at, fresh] = known_.try_emplace({ran.name, ran.flops, ran.causal, ran.read_bytes + ran.written_bytes, ran.shape});
  if (fresh) {
    const OperatorHabit* habit = machine_.habits.of(ran.name);
    at->second = {.seconds = operator_seconds(ran, machine_.device, habit), .known = has_cost(ran, habit)};
  }
  return at->second;
}

/// When copies are done with what this uses.
double RankClock::copied_for(const Event& event) const {
  double done = 0;
  if (copies_.empty()) return done;
  const auto times_of = [&](int64_t storage) {
    const auto found = copies_.find(storage);
    return found == copies_.end() ? CopyTimes{} : found->second;
  };
  for (const int64_t storage : event.reads) done = std::max(done, times_of(storage).written);
  for (const int64_t storage : event.writes) done = std::max({done, times_of(storage).written, times_of(storage).read});
  return done;
}

void RankClock::copy(const OperatorEvent& ran, const Event& event) {
  host_ += machine_.device.launch;
  double& stream = ran.on_host ? out_ : in_;
  const double begin = std::max({host_, ran.on_host ? device_ : 0, stream, copied_for(event)});
  stream = begin + static_cast<double>(ran.written_bytes) / machine_.device.host_link;
  for (const int64_t storage : event.reads) copies_[storage].read = stream;
  for (const int64_t storage : event.writes) copies_[storage].written = stream;
}

/// By its bytes: what its cores multiply is little beside that.
void RankClock::run_on_host(const OperatorEvent& ran, const Event& event) {
  OperatorEvent bytes = ran;
  bytes.flops = 0;
  const double seconds = operator_seconds(bytes, {.memory_bandwidth = machine_.device.host_memory, .memory_share = 1});
  if (updates_later_) {
    cores_ += seconds;
    return;
  }
  host_ = std::max(host_, copied_for(event)) + seconds;
}

void RankClock::run(const OperatorEvent& ran, const Event& event) {
  if (ran.crosses && is_copy(ran.name)) return copy(ran, event);
  if (ran.on_host && !ran.crosses) return run_on_host(ran, event);
  const auto& [seconds, known] = cost_of(ran);
  if (seconds == 0) return;
  const Habits& habits = machine_.habits;
  const OperatorHabit* habit = habits.of(ran.name);
  const double launches = habit != nullptr ? habit->launches : 1;
  host_ += launches * (habits.launch > 0 ? habits.launch : machine_.device.launch);
  if (host_ > device_) time_.asked += host_ - device_;
  const double taken = launches * machine_.device.kernel_gap + seconds;
  device_ = std::max(host_, device_);
  if (const double copied = copied_for(event); copied > device_) {
    time_.copied += copied - device_;
    device_ = copied;
  }
  device_ += taken;
  time_.computing += taken;
  if (!known) time_.guessed[ran.name] += taken;
  if (habits.logit_columns > 0 && !ran.shape.empty() && ran.shape.back() == habits.logit_columns && ran.flops > 0) use_logits(ran);
}

/// What lies between the product that makes logits and those of its backward.
void RankClock::use_logits(const OperatorEvent& made) {
  const Habits& habits = machine_.habits;
  host_ += habits.logit_launches * habits.launch;
  double logits = 1;
  for (const int64_t size : made.shape) logits *= static_cast<double>(size);
  const double seconds = logits * habits.logit_bytes / (machine_.device.memory_bandwidth * machine_.device.memory_share);
  device_ = std::max(host_, device_) + seconds;
  time_.computing += seconds;
}

void RankClock::start(const CollectiveEvent& call, const Event& event) {
  const auto [placed, fresh] = places_.try_emplace(call.group);
  if (fresh) placed->second = place_(call.group);
  const Habits& habits = machine_.habits;
  if (placed->second.ranks > 1) {
    host_ += (habits.collective_launch > 0 ? habits.collective_launch : machine_.device.collective_launch) +
             habits.collective_launch_per_level * std::log2(placed->second.ranks);
    if (call.group == "tp") host_ += habits.layer_collective_launch_per_rank * placed->second.ranks;
  }
  const CollectiveCost cost = collective_cost(call, placed->second, machine_);
  if (is_message(call) && std::ranges::find(channels_, call.group) != channels_.end()) {
    time_.message = std::max(time_.message, cost.seconds());
    for (const int64_t flight : event.writes) done_[flight] = {};
    return;
  }
  Stream& stream = streams_[is_message(call) ? fmt::format("{} {}", call.group, call.peer) : call.group];
  const double begin = std::max({host_, device_, last_of(stream.ends), copied_for(event)});
  const Ways ends = shared_ends(stream, call.op, begin, cost);
  const double end = last_of(ends);
  stream.across = cost.across;
  for (size_t way = 0; way < ends.size(); ++way) stream.ends[way] = std::max(stream.ends[way], ends[way]);
  time_.collectives += end - begin;
  std::erase_if(stream.flights, [&](int64_t flight) { return !done_.contains(flight); });
  for (const int64_t flight : event.writes) {
    done_[flight] = ends;
    if (std::ranges::find(stream.flights, flight) == stream.flights.end()) stream.flights.push_back(flight);
  }
  if (!habits.waits_for_collectives) return;
  time_.exposed += end - device_;
  device_ = end;
}

/// Of two that have bytes for the same links each has half of them until the smaller is through; so the one ends later by as much as the other has sent
/// meanwhile, and the other way round.
RankClock::Ways RankClock::shared_ends(const Stream& stream, const std::string& op, double begin, const CollectiveCost& cost) {
  Ways ends{};
  for (size_t way = 0; way < ends.size(); ++way) {
    if (op == (way == 0 ? "recv" : "send")) continue;
    ends[way] = begin + cost.seconds();
    if (cost.transfer == 0) continue;
    for (auto& [name, other] : streams_) {
      if (&other == &stream || other.across != cost.across || other.ends[way] <= begin) continue;
      const auto later = [&](double at) { return at <= begin ? at : at + std::min(at - begin, cost.transfer); };
      ends[way] += std::min(other.ends[way] - begin, cost.transfer);
      for (const int64_t flight : other.flights) {
        if (const auto found = done_.find(flight); found != done_.end()) found->second[way] = later(found->second[way]);
      }
      other.ends[way] = later(other.ends[way]);
    }
  }
  return ends;
}

void RankClock::wait(const Event& event) {
  for (const int64_t flight : event.reads) {
    const auto found = done_.find(flight);
    if (found == done_.end()) continue;
    const double done = last_of(found->second);
    if (done > device_) time_.exposed += done - device_;
    device_ = std::max(device_, done);
    done_.erase(found);
  }
}

void RankClock::turn(const ActionEvent& action) {
  if (action.action == kLeftOut) return;
  if (action.begins) {
    if (!acted_) time_.before = end();
    acted_ = true;
    action_began_ = end();
    return;
  }
  const schedules::Action parsed = schedules::parse_action(action.action);
  auto& mean = time_.actions[{parsed.kind, parsed.stage}];
  mean.seconds += end() - action_began_;
  ++mean.count;
  time_.after = end();  // until time() takes it from the whole
}

/// A host that runs ahead costs nothing; one that is behind decides.
double RankClock::end() const { return std::max(host_, device_); }

RankTime RankClock::time() const {
  RankTime time = time_;
  time.step = end();
  time.asked += time.step - device_;  // of what the host does last
  const double copied = std::max({time.step, in_, out_});
  time.copied += copied - time.step;
  time.step = std::max(copied, cores_);
  time.asked += time.step - copied;
  for (const auto& [name, stream] : streams_) time.step = std::max(time.step, last_of(stream.ends));
  time.after = acted_ ? time.step - time_.after : 0;
  return time;
}

}  // namespace tessera::plan
