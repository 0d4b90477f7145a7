#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/common.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/train/inputs.h"
#include "tessera/train/observers/metrics_file.h"
#include "tessera/train/observers/progress_bar.h"
#include "tessera/train/observers/tensorboard.h"
#include "tessera/train/trainer.h"

namespace tessera::cli {

namespace {

struct Flags {
  std::string file;
  std::vector<std::string> sets;
  int nproc = 1;
  int64_t dump_step = 0;
  std::string dump_dir;
};

std::optional<DumpRequest> dump_request(const Flags& flags, const Config& config) {
  require((flags.dump_step > 0) == !flags.dump_dir.empty(), "--dump-step and --dump-dir go together: give both or neither");
  if (flags.dump_dir.empty()) return std::nullopt;
  require(flags.dump_step <= config.run.steps, "--dump-step = ", flags.dump_step, ": the run ends at run.steps = ", config.run.steps, "; dump an earlier step");
  return DumpRequest{flags.dump_step, flags.dump_dir};
}

bool restarted() {
  const char* count = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return count != nullptr && std::atoi(count) > 0;
}

void write_text(const std::filesystem::path& file, const std::string& text) {
  std::error_code error;
  std::filesystem::create_directories(file.parent_path(), error);
  std::ofstream out(file, std::ios::trunc);
  out << text;
  require(out.good(), "log.dir = ", file.parent_path().string(), ": ", file.filename().string(), " cannot be written; set log.dir to a folder that can");
}

int train(const Flags& flags) {
  const Config config = read_config(flags.file, flags.sets);
  validate(config, world_size(flags.nproc));
  const auto dump = dump_request(flags, config);
  Inputs inputs = open_inputs(config, restarted());
  if (starts_copies(flags.nproc)) {
    // Decided here once for all ranks, and said once.
    for (const auto& remark : inputs.remarks) log().warn("{}", remark);
    return run_copies(flags.nproc, {"--set", "checkpoint.resume=" + (inputs.resume ? std::filesystem::absolute(inputs.resume->folder).string() : "")});
  }

  auto world = comm::World::from_environment(comm::world_options(config.comm));
  world.guard([&] {
    if (world.rank() == 0) {
      for (const auto& remark : inputs.remarks) log().warn("{}", remark);
      write_text(std::filesystem::path(config.log.dir) / "config.toml", to_toml(config));
      if (dump) std::filesystem::create_directories(dump->dir);
    }
    Trainer trainer(config, world, std::move(inputs), dump);
    trainer.add_observer(std::make_unique<MetricsFile>());
    trainer.add_observer(std::make_unique<TensorBoard>());
    trainer.add_observer(std::make_unique<ProgressBar>(ProgressBar::Options{.terminal = ProgressBar::is_terminal(stderr)}));
    trainer.run();
  });
  return 0;
}

}  // namespace

void add_train(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand("train", "Train a model as a configuration says");
  command->add_option("file", flags->file, "Configuration (TOML)")->required();
  command->add_option("--set", flags->sets, "key=value, over the file; may be given again")->allow_extra_args(false);
  command->add_option("--nproc", flags->nproc, "Ranks to start on this machine")->capture_default_str();
  command->add_option("--dump-step", flags->dump_step, "Write gradients and weights of this step");
  command->add_option("--dump-dir", flags->dump_dir, "Where to write them");
  command->callback([flags, &exit_code] { exit_code = train(*flags); });
}

}  // namespace tessera::cli
