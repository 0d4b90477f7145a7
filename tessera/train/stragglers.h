#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <vector>

namespace tessera {

/// Where a rank's time went in one step, before the ranks reported to each other: computing (data, forward, backward, optimizer) or in collectives.
struct RankTimes {
  int rank = 0;  ///< of the world
  double compute_s = 0;
  double wait_s = 0;
};

/// A rank that computes longer than the others: they wait for it, so the whole run is as slow as it is.
struct Straggler {
  int rank = 0;
  double compute_s = 0;  ///< its median over the steps looked at
  double median_s = 0;   ///< of all ranks
  double ratio() const { return compute_s / median_s; }
};

/// The middle one, of two the smaller: with two ranks the slower is measured against the faster. Of nothing 0.
double lower_median(std::vector<double> values);

/// Ranks whose compute time is above `ratio` times the median of all ranks, by at least `least_s` seconds (noise that costs nobody anything), slowest first.
/// steps[s][r] are rank r's seconds in step s; each rank is judged by its own median over the steps, so that one bad step names nobody.
std::vector<Straggler> find_stragglers(const std::vector<std::vector<double>>& steps, double ratio, double least_s = 0);

/// Names a rank once when it becomes a straggler, and again only if it had caught up meanwhile (half of the allowed excess or less).
class StragglerWatch {
 public:
  static constexpr int kWindow = 10;         ///< steps looked at
  static constexpr double kLeast_s = 0.010;  ///< seconds per step below which a difference is not worth a line

  /// `ratio` as log.straggler_ratio; 0: names nobody.
  explicit StragglerWatch(double ratio) : ratio_(ratio) {}

  /// After each step, with the times of all ranks: who is named now, slowest first.
  std::vector<Straggler> after_step(const std::vector<RankTimes>& ranks);

 private:
  double ratio_;
  std::deque<std::vector<double>> steps_;
  std::set<int> named_;
};

}  // namespace tessera
