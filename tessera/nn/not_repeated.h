#pragma once

namespace tessera::nn {

/// While alive, what this thread computes is no part of the forward pass around it that would be computed again with it: what is made once for all who ask,
/// counted, gathered, or given again as it was noted (nn/noted.h). Whoever stands in for the operators of a repeated pass by their order (recompute.keep) does
/// not look at it.
class NotRepeated {
 public:
  NotRepeated();
  ~NotRepeated();
  NotRepeated(const NotRepeated&) = delete;
  NotRepeated& operator=(const NotRepeated&) = delete;

  /// Whether one is alive.
  static bool now();

 private:
  bool before_;
};

}  // namespace tessera::nn
