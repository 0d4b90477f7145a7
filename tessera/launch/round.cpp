#include "tessera/launch/round.h"

#include <algorithm>
#include <ranges>
#include <set>
#include <utility>

#include <fmt/ranges.h>
#include <signal.h>

#include "tessera/core/error.h"

// A decision is made from one look at the shared value and put in its place by compare-and-set: a look that was out of date changes nothing, and its agent
// looks again. So agents need no leader. Two things fall to one node all the same: the workers' store is served by whoever begins a round, who alone knows
// its port, and the end of a round is judged by the first survivor, once no worker runs any more. Old workers go before anything else: nothing may run that
// belongs to no round.
// A number belongs to one round alone, or workers of two rounds would meet in one. Where the store is lost, whoever takes over may have seen less than others,
// some of whose workers run already; so these put in what they have seen when they come (caught_up), and the next number is above all of them.
// An endpoint may come to another job, which counts from 1 again: an agent that is led there ends the workers of its own one first, and forgets that one, or
// their ends would count in it. One of all decides whether they go there (way_back), since what each last saw may differ, and one that counts nodes which are
// not there would keep all of them from a job that could begin.
// What may go on is decided for the worst case: nodes that cannot be reached may have met elsewhere, so a minority that cannot prove the others gone ends
// rather than be a second job under one name.

namespace tessera::launch {
namespace {

using Act = Step::Act;

constexpr int failed = 1;
constexpr int bad_input = 2;

/// From one visit of a member to the next, which asks others in between that may not answer, and pauses.
constexpr double visit_s = 8;

bool contains(const std::vector<Node>& nodes, const std::string& id) {
  return std::ranges::any_of(nodes, [&](const Node& node) { return node.id == id; });
}

std::vector<Node> without(const std::vector<Node>& nodes, const std::string& id) {
  std::vector<Node> rest = nodes;
  std::erase_if(rest, [&](const Node& node) { return node.id == id; });
  return rest;
}

/// Static rendezvous: whose place `order` is.
auto holder_of(const std::vector<Node>& nodes, int order) {
  return std::ranges::find_if(nodes, [&](const Node& node) { return node.order >= 0 && node.order == order; });
}

/// As far as there is room, and in a static rendezvous only where a place is free.
void take_in(Round& next, const std::vector<Node>& waiting, const Rules& rules) {
  next.waiting.clear();
  for (const Node& node : waiting) {
    const bool fits = static_cast<int>(next.nodes.size()) < rules.max_nodes && holder_of(next.nodes, node.order) == next.nodes.end();
    (fits ? next.nodes : next.waiting).push_back(node);
  }
}

/// Whether a job has nodes enough without those that are gone, or was asked to end, which no other job is.
bool outlives(const Round& seen, const std::set<std::string>& gone, const Rules& rules) {
  const auto is_gone = [&](const Node& node) { return gone.contains(node.id); };
  Round next = seen;
  std::erase_if(next.nodes, is_gone);
  std::vector<Node> waiting = seen.waiting;
  std::erase_if(waiting, is_gone);
  take_in(next, waiting, rules);
  return seen.cause == Cause::Interrupt || static_cast<int>(next.nodes.size()) >= rules.min_nodes;
}

/// More than half.
int majority(const std::vector<Node>& nodes) { return static_cast<int>(nodes.size()) / 2 + 1; }

std::string count(size_t n, const char* what) { return detail::concat(n, ' ', what, n == 1 ? "" : "s"); }

/// One look at a job, by one of its agents.
class Look {
 public:
  Look(const Round& round, const std::map<std::string, Peer>& peers, const Self& self, const Rules& rules)
      : round_(round), peers_(peers), self_(self), rules_(rules), member_(contains(round.nodes, self.node.id)), waits_(contains(round.waiting, self.node.id)) {}

