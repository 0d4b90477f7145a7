#include "tessera/train/stragglers.h"

#include <algorithm>

namespace tessera {

double lower_median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<Straggler> find_stragglers(const std::vector<std::vector<double>>& steps, double ratio, double least_s) {
  if (steps.empty()) return {};
  std::vector<double> typical;
  for (size_t rank = 0; rank < steps.front().size(); ++rank) {
    std::vector<double> seconds;
    for (const auto& step : steps) seconds.push_back(step[rank]);
    typical.push_back(lower_median(std::move(seconds)));
  }
  const double median_s = lower_median(typical);
  std::vector<Straggler> found;
  for (size_t rank = 0; rank < typical.size(); ++rank) {
    if (typical[rank] > ratio * median_s && typical[rank] - median_s >= least_s) found.push_back({static_cast<int>(rank), typical[rank], median_s});
  }
  std::stable_sort(found.begin(), found.end(), [](const Straggler& a, const Straggler& b) { return a.compute_s > b.compute_s; });
  return found;
}

std::vector<Straggler> StragglerWatch::after_step(const std::vector<RankTimes>& ranks) {
  if (ratio_ == 0) return {};
  auto& step = steps_.emplace_back();
  for (const auto& times : ranks) step.push_back(times.compute_s);
  if (steps_.size() < kWindow) return {};
  if (steps_.size() > kWindow) steps_.pop_front();
  const std::vector<std::vector<double>> window(steps_.begin(), steps_.end());

  std::set<int> behind;
  for (const auto& straggler : find_stragglers(window, 1 + (ratio_ - 1) / 2)) behind.insert(straggler.rank);
  std::erase_if(named_, [&](int rank) { return !behind.contains(rank); });
  auto found = find_stragglers(window, ratio_, kLeast_s);
  std::erase_if(found, [&](const Straggler& straggler) { return !named_.insert(straggler.rank).second; });
  for (auto& straggler : found) straggler.rank = ranks[static_cast<size_t>(straggler.rank)].rank;
  return found;
}

}  // namespace tessera
