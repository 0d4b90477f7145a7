#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/plan_pictures.h"
#include "tessera/config/config.h"
#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/kernels/products.h"
#include "tessera/memory/on_host.h"
#include "tessera/plan/bounds.h"
#include "tessera/plan/device.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/framework.h"
#include "tessera/plan/machine.h"
#include "tessera/plan/presets.h"
#include "tessera/plan/whole_run.h"
#include "tessera/precision/compute_format.h"

namespace tessera::cli {

struct PlanFlags {
  std::string what, device, framework, layouts;
  std::vector<std::string> sets;
  int world = 1;
  bool says_world = false;
  std::optional<int> devices_per_node;
  bool json = false, longest = false, events = false, explain = false, search = false;
  std::optional<int64_t> batch, max_batch, patience;
  std::string output, tokens, curve, svg;
  PlanPictures pictures;
};

/// Above it, lists of ranks alone take longer than anybody waits; the largest machines have a tenth of it.
constexpr int kMostRanks = 1 << 20;

/// What a plan is asked for: whose step on what device, and how a configuration becomes the one that is run dry. Guards that such a plan opens hold on this
/// thread as long as the request lives.
class PlanRequest {
 public:
  explicit PlanRequest(const PlanFlags& flags);

  const PlanFlags& flags() const { return flags_; }
  const std::optional<plan::Framework>& framework() const { return framework_; }
  const std::optional<plan::Device>& device() const { return device_; }

  /// The file or preset, with the framework's settings and `--set` over it. A file has no name that speaks of a number of parameters, and no source.
  plan::Preset read(const std::vector<std::string>& sets, int world) const;

  /// Of `world` ranks: checked, within the device's memory, with sizes in place of -1, of the number format and the threads that the run would have.
  /// `sharing`: ranks of the runs that are planned, where `config` is of one rank until a layout is chosen; 0: `world`.
  void settle(Config& config, int world, precision::Saying saying = precision::Saying::Aloud, int sharing = 0) const;

  /// As a framework's host drives it in this configuration; none without a device.
  std::optional<plan::Machine> machine_of(const Config& config) const;
  /// Of the device, whose reserve has to fit; none without a device, and for a CPU, whose memory is given back.
  std::optional<plan::DeviceAllocator> allocator_of(const Config& config) const;
  /// What every dry run of `config` is told of these.
  plan::DryRunOptions dry_options(const Config& config) const;
  /// The machine of each of many configurations, whose stages it settles; empty where nothing about it depends on them.
  std::function<plan::Machine(Config& config)> machine_of_each() const;

  /// Of what looks at growing numbers of ranks.
  int world_or_8() const { return flags_.says_world ? flags_.world : 8; }

 private:
  void settle_stages(Config& config) const;

  bool is_for_this_machine() const;
  double room() const;

  const PlanFlags& flags_;
  std::optional<plan::Framework> framework_;
  std::optional<plan::Device> device_;
  std::unique_ptr<kernels::WholeLogitsGuard> logits_;
  std::optional<kernels::Fp16ProductsGuard> halves_;
  std::optional<kernels::Bf16ProductsGuard> accelerated_;
  std::optional<MetaAsAccelerator> accelerator_;
};

/// What `--json` has of a plan.
nlohmann::json json_of(const plan::DryRun& run, const Config& config, const std::optional<plan::Device>& device,
                       const std::optional<plan::Framework>& framework, const std::optional<plan::WholeRun>& all = std::nullopt,
                       const std::optional<plan::Bounds>& bounds = std::nullopt);

/// What `train` looks at besides the rules of a configuration: patterns that name no module.
void add_remarks(const Config& config, plan::DryRun& run);

}  // namespace tessera::cli
