#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/train/expert_load.h"

namespace tessera {

/// An expert that is asked for far more than the others of its layer: with experts over ranks, the others wait for the one that holds it.
struct HotExpert {
  int64_t layer = 0, expert = 0;
  double load = 0;  ///< over the mean of its layer: its median over the steps looked at
};

/// Names an expert once when it becomes hot, and again only if it had cooled down meanwhile (half of the allowed excess or less).
class HotExpertWatch {
 public:
  static constexpr int kWindow = 10;  ///< steps looked at, so that one odd batch names nobody
  static constexpr double kHot = 2;   ///< times the mean; where few experts make less possible, half of what is possible beyond it

  /// `per_token`: choices of a token, so that an expert has at most experts / per_token times the mean. `on` false: names nobody.
  HotExpertWatch(int64_t per_token, bool on) : per_token_(per_token), on_(on) {}

  /// After each step, with the loads of all layers: who is named now, hottest first.
  std::vector<HotExpert> after_step(const std::vector<ExpertLoad>& loads);

 private:
  int64_t per_token_;
  bool on_;
  std::deque<std::vector<ExpertLoad>> steps_;
  std::set<std::pair<int64_t, int64_t>> named_;
};

/// One line of what is named in a step, whoever else is: "layer 3: expert 5 takes 3.1 times the mean load (over the last 10 steps); ...".
std::string line_of(const std::vector<HotExpert>& named, const Config& config);

}  // namespace tessera
