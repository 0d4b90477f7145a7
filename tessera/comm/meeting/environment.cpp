#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "tessera/comm/meeting/endpoint.h"
#include "tessera/comm/meeting/slurm.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"

// Several launchers' variables are there at once more often than not: mpirun inside of a Slurm job, srun that speaks PMI, a batch script that exports torch's.
// The order below is that of who is the nearest to the process. Where a launcher is chosen and torch's own variables say something else, that is refused and
// not overruled: ranks that took different answers would hang.

namespace tessera::comm {
namespace {

constexpr int kLargestWorld = 1 << 24;

// Reads numbers with the variable's name in every refusal.
class Variables {
 public:
  explicit Variables(const Lookup& lookup) : lookup_(lookup) {}

  bool has(const std::string& name) const { return lookup_(name).has_value(); }
  std::string text(const std::string& name) const { return lookup_(name).value_or(""); }

  /// The first of `names` that is set; the last where none is.
  std::string first(std::initializer_list<std::string> names) const {
    for (const auto& name : names) {
      if (has(name)) return name;
    }
    return *(names.end() - 1);
  }

  int number(const std::string& name, int low, int64_t high, const std::string& rule) const {
    const auto value = text(name);
    int64_t parsed = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
    require(!value.empty() && error == std::errc() && end == value.data() + value.size(), name, " = \"", value, "\" is not a whole number; it must be ", rule);
    require(parsed >= low && parsed <= high, name, " = ", parsed, " must be ", rule);
    return static_cast<int>(parsed);
  }

  int count(const std::string& name) const { return number(name, 1, kLargestWorld, detail::concat("between 1 and ", kLargestWorld)); }
  /// A count that is at most the count `whole`, which `whole_name` gave.
  int part(const std::string& name, const std::string& whole_name, int whole) const {
    return number(name, 1, whole, detail::concat("between 1 and ", whole_name, " = ", whole));
  }
  /// An index below the count `whole`.
  int index(const std::string& name, const std::string& whole_name, int whole) const {
    return number(name, 0, whole - 1, detail::concat("between 0 and ", whole_name, " - 1 = ", whole - 1));
  }

