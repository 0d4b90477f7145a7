#include "cli/bench/sampling.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace tessera::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double least_sample_s = 200e-6;
constexpr int64_t least_samples = 5, most_samples = 2000, most_batch = 10000, most_warm_up = 10000;

double seconds_of(const std::function<void()>& call, int64_t times) {
  const auto start = Clock::now();
  for (int64_t i = 0; i < times; ++i) call();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> numbers) {
  const auto middle = numbers.begin() + static_cast<int64_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  return *middle;
}

}  // namespace

SamplingPlan plan_calls(double seconds_per_call, const Limits& limits) {
  const double call = std::max(seconds_per_call, 1e-9);
  SamplingPlan plan;
  plan.warm_up = std::clamp<int64_t>(std::llround(limits.seconds / 5 / call), 1, most_warm_up);
  plan.batch = std::clamp<int64_t>(std::llround(least_sample_s / call), 1, most_batch);
  plan.samples = std::clamp<int64_t>(std::llround(limits.seconds / (call * static_cast<double>(plan.batch))), least_samples, most_samples);
  if (limits.iterations > 0) {
    // The largest batch that divides the number asked for, so that it is kept exactly.
    while (limits.iterations % plan.batch != 0) --plan.batch;
    plan.samples = limits.iterations / plan.batch;
    plan.warm_up = std::min(plan.warm_up, limits.iterations);
  }
  return plan;
}

Timing measure(const Ranks& ranks, const std::function<void()>& call, const Limits& limits) {
  seconds_of(call, 2);  // memory is touched, connections are open
  ranks.barrier();
  const double once = std::min(seconds_of(call, 1), seconds_of(call, 1));
  const SamplingPlan plan = plan_calls(ranks.slowest({once}).front(), limits);
  seconds_of(call, plan.warm_up);
  std::vector<double> samples(static_cast<size_t>(plan.samples));
  for (double& sample : samples) {
    ranks.barrier();
    sample = seconds_of(call, plan.batch) / static_cast<double>(plan.batch);
  }
  const auto slowest = ranks.slowest({median(samples), *std::min_element(samples.begin(), samples.end())});
  return {slowest[0] * 1e6, slowest[1] * 1e6, plan.samples * plan.batch};
}

}  // namespace tessera::bench
