#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "tessera/comm/algorithms/table.h"
#include "tessera/comm/group.h"

namespace c10d {
class Store;
}

namespace tessera {
struct CommConfig;  // tessera/config/config.h
}

namespace tessera::comm {

class Recorder;

/// Wraps the engine of a new group: tracing, checking, fault injection and recording enter here, and callers never know.
using Decorator = std::function<std::shared_ptr<Engine>(std::shared_ptr<Engine> inner, const GroupInfo& group)>;

struct WorldOptions {
  std::string backend = "auto";                                 ///< comm.backend
  std::string interface{};                                      ///< comm.interface: a network interface, host or address; empty: the way to the master
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  ///< comm.timeout_s: of connecting, and of each collective
  std::string algorithm = "auto";                               ///< comm.algorithm
  std::string table{};                                          ///< comm.table: a file, or empty
  std::vector<TableRow> rows{};                                 ///< of a table, instead of the file's: what a checkpoint recorded
  bool check = false;                                           ///< comm.check
  std::string record_dir{};                                     ///< folder of the flight records; empty: none. From the environment: TESSERA_RECORD_DIR
  std::string inject{};                                         ///< faults to inject, as in --inject; empty: none. From the environment: TESSERA_INJECT
  std::optional<at::Device>
      device{};        ///< where this rank computes, of which the members of a group tell each other; unset: on the accelerator of its local rank
  std::string host{};  ///< for tests: plays another host (EngineOptions::host)
  std::vector<Decorator> decorators{};  ///< applied to each group in order, around those that the fields above ask for
};

/// What the configuration says of the world.
WorldOptions world_options(const CommConfig& config);

/// Who started this process as one of several.
enum class Launcher {
  None,      ///< nobody: alone
  Torchrun,  ///< `tessera run`, `--nproc`, torchrun, or anyone who sets torchrun's variables
  Mpirun,    ///< an MPI launcher
  Srun,      ///< a step of Slurm
};

/// Who this process is, as its launcher says.
struct Environment {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::string master_addr{};  ///< under mpirun empty unless MASTER_ADDR is set: the ranks learn it through MPI (rendezvous.h)
  int master_port = 0;
  bool agent_store = false;  ///< the launcher serves the store on master_port; otherwise rank 0 does
  int restart_count = 0;     ///< keeps the keys of one attempt apart from the next one's
  std::string job{};         ///< the same in all attempts of a job, and of no other as far as its launcher can tell them apart; empty: it cannot
  bool launched = false;     ///< one of several, or told that it is one of one
  Launcher launcher = Launcher::None;
  std::string told_by{};  ///< of one of several, for messages: the variables that say so, and what is odd about them
};

/// Reads a variable: std::getenv in life, a table in tests.
using Lookup = std::function<std::optional<std::string>(const std::string& name)>;

/// Reads the variables of the launcher, the innermost first: where torchrun runs under srun, torchrun is who started this process.
///   torchrun   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_USE_AGENT_STORE, TORCHELASTIC_RESTART_COUNT,
///              TESSERA_JOB (`tessera run` and `--nproc`) or TORCHELASTIC_RUN_ID.
///              RANK says it is torchrun. The other three also do, unless mpirun or srun is there; then they must agree with it.
///   mpirun     Open MPI's OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}, or PMI_RANK and PMI_SIZE with MPI_LOCALRANKID and MPI_LOCALNRANKS.
///   srun       SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, and of the step: SLURM_STEP_{NUM_TASKS,TASKS_PER_NODE,NODELIST}, or where these are missing
///              SLURM_{NTASKS,TASKS_PER_NODE,JOB_NODELIST}. The master is the first node of the list, the port made of job and step. A batch script and the
///              shell of an allocation, which have some of these variables, are no step; a step of one task is alone.
/// MASTER_ADDR and MASTER_PORT are heeded under each. Where the local ones are missing, all ranks are taken to be on this host. None of all that means alone.
/// Throws ConfigError, with the variable and its value, where they contradict each other, are incomplete, or are not numbers.
Environment read_environment(const Lookup& lookup);
/// The same from this process's environment.
Environment read_environment();

/// All ranks of a run, and the maker of groups.
///
/// Leaving: the destructor waits until every rank has left too, at most 10 s, so that no rank tears down connections or the store that another still
/// reads from. While an exception unwinds, and where the others do not come, it breaks the connections instead: peers that wait get an error.
/// Groups and meshes made from a world may outlive it; a moved-from world may only be destroyed or assigned to.
class World {
 public:
  /// Joins the ranks that the launcher's variables name, or is alone. Blocks until all have come. A process may do so again, and so may another one that its
  /// launcher starts after it, on every rank alike; while another world lives, only where rank 0 does not serve the store itself at a given port (srun,
  /// variables set by hand). Throws ConfigError (variables, backend) and CommError (address, port, cause, seconds waited).
  static World from_environment(const WorldOptions& options = {});
  static World join(const Environment& environment, const WorldOptions& options = {});
  /// Joins through a store that exists already, as often as one likes, on every rank alike. Without a backend name of its own, "auto" is Gloo.
  static World join(const Environment& environment, c10::intrusive_ptr<c10d::Store> store, const WorldOptions& options = {});
  /// A world of one; needs no network.
  static World alone(const WorldOptions& options = {});
  /// A world of any size on no network: every group records into `recorder` and computes nothing. This process plays `rank`.
  /// Making it, and a mesh on it, costs time and memory of the order of the groups' sizes.
  static World dry(int size, int rank, std::shared_ptr<Recorder> recorder, const WorldOptions& options = {});

