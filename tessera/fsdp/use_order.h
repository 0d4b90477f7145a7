#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace tessera {

/// The order in which units were used in the forward and in the backward before, and where in it those at hand stand: what a prefetch follows, and what says
/// whether a unit is used again. Depends on calls alone, never on time, so it is the same on every rank. Forwards and backwards of several micro-batches may
/// alternate in any way: each follows the last of its kind.
class UseOrder {
 public:
  /// A forward begins.
  void begin_forward() {
    forward_.keep();
    backward_.keep();
    in_backward_ = false;
    position_ = 0;
  }

  /// A backward begins.
  void begin_backward() {
    backward_.keep();
    in_backward_ = true;
    position_ = 0;
  }

  void saw(size_t unit) {
    Uses& uses = in_backward_ ? backward_ : forward_;
    if (uses.now.size() == kMost) begin_forward();  // forward again and again, and no backward
    uses.now.push_back(unit);
    const auto found = std::find(uses.before.begin() + static_cast<std::ptrdiff_t>(position_), uses.before.end(), unit);
    if (found != uses.before.end()) position_ = static_cast<size_t>(found - uses.before.begin()) + 1;
  }

  /// The unit expected `ahead` uses after the one last seen, from 0; behind the end of a forward those of a backward; nothing behind the end.
  const size_t* next(size_t ahead) const {
    const std::vector<size_t>& before = (in_backward_ ? backward_ : forward_).before;
    size_t index = position_ + ahead;
    if (index < before.size()) return &before[index];
    index -= before.size();
    return !in_backward_ && index < backward_.before.size() ? &backward_.before[index] : nullptr;
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
  Uses forward_, backward_;
  bool in_backward_ = false;
  size_t position_ = 0;  ///< in `before` of the one at hand
};

}  // namespace tessera