  Step step() const {
    if (was_of_another_job()) return leave_the_old_job();
    if (has_old_workers()) return stop(SIGKILL);
    switch (round_.phase) {
      case Phase::Joining:
        return joining();
      case Phase::Running:
        return member_ ? running() : outside();
      case Phase::Stopping:
        return member_ ? stopping() : outside();
      case Phase::Finished:
        return finished();
    }
    return {};
  }

 private:
  static Step wait() { return {}; }
  static Step stop(int signal) { return {.act = Act::Stop, .signal = signal}; }
  static Step leave(int code, std::string sentence) { return {.act = Act::Leave, .exit_code = code, .sentence = std::move(sentence)}; }
  static Step propose(Round proposal) { return {.act = Act::Propose, .proposal = std::move(proposal)}; }

  const NodeReport* record_of(const std::string& id) const {
    if (id == self_.node.id) return &self_.record;
    const auto peer = peers_.find(id);
    return peer == peers_.end() ? nullptr : &peer->second.record;
  }

  bool was_of_another_job() const { return !self_.job.empty() && self_.job != round_.job; }

  bool alive(const Node& node) const {
    const auto peer = peers_.find(node.id);
    return node.id == self_.node.id || peer == peers_.end() || !(peer->second.gone || peer->second.record.left || peer->second.silent_s > rules_.dead_after_s);
  }
  std::vector<Node> alive(const std::vector<Node>& nodes) const {
    std::vector<Node> found;
    std::ranges::copy_if(nodes, std::back_inserter(found), [&](const Node& node) { return alive(node); });
    return found;
  }
  /// Since the list was last changed, in which a node stands for a while after its agent has ended.
  bool has_beaten(const Node& node) const {
    const auto peer = peers_.find(node.id);
    return peer == peers_.end() || peer->second.silent_s < self_.unchanged_s;
  }
  std::vector<Node> lost() const {
    std::vector<Node> found;
    std::ranges::copy_if(round_.nodes, std::back_inserter(found), [&](const Node& node) { return !alive(node); });
    return found;
  }

  std::string describe_lost() const {
    std::vector<std::string> names;
    for (const Node& node : lost()) {
      const auto peer = peers_.find(node.id);
      names.push_back(detail::concat("node ", node.id, " (", node.address, ", ", ranks_of(round_, node.id), ") vanished: ",
                                     peer->second.gone ? std::string("its agent is gone") : detail::concat("no sign of life for ", rules_.dead_after_s, " s")));
    }
    return fmt::format("{}", fmt::join(names, ", "));
  }

  /// Workers of a round that went on without us.
  bool has_old_workers() const {
    const bool theirs = member_ && round_.phase != Phase::Joining && round_.phase != Phase::Finished && self_.record.round == round_.number;
    return self_.record.running && !theirs;
  }

  /// Who was asked to end lets its workers save as long as they may, and has no part in the other job.
  Step leave_the_old_job() const {
    if (self_.interrupted && self_.record.running) return wait();
    if (self_.interrupted && self_.record.round > 0) return self_.record.clean ? leave(0, "") : leave(failed, all_have_ended(*self_.interrupted));
    return self_.record.running ? stop(SIGKILL) : Step{.act = Act::Forget};
  }

  static std::string all_have_ended(int signal) { return detail::concat("interrupted by ", describe_signal(signal), "; all ranks have ended"); }

  /// Why this agent can never be of the job; empty where it can.
  std::string refusal() const {
    if (round_.nnodes != nnodes()) {
      return detail::concat("--nnodes = ", nnodes(), ": the job at ", rules_.place, " was begun with ", round_.nnodes,
                            "; give all its agents the same, or this one another --rdzv-endpoint");
    }
    if (!member_ && rules_.max_nodes == 1 && !round_.nodes.empty()) {
      return detail::concat("--nnodes = ", nnodes(), ": the job at ", rules_.place, " has its one node already; give this one another --rdzv-endpoint, ",
                            "or start it once that one has ended");
    }
    return "";
  }

