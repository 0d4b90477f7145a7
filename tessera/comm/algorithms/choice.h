#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tessera/comm/algorithms/message_plan.h"
#include "tessera/comm/algorithms/table.h"
#include "tessera/comm/world.h"

namespace tessera::comm {

struct Call;

/// Which algorithm carries out which call: what comm.algorithm and comm.table say.
///
///   auto                      the table's best for op, backend, ranks and bytes; without a table the engine's own
///   ring                      for the ops that have it; others take the engine's own. "engine" is the engine's own for all
///   all_reduce=ring,...       for these ops; others as with auto
///
/// Plans serve CPU tensors. What a plan cannot do stays with the engine: other devices, all_to_all with uneven rows by bruck, a group of one.
class AlgorithmChoice {
 public:
  /// Reads the options' algorithm, and their rows or else their table's file. Throws ConfigError (names, file and line) and touches no network.
  explicit AlgorithmChoice(const WorldOptions& options);

  /// Whether every call goes to the engine.
  bool engine_only() const { return fixed_.empty() && everywhere_.empty() && rows_.empty(); }
  /// Whether a plan may need to know who lives where.
  bool needs_hosts() const;

  /// The plan for a call, or null for the engine's own. `backend`: the engine's name in rows of a table; `hosts` as in MessagePlanRequest.
  std::optional<MessagePlanRequest> plan_for(const Call& call, const GroupInfo& group, const std::string& backend, const std::vector<int>& hosts = {}) const;

  const std::vector<TableRow>& rows() const { return rows_; }

 private:
  std::string algorithm_for(const Call& call, const GroupInfo& group, const std::string& backend, int64_t bytes) const;

  std::string everywhere_;                    // one name for all ops that have it
  std::map<std::string, std::string> fixed_;  // by op
  std::vector<TableRow> rows_;                // winners
};

/// Refuses what AlgorithmChoice refuses: before any process group is made.
void check_choice(const WorldOptions& options);

/// The options with their table read into `rows`: the file may change or go while the world lasts.
WorldOptions with_table_read(WorldOptions options);

/// Segments for a message of so many bytes: pieces of 128 KiB, at most 32, so that a chain or a tree is filled and no piece is too small for its latency.
int segments_for(int64_t bytes);

/// Bytes of scratch that a call takes in a world of these options (engine.h says when): the plan's, or the engine's. For dry worlds; all ranks on one host.
class ScratchOf {
 public:
  explicit ScratchOf(const WorldOptions& options);
  int64_t operator()(const Call& call, const GroupInfo& group) const;

 private:
  std::string backend_, name_;
  AlgorithmChoice choice_;
};

/// What a checkpoint keeps of a world's choice, because it orders the sums: {"algorithm": comm.algorithm, "rows": the table's rows in use}.
nlohmann::json recorded_choice(const WorldOptions& options);

/// Options with the choice that recorded_choice wrote. Throws ConfigError naming `source` where it is damaged.
WorldOptions with_recorded_choice(WorldOptions options, const nlohmann::json& recorded, const std::string& source);

}  // namespace tessera::comm
