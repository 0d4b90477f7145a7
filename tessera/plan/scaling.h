#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/config/config.h"
#include "tessera/plan/curves.h"
#include "tessera/plan/machine.h"
#include "tessera/plan/search.h"

namespace tessera::plan {

/// Strong scaling: the same step on ever more ranks, in the best layout of each number.
struct Scaling {
  struct Point {
    int ranks = 1;
    std::optional<Tried> whole{};  ///< the fastest that cuts no sequence; none where nothing fits, or no layout deals so few sequences to so many ranks
    std::optional<Tried> cut{};    ///< the fastest with mesh.cp, from the knee on
  };
  int64_t sequences = 1, seq_len = 1;  ///< of a step, and the tokens of each
  std::vector<Point> points{};         ///< doubling
  /// The last number of ranks up to which every doubling shortens the step by a quarter at least, of the half that it would be at best; none where the last
  /// point still does, or where nothing fits.
  std::optional<int> knee{};
  std::vector<std::string> beside{};  ///< ScalingOptions::beside

  /// Of a step.
  double tokens() const { return static_cast<double>(sequences) * static_cast<double>(seq_len); }
};

/// A doubling that shortens a step to no less than this share of it has stopped helping.
constexpr double kHelps = 0.75;

struct ScalingOptions {
  int world = 8;                                    ///< the last point; the others are halves of it, down to 1
  size_t runs = 16;                                 ///< dry runs of each search, so that the answer does not depend on this machine's speed
  int64_t fewest_columns = 512;                     ///< of a sequence, that a rank keeps
  bool allocator = false;                           ///< as SearchOptions has it
  std::function<Machine(Config& layout)> driven{};  ///< the same
  std::vector<std::string> beside{};                ///< the same
  std::function<void(const std::string& text)> progress{};
};

/// Of `config`'s model, sequence length, precision, optimizer and batch.global_size; run.memory_limit_bytes has to be set. Cost: two searches a point, of
/// `runs` dry runs each. Throws ConfigError where no layout of any number of ranks fits.
Scaling strong_scaling(const Config& config, const Machine& machine, const ScalingOptions& options);

/// Refuses a --world of which there is no curve.
void check_curve_world(int world);

/// The knee of a curve of seconds over ranks, as Scaling has it: by index. None where every doubling helps.
std::optional<size_t> knee_of(const std::vector<std::optional<double>>& seconds);

/// The step's time, and the tokens of a second and rank, over ranks.
Curves curves_of(const Scaling& scaling);

/// In sentences: where adding ranks stops helping, and what mesh.cp buys from there on.
std::vector<std::string> findings_of(const Scaling& scaling);

/// Beside those of its curves: `knee`, `points` with their layouts, `findings`.
nlohmann::json to_json(const Scaling& scaling);
/// A table for people.
std::string to_string(const Scaling& scaling);

}  // namespace tessera::plan