  Step joining() const {
    Round proposal = round_;
    if (self_.interrupted) return leave_early();
    if (std::string reason = refusal(); !reason.empty()) return leave(bad_input, std::move(reason));
    if (!member_ && !waits_) {
      const auto taken = holder_of(round_.nodes, self_.node.order);
      if (taken != round_.nodes.end()) {
        if (!has_beaten(*taken)) return wait();
        return leave(bad_input, detail::concat("--node-rank = ", self_.node.order, ": node ", taken->id, " has it already; give each node its own"));
      }
      auto& list = static_cast<int>(round_.nodes.size()) < rules_.max_nodes ? proposal.nodes : proposal.waiting;
      list.push_back(self_.node);
      return propose(proposal);
    }
    proposal.nodes = alive(round_.nodes);
    take_in(proposal, alive(round_.waiting), rules_);
    if (proposal != round_) return propose(proposal);
    if (!member_) return wait();

    const int size = static_cast<int>(round_.nodes.size());
    const bool complete = size >= rules_.max_nodes || (size >= rules_.min_nodes && self_.unchanged_s >= rules_.last_call_s);
    if (!complete) return self_.waited_s > rules_.join_timeout_s ? leave(failed, nobody_came()) : wait();
    if (!std::ranges::all_of(round_.nodes, [&](const Node& node) { return has_beaten(node); })) return wait();
    // By address, so that a job that is started anew places its ranks alike.
    std::ranges::stable_sort(proposal.nodes, {}, [](const Node& node) { return std::pair(node.order, node.address); });
    return proposal.nodes.front().id == self_.node.id ? begin(std::move(proposal)) : wait();
  }

  std::string nobody_came() const {
    return detail::concat(count(self_.most_came, "node"), " came to ", rules_.place, " within ", static_cast<int64_t>(self_.waited_s),
                          " s, --nnodes = ", nnodes(), " asks for at least ", rules_.min_nodes,
                          "; start the others, or give them more time with --rdzv-conf join_timeout=SECONDS");
  }

  /// A node that is no member waits until the round stops.
  Step outside() const {
    if (self_.interrupted) return leave_early();
    if (std::string reason = refusal(); !reason.empty()) return leave(bad_input, std::move(reason));
    if (waits_) return wait();
    Round proposal = round_;
    proposal.waiting.push_back(self_.node);
    return propose(proposal);
  }

  Step leave_early() const {
    if (!member_ && !waits_) return leave(failed, detail::concat("interrupted by ", describe_signal(*self_.interrupted), " while waiting for other nodes"));
    Round proposal = round_;
    proposal.nodes = without(round_.nodes, self_.node.id);
    proposal.waiting = without(round_.waiting, self_.node.id);
    return propose(proposal);
  }

  Step running() const {
    if (self_.record.round < round_.number && !self_.interrupted) return {.act = Act::Start};
    Round proposal = round_;
    proposal.phase = Phase::Stopping;
    proposal.last_lines.clear();  // of the attempt before this one, shown as this one began
    if (self_.interrupted) return propose(interrupted(std::move(proposal)));
    if (self_.failed) {
      proposal.cause = Cause::Failure;
      proposal.reason = judge(self_.record.failures).sentence;
      return propose(proposal);
    }
    if (!lost().empty()) {
      proposal.cause = Cause::Lost;
      proposal.reason = describe_lost();
      return propose(proposal);
    }
    if (ended_by_itself()) {
      proposal.cause = Cause::Lost;
      proposal.reason = describe_ended_alone(self_.node);
      return propose(proposal);
    }
    if (all_members([](const NodeReport& record) { return record.done; })) return propose(end(std::move(proposal), 0, ""));
    const std::vector<Node> joiners = alive(round_.waiting);
    const bool finishing = any_member([](const NodeReport& record) { return record.done; });
    if (!joiners.empty() && static_cast<int>(round_.nodes.size()) < rules_.max_nodes && !finishing) {
      proposal.cause = Cause::Join;
      proposal.reason = detail::concat("node ", joiners.front().id, " (", joiners.front().address, ") joins");
      return propose(proposal);
    }
    if (joiners.size() < round_.waiting.size()) {
      proposal = round_;
      proposal.waiting = joiners;
      return propose(proposal);
    }
    return wait();
  }

