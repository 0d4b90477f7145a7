#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/meeting/endpoint.h"
#include "tessera/launch/job_end.h"

/// How agents agree. All that they share is one value, the Round, that lives in a store and changes only by compare-and-set, and one NodeReport per node, that
/// only its own agent writes. What to do next is a pure function of both: `decide`. Any agent may propose a change; what the proposals say does not
/// depend on who makes them, so it does not matter whose comes first. Not part of the public surface.
///
///   Joining --(enough nodes)--> Running --(a reason to end)--> Stopping --(all have ended)--> Running, with the next number
///                                  |                               '---------------------> Finished
///                                  '--(all ranks ended with 0)---------------------------> Finished
namespace tessera::launch {

/// One agent and its workers.
struct Node {
  std::string id{};       ///< unique
  std::string address{};  ///< under which other nodes reach it
  int nproc = 1;
  int spare_port = 0;  ///< of the store that it can offer if the rendezvous' own vanishes; 0: none
  int order = -1;      ///< static rendezvous: its place among the nodes

  bool operator==(const Node&) const = default;
};

enum class Phase { Joining, Running, Stopping, Finished };

/// Why a round stops. What is further down wins where several are true.
enum class Cause { None, Join, Lost, Failure, Interrupt };

/// The state of a job.
struct Round {
  Phase phase = Phase::Joining;
  int64_t number = 0;           ///< of the times that workers were started, from 1
  std::string nnodes{};         ///< "MIN:MAX" of the agent that began it
  std::string job{};            ///< drawn by the agent that began it, and kept to its end: what tells it from any other job
  int64_t attempts_before = 0;  ///< that its nodes made in other jobs: folders of attempts are counted on from there
  std::vector<Node> nodes{};    ///< members; once it runs, in the order of their ranks
  std::vector<Node> waiting{};  ///< came later
  int restarts = 0;             ///< used up by failures
  int quorum = 0;               ///< Stopping: members that must come to the store, where those that do not may go on elsewhere
  bool lacks_server = false;    ///< Stopping: of the members one went with the store, and what its ranks came to nobody knows
  comm::Endpoint master{};      ///< the workers' store
  Cause cause = Cause::None;    ///< Stopping
  int signal = 0;               ///< Stopping, Interrupt: the signal to hand on
  std::string reason{};         ///< of the last stop, and of the end: one sentence
  std::string last_lines{};     ///< of the rank that failed
  int exit_code = 0;            ///< Finished

  bool operator==(const Round&) const = default;
};

/// What an agent says of itself and of its workers in round `round`.
struct NodeReport {
  int64_t beat = 0;  ///< counts up while the agent lives
  int64_t round = 0;
  bool running = false;            ///< workers of that round live
  bool done = false;               ///< all ended with 0, before they were asked to end
  bool clean = false;              ///< all ended with 0, asked or not
  bool left = false;               ///< it knows that the job is finished, or gave up before it began
  bool ended_alone = false;        ///< the agent ended them because it heard nothing of the others
  int64_t attempts_before = 0;     ///< in other jobs
  std::vector<Ending> failures{};  ///< before they were asked to end
  std::string record_sentence{};   ///< what its ranks' flight records say of the cause, if they name one

