#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <sys/resource.h>
#include <unistd.h>

#include "cli/commands.h"
#include "cli/common.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/comm/algorithms/choice.h"
#include "tessera/comm/decorators/inject.h"
#include "tessera/comm/meeting/network.h"
#include "tessera/config/schedule_kinds.h"
#include "tessera/config/settle_batch.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/format.h"
#include "tessera/core/log.h"
#include "tessera/core/system_reason.h"
#include "tessera/core/text_file.h"
#include "tessera/layout/slice.h"
#include "tessera/memory/history.h"
#include "tessera/memory/host_memory.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/flops.h"
#include "tessera/offload/disk_speed.h"
#include "tessera/plan/out_of_memory.h"
#include "tessera/plan/preflight.h"
#include "tessera/precision/compute_format.h"
#include "tessera/train/compose.h"
#include "tessera/train/inputs.h"
#include "tessera/train/observers/expert_map.h"
#include "tessera/train/observers/memory_report.h"
#include "tessera/train/observers/metrics_file.h"
#include "tessera/train/observers/progress_bar.h"
#include "tessera/train/observers/tensorboard.h"
#include "tessera/train/pipeline_layout.h"
#include "tessera/train/progress.h"
#include "tessera/train/ranks_agree.h"
#include "tessera/train/state_bytes.h"
#include "tessera/train/step_graph.h"
#include "tessera/train/stop.h"
#include "tessera/train/trainer.h"

namespace tessera::cli {

namespace {

struct TrainFlags {
  std::string file;
  std::vector<std::string> sets;
  int nproc = 1;
  std::optional<int64_t> dump_step;
  std::optional<std::string> dump_dir;
  std::string inject;
  bool memory_report = false;
  bool strict_log = false;
  bool preflight = false;
  std::string memory_report_file;  ///< empty: in log.dir
};

constexpr const char* kRecordDir = "TESSERA_RECORD_DIR";
// The checkpoint whose hashes this process's launcher has checked, so that its ranks need not read it whole once more.
constexpr const char* kHashed = "TESSERA_HASHED_CHECKPOINT";
// The launcher of this process has said what settings have no effect.
constexpr const char* kSettingsSaid = "TESSERA_SETTINGS_SAID";
// What this process's launcher has decided for all ranks: the checkpoint that they go on from, or nothing; and, given at all, that it looked for one in vain,
// so that what cannot be used in checkpoint.dir is set aside. No settings of the run, whose config.toml keeps what it was asked for.
constexpr const char* kGoesOnFrom = "TESSERA_GOES_ON_FROM";
constexpr const char* kStartsAfresh = "TESSERA_STARTS_AFRESH";

// How this process came to be, and what it computes on.
struct Launch {
  comm::Environment environment;
  int nproc = 1;
  int size = 1;
  at::Device device = at::kCPU;
  bool copies = false;  // it starts copies of itself, which are the ranks