 private:
  const Lookup& lookup_;
};

// What a launcher calls the four numbers. The local ones may be missing.
struct Names {
  std::string rank, size, local_rank, local_size;
};

std::string told_by(const Variables& variables, const std::string& rank, const std::string& size) {
  return detail::concat(rank, " = ", variables.text(rank), " and ", size, " = ", variables.text(size));
}

Environment read_ranks(const Variables& variables, const Names& names, Launcher launcher) {
  Environment environment{.launched = true, .launcher = launcher};
  environment.size = variables.count(names.size);
  environment.rank = variables.index(names.rank, names.size, environment.size);
  environment.told_by = told_by(variables, names.rank, names.size);
  environment.local_size = variables.has(names.local_size) ? variables.part(names.local_size, names.size, environment.size) : environment.size;
  environment.local_rank =
      variables.has(names.local_rank) ? variables.index(names.local_rank, names.local_size, environment.local_size) : environment.rank % environment.local_size;
  return environment;
}

// MASTER_ADDR and MASTER_PORT, as far as they are set.
void read_master(const Variables& variables, Environment& environment) {
  if (!variables.text("MASTER_ADDR").empty()) {
    const auto master = parse_endpoint(variables.text("MASTER_ADDR"), "MASTER_ADDR", 0);
    environment.master_addr = master.host;
    environment.master_port = master.port;
  }
  if (variables.text("MASTER_PORT").empty()) return;
  const int port = variables.number("MASTER_PORT", 1, 65535, "a port, 1 to 65535");
  require(environment.master_port == 0 || environment.master_port == port, "MASTER_PORT = ", port, " contradicts MASTER_ADDR = \"",
          variables.text("MASTER_ADDR"), "\", which names port ", environment.master_port, "; leave one of the two ports out");
  environment.master_port = port;
}

// Ours draws a name for each job. torchrun's is drawn (--standalone), or what its user calls the job, who may call two jobs alike; "none" is what it calls any
// other. What else it sets may change from one attempt to the next, and a restart must never be taken for another job.
std::string job_of(const Variables& variables) {
  if (const auto drawn = variables.text("TESSERA_JOB"); !drawn.empty()) return drawn;
  const auto id = variables.text("TORCHELASTIC_RUN_ID");
  return id == "none" ? "" : id;
}

Environment read_torchrun(const Variables& variables) {
  const std::string way_out = "; set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of them to run alone";
  for (const auto* name : {"RANK", "WORLD_SIZE"}) require(variables.has(name), name, " is not set while other variables of a launcher are", way_out);
  auto environment = read_ranks(variables, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, Launcher::Torchrun);
  if (variables.has("TORCHELASTIC_RESTART_COUNT")) {
    environment.restart_count = variables.number("TORCHELASTIC_RESTART_COUNT", 0, kLargestWorld, "0 or more");
  }
  environment.job = job_of(variables);
  const auto agent = variables.text("TORCHELASTIC_USE_AGENT_STORE");
  environment.agent_store = agent == "True" || agent == "true" || agent == "1";
  if (environment.size == 1) return environment;  // meets nobody
  read_master(variables, environment);
  require(!environment.master_addr.empty(), "MASTER_ADDR is not set while WORLD_SIZE = ", environment.size, way_out);
  require(environment.master_port != 0, "MASTER_PORT is not set while WORLD_SIZE = ", environment.size, way_out);
  return environment;
}

// Scripts made for torch export some of torchrun's variables themselves; those must not say anything else than the launcher does.
void check_agreement(const Variables& variables, const Environment& environment, const std::string& launcher) {
  const std::pair<const char*, int> values[] = {
      {"WORLD_SIZE", environment.size}, {"LOCAL_RANK", environment.local_rank}, {"LOCAL_WORLD_SIZE", environment.local_size}};
  for (const auto& [name, value] : values) {
    require(!variables.has(name) || variables.text(name) == std::to_string(value), name, " = \"", variables.text(name), "\" contradicts ", launcher,
            ", which says ", value, "; unset it, or set RANK as well to be launched by torchrun's variables");
  }
}

bool in_openmpi(const Variables& variables) { return variables.has("OMPI_COMM_WORLD_RANK") || variables.has("OMPI_COMM_WORLD_SIZE"); }
bool in_pmi(const Variables& variables) { return variables.has("PMI_RANK") && variables.has("PMI_SIZE"); }
bool in_half_of_pmi(const Variables& variables) { return variables.has("PMI_RANK") != variables.has("PMI_SIZE"); }

// srun sets SLURM_STEP_*; a batch script has SLURM_PROCID = 0 without them, or with the id of a step of Slurm's own: the highest numbers there are.
bool in_step(const Variables& variables) {
  if (!variables.has("SLURM_PROCID") || !(variables.has("SLURM_STEP_NUM_TASKS") || variables.has("SLURM_NTASKS"))) return false;
  const auto id = variables.text(variables.first({"SLURM_STEP_ID", "SLURM_STEPID"}));
  if (id.size() == 10 && id >= "4294967280") return false;
  for (const auto* name : {"SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"}) {
    if (variables.has(name)) return true;
  }
  return variables.text("ENVIRONMENT") != "BATCH";
}

Environment read_mpirun(const Variables& variables, const Names& names) {
  for (const auto* name : {&names.rank, &names.size}) require(variables.has(*name), *name, " is not set while other variables of mpirun are");
  auto environment = read_ranks(variables, names, Launcher::Mpirun);
  read_master(variables, environment);
  check_agreement(variables, environment, "mpirun");
  return environment;
}

// Ranks on this rank's node, from the list of tasks per node; without it the tasks must spread evenly. `nodes` is 0 where there is no list of nodes.
int tasks_on_node(const Variables& variables, int size, int nodes, const std::string& size_name) {
  const auto name = variables.first({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  if (!variables.has(name)) {
    nodes = std::max(nodes, 1);
    require(size % nodes == 0, name, " is not set, and ", size_name, " = ", size, " tasks do not spread evenly over ", nodes, " nodes");
    return size / nodes;
  }
  const auto counts = expand_counts(variables.text(name), name);
  const int total = std::accumulate(counts.begin(), counts.end(), 0);
  require(total == size, name, " = \"", variables.text(name), "\" sums to ", total, " tasks while ", size_name, " = ", size);
  require(static_cast<int>(counts.size()) == nodes || nodes == 0, name, " = \"", variables.text(name), "\" names ", counts.size(),
          " nodes while the list of nodes has ", nodes);
  const int node = counts.size() == 1 ? 0 : variables.index("SLURM_NODEID", "nodes", static_cast<int>(counts.size()));
  return counts[node];
}

int64_t id_of(const Variables& variables, std::initializer_list<std::string> names) {
  const auto name = variables.first(names);
  return variables.has(name) ? variables.number(name, 0, std::numeric_limits<int>::max(), "a number of Slurm's") : 0;
}

Environment read_srun(const Variables& variables) {
  const auto size_name = variables.first({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
  Environment environment{.launched = true, .launcher = Launcher::Srun};
  environment.size = variables.count(size_name);
  environment.rank = variables.index("SLURM_PROCID", size_name, environment.size);
  if (environment.size == 1) return {};  // a shell in an allocation looks the same
  environment.told_by = told_by(variables, "SLURM_PROCID", size_name);
  if (!variables.has("SLURM_STEP_ID") && !variables.has("SLURM_STEPID"))
    environment.told_by += ", which look like those of a batch script without srun, as SLURM_STEP_ID is not set: start it by srun, or unset SLURM_PROCID";

  const auto list_name = variables.first({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
  const auto nodes = variables.has(list_name) ? expand_nodes(variables.text(list_name), list_name) : std::vector<std::string>();
  environment.local_size = tasks_on_node(variables, environment.size, static_cast<int>(nodes.size()), size_name);
  const bool one_node = environment.local_size == environment.size;
  if (variables.has("SLURM_LOCALID") || !one_node) {
    environment.local_rank = variables.index("SLURM_LOCALID", "tasks of its node", environment.local_size);
  } else {
    environment.local_rank = environment.rank;
  }

  read_master(variables, environment);
  if (environment.master_addr.empty()) {
    require(one_node || !nodes.empty(), list_name, " is not set, so that the first node is not known; set MASTER_ADDR to an address of rank 0's node");
    environment.master_addr = one_node ? "127.0.0.1" : nodes.front();
  }
  if (environment.master_port == 0) {
    // Below the ports that the kernel gives out by itself (32768 and up).
    environment.master_port = 20000 + (31 * id_of(variables, {"SLURM_JOB_ID", "SLURM_JOBID"}) + id_of(variables, {"SLURM_STEP_ID", "SLURM_STEPID"})) % 12768;
  }
  check_agreement(variables, environment, "srun");
  return environment;
}

}  // namespace

Environment read_environment(const Lookup& lookup) {
  const Variables variables(lookup);
  if (variables.has("RANK")) return read_torchrun(variables);
  if (in_openmpi(variables)) {
    return read_mpirun(variables, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"});
  }
  // srun can speak PMI, too, and mpirun can start its helpers by srun: then the two differ, and PMI's are the program's.
  const auto task = variables.text("SLURM_PROCID"), tasks = variables.text(variables.first({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}));
  const bool step = in_step(variables);
  if (in_pmi(variables) && !(step && variables.text("PMI_RANK") == task && variables.text("PMI_SIZE") == tasks)) {
    return read_mpirun(variables, {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"});
  }
  if (step) return read_srun(variables);
  if (in_half_of_pmi(variables)) return read_mpirun(variables, {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"});  // or rather a refusal
  for (const auto* name : {"WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
    if (variables.has(name)) return read_torchrun(variables);
  }
  return {};
}

Environment read_environment() {
  return read_environment([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value ? std::optional<std::string>(value) : std::nullopt;
  });
}

}  // namespace tessera::comm
