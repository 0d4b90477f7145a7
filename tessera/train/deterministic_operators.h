#pragma once

namespace tessera {

/// While one lives, libtorch's operators on devices add up in a fixed order wherever they have one, and throw, by their names, where they have none. Of a
/// step's operators those are the backward passes of attention on CUDA, which otherwise add by atomics (docs/gpu.md); a mere warning would leave them so. The
/// setting is libtorch's, and the process's: it holds until the last of these ends, and then is what it was before the first.
class DeterministicOperators {
 public:
  DeterministicOperators();
  ~DeterministicOperators();
  DeterministicOperators(const DeterministicOperators&) = delete;
  DeterministicOperators& operator=(const DeterministicOperators&) = delete;
};

}  // namespace tessera
