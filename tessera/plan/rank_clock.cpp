#include "tessera/plan/rank_clock.h"

#include <algorithm>
#include <utility>

#include "tessera/plan/operator_time.h"
#include "tessera/plan/read_events.h"
#include "tessera/train/engine.h"

namespace tessera::plan {

RankClock::RankClock(const Machine& machine, std::function<Placement(const std::string&)> place, std::vector<std::string> channels)
    : machine_(machine), place_(std::move(place)), channels_(std::move(channels)) {}

void RankClock::read(const Event& event) {
  if (const auto* ran = std::get_if<OperatorEvent>(&event.what)) run(*ran);
  if (const auto* call = std::get_if<CollectiveEvent>(&event.what)) start(*call, event);
  if (std::holds_alternative<WaitEvent>(event.what)) wait(event);
  if (std::holds_alternative<HostReadEvent>(event.what)) host_ = std::max(host_, device_);
  if (const auto* action = std::get_if<ActionEvent>(&event.what)) turn(*action);
}

/// Layers repeat each other: what an operator takes is worked out once.
double RankClock::seconds_of(const OperatorEvent& ran) {
  const auto [at, fresh] = known_.try_emplace({ran.name, ran.flops, ran.read_bytes + ran.written_bytes, ran.shape}, 0);
  if (fresh) at->second = operator_seconds(ran, machine_.device);
  return at->second;
}

void RankClock::run(const OperatorEvent& ran) {
  const double seconds = seconds_of(ran);
  if (seconds == 0) return;
  host_ += machine_.device.launch;
  if (host_ > device_) time_.asked += host_ - device_;
  device_ = std::max(host_, device_) + machine_.device.kernel_gap + seconds;
  time_.computing += machine_.device.kernel_gap + seconds;
}

void RankClock::start(const CollectiveEvent& call, const Event& event) {
  host_ += machine_.device.collective_launch;
  const auto [placed, fresh] = places_.try_emplace(call.group);
  if (fresh) placed->second = place_(call.group);
  const double seconds = collective_seconds(call, placed->second, machine_);
  double& group = groups_[call.group];
  if (is_message(call) && std::ranges::find(channels_, call.group) != channels_.end()) {
    time_.message = std::max(time_.message, seconds);
    for (const int64_t flight : event.writes) done_[flight] = 0;
    return;
  }
  group = std::max({host_, device_, group}) + seconds;
  time_.collectives += seconds;
  for (const int64_t flight : event.writes) done_[flight] = group;
}

void RankClock::wait(const Event& event) {
  for (const int64_t flight : event.reads) {
    const auto found = done_.find(flight);
    if (found == done_.end()) continue;
    if (found->second > device_) time_.exposed += found->second - device_;
    device_ = std::max(device_, found->second);
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
  for (const auto& [group, done] : groups_) time.step = std::max(time.step, done);
  time.after = acted_ ? time.step - time_.after : 0;
  return time;
}

}  // namespace tessera::plan
