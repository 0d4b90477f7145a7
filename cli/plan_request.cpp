#include "cli/plan_request.h"

#include <algorithm>

#include "cli/common.h"
#include "tessera/config/settle_batch.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/train/compose.h"
#include "tessera/train/threads.h"

namespace tessera::cli {

namespace {

plan::Device device_named(const PlanFlags& flags) {
  plan::Device device = plan::find_device(flags.device);
  if (!flags.devices_per_node) return device;
  require(*flags.devices_per_node >= 1, "--devices-per-node = ", *flags.devices_per_node, ": it must be at least 1");
  device.devices_per_node = *flags.devices_per_node;
  return device;
}

/// Sizes that are left to the world (-1) as they come out: what frameworks hold is divided by them.
void settle_mesh(Config& config, int world) {
  for (const auto& [axis, size] : resolve_mesh(config.mesh, config.zero.stage, world)) {
    if (axis == "tp") config.mesh.tp = size;
    if (axis == "cp") config.mesh.cp = size;
    if (axis == "pp") config.mesh.pp = size;
  }
}

int tp_of(const Config& config, int world) {
  if (config.mesh.tp > 0) return config.mesh.tp;
  Config settled = config;
  settle_mesh(settled, world);
  return settled.mesh.tp;
}

/// A CPU: what its file says of the host is of the device.
bool is_its_own_host(const plan::Device& device) { return device.host && device.host->memory_bytes_per_s == device.memory_bytes_per_s; }

}  // namespace

PlanRequest::PlanRequest(const PlanFlags& flags) : flags_(flags) {
  if (!flags.framework.empty()) framework_ = plan::find_framework(flags.framework);
  if (framework_ && framework_->whole_logits) logits_ = std::make_unique<kernels::WholeLogitsGuard>();
  if (!flags.device.empty()) device_ = device_named(flags);
  if (device_ && device_->flops_per_s.contains("fp16")) halves_.emplace();  // of a device; a CPU's file has no rate of them
  // A file is planned for this machine, as train would run it, or for the device that is named; a preset, which no CPU trains, and another framework's step,
  // for one that multiplies what it names.
  if (!is_there(flags.what) || framework_ || (device_ && !is_its_own_host(*device_))) accelerator_.emplace();
  const bool multiplies = !is_there(flags.what) || framework_ || (device_ && device_->flops_per_s.contains("bf16"));
  if (multiplies || (device_ && !is_its_own_host(*device_))) accelerated_.emplace(/*native=*/multiplies);
}

plan::Preset PlanRequest::read(const std::vector<std::string>& asked, int world) const {
  const auto read_with = [&](const std::vector<std::string>& sets) {
    if (is_there(flags_.what)) return plan::Preset{.config = read_config(flags_.what, sets)};
    if (auto found = plan::preset(flags_.what, sets)) {
      BatchConfig& batch = found->config.batch;
      const auto sizes_the_step = [](const std::string& set) { return set.starts_with("batch.global_size"); };
      if (batch.per_rank > 0 && std::ranges::none_of(asked, sizes_the_step)) batch.global_size = 0;  // the preset's own, which nobody asked for
      resolve(found->config);
      return *found;
    }
    std::string names;
    for (const auto& name : plan::preset_names()) names += " " + name;
    const auto near = nearest(flags_.what, plan::preset_names());
    throw ConfigError(detail::concat(flags_.what, ": neither a file nor a preset", near.empty() ? "" : "; did you mean " + near + "?", "; presets:", names,
                                     ", or a number of parameters such as 7e9"));
  };
  plan::Preset found = read_with(asked);
  if (!framework_) return found;
  std::vector<std::string> sets = plan::settings_of(*framework_, tp_of(found.config, world));
  sets.insert(sets.end(), asked.begin(), asked.end());
  return read_with(sets);
}

bool PlanRequest::is_for_this_machine() const { return is_there(flags_.what) && !framework_ && (!device_ || is_there(flags_.device)); }

/// What the device has for a step, beside its context; a framework has one of its own, which counts with what it holds.
double PlanRequest::room() const { return device_->memory_bytes - (framework_ ? 0 : device_->context_bytes); }

void PlanRequest::settle(Config& config, int world, precision::Saying saying, int sharing) const {
  if (device_) {
    const auto memory = static_cast<int64_t>(room());
    int64_t& limit = config.run.memory_limit_bytes;
    limit = limit == 0 ? memory : std::min(limit, memory);
  }
  settle_batch(config, world);
  validate(config, world, Purpose::Plan);
  if (framework_) settle_mesh(config, world);
  settle_stages(config);
  precision::settle_compute(config, at::kMeta, saying);
  const int ranks = sharing > 0 ? sharing : world, of_host = device_ ? std::min(ranks, device_->devices_per_node) : ranks;
  config.run.threads = is_for_this_machine() ? threads_per_rank(config.run, of_host) : config.run.threads.value_or(1);  // scratch goes with them
}

std::optional<plan::Machine> PlanRequest::machine_of(const Config& config) const {
  if (!device_) return std::nullopt;
  plan::Machine machine = plan::machine_of(*device_);
  const auto tf32 = device_->flops_per_s.find("tf32");
  if (config.precision.compute == "tf32" && tf32 != device_->flops_per_s.end()) machine.device.flops[at::kFloat] = tf32->second;
  return framework_ ? plan::driven(*framework_, config, machine) : machine;
}

std::optional<plan::DeviceAllocator> PlanRequest::allocator_of(const Config& config) const {
  if (!device_ || is_its_own_host(*device_)) return std::nullopt;
  const int64_t limit = config.run.memory_limit_bytes;
  const auto context = static_cast<int64_t>(framework_ ? framework_->context_bytes : 0);  // the device's own is no part of the limit
  return plan::DeviceAllocator{.within = std::max<int64_t>(1, limit - context), .all = limit == static_cast<int64_t>(room())};
}

plan::DryRunOptions PlanRequest::dry_options(const Config& config) const {
  return {.machine = machine_of(config), .allocator = allocator_of(config), .text_to_come = !is_there(flags_.what)};
}

void PlanRequest::settle_stages(Config& config) const {
  if (!framework_ || !framework_->stages_by_weights || config.mesh.pp <= 1 || config.pipeline.virtual_stages != 1) return;
  if (config.pipeline.split == std::vector<std::string>{"auto"}) config.pipeline.split = plan::stages_by_weights(config.model, config.mesh.pp);
}

std::function<plan::Machine(Config& config)> PlanRequest::machine_of_each() const {
  if (!device_ || !framework_) return {};
  return [this](Config& config) {
    settle_stages(config);
    return machine_of(config).value();
  };
}

nlohmann::json json_of(const plan::DryRun& run, const Config& config, const std::optional<plan::Device>& device,
                       const std::optional<plan::Framework>& framework, const std::optional<plan::WholeRun>& all, const std::optional<plan::Bounds>& bounds) {
  nlohmann::json json = plan::to_json(run);
  if (bounds) json["bounds"] = plan::to_json(*bounds);
  if (all) json["run"] = plan::to_json(*all);
  json["compute"] = config.precision.compute;  // what auto became
  if (device) json["device"] = device->key;
  if (framework) {
    json["framework"] = framework->key;
    json["reserved_bytes"] = plan::reserved_bytes(*framework, config, run);
    json["context_bytes"] = framework->context_bytes;
    json["unfitted_bytes"] = plan::reserved_bytes(*framework, config, run, /*reserve=*/false);
    json["first_rank_reserved_bytes"] = plan::reserved_bytes(*framework, config, run, /*reserve=*/true, /*pipeline_rank=*/0);
    if (run.memory_limit > 0) json["fits"] = plan::fits(*framework, config, run);
  }
  return json;
}

/// What `train` looks at besides the rules of a configuration: patterns that name no module.
void add_remarks(const Config& config, plan::DryRun& run) {
  try {
    check_modules(config, mesh_shape(config.mesh, config.zero.stage, run.world));
  } catch (const ConfigError& error) {
    run.remarks.emplace_back(error.what());
  }
}

}  // namespace tessera::cli