  /// As it does where nobody answers for long, and then the others answer again, who know of nothing.
  bool ended_by_itself() const {
    const NodeReport& record = self_.record;
    return record.round == round_.number && !record.running && !record.done && record.failures.empty();
  }

  std::string describe_ended_alone(const Node& node) const {
    return detail::concat("node ", node.id, " (", node.address, ", ", ranks_of(round_, node.id), ") ended its ranks while the rendezvous did not answer");
  }

  Round interrupted(Round proposal) const {
    proposal.cause = Cause::Interrupt;
    proposal.signal = *self_.interrupted;
    return proposal;
  }

  bool is_current(const NodeReport* record) const { return record != nullptr && record->round == round_.number; }
  /// Not where one went with the store, of which nobody knows.
  template <class Predicate>
  bool all_members(Predicate predicate) const {
    return !round_.lacks_server &&
           std::ranges::all_of(round_.nodes, [&](const Node& node) { return is_current(record_of(node.id)) && predicate(*record_of(node.id)); });
  }
  template <class Predicate>
  bool any_member(Predicate predicate) const {
    return std::ranges::any_of(round_.nodes, [&](const Node& node) { return is_current(record_of(node.id)) && predicate(*record_of(node.id)); });
  }

  Step stopping() const {
    if (self_.interrupted && round_.cause != Cause::Interrupt) return propose(interrupted(round_));
    if (self_.record.running) return stop(round_.cause == Cause::Interrupt ? round_.signal : SIGTERM);
    const std::vector<Node> survivors = alive(round_.nodes);
    const bool ended = std::ranges::none_of(survivors, [&](const Node& node) { return is_current(record_of(node.id)) && record_of(node.id)->running; });
    return ended && survivors.front().id == self_.node.id ? conclude(survivors) : wait();
  }

  /// All workers have ended: whether and with whom the job goes on.
  Step conclude(const std::vector<Node>& survivors) const {
    const bool some_lost = survivors.size() < round_.nodes.size();
    const auto [job_end, last_lines] = explain();
    if (all_members([](const NodeReport& record) { return record.done; })) return propose(end(round_, 0, ""));
    if (job_end.exit_code == bad_input) return propose(end(round_, bad_input, job_end.sentence));
    if (round_.cause == Cause::Interrupt) {
      if (job_end.exit_code != 0) return propose(end(round_, failed, job_end.sentence));
      if (all_members([](const NodeReport& record) { return record.clean; })) return propose(end(round_, 0, ""));
      return propose(end(round_, failed, all_have_ended(round_.signal)));
    }

    Round next = round_;
    next.last_lines.clear();
    const auto alone = std::ranges::find_if(round_.nodes, [&](const Node& node) { return is_current(record_of(node.id)) && record_of(node.id)->ended_alone; });
    if (alone != round_.nodes.end() && round_.cause == Cause::Failure) next.reason = describe_ended_alone(*alone);
    if (some_lost) next.reason = describe_lost();
    // Ranks that lose a node, or others that their agent has ended, fail in all kinds of ways: that is no doing of theirs, and uses up no restart.
    const bool lost_peers = some_lost || alone != round_.nodes.end() || round_.cause == Cause::Lost || round_.cause == Cause::Join;
    if (job_end.exit_code != 0 && !lost_peers) {
      next.last_lines = last_lines;
      const std::string spent = rules_.max_restarts > 0 ? detail::concat("; restarted ", count(round_.restarts, "time"), " before") : "";
      if (round_.restarts >= rules_.max_restarts) return propose(end(next, failed, job_end.sentence + spent));
      ++next.restarts;
      next.reason = detail::concat(job_end.sentence, "; restart ", next.restarts, " of ", rules_.max_restarts);
    }
    next.nodes = survivors;
    take_in(next, alive(round_.waiting), rules_);
    std::ranges::stable_sort(next.nodes, {}, &Node::order);  // of a static rendezvous, whose ranks are given; elsewhere all orders are one
    if (const std::vector<Node> missing = lost(); may_go_on_without_us(missing)) {
      return propose(end(next, failed,
                         detail::concat(next.reason, "; ", count(survivors.size(), "node"), " of ", round_.nodes.size(),
                                        " cannot tell whether the others go on without ", survivors.size() == 1 ? "it" : "them")));
    }
    if (has_come(survivors) < round_.quorum) return wait();
    if (static_cast<int>(next.nodes.size()) < rules_.min_nodes) {
      return propose(
          end(next, failed,
              detail::concat(next.reason, "; ", count(next.nodes.size(), "node"), " left, --nnodes = ", nnodes(), " asks for at least ", rules_.min_nodes)));
    }
    return begin(std::move(next));
  }

