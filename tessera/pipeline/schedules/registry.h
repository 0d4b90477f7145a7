#pragma once

#include <string>
#include <vector>

#include "tessera/pipeline/schedules/refused_request.h"
#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/pipeline/schedules/simulate.h"

namespace tessera::schedules {

/// What a schedule is made from. What its generator does not take has to stay as it is here.
struct Request {
  std::string name = "1f1b";   ///< of a known schedule, or a CSV file (csv.h)
  int ranks = 0;               ///< p; of a file, 0 takes what it holds
  int micro_batches = 0;       ///< m; the same
  int chunks = 0;              ///< v; 0: one, or what the schedule demands
  Costs costs{};               ///< zb_1p, zb_2p and zb_auto are made for them
  int memory_limit = 0;        ///< zb_auto: the most micro-batches whose activations a rank may hold
  double kept = 1;             ///< zb_1p, zb_2p, zb_auto: share of them that a backward of inputs leaves for the gradients of weights
  int group = 0;               ///< interleaved: micro-batches that pass a chunk before the next follows, as Megatron says; 0: PyTorch's rule
  int per_update = 0;          ///< pipedream_2bw: micro-batches that an update sums; 0: the fewest
  bool vertical_sync = false;  ///< pipedream
};

/// A line of the list of schedules. Formulas are of p ranks, m micro-batches, v chunks and rank i, F = B = W, nothing sent.
struct KnownSchedule {
  std::string name{};
  std::string what{};    ///< in a few words
  std::string domain{};  ///< which p, m and v it takes
  std::string bubble{};  ///< idle share of the makespan
  std::string peak{};    ///< activations of rank i, in micro-batches of its whole share
  int chunks = 1;        ///< how many a rank holds; 0: any number
};
const std::vector<KnownSchedule>& known_schedules();
std::vector<std::string> schedule_names();

/// Whether a name is a file's: it ends with .csv.
bool is_schedule_file(const std::string& name);

/// Makes a schedule by its name, or reads the file. Throws RefusedRequest, or ConfigError, for a name that does not exist, for what the schedule does not take
/// (with the rule and the next value that works), and for a file that is wrong or of another size.
Schedule make_schedule(const Request& request);

}  // namespace tessera::schedules