  int attempt() const { return environment.restart_count; }
  bool restarted() const { return attempt() > 0; }
  bool first() const { return environment.rank == 0; }
  int local_ranks() const { return environment.launched ? environment.local_size : size; }
  // The launcher of a run's ranks, or the first of them: what is said once is said here.
  bool says_once() const { return !std::getenv(kSettingsSaid) && first() && !restarted(); }
};

void take_launchers_decision(CheckpointConfig& checkpoint) {
  if (const char* const from = std::getenv(kGoesOnFrom)) checkpoint.resume = from;
  if (std::getenv(kStartsAfresh)) checkpoint.replace = true;
}

std::optional<DumpRequest> dump_request(const TrainFlags& flags, const Config& config, const MeshShape& mesh) {
  require(flags.dump_step.has_value() == flags.dump_dir.has_value(), "--dump-step and --dump-dir go together: give both or neither");
  if (!flags.dump_step) return std::nullopt;
  const auto& [step, folder] = std::tie(*flags.dump_step, *flags.dump_dir);
  require(step >= 1, "--dump-step = ", step, ": steps are numbered from 1; name one of them");
  require(!folder.empty(), "--dump-dir is empty: name a folder");
  require(step <= config.run.steps, "--dump-step = ", step, ": the run ends at run.steps = ", config.run.steps, "; dump an earlier step");
  std::error_code error;
  for (const std::string& input : inputs_of(config)) {
    require(!std::filesystem::equivalent(folder, input, error), "--dump-dir = ", folder, ": is what this command reads (", input, "); name another folder");
  }
  std::filesystem::create_directories(folder, error);
  if (error) fail_to_write("--dump-dir = " + folder + ": cannot be made", error.value(), "name a folder that can be written");
  if (const int problem = problem_of_writing_in(folder); problem != 0) {
    fail_to_write("--dump-dir = " + folder + ": nothing can be written there", problem, "name a folder on another disk");
  }
  require(!updates_within_steps(config, size_along(mesh, mesh_roles(config).stages)), "--dump-step = ", step,
          ": with pipeline.schedule = ", config.pipeline.schedule,
          " a step has many updates, each with gradients of its own; leave it out, or set pipeline.schedule = 1f1b");
  require(
      !config.offload.delayed_update, "--dump-step = ", step,
      ": with offload.delayed_update = true the update of a step runs while the next one computes, so that at its end the weights lack it; leave it out, or "
      "set offload.delayed_update = false");
  return DumpRequest{step, folder};
}

// A step that was taken before this start is not taken again. A restart behind it has dumped it before.
void check_dump_is_ahead(const std::optional<DumpRequest>& dump, const Inputs& inputs, const Launch& launch) {
  if (!dump || !inputs.resume || launch.restarted()) return;
  const ResumePoint& from = *inputs.resume;
  require(dump->step > from.manifest.step, "--dump-step = ", dump->step, ": the run goes on from step ", from.manifest.step, " (", from.folder.string(),
          "), and dumps steps that it takes itself; name a later one, or an earlier checkpoint as checkpoint.resume");
}

// Faults are refused before any rank is started.
void check_faults(const std::string& flag, const Launch& launch) {
  const char* variable = std::getenv("TESSERA_INJECT");
  if (!flag.empty()) comm::parse_faults(flag, launch.size, launch.attempt(), "--inject");
  if (flag.empty() && variable) comm::parse_faults(variable, launch.size, launch.attempt(), "TESSERA_INJECT");
}

std::vector<std::string> inputs_of_run(const TrainFlags& flags, const Config& config) {
  std::vector<std::string> inputs = inputs_of(config);
  inputs.push_back(flags.file);
  return inputs;
}

// The picture takes no other file's place: what the command reads, or what the run writes besides.
void check_memory_report(const TrainFlags& flags, const Config& config) {
  const std::string place = check_output_file("--memory-report", flags.memory_report_file, inputs_of_run(flags, config));
  if (place.empty()) return;
  const auto canonical = std::filesystem::weakly_canonical(place), log_dir = std::filesystem::weakly_canonical(config.log.dir);
  for (const auto& written : run_files(log_dir)) {
    require(canonical != written, "--memory-report = ", flags.memory_report_file, ": is where the run writes its own ", written.filename().string(),
            " (log.dir); name another file");
  }
}

// Links in a loop and names that are too long, before anything in it is asked for.
void check_reached(const char* knob, const std::string& path) {
  try {
    is_there(path);
  } catch (const ConfigError& error) {
    throw ConfigError(detail::concat(knob, " = ", error.what()));
  }
}

// Whoever would make a folder of that name finds the link in its way.
void require_no_dead_link(const char* knob, const std::string& folder) {
  std::error_code neither;
  check_reached(knob, folder);
  require(is_there(folder) || !std::filesystem::is_symlink(folder, neither), knob, " = ", folder,
          ": is a link to a folder that does not exist; make that, or name another ", knob);
}

bool is_within_a_save(const Config& config) {
  if (config.checkpoint.dir.empty() || config.log.dir.empty()) return false;
  const auto whole = [](const std::string& folder) {
    std::error_code unreachable;  // which is said of each by itself
    const auto path = std::filesystem::weakly_canonical(std::filesystem::absolute(folder), unreachable);
    return path.has_filename() ? path : path.parent_path();  // "saves/"
  };
  const std::filesystem::path saves = whole(config.checkpoint.dir), logs = whole(config.log.dir);
  const auto [of_saves, of_logs] = std::ranges::mismatch(saves, logs);
  return of_saves == saves.end() && of_logs != logs.end() && checkpoint::is_of_saves(*of_logs);
}

// A run saves its configuration as config.toml in log.dir: over one that a run has saved, and over nobody's own. Its timeline begins anew there: not over the
// one that it makes its schedule for, which a restart and a resumed run have to find as it was.
void check_log_dir(const TrainFlags& flags, const Config& config) {
  std::error_code neither;
  const bool own = std::filesystem::equivalent(flags.file, std::filesystem::path(config.log.dir) / "config.toml", neither) && !is_saved_config(flags.file);
  require_no_dead_link("log.dir", config.log.dir);
  require(!is_within_a_save(config), "log.dir = ", config.log.dir, ": lies in a folder that saves into checkpoint.dir = ", config.checkpoint.dir,
          " make, set aside and delete; name another log.dir");
  require(!own, "log.dir = ", config.log.dir, ": the run saves its configuration there as config.toml, over the one that it reads (", flags.file,
          "); name another log.dir, or rename the file");
  const PipelineConfig& pipeline = config.pipeline;
  const bool reads_costs = config.mesh.pp != 1 && is_made_for_costs(pipeline.schedule) && !pipeline.costs_from.empty();
  const auto is_own_timeline = [&](const std::filesystem::path& file) {
    return std::filesystem::equivalent(file, std::filesystem::path(config.log.dir) / "timeline.jsonl", neither);
  };
  require(!reads_costs || !(is_own_timeline(pipeline.costs_from) || is_own_timeline(std::filesystem::path(pipeline.costs_from) / "timeline.jsonl")),
          "pipeline.costs_from = ", pipeline.costs_from,
          ": is in log.dir, where this run begins its own timeline.jsonl; name another log.dir, or a copy of that file elsewhere");
}

void say_without_effect(const Config& config, const Launch& launch) {
  if (!launch.says_once()) return;
  for (const auto& setting : settings_without_effect(config, launch.size)) log().warn("{}", setting);
  for (const auto& group : groups_without_effect(config)) log().warn("{}", group);
}

// Where flight records go: a launcher's choice comes before ours, so this is empty where there is one.
std::string record_dir(const Config& config) {
  if (!config.log.record || std::getenv(kRecordDir)) return {};
  return (std::filesystem::absolute(config.log.dir) / "record").string();
}

// Where there is no room, a run goes on without it (but for --strict-log), as without a line of metrics.jsonl: one that starts again over a full disk must not
// end there. What was there before stays until the new text is whole: the restart may read it.
void write_text(const std::filesystem::path& file, const std::string& text, bool strict) {
  std::error_code error;
  const bool was_there = std::filesystem::is_regular_file(file, error);
  if (was_there && read_text_file(file.string(), file.string()) == text) return;
  std::filesystem::create_directories(file.parent_path(), error);
  const int no_folder = error.value();
  const std::filesystem::path place = target_of(file);  // a link stays one
  std::filesystem::path whole = place;
  whole += ".new";
  int reason = try_to_replace(place, whole, text);
  if (reason == 0) return;
  if (no_folder != 0) reason = no_folder;
  const std::string name = file.filename().string();
  const std::string problem = detail::concat("log.dir = ", file.parent_path().string(), ": ", name, " cannot be written");
  if (strict || !is_full(reason)) fail_to_write(problem, reason, is_full(reason) ? "leave out --strict-log" : "set log.dir to a folder that can be written");
  log().warn("{}: {}; the run goes on without it{}", problem, reason_of_writing(reason),
             was_there ? detail::concat(", and the ", name, " that is there tells another start's settings, not this one's") : "");
}

// Over what a run of this build has saved; anything else stays beside it, under a name that nothing has.
void save_config(const Config& config, bool strict) {
  const auto file = std::filesystem::path(config.log.dir) / "config.toml";
  std::error_code error;
  if (std::filesystem::exists(file, error) && (!std::filesystem::is_regular_file(file, error) || !is_saved_config(file))) {
    const auto aside = name_aside(file, "kept");
    std::filesystem::rename(file, aside, error);
    require(!error, "log.dir = ", config.log.dir, ": config.toml there was not saved by a run of this build, and cannot be kept as ", aside.filename().string(),
            ": ", error.message(), "; move it elsewhere, or choose another log.dir");
    log().warn("{}: was not saved by a run of this build; as it was it is kept in {}", file.string(), aside.filename().string());
  }
  write_text(file, to_toml(config), strict);
}

// The collective algorithms are those that the checkpoint recorded: they order the sums.
comm::WorldOptions options_for(const Config& config, int size, Inputs& inputs) {
  const auto& resume = inputs.resume;
  return world_options_of(config, data_ranks(config, size), resume ? resume->manifest.progress : nlohmann::json(), resume ? resume->folder.string() : "",
                          inputs.remarks);
}

// Groups exist by now, so a checkpoint that takes a damaged one's place finds the damaged one's algorithms.
void hash_together(const Config& config, const comm::World& world, Inputs& inputs) {
  const auto first = inputs.resume ? inputs.resume->manifest.step : 0;
  check_hashes(inputs, config, world);
  if (!inputs.resume || inputs.resume->manifest.step == first) return;
  if (comm::recorded_choice(options_for(config, world.size(), inputs)) == comm::recorded_choice(world.options())) return;
  inputs.remarks.push_back(
      detail::concat(inputs.resume->folder.string(),
                     " recorded other collective algorithms than the damaged one: sums are added in another order from here on, so the run "
                     "goes on, but not bit for bit"));
}

// Ends this rank with one sentence that says what would fit. What the first rank that runs out can tell is told once: the others mostly follow in the same
// step.
[[noreturn]] void end_out_of_memory(const Config& config, const comm::World& world, const MemoryTracker& memory, const c10::OutOfMemoryError& error) {
  const auto refusal = memory.refusal();
  if (!refusal) throw Error(error.what_without_backtrace());  // of a thread whose memory nobody counts
  world.report_failure("out of memory");
  Config mine = config;
  mine.run.threads = at::get_num_threads();
  const auto report = plan::explain(mine, {.rank = world.rank(), .world = world.size(), .refusal = *refusal});
  const std::string first = world.reported_failure();
  if (first.empty() || first.starts_with(detail::concat("rank ", world.rank(), " "))) std::fputs(report.tables.c_str(), stderr);
  throw Error(report.sentence);
}

// What goes to a disk, of all ranks of this host.
struct OnDisk {
  std::string keys;  // that send it there
  int64_t bytes = 0;
  DiskTraffic step{};  // bytes
};

// How long a step takes by its disk alone, as far as that can be told from a file of the same size or 64 MiB; empty where nothing can be measured.
std::string said_of_speed(const std::filesystem::path& folder, const OnDisk& what) {
  constexpr int64_t kMeasured = int64_t{64} << 20;
  const auto speed = measure_disk(folder, std::min(what.bytes, kMeasured));
  if (!speed) return "";
  const double seconds = what.step.write / speed->write + what.step.read / speed->read;
  const auto bytes = [](double number) { return format_bytes(static_cast<int64_t>(number)); };
  return detail::concat("; a step writes ", bytes(what.step.write), " there and reads ", bytes(what.step.read), ", ", format_duration(seconds), " at the ",
                        bytes(speed->write), "/s and ", bytes(speed->read), "/s measured now, less what the host's memory keeps");
}

// The nearest folder that is there: what is about to be made lies on its disk.
void check_disk(const Config& config, const OnDisk& what, int local_ranks, bool first) {
  std::filesystem::path folder = std::filesystem::absolute(spill_folder(config));
  std::error_code failed;
  while (!std::filesystem::exists(folder, failed) && folder != folder.root_path()) folder = folder.parent_path();
  const auto space = std::filesystem::space(folder, failed);
  if (failed) return;  // whoever makes the file says why
  const auto free = static_cast<int64_t>(space.available);
  require(what.bytes <= free, "offload.dir = ", spill_folder(config).string(), ": ", what.keys, " = disk takes ", format_bytes(what.bytes), " there for the ",
          local_ranks, local_ranks == 1 ? " rank" : " ranks", " on this host, and ", format_bytes(free), " are free; name a folder with more space, or set ",
          what.keys, " = host");
  if (first) {
    log().info("{} = disk: {} of {} free in {}{}", what.keys, format_bytes(what.bytes), format_bytes(free), spill_folder(config).string(),
               said_of_speed(folder, what));
  }
}

// What the ranks of this host keep there from step to step.
struct HostShare {
  int ranks = 1;
  bool on_cpu = false;            // the host is the device
  double parameters = 0;          // of the model
  double parameters_on_host = 0;  // that its ranks hold
  double kept = 0;                // bytes in its memory, of a parameter
  double mapped = 0;              // bytes of a parameter in files that a rank maps into its addresses
  OnDisk on_disk{};

