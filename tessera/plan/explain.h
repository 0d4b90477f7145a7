#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/config/config.h"
#include "tessera/plan/dry_run.h"
#include "tessera/train/state_bytes.h"

namespace tessera::plan {

/// What training keeps of a model in one choice of number formats: bytes of each parameter, where nothing is sharded, on average.
struct KeptStates {
  std::string formats{};            ///< "16 bits, masters in 32"
  std::vector<std::string> sets{};  ///< that ask for them, as `--set` takes them
  BytesPerParameter bytes{};
  double masters = 0;  ///< of bytes.state

  double moments() const { return bytes.state - masters; }
};

/// What one micro-batch of B sequences of S tokens keeps for its backward at most, and what its logits and loss take: so much of each of T = B S tokens, and
/// so much however many there are (weights that were cast for products, where parameters are wider).
struct KeptActivations {
  struct Part {
    double token = 0, fixed = 0;
    double bytes(double tokens) const { return tokens * token + fixed; }
  };
  Part of_layer{}, outside{};
  double outputs = 0;                  ///< a token
  int64_t seen = 0, seen_outputs = 0;  ///< by the dry run of the whole model, of `seen_tokens`
  int64_t seen_tokens = 0;

  double bytes(double tokens, double layers) const { return layers * of_layer.bytes(tokens) + outside.bytes(tokens); }
};

/// What a technique makes of a rank's share.
struct Change {
  std::string name{};
  std::vector<std::string> sets{};
  int ranks = 1;
  double states = 0;       ///< bytes a rank
  double activations = 0;  ///< bytes a rank
  std::string law{};       ///< "(w + g + k) / N"
};

/// Whether one device holds it all, by dry runs.
struct Verdict {
  int64_t memory = 0, states = 0, needed = 0;  ///< bytes; `needed` at the peak of one rank that holds everything
  int smallest = 0;                            ///< devices with as much on which it fits, each with its own sequences; 0: on none of those that were tried
  std::vector<std::string> sets{};             ///< with these
  int64_t needed_there = 0;                    ///< of each of them

  bool fits() const { return needed <= memory; }
};

/// Where the memory of a run goes, number by number.
struct Explanation {
  double parameters = 0;  ///< that are spoken of: a preset's by its name
  int64_t counted = 0;    ///< that its shape has
  int64_t layers = 0;
  double trained = 1;                   ///< elements, as a share of those that the shape has: [lora] freezes them, and trains what it adds
  std::vector<std::string> left_out{};  ///< settings that were given, and are not looked at, for one device has all of it
  std::vector<KeptStates> states{};
  KeptActivations activations{};
  std::vector<Change> changes{};
  std::optional<Verdict> verdict{};  ///< where run.memory_limit_bytes says what a device has

  bool adapted() const { return trained != 1; }
};

/// Of one rank with one micro-batch of `config`, whose layers are alike; `ranks`: over how many the changes share. Cost: some dry runs of few layers and one of
/// all; with run.memory_limit_bytes, up to two dozen more of all. `allocator`: of the device whose memory decides; none: tensors alone do.
Explanation explain(const Config& config, double parameters, int ranks, const std::optional<DeviceAllocator>& allocator = std::nullopt);

nlohmann::json to_json(const Explanation& explanation);
std::string to_string(const Explanation& explanation);

}  // namespace tessera::plan
