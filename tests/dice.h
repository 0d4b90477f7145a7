#pragma once

#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>

namespace tessera::testing_support {

/// What tests that draw their programs draw with: the same numbers for the same seed, anywhere.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}

  int below(int n) { return static_cast<int>(engine_() % static_cast<uint64_t>(n)); }
  bool once_in(int n) { return below(n) == 0; }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return *(choices.begin() + below(static_cast<int>(choices.size())));
  }

 protected:
  std::mt19937_64 engine_;
};

/// Which seeds DISABLED_Many draws: that of TESSERA_SEED, or from n to m of TESSERA_SEEDS = n,m; else those given.
inline std::pair<uint64_t, uint64_t> seeds_asked(uint64_t begin, uint64_t end) {
  if (const char* const seeds = std::getenv("TESSERA_SEEDS")) {
    const std::string text = seeds;
    return {std::stoull(text), std::stoull(text.substr(text.find(',') + 1))};
  }
  if (const char* const seed = std::getenv("TESSERA_SEED")) return {std::stoull(seed), std::stoull(seed) + 1};
  return {begin, end};
}

}  // namespace tessera::testing_support