  double needed() const { return kept * parameters_on_host; }
  int64_t of_rank() const { return static_cast<int64_t>(needed() / ranks); }
};

HostShare host_share(const Launch& launch, const Config& config) {
  const MeshShape mesh = mesh_shape(config.mesh, config.zero.stage, launch.size);
  const MeshRoles roles = mesh_roles(config);
  const Sharers shards = sharers(config, mesh);
  HostShare share{.ranks = launch.local_ranks(), .on_cpu = launch.device.is_cpu(), .parameters = static_cast<double>(num_parameters(config.model))};
  share.parameters_on_host = share.parameters / size_along(mesh, roles.layers) / size_along(mesh, roles.stages) * share.ranks;
  const int64_t micro_batches = chunk(config.batch.global_size / config.batch.micro_size, size_along(mesh, roles.batch), 0).second;
  const auto parts = on_disk_per_parameter(config, shards);
  const DiskTraffic traffic = parts.total() > 0 ? disk_traffic_per_parameter(config, shards, micro_batches) : DiskTraffic();
  const bool in_files = config.offload.params.uses("disk");
  share.kept = on_host_per_parameter(config, shards, share.on_cpu).total();
  share.mapped = in_files ? parts.weight + parts.gradient : 0;
  share.on_disk = {.keys = in_files ? "offload.params" : "offload.optimizer",
                   .bytes = static_cast<int64_t>(parts.total() * share.parameters_on_host),
                   .step = {.write = traffic.write * share.parameters_on_host, .read = traffic.read * share.parameters_on_host}};
  return share;
}

std::string said_of_kept(const Config& config, const HostShare& share) {
  return detail::concat("model: each of its ", format_count(share.parameters), " parameters keeps ", format_float(std::round(100 * share.kept) / 100),
                        " bytes ", config.lora.modules.empty() ? "" : "on average, most of them frozen (lora.modules), ",
                        share.on_cpu ? "" : "beside the device, in the host's memory, ",
                        "on a rank from step to step (weight, gradient, optimizer), which is ");
}

// A way out, where there is that one.
std::string fewer_bits(const Config& config, const HostShare& share) {
  return !config.lora.modules.empty() && share.on_cpu && config.quantize.modules.empty() ? "fewer bits for what is frozen (quantize.modules), " : "";
}

void check_memory_of_host(const Config& config, const HostShare& share) {
  const int64_t host = host_memory_bytes();
  require(host == 0 || share.needed() <= static_cast<double>(host), said_of_kept(config, share), format_bytes(static_cast<int64_t>(share.needed())),
          " for the ", share.ranks, share.ranks == 1 ? " rank" : " ranks", " on this host, and it has ", format_bytes(host), "; use a smaller model, ",
          fewer_bits(config, share), "zero.stage = 3 or mesh.tp over more hosts (tessera plan says what each rank then needs)");
}

void check_memory_of_process(const Config& config, const HostShare& share) {
  const int64_t process = process_memory_limit_bytes();
  require(process == 0 || share.of_rank() <= process, said_of_kept(config, share), format_bytes(share.of_rank()), ", and a process may have ",
          format_bytes(process), " (ulimit -d or -v); raise that limit, set offload.optimizer = disk",
          config.zero.stage == 3 ? " (with offload.params and offload.gradients = disk, which leave units in use alone)" : "", ", or use ",
          fewer_bits(config, share), "more ranks with zero.stage = 3 or mesh.tp");
}

void check_addresses(const HostShare& share) {
  const auto mapped = static_cast<int64_t>(share.mapped * share.parameters_on_host / share.ranks);
  rlimit addresses{};
  require(mapped == 0 || ::getrlimit(RLIMIT_AS, &addresses) != 0 || addresses.rlim_cur == RLIM_INFINITY ||
              share.of_rank() + mapped <= static_cast<int64_t>(addresses.rlim_cur),
          "offload.params = disk: a rank maps ", format_bytes(mapped), " of its file beside the ", format_bytes(share.of_rank()),
          " that it keeps in memory, and a process may map ", format_bytes(static_cast<int64_t>(addresses.rlim_cur)),
          " (ulimit -v); raise that limit (ulimit -d, which counts no files, may stay), or use more ranks");
}

// By a dry run, which counts activations, too.
void check_disk_with_activations(const Launch& launch, const Config& config, const HostShare& share) {
  const OnDisk& states = share.on_disk;
  const int64_t all = plan::disk_bytes_of_host(config, launch.size, share.ranks);
  const auto moved = static_cast<double>(all - states.bytes);  // out and in, at least once a step
  check_disk(config,
             {.keys = states.bytes > 0 ? states.keys + " and offload.activations" : "offload.activations",
              .bytes = all,
              .step = {.write = states.step.write + moved, .read = states.step.read + moved}},
             share.ranks, launch.first());
}

// Refused before anything is allocated: beyond the host's memory, the kernel would end one process or another some time later, and a disk is full in the midst
// of a step.
void check_host(const Launch& launch, const Config& config) {
  const HostShare share = host_share(launch, config);
  const bool activations = config.offload.activations.uses("disk") && launch.says_once();
  // By the formula: with activations, a lower bound, so that no dry run is made of what is far too much.
  if (share.on_disk.bytes > 0) check_disk(config, share.on_disk, share.ranks, launch.first() && !activations);
  check_memory_of_host(config, share);
  check_memory_of_process(config, share);
  check_addresses(share);
  if (activations) check_disk_with_activations(launch, config, share);
}

// A checkpoint.dir that is there already is this run's before anything in it is read: what a live run is about to change says nothing, and of all that may be
// in the way it comes first. One that is not there is nobody's, and is made once the rest is found good.
Inputs hold_checkpoint_dir(const Config& config, bool restarted) {
  Inputs held;
  held.restarted = restarted;
  std::error_code ignored;
  if (std::filesystem::is_directory(config.checkpoint.dir, ignored)) lock_checkpoint_dir(config, held);
  return held;
}

// Tried before any rank is started, rather than at the first save.
void try_checkpoint_dir(const Config& config) {
  if (config.checkpoint.dir.empty()) return;
  std::error_code error;
  require_no_dead_link("checkpoint.dir", config.checkpoint.dir);
  std::filesystem::create_directories(config.checkpoint.dir, error);
  const int problem = error ? error.value() : problem_of_writing_in(config.checkpoint.dir);
  if (problem != 0) {
    fail_to_write("checkpoint.dir = " + config.checkpoint.dir + ": nothing can be written there", problem,
                  "set checkpoint.dir to a folder that can be, or to \"\" for no checkpoints");
  }
}

// As this machine alone would compute; the ranks' answer comes once they meet.
Config resolved_on(at::Device device, const Config& config) {
  if (config.run.graph) require_graphs(device);
  Config resolved = config;
  precision::settle_compute(resolved, device, precision::Saying::Silent);
  return resolved;
}

// What can be refused before any of the run's inputs is read, and before any rank is started: first what the settings say of the model and of the ranks, then
// where the run may write, and then, which takes longest, whether the host has room. Returns what is to be dumped.
std::optional<DumpRequest> check_settings(const TrainFlags& flags, const Launch& launch, const Config& config) {
  const Config resolved = resolved_on(launch.device, config);
  const MeshShape mesh = mesh_shape(config.mesh, config.zero.stage, launch.size);
  check_pipeline(config, mesh);
  check_modules(resolved, mesh);
  check_faults(flags.inject, launch);
  comm::check_choice(comm::world_options(config.comm));
  if (!config.comm.interface.empty()) comm::check_interface(config.comm.interface);

  auto dump = dump_request(flags, config, mesh);
  check_memory_report(flags, config);
  check_log_dir(flags, config);
  if (launch.first()) MetricsFile::check_free(config.log.dir, lock_patience(config, launch.restarted()));
  check_reached("checkpoint.dir", config.checkpoint.dir);

  say_without_effect(config, launch);
  check_host(launch, resolved);
  if (flags.preflight && launch.says_once()) {
    log().info("{}", plan::preflight(resolved, launch.size, launch.local_ranks(), launch.device.is_cpu() ? host_memory_bytes() : 0));
  }
  return dump;
}

// Opens what the run reads, and refuses what does not fit to it or to what is in checkpoint.dir.
Inputs check_inputs(const Launch& launch, const Config& config, const std::optional<DumpRequest>& dump) {
  const char* hashed = std::getenv(kHashed);
  Inputs inputs = open_inputs(
      config,
      {.restarted = launch.restarted(), .job = launch.environment.job, .hashed = hashed ? hashed : "", .one_of_several = launch.size > 1 && !launch.copies});
  if (launch.says_once()) say_once(inputs.text_remarks);
  if (launch.first()) check_checkpoint_dir(config, inputs);  // the others are told
  check_dump_is_ahead(dump, inputs, launch);
  try_checkpoint_dir(config);
  return inputs;
}

// Decides once for all ranks, says it once, and starts them. `held` is what this process holds of checkpoint.dir. Returns the exit code.
int start_copies(const Launch& launch, const Config& config, Inputs held, const Inputs& inputs) {
  lock_checkpoint_dir(config, held);
  for (const auto& remark : inputs.remarks) log().warn("{}", remark);
  std::vector<std::pair<std::string, std::string>> variables{{kSettingsSaid, "1"}};
  if (const auto dir = record_dir(config); !dir.empty()) variables.emplace_back(kRecordDir, dir);
  const std::string resume = inputs.resume ? std::filesystem::absolute(inputs.resume->folder).string() : "";
  if (inputs.resume && inputs.resume->hashed) variables.emplace_back(kHashed, resume);
  variables.emplace_back(kGoesOnFrom, resume);
  if (inputs.may_start_afresh) variables.emplace_back(kStartsAfresh, "1");  // what could not be used is not in the way
  held.lock.reset();                                                        // the first rank will take it
  return run_copies(launch.nproc, {}, variables);
}

// The settings as they were given, where this process has settled others.
struct Asked {
  CheckpointConfig checkpoint;
  BatchConfig batch;  // per_rank, which other ranks would settle otherwise

