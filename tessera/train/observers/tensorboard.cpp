#include "tessera/train/observers/tensorboard.h"

#include <array>
#include <cerrno>
#include <chrono>
#include <vector>

#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/host_name.h"
#include "tessera/core/log.h"
#include "tessera/core/system_reason.h"
#include "tessera/train/observers/event_record.h"
#include "tessera/train/observers/run_record.h"

namespace tessera {
namespace {

double wall_time() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

}  // namespace

void TensorBoard::on_start(const RunInfo& run) {
  const std::filesystem::path folder = run.log_dir / "tensorboard";
  constexpr std::string_view prefix = "events.out.tfevents.";
  std::error_code error;
  const RunRecord writer(folder);
  const int64_t own_steps = writer.own_steps(run);
  if (run.first_step > 1 && own_steps == 0 && std::filesystem::exists(folder, error)) {
    const auto aside = name_aside(folder, "another-run");
    std::filesystem::rename(folder, aside, error);
    require(!error, "log.dir = ", run.log_dir.string(), ": tensorboard/ is another run's than the one that goes on from step ", run.first_step - 1,
            ", and cannot be set aside: ", error.message(), "; move it elsewhere, or choose another log.dir");
    log().warn("{}: is another run's than the one that goes on from step {}: set aside in {}", folder.string(), run.first_step - 1, aside.filename().string());
  } else if (own_steps + 1 < run.first_step) {
    log().warn("{}: events beyond step {} are of another line of this run than the one that goes on from step {}: readers pass over them", folder.string(),
               own_steps, run.first_step - 1);
  }
  // A run from its first step starts anew, as metrics.jsonl does: readers would mix it with the older run.
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (run.first_step <= 1 && entry.path().filename().string().starts_with(prefix)) std::filesystem::remove(entry.path(), error);
  }
  const double now = wall_time();
  // Readers take files in the order of their names, so the time comes first, in full.
  const auto file =
      folder / (std::string(prefix) + std::to_string(static_cast<int64_t>(now * 1e6)) + "." + host_name("localhost") + "." + std::to_string(::getpid()));
  if (!out_.open(file))
    fail_to_write(detail::concat("log.dir = ", run.log_dir.string(), ": ", file.string(), " cannot be written"), errno, "choose another log.dir");
  write(file_version_event(now));
  if (run.first_step > 1) write(restart_event(now, own_steps + 1));
  writer.write(run);
}

void TensorBoard::after_step(const StepResult& result) {
  std::vector<std::pair<std::string, double>> scalars = {
      {"train/loss", result.loss},     {"train/grad_norm", result.grad_norm},       {"train/lr", result.lr},
      {"train/step_s", result.step_s}, {"train/tokens_per_s", result.tokens_per_s}, {"train/peak_bytes", static_cast<double>(result.peak_bytes)}};
  for (int c = 0; c < num_memory_categories; ++c) {
    const auto at = static_cast<size_t>(c);
    const std::string name(to_string(static_cast<MemoryCategory>(c)));
    scalars.emplace_back("memory/peak_" + name, static_cast<double>(result.memory.peak[at]));
    scalars.emplace_back("memory/current_" + name, static_cast<double>(result.memory.current[at]));
    if (result.memory.host[at] > 0) scalars.emplace_back("memory/host_" + name, static_cast<double>(result.memory.host[at]));
  }
  for (const auto& [name, value] : result.extras) scalars.emplace_back("train/" + name, value);
  write(scalars_event(wall_time(), result.step, scalars));
}

void TensorBoard::after_validation(const ValidationResult& result) {
  const std::array<std::pair<std::string, double>, 2> scalars = {{{"validation/loss", result.loss}, {"validation/bits_per_byte", result.bits_per_byte}}};
  write(scalars_event(wall_time(), result.step, scalars));
}

void TensorBoard::write(std::string_view event) { out_.append(event_record(event)); }

void TensorBoard::on_end(const RunEnd&) { out_.close(); }

}  // namespace tessera
