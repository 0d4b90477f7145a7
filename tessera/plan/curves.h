#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/config/config.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/machine.h"

namespace tessera::plan {

/// How a figure of a plan grows with another, a line for each way to train: what `plan --curve` prints and draws. Each point is a dry run.
struct Curves {
  enum class Unit : uint8_t { Bytes, Seconds, TokensPerSecond };
  struct Line {
    std::string name{};
    std::vector<std::pair<double, double>> points{};  ///< in the order of x; layouts that this model cannot have are left out
  };
  struct Panel {
    std::string title{};
    std::string x{};                ///< what stands below: "ranks"
    Unit unit = Unit::Bytes;        ///< what is counted upwards
    std::vector<Line> lines{};      ///< one at least has a point
    std::optional<double> limit{};  ///< a device's memory
  };
  std::string name{};
  std::vector<Panel> panels{};
};

/// memory:  peak of a rank over the number of ranks, a line for each ZeRO stage; each rank has a micro-batch, so the step grows with the ranks.
/// latency: seconds of a step of one sequence over the ranks that share it, by tensor, pipeline and context parallelism.
/// batch:   seconds of a step on `world` ranks over its sequences, by DDP, ZeRO 1, FSDP, tensor parallelism and a pipeline. Where there are more ranks than
///          sequences, data ranks idle (train refuses such a step).
/// traffic: bytes that a rank sends in a step of `world` ranks, weights or activations, over the sequences of a step and over the hidden size.
/// ranks:   strong scaling, of which scaling.h has more than these lines.
std::vector<std::string> curve_names();

struct CurveOptions {
  int world = 8;                                    ///< the last point over ranks, and the ranks of what goes over something else
  std::optional<Machine> machine{};                 ///< needed by latency and batch
  std::optional<DeviceAllocator> allocator{};       ///< memory: what it reserves, in place of the tensors alive
  std::function<Machine(Config& layout)> driven{};  ///< as SearchOptions has it
  std::function<void(const std::string& text)> progress{};
};

/// Of `config`'s model, sequence length, precision and optimizer; its mesh, zero.stage and step are chosen by each point (ranks: but for the step). Throws
/// ConfigError for a name that is no curve, for one that needs a machine where there is none, and where no layout has a point.
Curves make_curves(const Config& config, const std::string& name, const CurveOptions& options);

std::string to_string(const Curves& curves);
nlohmann::json to_json(const Curves& curves);

/// Panels beside each other, logarithmic both ways.
std::string svg_of(const Curves& curves);

}  // namespace tessera::plan
