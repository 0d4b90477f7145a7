#include "cli/common.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>

#include <c10/util/Exception.h>
#include <unistd.h>

#include "tessera/core/devices.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/log.h"
#include "tessera/core/system_reason.h"
#include "tessera/kernels/fp32_products.h"
#include "tessera/launch/local.h"
#include "tessera/pipeline/schedules/timed.h"
#include "tessera/train/pipeline_layout.h"

namespace tessera::cli {

int world_size(int nproc) {
  require(nproc >= 1, "--nproc = ", nproc, ": it must be at least 1");
  const auto environment = comm::read_environment();
  if (!environment.launched) return nproc;
  require(nproc == 1 || nproc == environment.size, "--nproc = ", nproc, ": a launcher already started this process as one of ", environment.size,
          " ranks; leave --nproc out");
  return environment.size;
}

at::Device device_for(const std::string& wanted, int nproc, const std::string& key) {
  const auto environment = comm::read_environment();
  const LocalRank first = environment.launched ? LocalRank{environment.local_rank, environment.local_size} : LocalRank{.rank = 0, .ranks = nproc};
  (void)kernels::cpu_products();  // or a refusal, before anything is read or said
  return resolve_device(wanted, first, key);
}

std::string check_output_file(const char* knob, const std::string& file, const std::vector<std::string>& inputs) {
  if (file.empty()) return file;
  const auto place = output_place(file, knob);
  const auto folder = std::filesystem::absolute(place).parent_path();
  if (const int problem = problem_of_writing_in(folder); problem != 0) {
    const std::string what = detail::concat(knob, " = ", file, ": nothing can be written in ", folder.string());
    fail_to_write(what, problem, is_full(problem) ? "name a file on another disk" : "name a file in a folder that can be written");
  }
  if (!is_there(place)) return place.string();
  for (const auto& input : inputs) {
    std::error_code neither;
    const bool is_input = std::filesystem::equivalent(file, input, neither) || std::filesystem::equivalent(folder, input, neither);
    require(!is_input, knob, " = ", file, ": is what this command reads, or belongs to it (", input, "), and would be overwritten; name another file");
  }
  return place.string();
}

void check_output_files(const std::vector<std::pair<const char*, std::string>>& outputs, const std::vector<std::string>& inputs) {
  std::map<std::filesystem::path, const char*> taken;
  for (const auto& [flag, file] : outputs) {
    const std::string place = check_output_file(flag, file, inputs);
    if (place.empty()) continue;
    const auto [other, free] = taken.emplace(std::filesystem::weakly_canonical(place), flag);
    require(free, flag, " = ", file, ": is where ", other->second, " is written, too; name another file");
  }
}

std::vector<std::filesystem::path> run_files(const std::filesystem::path& log_dir) {
  std::vector<std::filesystem::path> files;
  for (const char* const name : {"config.toml", "metrics.jsonl", "validation.jsonl", "timeline.jsonl", "expert_load.svg"}) files.push_back(log_dir / name);
  return files;
}

void add_timeline(std::vector<std::string>& inputs, const std::string& from) {
  const auto timeline = schedules::timeline_file(from);
  inputs.push_back(timeline.string());
  for (const auto& file : run_files(timeline.parent_path())) inputs.push_back(file.string());
}

std::vector<std::string> inputs_of(const Config& config) {
  std::vector<std::string> inputs{config.data.tokenizer, config.model.from_hf, config.comm.table, config.lora.from_peft};
  for (const auto* files : {&config.data.files, &config.data.validation_files}) inputs.insert(inputs.end(), files->begin(), files->end());
  if (is_schedule_file(config.pipeline)) inputs.push_back(config.pipeline.schedule);
  if (!config.pipeline.costs_from.empty()) inputs.insert(inputs.end(), {config.pipeline.costs_from, config.pipeline.costs_from + "/timeline.jsonl"});
  return inputs;
}

void within_memory(const Config& config, const std::string& smaller, const std::function<void()>& read) {
  try {
    read();
  } catch (const c10::OutOfMemoryError& error) {
    const int64_t limit = config.run.memory_limit_bytes;
    throw Error(detail::concat(limit > 0 ? detail::concat("run.memory_limit_bytes = ", limit) : "out of memory", ": ", error.what_without_backtrace(), "; ",
                               smaller, ", cut the model over more ranks (--nproc N --set mesh.tp=N)", limit > 0 ? ", or raise the limit" : ""));
  }
}

void say_once(const std::vector<std::string>& remarks) {
  if (comm::read_environment().rank != 0) return;
  for (const auto& remark : remarks) log().warn("{}", remark);
}

int problem_of_writing_in(const std::filesystem::path& folder) {
  const auto probe = folder / detail::concat(".tessera_", getpid());
  errno = 0;
  std::ofstream file(probe);
  file << "written to see whether it can be\n" << std::flush;
  file.close();  // a disk over a network may say only now that it is full
  const int problem = file.good() ? 0 : errno != 0 ? errno : EIO;
  std::error_code ignored;
  std::filesystem::remove(probe, ignored);
  return problem;
}

std::string problem_of_output(std::FILE* out, const std::string& done) {
  const bool lost_before = std::ferror(out) != 0;
  errno = 0;
  const bool flushed = std::fflush(out) == 0;
  int code = flushed ? 0 : errno;
  if (flushed && !lost_before) return "";
  // A stream keeps no reason of what it lost before. One more character meets the same one; where it does not, it is behind what is not whole.
  if (code == 0 && ::write(fileno(out), "\n", 1) < 0) code = errno;
  if (!done.empty()) return detail::concat("cannot be written: ", reason_of_writing(code), "; ", done);
  return detail::concat("cannot be written: ", reason_of_writing(code),
                        "; what it holds is not whole: ", is_full(code) ? "make room" : "give it an output that can be written", ", and run this again");
}

void leave_signals_to_the_launcher() {
  for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, SIG_IGN);  // what the launcher restores at its end
}

bool starts_copies(int nproc) { return nproc > 1 && !comm::read_environment().launched; }

int run_copies(int nproc, const std::vector<std::string>& more, const std::vector<std::pair<std::string, std::string>>& variables) {
  launch::LocalOptions options;
  options.nproc = nproc;
  options.command = launch::self_command();
  options.command.insert(options.command.end(), more.begin(), more.end());
  options.environment = variables;
  leave_signals_to_the_launcher();
  return launch::run_local(options);
}

}  // namespace tessera::cli
