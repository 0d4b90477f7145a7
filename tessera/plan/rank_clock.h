#pragma once

#include <array>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "tessera/core/events.h"
#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/plan/collective_time.h"
#include "tessera/plan/machine.h"

namespace tessera::plan {

/// Seconds of a step of one rank, and where they went.
struct RankTime {
  double step = 0;                          ///< from the first thing asked to the last thing done, as if messages of the pipeline took no time
  double computing = 0;                     ///< the device runs operators
  double exposed = 0;                       ///< of what is left: it waits for a collective
  double asked = 0;                         ///< and for the host to ask, which may compute itself
  double copied = 0;                        ///< and for a copy from or to the host
  double collectives = 0;                   ///< of them all, hidden behind operators or not
  std::map<std::string, double> guessed{};  ///< of what is computed: operators that nobody knows the cost of (has_cost), by name

  struct Mean {
    double seconds = 0;
    int count = 0;
    double mean() const { return count == 0 ? 0 : seconds / count; }
  };
  std::map<std::pair<schedules::Kind, int>, Mean> actions;  ///< by kind and stage: what an action took
  double before = 0, after = 0;                             ///< the first action, and the last: what is no part of the pipeline
  double message = 0;                                       ///< the slowest message between stages
};

/// A rank's step as its device would run it: a simulation of discrete events in the order in which the rank asks for them.
///
///   host         asks for one thing after the other, each of which takes it a moment, and waits where it reads a value
///   computation  operators one after the other, each when the host has asked and, behind a wait, when the collective is done
///   collectives  of each group one after the other, from when the host has asked and all operators before are done, beside the computation; so are a
///                group's messages with each other rank, beside those with the others: NCCL has a communicator for each two
///
///   copies       to the device and to the host, those of each way one after the other: out when all operators before are done, in when the host has asked
///   the host     operators of what lies beside the device hold it up; who uses what a copy makes, or overwrites what it reads, waits for it
///
/// Groups whose collectives are on the same links at the same time, those between hosts or those inside one, share them: each has half while both have bytes to
/// send. A collective fills links both ways, a message one. The device is idle where the host is slower than it, which is what makes small layers on many ranks
/// slow; nothing here knows of any technique. Memory is not shared: a collective beside an operator slows neither.
class RankClock {
 public:
  /// `place`: of a group's ranks, by its name. `channels`: groups whose messages go between stages of a pipeline, which take no time here.
  /// `updates_later`: what the host's cores compute they do beside all else (offload.delayed_update), and are done by the end of a step as long as that.
  RankClock(const Machine& machine, std::function<Placement(const std::string& group)> place, std::vector<std::string> channels = {},
            bool updates_later = false);

  void read(const Event& event);
  RankTime time() const;
  double now() const { return end(); }  ///< seconds since the step began: all up to here is asked for and computed

 private:
  void run(const OperatorEvent& ran, const Event& event);
  void copy(const OperatorEvent& ran, const Event& event);
  void run_on_host(const OperatorEvent& ran, const Event& event);
  double copied_for(const Event& event) const;
  void use_logits(const OperatorEvent& made);
  void start(const CollectiveEvent& call, const Event& event);
  void wait(const Event& event);
  void turn(const ActionEvent& action);
  struct Cost {
    double seconds = 0;
    bool known = true;
  };
  const Cost& cost_of(const OperatorEvent& ran);
  double end() const;

  const Machine& machine_;
  std::function<Placement(const std::string&)> place_;
  std::vector<std::string> channels_;
  bool updates_later_;
  double host_ = 0, device_ = 0, in_ = 0, out_ = 0, cores_ = 0;  ///< cores: what they have computed, where that is beside all else
  struct CopyTimes {
    double written = 0, read = 0;  ///< by copies
  };
  std::unordered_map<int64_t, CopyTimes> copies_;  ///< of storages
  using Ways = std::array<double, 2>;              ///< when a link is through with what goes out, and with what comes in
  /// The collectives of a group, or its messages with one other rank, one after the other.
  struct Stream {
    Ways ends{};
    bool across = false;             ///< on the links between hosts
    std::vector<int64_t> flights{};  ///< those begun that nobody has waited for, and some that somebody has
  };
  Ways shared_ends(const Stream& stream, const std::string& op, double begin, const CollectiveCost& cost);
  std::map<std::string, Stream> streams_;
  std::unordered_map<int64_t, Ways> done_;  ///< calls in flight
  double action_began_ = 0;
  bool acted_ = false;
  RankTime time_;
  std::map<std::string, Placement> places_;
  std::map<std::tuple<std::string, double, bool, int64_t, std::vector<int64_t>>, Cost> known_;  ///< of operators that came before
};

}  // namespace tessera::plan
