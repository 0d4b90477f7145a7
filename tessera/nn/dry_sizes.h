#pragma once

#include <cstdint>

namespace tessera::nn {

/// What a dry run's sizes are to those of a run: the same, or the least or the most of what a run may have there.
enum class DrySizes : uint8_t { Known, Least, Most };

/// While alive, what this thread's dry run makes is of such sizes. Whoever does one thing with large tensors and another with small ones does, with the least,
/// what takes least memory, and with the most what takes most. Known where there is none. Nests.
class DrySizesScope {
 public:
  explicit DrySizesScope(DrySizes sizes);
  ~DrySizesScope();
  DrySizesScope(const DrySizesScope&) = delete;
  DrySizesScope& operator=(const DrySizesScope&) = delete;

  static DrySizes now();

 private:
  DrySizes before_;
};

}  // namespace tessera::nn
