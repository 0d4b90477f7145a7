#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/call_site.h"
#include "tessera/comm/decorators/decorator.h"
#include "tests/support/sim_device/happens_before.h"

// Collectives that take as long as a test says, in the time that only simulated devices have (docs/testing.md).

namespace tessera::testing_support {

inline constexpr double kWork = 1e-6;  // of a piece of work that nobody slows down

/// How long rank 0's collectives take, by call site; what it made of them since it last reported.
struct Slowness {
  std::function<double(std::string_view site)> seconds;
  double of_step = 0;            ///< of all calls since the last report
  std::vector<double> of_steps;  ///< before each report
};

/// See slowing().
class SlowEngine final : public comm::DecoratedEngine {
 public:
  SlowEngine(const comm::GroupInfo& group, std::shared_ptr<comm::Engine> inner, std::shared_ptr<Slowness> slowness)
      : DecoratedEngine(group, std::move(inner)), slowness_(std::move(slowness)) {}

  comm::Work start(const comm::Call& call) override {
    const std::string_view site = comm::CallSite::current();
    if (site == "report") slowness_->of_steps.push_back(std::exchange(slowness_->of_step, 0));
    const double seconds = slowness_->seconds(site);
    if (seconds > 0) slowness_->of_step += seconds;
    const sim::Takes takes(std::max(seconds, kWork));
    return inner()->start(call);
  }

 private:
  std::shared_ptr<Slowness> slowness_;
};

/// A decorator for each rank, of which rank 0's slows its engines down, on the simulated devices' own clock.
inline comm::Decorator slowing(std::shared_ptr<Slowness> slowness) {
  return [slowness](std::shared_ptr<comm::Engine> inner, const comm::GroupInfo& group) -> std::shared_ptr<comm::Engine> {
    return group.world_rank(group.rank) != 0 ? inner : std::make_shared<SlowEngine>(group, std::move(inner), slowness);
  };
}

}  // namespace tessera::testing_support
