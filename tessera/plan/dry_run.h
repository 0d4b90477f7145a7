#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/config/config.h"
#include "tessera/expert_parallel/dry_load.h"
#include "tessera/memory/history.h"
#include "tessera/plan/machine.h"
#include "tessera/plan/pipeline_plan.h"
#include "tessera/plan/rank_classes.h"
#include "tessera/plan/read_events.h"
#include "tessera/plan/step_time.h"

namespace tessera::plan {

/// An operator of a step of which nobody knows what it takes (has_cost): its bytes stand for it.
struct GuessedOperator {
  std::string name{};
  int64_t count = 0;
  int64_t bytes = 0;            ///< that all its calls read and write
  double seconds = 0;           ///< of a step (DryRunOptions::machine)
  bool has_meta_kernel = true;  ///< else its results' shapes are those that a CPU's kernel makes of zeros (stand_ins.h)
};

/// Ranks that do the same step.
struct RankClass {
  int64_t count = 0;
  std::vector<int> examples;                ///< the first few of them
  int64_t micro_batches = 0;                ///< per step, padding included
  int pipeline_rank = 0;                    ///< along mesh.pp
  int64_t parameters = 0;                   ///< elements held
  MemoryByCategory peak_bytes{};            ///< at the moment of the largest total over the dry steps
  int64_t reserved_bytes = 0;               ///< what the device's allocator takes for those, at its most (DryRunOptions::allocator); 0: it is not asked
  MemoryByCategory host_bytes{};            ///< beside the device (offload), when most was there
  int64_t disk_bytes = 0;                   ///< of files in offload.dir
  std::vector<MemoryBlock> largest;         ///< alive then, the largest first (DryRunOptions::largest)
  std::vector<CollectiveSum> collectives;   ///< of one step, in the order of their first call
  double flops = 0;                         ///< model FLOPs of one step (see docs/planning.md)
  double hardware_flops = 0;                ///< of the matrix products of a step's passes, what is computed again included
  double flops_beside = 0;                  ///< of those beside them: an optimizer's (Muon), and those that compress gradients
  double recomputed_flops = 0;              ///< of those, what recompute runs again
  std::vector<GuessedOperator> guessed;     ///< by name
  Events events;                            ///< of one step (DryRunOptions::events)
  RankTime time;                            ///< of one step (DryRunOptions::machine)
  std::map<std::string, Placement> places;  ///< where the ranks of each group lie (the same)
  MemoryHistory history;                    ///< of one step (DryRunOptions::history)
};

/// An accelerator's allocator, which keeps what it took (caching_allocator.h).
struct DeviceAllocator {
  int64_t within = 0;  ///< bytes that it may take, before which it gives back what is free; 0: no limit
  bool all = true;     ///< that is what the device has for it; else less, by run.memory_limit_bytes
};

/// How many sequences make up a step: those of a forward pass, times the ranks that are dealt others, times their passes.
struct EffectiveBatch {
  int64_t per_rank = 0;  ///< batch.micro_size
  int64_t data_ranks = 1;
  int64_t accumulation = 0;  ///< micro-batches of the rank that has most
  int64_t global = 0;        ///< batch.global_size: less than the product where micro-batches do not go up in the ranks
};

/// What `tessera plan` knows of a run before a device is touched.
struct DryRun {
  int world = 1;
  EffectiveBatch batch;
  int64_t tokens_per_step = 0;
  int64_t parameters = 0;         ///< of the whole model, tied ones once
  int64_t active_parameters = 0;  ///< of those, what one token meets: not the experts that it does not visit
  std::vector<RankClass> ranks;
  std::vector<int> class_of;                 ///< of `ranks`, by rank of the world
  std::vector<std::string> remarks;          ///< what `train` would refuse, and why
  int64_t memory_limit = 0;                  ///< run.memory_limit_bytes; 0: none
  std::optional<DeviceAllocator> allocator;  ///< DryRunOptions::allocator
  PipelinePlan pipeline;
  std::optional<StepTime> time;  ///< DryRunOptions::machine

