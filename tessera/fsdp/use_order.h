#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace tessera {

/// The order in which units were used in the forward and in the backward before, and where in it those at hand stand: what a prefetch follows, and what says
/// whether a unit is used again. Depends on calls alone, never on time, so it is the same on every rank. Forwards and backwards of several micro-batches may
/// alternate in any way: each follows the last of its kind. What comes behind the one at hand is a backward where that is a forward, until somebody knows
/// better.
class UseOrder {
 public:
  enum class Follows { Unknown, Nothing, Forward, Backward };

  /// A forward begins.
  void begin_forward() {
    forward_.keep();
    backward_.keep();
    in_backward_ = over_ = false;
    position_ = 0;
  }

  /// A backward begins.
  void begin_backward() {
    backward_.keep();
    in_backward_ = true;
    over_ = false;
    position_ = 0;
  }

  /// The one at hand has ended.
  void end() {
    forward_.keep();
    backward_.keep();
    over_ = true;
  }

  /// What comes behind the one at hand, or behind the last one.
  void follow_with(Follows follows) { follows_ = follows; }

  void saw(size_t unit) {
    Uses& uses = in_backward_ ? backward_ : forward_;
    if (uses.now.size() == kMost) begin_forward();  // forward again and again, and no backward
    uses.now.push_back(unit);
    const auto found = std::find(uses.before.begin() + static_cast<std::ptrdiff_t>(position_), uses.before.end(), unit);
    if (found != uses.before.end()) position_ = static_cast<size_t>(found - uses.before.begin()) + 1;
  }

  /// The unit expected `ahead` uses after the one last seen, from 0; behind the end those of what follows.
  const size_t* next(size_t ahead) const {
    if (!over_) {
      const std::vector<size_t>& before = (in_backward_ ? backward_ : forward_).before;
      if (position_ + ahead < before.size()) return &before[position_ + ahead];
      ahead -= before.size() - position_;
    }
    const std::vector<size_t>* const following = what_follows();
    return following && ahead < following->size() ? &(*following)[ahead] : nullptr;
  }

  /// Whether there is a forward to follow.
  bool is_known() const { return !forward_.before.empty(); }
  /// Whether the unit is expected once more before forward ends.
  bool comes_again_in_forward(size_t unit) const {
    return !in_backward_ && std::find(forward_.before.begin() + static_cast<std::ptrdiff_t>(position_), forward_.before.end(), unit) != forward_.before.end();
  }

 private:
  static constexpr size_t kMost = 1 << 20;

  struct Uses {
    std::vector<size_t> before, now;
    void keep() {
      if (!now.empty()) before.swap(now);
      now.clear();
    }
  };
  const std::vector<size_t>* what_follows() const {
    switch (follows_) {
      case Follows::Unknown:
        return in_backward_ ? nullptr : &backward_.before;
      case Follows::Nothing:
        return nullptr;
      case Follows::Forward:
        return &forward_.before;
      case Follows::Backward:
        return &backward_.before;
    }
    return nullptr;
  }

  Uses forward_, backward_;
  bool in_backward_ = false, over_ = false;
  Follows follows_ = Follows::Unknown;
  size_t position_ = 0;  ///< in `before` of the one at hand
};

}  // namespace tessera
