#include "tessera/train/hot_experts.h"

#include <algorithm>

#include <fmt/format.h>

#include "tessera/train/stragglers.h"

namespace tessera {

std::vector<HotExpert> HotExpertWatch::after_step(const std::vector<ExpertLoad>& loads) {
  if (!on_ || loads.empty()) return {};
  steps_.push_back(loads);
  if (steps_.size() < kWindow) return {};
  if (steps_.size() > kWindow) steps_.pop_front();
  std::vector<HotExpert> found;
  for (size_t layer = 0; layer < loads.size(); ++layer) {
    const size_t experts = loads[layer].share.size();
    const double possible = static_cast<double>(experts) / static_cast<double>(per_token_);
    const double hot = std::min(kHot, 1 + (possible - 1) / 2), cool = 1 + (hot - 1) / 2;
    for (size_t expert = 0; expert < experts; ++expert) {
      std::vector<double> times;
      for (const auto& step : steps_) times.push_back(step[layer].share[expert] * static_cast<double>(experts));
      const HotExpert one{.layer = loads[layer].layer, .expert = static_cast<int64_t>(expert), .load = lower_median(std::move(times))};
      if (one.load <= cool) named_.erase({one.layer, one.expert});
      if (one.load > hot && named_.insert({one.layer, one.expert}).second) found.push_back(one);
    }
  }
  std::ranges::stable_sort(found, std::ranges::greater(), &HotExpert::load);
  return found;
}

std::string line_of(const std::vector<HotExpert>& named, const Config& config) {
  const HotExpert& first = named.front();
  std::string line = fmt::format("layer {}: expert {} takes {:.1f} times the mean load (median of the last {} steps)", first.layer, first.expert, first.load,
                                 HotExpertWatch::kWindow);
  if (named.size() > 1) line += fmt::format(", and {} more are named with it (busiest_expert in metrics.jsonl)", named.size() - 1);
  if (config.mesh.ep > 1) line += fmt::format("; of mesh.ep = {} ranks the others wait for that which holds it", config.mesh.ep);
  return line + (config.model.router == "sigmoid" ? "; a larger moe.bias_rate evens loads out" : "; a larger moe.balance_loss evens loads out");
}

}  // namespace tessera