  /// Whether no rank needs more than the limit.
  bool fits() const;
};

/// How far a dry run is.
struct DryRunProgress {
  int kind = 1, kinds = 1;  ///< of ranks
  int step = 1, steps = 1;  ///< of that kind
  double share = 0;         ///< of the step, by its FLOPs
};

struct DryRunOptions {
  bool largest = false;                        ///< the largest tensors at the peak, too, for some 2 us an operator
  bool events = false;                         ///< all that a step does, too
  std::optional<Machine> machine{};            ///< what a step takes on it, too
  std::optional<DeviceAllocator> allocator{};  ///< what it reserves, too
  bool history = false;                        ///< what is alive over the step, too, in seconds of the machine, or else in operators (step_history.h)
  bool text_to_come = false;                   ///< data.files may be empty, as a preset's: no remark says that `train` refuses it
  bool alike_stages =
      false;  ///< of the ranks between the first and the last of a pipeline that hold as much, the one that keeps most micro-batches stands for all
  bool share_traces = true;       ///< of those that do the same, one is run, and what the others do is told from it: no number differs
  int exact_ranks = kExactRanks;  ///< in worlds of so many ranks, those that hold a row more or less are told apart (rank_classes.h); 0: in none
  /// A unit of zero.stage = 3 that alone takes more than run.memory_limit_bytes is refused before a step, as train refuses it: for who looks for what fits.
  bool limits_units = false;
  /// Of each packed window: attention takes least memory where they are short. 1: the whole window, or, where a sliding window makes as many tiles of equal
  /// shorter ones, which attention takes together (documents_that_fill), each rank's memory is that of whichever needs more.
  int64_t documents = 1;
  bool documents_apart = false;                                    ///< attention takes no two of them together: they are all of different lengths
  experts::DryLoad routed = experts::DryLoad::Even;                ///< what routers send to experts that are dealt over ranks
  bool rehearse = true;                                            ///< of micro-batches that do the same, some are run (rehearsal.h); false: all
  std::function<Config(const Config& config, int rank)> told{};    ///< what a rank is told otherwise, of which a plan says whether the others would wait for it
  std::function<void(const DryRunProgress& progress)> progress{};  ///< told some thousands of times a second
};

/// Runs the very step of `train` on meta tensors with groups that record, for one rank of each class, at any world size, on no device and without data.
/// Three steps are run: the first, in which buckets follow the order of registration; the second, in which they are made anew; and one as all others are.
/// Peaks are over all three, collectives are those of the third. All numbers are read from the events of a step (core/events.h), and of micro-batches that do
/// the same a few are run, where that changes no number. `config` must be validated for `world`.
/// The classes' collectives are compared (agreement.h): ConfigError where ranks that share a group would not meet in it, or wait in a circle.
/// Cost: milliseconds a layer, micro-batch and class, and some 100 ns a rank of the world; no memory to speak of.
/// run.memory_limit_bytes refuses nothing here, but for limits_units: what a run needs is asked, not whether it gets it.
DryRun dry_run(const Config& config, int world, const DryRunOptions& options = {});

/// How many documents of one length, no longer than the window that slides over them, make up a packed window for attention to have most to do at once: tiles
/// of one size it takes together. 1: nothing slides, or no documents are packed.
int64_t documents_that_fill(const Config& config, int world);

/// What the rank needs of its device at the most: what its allocator reserves where that was asked for, else the tensors alive.
int64_t needed_bytes(const RankClass& ranks);

/// The class whose ranks need most.
const RankClass& largest_class(const DryRun& run);

/// One sentence, without an end, that names the operators whose bytes stand for what they take, and their share of the step where there is a machine; empty
/// where there are none.
std::string guesses_of(const DryRun& run);

/// The fields of `tessera plan --json`.
nlohmann::json to_json(const DryRun& run);

/// A table for people.
std::string to_string(const DryRun& run);

}  // namespace tessera::plan
