#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <unistd.h>

#include "cli/commands.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/kernels/products.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/out_of_memory.h"
#include "tessera/plan/presets.h"
#include "tessera/precision/compute_format.h"
#include "tessera/train/inputs.h"

namespace tessera::cli {

namespace {

struct PlanFlags {
  std::string what;
  std::vector<std::string> sets;
  int world = 1;
  bool json = false;
};

Config planned(const PlanFlags& flags) {
  if (is_there(flags.what)) return read_config(flags.what, flags.sets);
  if (auto config = plan::preset(flags.what, flags.sets)) {
    resolve(*config);
    return *config;
  }
  std::string names;
  for (const auto& name : plan::preset_names()) names += " " + name;
  const auto near = nearest(flags.what, plan::preset_names());
  throw ConfigError(detail::concat(flags.what, ": neither a file nor a preset", near.empty() ? "" : "; did you mean " + near + "?", "; presets:", names));
}

/// Above it, lists of ranks alone take longer than anybody waits; the largest machines have a tenth of it.
constexpr int kMostRanks = 1 << 20;

/// One line on standard error, written again and again on a terminal, and every ten seconds elsewhere; nothing of a plan that is done at once.
class ProgressLine {
 public:
  ~ProgressLine() {
    if (shown_ && terminal_) std::fputs("\r\033[K", stderr);
  }
  void operator()(const plan::DryRunProgress& progress) {
    const auto now = Clock::now();
    if (now < next_) return;
    next_ = now + (terminal_ ? std::chrono::milliseconds(500) : std::chrono::milliseconds(10000));
    shown_ = true;
    std::fprintf(stderr, "%splan: kind %d of %d of ranks, step %d of %d: %2.0f%%%s", terminal_ ? "\r" : "", progress.kind, progress.kinds, progress.step,
                 progress.steps, 100 * progress.share, terminal_ ? "" : "\n");
    std::fflush(stderr);
  }

 private:
  using Clock = std::chrono::steady_clock;
  bool terminal_ = isatty(STDERR_FILENO) != 0;
  bool shown_ = false;
  Clock::time_point next_ = Clock::now() + std::chrono::seconds(2);
};

nlohmann::json json_of(const plan::DryRun& run, const Config& config) {
  nlohmann::json json = plan::to_json(run);
  json["compute"] = config.precision.compute;  // what auto became
  return json;
}

}  // namespace

void add_plan(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<PlanFlags>();
  auto* command = app.add_subcommand("plan", "What a run needs on each rank, from a dry run of its very step");
  command->add_option("what", flags->what, "Configuration (TOML), or the name of a preset")->required();
  command->add_option("--world", flags->world, "Ranks")->capture_default_str();
  command->add_option("--set", flags->sets, "key=value, over the file; may be given again")->allow_extra_args(false);
  command->add_flag("--json", flags->json, "Print JSON");
  command->callback([flags, &exit_code] {
    require(flags->world >= 1, "--world = ", flags->world, ": it must be at least 1");
    require(flags->world <= kMostRanks, "--world = ", flags->world, ": a plan is made for at most ", kMostRanks, " ranks; name fewer");
    Config config = planned(*flags);
    validate(config, flags->world, Purpose::Plan);
    // A file is planned for this machine, as train would run it; a preset, which no CPU trains, for devices that multiply what it names.
    std::optional<kernels::Bf16ProductsGuard> accelerator;
    if (!is_there(flags->what)) accelerator.emplace(/*native=*/true);
    precision::settle_compute(config, at::kMeta);
    const auto run = [&] {
      ProgressLine line;
      return plan::dry_run(config, flags->world, {.progress = std::ref(line)});
    }();
    std::string text = flags->json ? json_of(run, config).dump(2) + "\n" : plan::to_string(run);
    if (!run.fits() && !flags->json) text += "\n" + plan::settings_text(plan::find_fit(config, flags->world, run.memory_limit));
    std::fputs(text.c_str(), stdout);
    exit_code = 0;
  });
}

}  // namespace tessera::cli
