#include "tessera/plan/step_time.h"

#include <algorithm>

#include <fmt/format.h>

#include "tessera/core/error.h"

namespace tessera::plan {
namespace {

using schedules::Kind;

double mean_of(const RankTime& time, Kind kind, int stage) {
  const auto found = time.actions.find({kind, stage});
  return found == time.actions.end() ? 0 : found->second.mean();
}

/// A schedule that cuts no backward never asks for the halves, and the other way round: what is not there is made of what is.
schedules::StageCosts stage_costs(const RankTime& time, int stage) {
  schedules::StageCosts costs{.forward = mean_of(time, Kind::Forward, stage),
                              .backward = mean_of(time, Kind::Backward, stage),
                              .backward_input = mean_of(time, Kind::BackwardInput, stage),
                              .backward_weight = mean_of(time, Kind::BackwardWeight, stage),
                              .update = mean_of(time, Kind::Update, stage)};
  if (costs.backward == 0) costs.backward = costs.backward_input + costs.backward_weight;
  if (costs.backward_input == 0) costs.backward_input = costs.backward / 2, costs.backward_weight = costs.backward / 2;
  return costs;
}

/// Of each rank of the pipeline.
std::vector<const RankTime*> slowest_of(const std::vector<TimedClass>& classes, const schedules::Schedule& pipeline) {
  std::vector<const RankTime*> slowest(std::max<size_t>(1, pipeline.actions.size()), nullptr);
  for (const TimedClass& each : classes) {
    const RankTime*& known = slowest.at(static_cast<size_t>(each.pipeline_rank));
    if (known == nullptr || each.time->step > known->step) known = each.time;
  }
  return slowest;
}

}  // namespace

schedules::Costs pipeline_costs(const std::vector<TimedClass>& classes, const schedules::Schedule& pipeline) {
  const auto slowest = slowest_of(classes, pipeline);
  schedules::Costs costs;
  for (int stage = 0; stage < pipeline.stages(); ++stage) {
    const RankTime* time = slowest.at(static_cast<size_t>(pipeline.rank_of[static_cast<size_t>(stage)]));
    invariant(time != nullptr, "no class holds stage ", stage);
    costs.stages.push_back(stage_costs(*time, stage));
    costs.communication = std::max(costs.communication, time->message);
  }
  return costs;
}

StepTime step_time(const std::vector<TimedClass>& classes, const schedules::Schedule& pipeline) {
  invariant(!classes.empty(), "a step without ranks");
  const auto slowest = slowest_of(classes, pipeline);
  const RankTime& decides = **std::ranges::max_element(slowest, {}, [](const RankTime* time) { return time == nullptr ? -1 : time->step; });
  StepTime step{.seconds = decides.step, .computing = decides.computing, .exposed = decides.exposed, .asked = decides.asked, .copied = decides.copied};
  for (const auto& [name, seconds] : decides.guessed) step.guessed += seconds;
  if (pipeline.actions.empty()) return step;
  const schedules::Costs costs = pipeline_costs(classes, pipeline);
  double before = 0, after = 0;
  for (const RankTime* time : slowest) before = std::max(before, time->before), after = std::max(after, time->after);
  step.seconds = before + measure(pipeline, simulate(pipeline, costs)).makespan + after;
  step.bubble = std::max(0.0, step.seconds - decides.step);
  return step;
}

nlohmann::json to_json(const StepTime& time) {
  return {{"seconds", time.seconds},
          {"computing", time.computing},
          {"guessed", time.guessed},
          {"exposed_communication", time.exposed},
          {"waiting_for_host", time.asked},
          {"waiting_for_copies", time.copied},
          {"bubble", time.bubble},
          {"tokens_per_second", time.tokens_per_second},
          {"mfu", time.mfu}};
}

std::string to_string(const StepTime& time) {
  const auto share = [&](double seconds) { return 100 * seconds / time.seconds; };
  const std::string copies = time.copied > 0 ? fmt::format("for copies from and to it {:.0f}%, ", share(time.copied)) : std::string();
  return fmt::format(
      "a step takes {:.3g} s: computing {:.0f}%, waiting for collectives {:.0f}%, for the host {:.0f}%, {}for other stages {:.0f}%; "
      "{:.0f} tokens/s a device, {:.0f}% of its peak\n",
      time.seconds, share(time.computing), share(time.exposed), share(time.asked), copies, share(time.bubble), time.tokens_per_second, 100 * time.mfu);
}

}  // namespace tessera::plan