  bool operator==(const NodeReport&) const = default;
};

struct Peer {
  NodeReport record{};
  double silent_s = 0;  ///< since its beat was last seen to change
  bool gone = false;    ///< proven: its host answers that the agent is not there any more
  bool there = true;    ///< it has written to this store, where one took over
};

struct Rules {
  int min_nodes = 1, max_nodes = 1;
  int max_restarts = 0;
  double join_timeout_s = 600;  ///< for the first round to begin
  double last_call_s = 3;       ///< for more than MIN nodes to come
  double dead_after_s = 5;      ///< of silence
  std::string place{};          ///< of the rendezvous, for messages
  std::string run_id{};         ///< of the job, for messages
};

/// What an agent knows of itself.
struct Self {
  Node node{};
  std::string job{};  ///< Round::job, of which it has seen what follows; empty: none yet
  NodeReport record{};
  bool failed = false;                                          ///< a worker failed, and there was time to see why
  bool asked = false;                                           ///< its workers were, to end
  std::optional<int> interrupted{};                             ///< by this signal
  std::optional<std::pair<int64_t, comm::Endpoint>> serving{};  ///< the workers' store for that round is up
  double waited_s = 0;                                          ///< since it first saw the job, or one before that never began
  size_t most_came = 0;                                         ///< nodes at once, meanwhile
  bool began = false;                                           ///< the job has, as far as it saw
  double unchanged_s = 0;                                       ///< since `nodes` last changed
  bool took_part = false;                                       ///< in this job, which it saw before it was finished
};

/// What to do now. One thing at a time: the next look decides again.
struct Step {
  enum class Act {
    Wait,
    Propose,  ///< `proposal` in place of the round that was looked at
    Serve,    ///< a store for the workers of round `number`
    Start,    ///< this node's workers of the round that was looked at
    Stop,     ///< this node's workers, by `signal`
    Forget,   ///< the job before, whose place that of the round has taken (in_another_job)
    Leave,    ///< with `exit_code` and `sentence`
  };
  Act act = Act::Wait;
  Round proposal{};
  int64_t number = 0;
  int signal = 0;
  int exit_code = 0;
  std::string sentence{};
};

Step decide(const Round& round, const std::map<std::string, Peer>& peers, const Self& self, const Rules& rules);

/// What an agent does that has heard nothing for `silence_s`, longer than silence may last: its ranks wait in vain and are ended, and it tries to come back.
/// Those that were asked to end have the time that they were given. What it says as it leaves is up to it.
Step decide_alone(const Self& self, double silence_s, const Rules& rules);

/// What an agent learns of itself from what it sees of its job.
void take_note(Self& self, const Round& round);

/// What an agent that was of another job knows of itself as it comes to that of `round`, which counts its rounds from 1 again.
Self in_another_job(const Self& self, const Round& round);

/// Who is where the store was.
enum class OldPlace {
  Silent,    ///< it may be alive, behind a cut link
  Nobody,    ///< proven: its host says so
  Stranger,  ///< another program, or an agent of another --rdzv-id; it is gone all the same
  NewJob,    ///< an agent that has begun another job of this one's --rdzv-id
};

/// What is found at a node's spare store.
enum class Spare {
  Refused,    ///< its agent is gone
  Silent,     ///< it may be alive
  Undecided,  ///< it lives, and has not found out yet
  Serves,     ///< the job goes on there
  Followed,   ///< its agent has gone to another job
};

/// Members that come to a node's spare store while it has no other itself. They come every few seconds as long as they find no way back: a mark from before
/// that, or one that is not renewed, may be of a member that has found it.
class Visits {
 public:
  /// Those that have come since the look before; of the first look nobody knows since when.
  void note(const std::set<std::string>& ids, double at_s);
  bool comes(const std::string& id, double at_s, const Rules& rules) const;

 private:
  bool looked_ = false;
  std::map<std::string, double> last_s_{};
};

/// What a node knows whose store vanished.
struct Loss {
  Round seen{};  ///< last
  std::string server{}, self{};
  OldPlace old_place = OldPlace::Silent;
  std::map<std::string, Spare> spares{};  ///< by node, as far as it looked
  int came = 1;                           ///< members that come to its own spare store, itself among them
  double lasts_s = 0;
};

struct WayBack {
  enum class To { TakeOver, Join, Follow, Nowhere };
  To to = To::Nowhere;
  int quorum = 0;         ///< TakeOver: as in Round
  std::string node{};     ///< Join: whose spare store
  std::string problem{};  ///< Nowhere
};

/// Where it meets the others again: the first of the members that is left, in the order of ranks, decides for all, and the others do as it did, for what each
/// of them last saw may differ. It takes over, or follows to the job that has the old place where fewer than MIN are left. While members before it that may be
/// alive do not answer, it takes over only with more than half of the nodes, and at least MIN; it follows after `dead_after_s`, where neither they nor those
/// that answer are MIN.
WayBack way_back(const Loss& loss, const Rules& rules);

/// How a job goes on whose store went with the node `server`: from what one of the others, which serves it from then on, last saw. `quorum` as in Round.
Round taken_over(const Round& seen, const std::string& server, int quorum);

/// What one of the others, which comes to that store and finds `there`, has to put in its place: nothing, unless it has seen a later round, or another one of
/// that number, which its workers may be of. Then the job goes on from that, and all end their workers first.
std::optional<Round> caught_up(const Round& there, const Round& seen, const std::string& server);

/// What a job waits for that has too few nodes to begin; empty where it has enough, or has begun.
std::string missing_nodes(const Round& round, const Rules& rules);

/// For what the node waits that has no place in the job; empty where it has one.
std::string missing_place(const Round& round, const std::string& id, const Rules& rules);

/// Of the folder in which the round's output and flight records are kept, on all its nodes.
int64_t folder_number(const Round& round);

/// Where a node's ranks begin, and how many there are in all.
struct Place {
  int node_rank = 0, first_rank = 0, world_size = 0;
};
/// Nothing where the node is no member.
std::optional<Place> place_of(const Round& round, const std::string& id);

/// "ranks 2-3", "rank 2".
std::string ranks_of(const Round& round, const std::string& id);

/// As they are kept in the store.
std::string write_round(const Round& round);
Round read_round(const std::string& text);
std::string write_record(const NodeReport& record);
NodeReport read_record(const std::string& text);

}  // namespace tessera::launch
