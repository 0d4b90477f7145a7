#include "tessera/verify/verify.h"

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "tessera/core/json_text.h"
#include "tessera/kernels/fp32_products.h"
#include "tessera/precision/compute_format.h"
#include "tessera/train/inputs.h"

namespace tessera::cli {

namespace {

struct VerifyFlags {
  std::string file;
  std::string mesh;
  std::vector<std::string> sets;
  int64_t steps = VerifyOptions{}.steps;
  bool json = false;
};

int run_verify(const VerifyFlags& flags) {
  Config config = read_config(flags.file, flags.sets);
  (void)kernels::cpu_products();  // or a refusal
  const MeshConfig mesh = parse_mesh(flags.mesh, config.mesh);
  precision::settle_compute(config, verify_device(config, mesh));
  const VerifyReport report = verify(config, mesh, {.steps = flags.steps});
  const std::string text = flags.json ? json_text(to_json(report)) + "\n" : to_string(report);
  std::fputs(text.c_str(), stdout);
  return report.passed() ? 0 : 1;
}

}  // namespace

void add_verify(Command app, int& exit_code) {
  auto flags = std::make_shared<VerifyFlags>();
  auto command = app.add_command("verify", "Whether a layout trains as one device does: the same steps in both, compared");
  command.add_option("file", flags->file, "Configuration (TOML)").required();
  command.add_option("--mesh", flags->mesh, "Axes of the layout, such as dp_replicate=3 or dp_shard=2,tp=2; the others are 1").required();
  command.add_option("--set", flags->sets, "key=value, over the file; may be given again").one_at_a_time();
  add_device_option(command, flags->sets);
  command.add_option("--steps", flags->steps, "Optimizer steps to compare").shows_default();
  command.add_flag("--json", flags->json, "Print JSON");
  command.when_chosen([flags, &exit_code] { exit_code = run_verify(*flags); });
}

}  // namespace tessera::cli