  /// Behind a cut link, more than half of the nodes, and at least MIN, meet again elsewhere (Rendezvous).
  bool may_go_on_without_us(const std::vector<Node>& missing) const {
    if (static_cast<int>(round_.nodes.size() - missing.size()) < round_.quorum) return true;
    const bool proven = std::ranges::all_of(missing, [&](const Node& node) { return peers_.at(node.id).gone; });
    return !proven && 2 * missing.size() > round_.nodes.size() && static_cast<int>(missing.size()) >= rules_.min_nodes;
  }

  /// How many of them are of this store, and of no other one any more.
  int64_t has_come(const std::vector<Node>& nodes) const {
    return std::ranges::count_if(nodes, [&](const Node& node) {
      const auto peer = peers_.find(node.id);
      return peer == peers_.end() || peer->second.there;
    });
  }

  struct Explanation {
    JobEnd job_end{};
    std::string last_lines{};
  };
  Explanation explain() const {
    std::vector<Ending> failures;
    std::string record_sentence;
    for (const Node& node : round_.nodes) {
      const NodeReport* record = record_of(node.id);
      if (!is_current(record)) continue;
      failures.insert(failures.end(), record->failures.begin(), record->failures.end());
      if (record_sentence.empty()) record_sentence = record->record_sentence;
    }
    Explanation explanation{judge(failures)};
    if (explanation.job_end.consequence && !record_sentence.empty()) explanation.job_end.sentence = record_sentence;
    const auto cause = std::ranges::find(failures, explanation.job_end.rank, &Ending::rank);
    if (cause != failures.end() && !cause->is_consequence() && !cause->last_lines.empty()) {
      explanation.last_lines = detail::concat("last lines of rank ", cause->rank, ":\n", cause->last_lines);
    }
    return explanation;
  }

  /// The next round, by the agent that serves its workers' store.
  Step begin(Round next) const {
    next.phase = Phase::Running;
    ++next.number;
    if (!self_.serving || self_.serving->first != next.number) return {.act = Act::Serve, .number = next.number};
    next.master = self_.serving->second;
    next.cause = Cause::None;
    next.signal = 0;
    next.quorum = 0;
    next.lacks_server = false;
    for (const Node& node : next.nodes) {
      if (const NodeReport* record = record_of(node.id)) next.attempts_before = std::max(next.attempts_before, record->attempts_before);
    }
    return propose(std::move(next));
  }

  static Round end(Round round, int exit_code, std::string sentence) {
    round.phase = Phase::Finished;
    round.exit_code = exit_code;
    round.reason = std::move(sentence);
    return round;
  }

  Step finished() const {
    if (member_ || self_.record.round > 0) return leave(round_.exit_code, round_.reason);
    if (self_.took_part) return left_out();
    if (self_.interrupted) return leave(failed, detail::concat("interrupted by ", describe_signal(*self_.interrupted), " while waiting for other nodes"));
    if (self_.waited_s <= rules_.join_timeout_s) return wait();  // an earlier job of that name is about to leave
    return leave(failed, detail::concat("the job at ", rules_.place, " has ended; waited ", static_cast<int64_t>(self_.waited_s), " s for its store to close"));
  }

