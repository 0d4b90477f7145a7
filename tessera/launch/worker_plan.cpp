#include "tessera/launch/worker_plan.h"

#include <algorithm>
#include <sstream>
#include <thread>

#include "tessera/core/error.h"

namespace tessera::launch {
namespace {

int parse_number(const std::string& text, int most) {
  if (text.empty() || text.size() > 6 || !std::ranges::all_of(text, [](unsigned char c) { return c >= '0' && c <= '9'; })) return -1;
  const int number = std::stoi(text);
  return number <= most ? number : -1;
}

}  // namespace

StreamChoice::StreamChoice(const std::string& text, const std::string& knob) {
  constexpr const char* rule = ": 0 none, 1 standard output, 2 standard error, 3 both, for all local ranks, or as RANK:STREAM,... for some, as in 0:3,1:2";
  constexpr int both = 3;
  if (text.find(':') == std::string::npos) {
    all_ = parse_number(text, both);
    require(all_ >= 0, knob, " = ", text, rule);
    return;
  }
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const size_t colon = entry.find(':');
    const int rank = parse_number(entry.substr(0, colon), 999999);
    const int streams = colon == std::string::npos ? -1 : parse_number(entry.substr(colon + 1), both);
    require(rank >= 0 && streams >= 0, knob, " = ", text, rule);
    some_[rank] = streams;
  }
}

int StreamChoice::bits(int local_rank) const {
  const auto found = some_.find(local_rank);
  return found == some_.end() ? all_ : found->second;
}

OutputPlan plan_output(const OutputOptions& options, const std::string& role, int attempt, int rank, int local_rank) {
  const auto plan = [&](bool redirected, bool teed, bool is_error) {
    StreamPlan stream;
    const bool shown = options.shown.empty() || options.shown.contains(local_rank);
    stream.console = shown && (!redirected || teed);
    if (options.prefix == Prefix::Rank)
      stream.prefix = detail::concat("[rank ", rank, "] ");
    else if (options.prefix == Prefix::Role || teed)
      stream.prefix = detail::concat('[', role, local_rank, "]:");
    if (!options.folder.empty() && (redirected || teed || options.keep_all)) {
      stream.file = detail::concat(options.folder, "/attempt_", attempt, '/', rank, is_error ? "/stderr.log" : "/stdout.log");
    }
    stream.captured = !stream.console || !stream.prefix.empty() || !stream.file.empty() || (is_error && options.capture_errors);
    return stream;
  };
  return {plan(options.redirects.out(local_rank), options.tee.out(local_rank), false),
          plan(options.redirects.err(local_rank), options.tee.err(local_rank), true)};
}

std::vector<WorkerPlan> plan_workers(const JobOptions& job, const Round& round, const std::string& id, const std::string& record_folder) {
  const std::optional<Place> place = place_of(round, id);
  invariant(place.has_value(), "node ", id, " is no member of round ", round.number);
  const int nproc = round.nodes[place->node_rank].nproc;
  // Every time that workers are started anew counts, also where no failure used up a restart: whoever finds more than 0 resumes.
  const int attempt = static_cast<int>(round.number) - 1;
  const int folder = static_cast<int>(folder_number(round));

  Variables variables = job.variables;
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  variables.emplace("OMP_NUM_THREADS", std::to_string(std::max(1, cores / nproc)));
  const auto set = [&](const char* name, const auto& value) { variables[name] = detail::concat(value); };
  set("WORLD_SIZE", place->world_size);
  set("LOCAL_WORLD_SIZE", nproc);
  set("GROUP_RANK", place->node_rank);
  set("GROUP_WORLD_SIZE", round.nodes.size());
  set("ROLE_NAME", job.role);
  set("ROLE_WORLD_SIZE", place->world_size);
  set("MASTER_ADDR", round.master.host);
  set("MASTER_PORT", round.master.port);
  set("TORCHELASTIC_USE_AGENT_STORE", "True");
  set("TORCHELASTIC_RESTART_COUNT", attempt);
  set("TORCHELASTIC_MAX_RESTARTS", job.max_restarts);
  set("TORCHELASTIC_RUN_ID", job.run_id);
  set("TESSERA_JOB", round.job);  // also where it is inherited: this job's own restarts are what it is for
  if (!record_folder.empty()) set("TESSERA_RECORD_DIR", record_folder);

  std::vector<WorkerPlan> plans;
  for (int local_rank = 0; local_rank < nproc; ++local_rank) {
    const int rank = place->first_rank + local_rank;
    set("RANK", rank);
    set("ROLE_RANK", rank);
    set("LOCAL_RANK", local_rank);
    plans.push_back({rank, job.command, variables, plan_output(job.output, job.role, folder, rank, local_rank)});
  }
  return plans;
}

}  // namespace tessera::launch