  Config in(Config config) const {
    config.checkpoint = checkpoint;
    config.batch = batch;
    return config;
  }
};

void add_observers(Trainer& trainer, const TrainFlags& flags, const Config& config, std::unique_ptr<MetricsFile> metrics) {
  trainer.add_observer(std::move(metrics));
  trainer.add_observer(std::make_unique<TensorBoard>(flags.strict_log));
  if (config.model.experts > 0) trainer.add_observer(std::make_unique<ExpertMap>());
  if (flags.memory_report) trainer.add_observer(std::make_unique<MemoryReport>(flags.memory_report_file));
  trainer.add_observer(std::make_unique<ProgressBar>(ProgressBar::Options{.terminal = ProgressBar::is_terminal(stderr)}));
}

// Trains as one rank of all.
void run_rank(const TrainFlags& flags, const Launch& launch, Config config, const Asked& asked, const std::optional<DumpRequest>& dump, Inputs inputs) {
  auto options = options_for(config, launch.size, inputs);
  options.device = launch.device;
  options.record_dir = record_dir(config);
  options.inject = flags.inject;
  auto metrics = std::make_unique<MetricsFile>(flags.strict_log);
  if (launch.first()) metrics->hold(config.log.dir, lock_patience(config, launch.restarted()));  // before the ranks meet, as checkpoint.dir
  auto world = comm::World::from_environment(options);
  std::optional<StopSignals> signals;
  const MemoryTracker memory;
  const auto run = [&] {
    Settings settings = run_settings(config, inputs, world.options());
    settings.emplace_back("--dump-step", dump ? std::to_string(dump->step) : "not given");
    check_ranks_agree(world.group(), settings);
    hash_together(config, world, inputs);
    precision::settle_compute(config, launch.device, world.group());
    if (world.rank() == 0) {
      for (const auto& remark : inputs.remarks) log().warn("{}", remark);
    }
    Trainer trainer(config, world, std::move(inputs), dump, {.tracker = memory, .report = flags.memory_report}, launch.device);
    if (world.rank() == 0) save_config(asked.in(config), flags.strict_log);  // of a run that begins
    add_observers(trainer, flags, config, std::move(metrics));
    // Whoever ends the ranks of a launcher tells it, and it tells them by SIGTERM; a rank that hears of Ctrl-C itself has no one to wait for.
    launch.environment.launched ? signals.emplace({SIGTERM}) : signals.emplace({SIGTERM, SIGINT});
    trainer.stop_when([&] { return signals->received(); });
    trainer.run();
    // The run is over and saved: other agents of the launcher may still hand on the request to stop while ranks leave.
    signals->leave_ignored(SIGTERM);
    signals.reset();
  };
  world.guard([&] {
    try {
      run();
    } catch (const c10::OutOfMemoryError& error) {
      end_out_of_memory(config, world, memory, error);
    }
  });
}

int train(const TrainFlags& flags) {
  Config config = read_config(flags.file, flags.sets);
  const Asked asked{.checkpoint = config.checkpoint, .batch = config.batch};
  take_launchers_decision(config.checkpoint);
  const int size = world_size(flags.nproc);
  settle_batch(config, size);
  validate(config, size);
  const Launch launch{.environment = comm::read_environment(),
                      .nproc = flags.nproc,
                      .size = size,
                      .device = device_for(config.run.device, flags.nproc),
                      .copies = starts_copies(flags.nproc)};
  const auto dump = check_settings(flags, launch, config);
  Inputs held = launch.first() ? hold_checkpoint_dir(config, launch.restarted()) : Inputs();
  Inputs inputs = check_inputs(launch, config, dump);
  if (launch.copies) return start_copies(launch, config, std::move(held), inputs);
  inputs.lock = std::move(held.lock);
  inputs.remarks.insert(inputs.remarks.begin(), held.remarks.begin(), held.remarks.end());
  if (launch.first()) lock_checkpoint_dir(config, inputs);
  run_rank(flags, launch, std::move(config), asked, dump, std::move(inputs));
  return 0;
}

}  // namespace

void add_train(Command app, int& exit_code) {
  auto flags = std::make_shared<TrainFlags>();
  auto command = app.add_command("train", "Train a model as a configuration says");
  command.add_option("file", flags->file, "Configuration (TOML)").required();
  command.add_option("--set", flags->sets, "key=value, over the file; may be given again").one_at_a_time();
  command.add_option("--nproc", flags->nproc, "Ranks to start on this machine").shows_default();
  add_device_option(command, flags->sets);
  command.add_option("--dump-step", flags->dump_step, "Write gradients and weights of this step");
  command.add_option("--dump-dir", flags->dump_dir, "Where to write them");
  command.add_option("--inject", flags->inject, "Faults to make happen, such as \"rank=1,op=all_reduce,count=40,do=kill\"; several are separated by ;");
  command.add_flag("--preflight", flags->preflight, "Run a step dry before any rank is started, and refuse what would not fit or would hang");
  command.add_flag("--strict-log", flags->strict_log, "End the run where a record cannot be written, rather than say so and train on");
  auto report =
      command.add_flag("--memory-report{}", flags->memory_report_file,
                       "Draw the memory of the second step and list its largest tensors; =FILE: where the picture goes (memory_report.svg in log.dir)");
  command.when_chosen([flags, report, &exit_code] {
    flags->memory_report = report.given();
    exit_code = train(*flags);
  });
}

}  // namespace tessera::cli
