#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/pipeline/itinerary.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/read_events.h"

/// The dry run of one rank: the stepper of train on meta, over groups that record, and what its events say (dry_run.h has the whole).
namespace tessera::plan {

/// What the ranks of a dry run have in common.
struct DryPlan {
  const Config& config;  ///< as this rank is told
  int world;
  const PipelinePlan& pipeline;  ///< by which the model's FLOPs are dealt to the stages
};

struct RankRun {
  RankClass ranks;
  Events events;           ///< of the last step: its collectives and the waits for them, or all where they are asked for
  bool consistent = true;  ///< with what the tracker saw; else the rehearsal has left something out
};

/// A dry step as it was taken down.
struct DryStep {
  double tokens = 0;  ///< of this rank's columns, those that a run has targets for
  Alive before, after;
  Events shown;
  std::vector<MemoryBlock> largest;  ///< at the peak, where they are asked for
};

/// What a rank's dry steps have shown, from which steps of ranks that do the same are read, too.
struct Trace {
  int stage = 0;                    ///< of mesh.pp
  std::vector<pipeline::Leg> legs;  ///< of a step that was run
  std::vector<std::string> channels;
  RankClass ranks;                 ///< what needs no events
  Events beginning;                ///< memory that is held before the first step
  std::set<std::string> stood_in;  ///< operators without a meta kernel
  std::vector<DryStep> steps;
};

/// Runs three steps of `rank`. `alike`: the ranks that do what it does. What its steps have shown goes to `trace`, if it is given.
RankRun run_rank(const DryPlan& dry, int rank, const std::vector<int>& alike, const DryRunOptions& options, DryRunProgress progress, Trace* trace = nullptr);

/// The same of a rank between the ends of a pipeline, from the trace of another that holds as many layers: nothing is run. Nothing where it does another thing.
std::optional<RankRun> read_rank(const DryPlan& dry, int rank, const std::vector<int>& alike, const DryRunOptions& options, const Trace& trace);

}  // namespace tessera::plan