  World(World&&) noexcept;
  World& operator=(World&&) noexcept;
  ~World();

  int rank() const;
  int size() const;
  int local_rank() const;
  int local_size() const;
  /// Whether collectives compute nothing (World::dry).
  bool is_dry() const;
  const WorldOptions& options() const;

  /// The group of all ranks.
  Group group() const;

  /// The group of `ranks` (of the world, in group order; this rank among them). Collective over those ranks: each must make the call, and calls
  /// with the same name and ranks are matched by their order. No other rank takes part, so all rows of a mesh form at once.
  /// Throws InternalError for a list without this rank, outside the world or with repetitions, CommError where a member does not come.
  Group subgroup(const std::vector<int>& ranks, const std::string& name) const;

  /// Runs `body`. If it throws, tells all ranks why, breaks this rank's connections so that nobody waits for it, and lets the exception pass. The
  /// world should be made outside: what dies while an exception passes through it cannot be told from a crash by its peers.
  void guard(const std::function<void()>& body) const;

  /// Tells all ranks why this one fails: their pending and later errors quote it. Call it before connections close. Never throws.
  void report_failure(const std::string& cause) const noexcept;
  /// What the first failing rank reported, as "rank 3 failed: ..."; empty if none did. Never throws.
  std::string reported_failure() const noexcept;

  /// Breaks every group's connections: what waits on this rank, here and elsewhere, ends with an error. From any thread.
  void abort() const noexcept;

  /// Waits until every rank has left, at most `patience`; the destructor's part, for those who want the answer. True if all have. Idempotent.
  bool leave(std::chrono::milliseconds patience = std::chrono::seconds(10)) noexcept;

 private:
  struct State;
  explicit World(std::shared_ptr<State> state);
  /// In a store whose keys are this world's alone.
  static World join_in(const Environment& environment, c10::intrusive_ptr<c10d::Store> store, const WorldOptions& options);
  void finish() noexcept;
  friend class WorldView;
  std::shared_ptr<State> state_;
  int exceptions_ = 0;
};

/// A world without its end: makes groups, and may be copied and kept by those who outlive it (Mesh).
class WorldView {
 public:
  explicit WorldView(const World& world);
  int rank() const;
  int size() const;
  bool is_dry() const;
  Group group() const;
  Group subgroup(const std::vector<int>& ranks, const std::string& name) const;

 private:
  std::shared_ptr<World::State> state_;
};

}  // namespace tessera::comm
