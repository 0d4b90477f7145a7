#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

namespace tessera {

/// The order in which units were used in the pass before, and where in it the pass at hand stands: what a prefetch follows, and what says whether a unit is
/// used again. Depends on calls alone, never on time, so it is the same on every rank.
class UseOrder {
 public:
  /// A pass begins; the one at hand becomes the one to follow.
  void restart() {
    if (!current_.empty()) {
      last_.swap(current_);
      last_turn_ = turn_.value_or(last_.size());
    }
    current_.clear();
    turn_.reset();
    position_ = 0;
  }

  void saw(size_t unit) {
    if (current_.size() == kMost) restart();  // forward again and again, and no backward
    current_.push_back(unit);
    const size_t end = turn_ ? last_.size() : last_turn_;
    for (size_t i = position_; i < end; ++i) {
      if (last_[i] != unit) continue;
      position_ = i + 1;
      return;
    }
  }

  /// Forward ends here, and backward begins.
  void turn() {
    turn_ = current_.size();
    position_ = std::max(position_, last_turn_);
  }

  /// The unit expected `ahead` uses after the one last seen, from 0; nothing behind the end.
  const size_t* next(size_t ahead) const { return position_ + ahead < last_.size() ? &last_[position_ + ahead] : nullptr; }

  /// Whether there is a pass to follow.
  bool is_known() const { return !last_.empty(); }
  /// Whether the unit is expected once more before forward ends.
  bool comes_again_in_forward(size_t unit) const {
    const size_t end = std::max(position_, last_turn_);
    return std::find(last_.begin() + position_, last_.begin() + end, unit) != last_.begin() + end;
  }

 private:
  static constexpr size_t kMost = 1 << 20;
  std::vector<size_t> last_, current_;
  size_t last_turn_ = 0;        ///< in last_: where forward ended
  std::optional<size_t> turn_;  ///< in current_, once it has come
  size_t position_ = 0;         ///< in last_
};

}  // namespace tessera
