#pragma once

#include <functional>

namespace tessera::nn {

/// What calls of a pass leave for later ones beside their results: how long a sequence is of which these are given a part. An interceptor of modules whose
/// calls go by it derives from this, too. Who makes a call again without those before it (a stage of a pipeline) asks while the whole pass runs, and puts it
/// back.
class PassState {
 public:
  virtual ~PassState() = default;

  /// Puts back what is now. Keeps nothing alive.
  virtual std::function<void()> now() const = 0;
};

}  // namespace tessera::nn
