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

/// While alive, this thread's dry run puts the rows that come to an expert by chance into as few experts as they can come to, of which there are so many; 0,
/// as where there is none: into all alike. Whoever's scratch goes by an expert's rows asks. Nests.
class DryGroupsScope {
 public:
  explicit DryGroupsScope(int64_t groups);
  ~DryGroupsScope();
  DryGroupsScope(const DryGroupsScope&) = delete;
  DryGroupsScope& operator=(const DryGroupsScope&) = delete;

  static int64_t now();

 private:
  int64_t before_;
};

}  // namespace tessera::nn
