#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "tessera/core/error.h"
#include "tessera/kernels/products.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/out_of_memory.h"
#include "tessera/plan/presets.h"
#include "tessera/precision/compute_format.h"
#include "tessera/train/inputs.h"

namespace tessera::cli {

namespace {

struct Flags {
  std::string what;
  std::vector<std::string> sets;
  int world = 1;
  bool json = false;
};

Config planned(const Flags& flags) {
  if (std::filesystem::exists(flags.what)) return read_config(flags.what, flags.sets);
  if (auto config = plan::preset(flags.what, flags.sets)) {
    resolve(*config);
    return *config;
  }
  std::string names;
  for (const auto& name : plan::preset_names()) names += " " + name;
  const auto near = nearest(flags.what, plan::preset_names());
  throw ConfigError(detail::concat(flags.what, ": neither a file nor a preset", near.empty() ? "" : "; did you mean " + near + "?", "; presets:", names));
}

nlohmann::json json_of(const plan::DryRun& run, const Config& config) {
  nlohmann::json json = plan::to_json(run);
  json["compute"] = config.precision.compute;  // what auto became
  return json;
}

}  // namespace

void add_plan(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand("plan", "What a run needs on each rank, from a dry run of its very step");
  command->add_option("what", flags->what, "Configuration (TOML), or the name of a preset")->required();
  command->add_option("--world", flags->world, "Ranks")->capture_default_str();
  command->add_option("--set", flags->sets, "key=value, over the file; may be given again")->allow_extra_args(false);
  command->add_flag("--json", flags->json, "Print JSON");
  command->callback([flags, &exit_code] {
    require(flags->world >= 1, "--world = ", flags->world, ": it must be at least 1");
    Config config = planned(*flags);
    validate(config, flags->world, Purpose::Plan);
    // A file is planned for this machine, as train would run it; a preset, which no CPU trains, for devices that multiply what it names.
    std::optional<kernels::Bf16ProductsGuard> accelerator;
    if (!std::filesystem::exists(flags->what)) accelerator.emplace(/*native=*/true);
    precision::settle_compute(config, at::kMeta);
    const auto run = plan::dry_run(config, flags->world);
    std::string text = flags->json ? json_of(run, config).dump(2) + "\n" : plan::to_string(run);
    if (!run.fits() && !flags->json) text += "\n" + plan::settings_text(plan::find_fit(config, flags->world, run.memory_limit));
    std::fputs(text.c_str(), stdout);
    exit_code = 0;
  });
}

}  // namespace tessera::cli
