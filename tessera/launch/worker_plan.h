#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/launch/round.h"
#include "tessera/launch/workers.h"

/// What each worker of a round is started with: values, made from the round. Not part of the public surface.
namespace tessera::launch {

/// Which streams of which local rank, as torchrun writes them: "3" both of all, "0:1,1:2" standard output of 0 and standard error of 1.
class StreamChoice {
 public:
  StreamChoice() = default;
  /// Throws ConfigError that names `knob`.
  StreamChoice(const std::string& text, const std::string& knob);
  bool out(int local_rank) const { return (bits(local_rank) & 1) != 0; }
  bool err(int local_rank) const { return (bits(local_rank) & 2) != 0; }

 private:
  int bits(int local_rank) const;
  int all_ = 0;
  std::map<int, int> some_{};
};

enum class Prefix { None, Role, Rank };  ///< "[default0]:" as torchrun's, "[rank 3] "

struct OutputOptions {
  std::string folder{};      ///< of this run's logs: FOLDER/attempt_0/RANK/stdout.log; empty: none are kept
  StreamChoice redirects{};  ///< to files only
  StreamChoice tee{};        ///< to files and, with a prefix, to the console
  bool keep_all = false;     ///< every stream to files, and to the console as ever
  std::set<int> shown{};     ///< local ranks that reach the console; empty: all
  Prefix prefix = Prefix::None;
  bool capture_errors = false;  ///< so that a failed rank's last lines can be shown again
};

struct JobOptions {
  std::vector<std::string> command{};
  Variables variables{};  ///< what workers inherit, and what is set for all of them
  std::string run_id = "none";
  std::string role = "default";
  int max_restarts = 0;
  OutputOptions output{};
};

OutputPlan plan_output(const OutputOptions& options, const std::string& role, int attempt, int rank, int local_rank);

/// The workers of node `id`, which must be a member. `record_folder` is set as TESSERA_RECORD_DIR unless it is empty.
std::vector<WorkerPlan> plan_workers(const JobOptions& job, const Round& round, const std::string& id, const std::string& record_folder);

}  // namespace tessera::launch