  /// It waited for a place to the end. Who sees a job of MIN:MAX nodes through has done its part as a spare; with one number of nodes, none was to come.
  Step left_out() const {
    const int code = round_.exit_code == 0 && rules_.min_nodes == rules_.max_nodes ? failed : round_.exit_code;
    return leave(
        code, detail::concat("this node ran nothing: the job at ", rules_.place, " (--rdzv-id ", rules_.run_id, "), in which it waited for a place, has ended",
                             round_.reason.empty() ? "" : ": ", round_.reason, "; a job of its own needs another --rdzv-endpoint"));
  }

  std::string nnodes() const { return detail::concat(rules_.min_nodes, ':', rules_.max_nodes); }

  const Round& round_;
  const std::map<std::string, Peer>& peers_;
  const Self& self_;
  const Rules& rules_;
  bool member_, waits_;
};

}  // namespace

Step decide(const Round& round, const std::map<std::string, Peer>& peers, const Self& self, const Rules& rules) {
  return Look(round, peers, self, rules).step();
}

Step decide_alone(const Self& self, double silence_s, const Rules& rules) {
  if (self.record.running) return self.asked ? Step{} : Step{.act = Act::Stop, .signal = SIGTERM};
  if (self.interrupted) return {.act = Act::Leave, .exit_code = self.record.clean ? 0 : failed};
  return silence_s > rules.join_timeout_s ? Step{.act = Act::Leave, .exit_code = failed} : Step{};
}

void take_note(Self& self, const Round& round) {
  if (self.job.empty()) self.job = round.job;
  if (self.job != round.job) return;
  self.took_part = self.took_part || round.phase != Phase::Finished;
  self.began = self.began || round.number > 0;
  self.most_came = std::max(self.most_came, round.nodes.size());
}

Self in_another_job(const Self& self, const Round& round) {
  Self next{.node = self.node, .job = round.job, .interrupted = self.interrupted};
  next.record.attempts_before = self.record.attempts_before + self.record.round;
  if (!self.began) {  // it has waited for this one as well
    next.waited_s = self.waited_s;
    next.most_came = self.most_came;
  }
  take_note(next, round);
  return next;
}

void Visits::note(const std::set<std::string>& ids, double at_s) {
  if (!std::exchange(looked_, true)) return;
  for (const std::string& id : ids) last_s_[id] = at_s;
}

bool Visits::comes(const std::string& id, double at_s, const Rules& rules) const {
  const auto last = last_s_.find(id);
  return last != last_s_.end() && at_s - last->second <= visit_s + rules.dead_after_s;
}

WayBack way_back(const Loss& loss, const Rules& rules) {
  using To = WayBack::To;
  const auto& nodes = loss.seen.nodes;
  const bool new_job = loss.old_place == OldPlace::NewJob;
  bool proven = loss.old_place != OldPlace::Silent, leads = false;
  for (const Node& node : nodes) {
    if (node.id == loss.server) continue;
    leads = node.id == loss.self;
    if (leads) break;
    switch (loss.spares.at(node.id)) {
      case Spare::Refused:
        break;
      case Spare::Silent:
        proven = false;  // it may have taken over where we do not reach it
        break;
      case Spare::Undecided:
        return {.problem = detail::concat("node ", node.id, " has not taken over")};
      case Spare::Serves:
        return {.to = To::Join, .node = node.id};
      case Spare::Followed:
        if (new_job) return {.to = To::Follow};
        return {.problem = detail::concat("node ", node.id, " has gone to another job there")};
    }
  }
  if (!leads) {
    if (new_job || loss.old_place == OldPlace::Stranger) return {.to = To::Follow};
    return {.problem = "this node is no member, and no other one is left"};
  }

  std::set<std::string> gone{loss.server}, silent;
  for (const auto& [id, spare] : loss.spares) {
    if (spare == Spare::Serves) return {.to = To::Join, .node = id};  // while this one was silent
    if (spare == Spare::Silent) silent.insert(id);
    if (spare == Spare::Refused || spare == Spare::Followed) gone.insert(id);
  }
  if (new_job && !outlives(loss.seen, gone, rules)) return {.to = To::Follow};
  const int all = static_cast<int>(nodes.size());
  if (proven) return {.to = To::TakeOver};
  if (2 * loss.came > all && loss.came >= rules.min_nodes) return {.to = To::TakeOver, .quorum = majority(nodes)};  // those who came may have gone back
  gone.insert(silent.begin(), silent.end());
  const bool goes_on_there = static_cast<int>(silent.size()) >= rules.min_nodes;
  if (new_job && loss.lasts_s > rules.dead_after_s && !goes_on_there && !outlives(loss.seen, gone, rules)) return {.to = To::Follow};
  return {.problem = detail::concat("its host does not answer, and ", loss.came, " of ", all, " nodes cannot tell whether the others go on without them")};
}

Round taken_over(const Round& seen, const std::string& server, int quorum) {
  Round next = seen;
  next.nodes = without(seen.nodes, server);
  next.lacks_server = next.nodes.size() < seen.nodes.size();
  next.phase = Phase::Stopping;
  if (seen.cause != Cause::Interrupt) next.cause = Cause::Lost;  // a job that was asked to end begins no other round
  next.quorum = std::max(quorum, seen.quorum);                   // who took over before may have gone while it waited for those
  next.reason = detail::concat("node ", server, ", which served the rendezvous, vanished");
  return next;
}

std::optional<Round> caught_up(const Round& there, const Round& seen, const std::string& server) {
  // Two rounds of one number are told apart by their workers' store, which is a new one each time.
  const bool later = there.number > seen.number || (there.number == seen.number && there.master == seen.master);
  if (later || there.phase == Phase::Finished || there.job != seen.job) return std::nullopt;
  return taken_over(seen, server, there.quorum > 0 ? majority(seen.nodes) : 0);
}

std::string missing_nodes(const Round& round, const Rules& rules) {
  const auto came = static_cast<int>(round.nodes.size());
  if (round.phase != Phase::Joining || came >= rules.min_nodes) return "";
  return detail::concat(came, " of at least ", rules.min_nodes, came == 1 ? " nodes has" : " nodes have", " come; waiting up to ",
                        static_cast<int64_t>(rules.join_timeout_s), " s for the others (--rdzv-conf join_timeout)");
}

std::string missing_place(const Round& round, const std::string& id, const Rules& rules) {
  if (!contains(round.waiting, id) || round.phase == Phase::Finished) return "";
  return detail::concat("waiting for a place in the job at ", rules.place, " (--rdzv-id ", rules.run_id, "), which has ", count(round.nodes.size(), "node"),
                        " of --nnodes = ", round.nnodes, "; a job of its own needs another --rdzv-endpoint");
}

int64_t folder_number(const Round& round) { return round.attempts_before + round.number - 1; }

std::optional<Place> place_of(const Round& round, const std::string& id) {
  std::optional<Place> place;
  int first_rank = 0;
  for (size_t i = 0; i < round.nodes.size(); ++i) {
    if (round.nodes[i].id == id) place = Place{static_cast<int>(i), first_rank, 0};
    first_rank += round.nodes[i].nproc;
  }
  if (place) place->world_size = first_rank;
  return place;
}

std::string ranks_of(const Round& round, const std::string& id) {
  const auto place = place_of(round, id);
  if (!place) return "no ranks";
  const int nproc = round.nodes[place->node_rank].nproc;
  return nproc == 1 ? detail::concat("rank ", place->first_rank) : detail::concat("ranks ", place->first_rank, '-', place->first_rank + nproc - 1);
}

}  // namespace tessera::launch
