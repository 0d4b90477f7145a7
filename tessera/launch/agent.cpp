#include "tessera/launch/agent.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <utility>

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/comm/flight_record/flight_record.h"
#include "tessera/comm/meeting/stores.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/launch/link.h"
#include "tessera/launch/record_findings.h"
#include "tessera/launch/signals.h"
#include "tessera/launch/watch.h"

// The loop looks at its workers, at signals and at what the link last brought, asks a pure function (round.h) what to do, does that one thing, and looks again.
// It never waits for the network: the link has a thread that may be stuck, and is then left behind for another. Silence is counted only while this process ran,
// or waking a suspended machine would make everyone else seem dead.

namespace tessera::launch {
namespace {

using Clock = std::chrono::steady_clock;
using Act = Step::Act;

Clock::duration duration(double seconds) { return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)); }
std::chrono::milliseconds milliseconds(double seconds) { return std::chrono::milliseconds(std::lround(seconds * 1000)); }

/// Connecting takes some seconds where hosts do not answer; requests in between may never end.
constexpr double most_s_to_connect = 30;

/// Of waiting for other nodes or for their place, after which that is said.
constexpr double tell_after_s = 5;

/// Within which signals are one request: who ends all processes of a job may reach a launcher more than once.
constexpr auto one_request = std::chrono::seconds(1);

/// Time that passed while we ran: a pause of ours (SIGSTOP, a suspended machine) is no silence of others.
class PatientClock {
 public:
  void tick() {
    const Clock::time_point now = Clock::now();
    elapsed_ += std::min<Clock::duration>(now - std::exchange(last_, now), most_per_tick);
  }
  void restart() { elapsed_ = {}; }
  double elapsed_s() const { return std::chrono::duration<double>(elapsed_).count(); }

 private:
  static constexpr auto most_per_tick = std::chrono::milliseconds(500);
  Clock::time_point last_ = Clock::now();
  Clock::duration elapsed_{};
};

class Agent {
 public:
  explicit Agent(const AgentOptions& options)
      : options_(options), rules_(options.rendezvous.rules), rendezvous_(std::make_shared<Rendezvous>(options.rendezvous)) {
    self_.node = rendezvous_->node();
    rules_.place = rendezvous_->place();
    rules_.run_id = options.rendezvous.run_id;
    connect();
  }

  int run() {
    while (true) {
      const auto signal = signals_.wait(wake_, milliseconds(options_.monitor_s));
      if (signal) interrupt(*signal);
      look_after_workers();
      link_->post(self_.record);
      look_at_link();
      const Step step = next_step();
      if (step.act == Act::Leave) return leave(step);
      execute(step);
    }
  }

 private:
  void connect() {
    link_.reset();
    link_ = std::make_unique<Link>([rendezvous = rendezvous_] { return rendezvous->connect(); }, self_.record, milliseconds(options_.heartbeat_s), wake_);
    exchanges_ = tries_ = 0;
    view_.reset();
    stuck_.restart();
  }

  /// Our own ranks at once; the others hear of it from the next proposal. Whoever asks again, by the same signal, does not want to
  /// wait for the grace time; schedulers go from one signal to the next.
  void interrupt(int signal) {
    const Clock::time_point now = Clock::now();
    const bool again = self_.interrupted.has_value();
    if (again && (signal != *self_.interrupted || now - interrupted_at_ <= one_request)) return;
    if (!again) {
      self_.interrupted = signal;
      interrupted_at_ = now;
    }
    if (watch_) watch_->stop(signal, again ? Clock::duration{} : duration(options_.grace_s), now);
  }

  void look_after_workers() {
    if (!watch_) return;
    const Clock::time_point now = Clock::now();
    const bool ran = self_.record.running;
    watch_->poll(now);
    self_.failed = watch_->failed(now);
    self_.asked = watch_->asked();
    self_.record.done = watch_->done();
    self_.record.clean = watch_->clean();
    self_.record.failures = watch_->failures();
    self_.record.running = watch_->running();
    if (ran && !self_.record.running && !self_.record.clean && !asked_to_save()) explain();
  }

  /// The ranks were healthy, and end because somebody wants them to.
  bool asked_to_save() const { return self_.interrupted || (view_ && (view_->round.cause == Cause::Interrupt || view_->round.cause == Cause::Join)); }

  void explain() {
    const RecordFindings findings = explain_records(record_folder_);
    if (findings.sentence.empty()) return;
    std::fprintf(stderr, "%s", findings.table.c_str());
    if (options_.talkative)
      std::fprintf(stderr, "flight records: %s\n", options_.keeps_records ? record_folder_.c_str() : "gone with this job; --log-dir keeps them");
    if (findings.names_cause) self_.record.record_sentence = findings.sentence;
  }

  void look_at_link() {
    silence_.tick();
    waited_.tick();
    stuck_.tick();
    Link::Seen seen = link_->look();
    problem_ = std::move(seen.problem);
    told_ = seen.current;
    connecting_ = seen.connecting;
    if (seen.tries != std::exchange(tries_, seen.tries)) stuck_.restart();
    if (seen.exchanges == exchanges_) return;
    exchanges_ = seen.exchanges;
    silence_.restart();
    view_ = std::move(seen.view);
    take_note(self_, view_->round);
    self_.node = rendezvous_->node();
    self_.unchanged_s = view_->unchanged_s;
    rendezvous_->note(view_->round);
    say_news();
  }

  void say_news() {
    const std::string place = rendezvous_->place();
    if (options_.talkative && rules_.max_nodes > 1 && rendezvous_->serves() && !std::exchange(told_that_we_serve_, true)) {
      log().info("this node serves the rendezvous at {}", place);
    } else if (options_.talkative && place != rules_.place) {
      log().info("the rendezvous is now at {}", place);
    }
    rules_.place = place;
    const Round& round = view_->round;
    tell_who_is_missing(round);
    tell_who_has_the_places(round);
    if (round.phase != Phase::Running || round.number == told_number_) return;
    told_number_ = round.number;
    if (!options_.talkative) return;
    if (!round.reason.empty()) tell_why(round);
    if (round.number > 1 || round.nodes.size() > 1) {
      log().info("round {}: {} {}, this one has {} of {}", round.number, round.nodes.size(), round.nodes.size() == 1 ? "node" : "nodes",
                 ranks_of(round, self_.node.id), place_of(round, round.nodes.front().id)->world_size);
    }
  }

  void tell_who_is_missing(const Round& round) {
    if (!options_.talkative || told_who_is_missing_ || waited_.elapsed_s() <= tell_after_s) return;
    const std::string missing = missing_nodes(round, rules_);
    told_who_is_missing_ = !missing.empty();
    if (told_who_is_missing_) log().info("{}", missing);
  }

  void tell_who_has_the_places(const Round& round) {
    if (!options_.talkative || told_who_has_the_places_ || waited_.elapsed_s() <= tell_after_s) return;
    const std::string missing = missing_place(round, self_.node.id, rules_);
    told_who_has_the_places_ = !missing.empty();
    if (told_who_has_the_places_) log().info("{}", missing);
  }

  void tell_why(const Round& round) const {
    show_last_lines(round);
    log().warn("{}", round.reason);
  }

  static void show_last_lines(const Round& round) {
    if (!round.last_lines.empty()) std::fprintf(stderr, "%s%s", round.last_lines.c_str(), round.last_lines.ends_with('\n') ? "" : "\n");
  }

  bool cut_off() const { return !view_ || silence_.elapsed_s() > rules_.dead_after_s; }

  Step next_step() {
    self_.waited_s = waited_.elapsed_s();
    return cut_off() ? without_others() : decide(view_->round, view_->peers, self_, rules_);
  }

  /// Nobody can be asked.
  Step without_others() {
    Step step = decide_alone(self_, silence_.elapsed_s(), rules_);
    if (step.act == Act::Leave && step.exit_code != 0) step.sentence = self_.interrupted ? interrupted_alone() : no_rendezvous();
    if (step.act == Act::Leave) return step;
    if (step.act == Act::Stop) self_.record.ended_alone = true;
    if (options_.talkative && told_number_ == 0 && silence_.elapsed_s() > tell_after_s && !std::exchange(told_that_we_wait_, true)) {
      log().info("no rendezvous at {} yet{}{}; it is tried for {:.0f} s", rules_.place, problem_.empty() ? "" : ": ", problem_, rules_.join_timeout_s);
    }
    // The line may be stuck in a request that nobody will answer.
    if (stuck_.elapsed_s() > (connecting_ ? most_s_to_connect : rules_.dead_after_s)) connect();
    return step;
  }

  std::string interrupted_alone() const {
    const std::string sentence = detail::concat("interrupted by ", describe_signal(*self_.interrupted), "; all ranks have ended");
    return problem_.empty() ? sentence : detail::concat(sentence, "; ", no_rendezvous());
  }

  std::string no_rendezvous() const {
    const char* how = told_number_ > 0 ? "lost the rendezvous at " : "no rendezvous at ";
    return detail::concat(how, rules_.place, ": ", problem_, "; waited ", std::lround(silence_.elapsed_s() * 10) / 10.0, " s");
  }

  void execute(const Step& step) {
    switch (step.act) {
      case Act::Propose:
        if (proposed_at_ != exchanges_) link_->propose({view_->round, step.proposal});
        proposed_at_ = exchanges_;
        break;
      case Act::Serve:
        serve(step.number);
        break;
      case Act::Start:
        start();
        break;
      case Act::Stop:
        stop(step.signal);
        break;
      case Act::Forget:
        forget_job();
        break;
      default:
        break;
    }
  }

  void serve(int64_t number) {
    if (options_.master_is_rendezvous) {
      self_.serving = {number, *options_.rendezvous.endpoint};
      wake_.ring();
      return;
    }
    master_ = {};  // the last round's ranks have ended
    master_ = comm::serve_store({self_.node.address, 0});
    self_.serving = {number, {self_.node.address, master_->getPort()}};
    wake_.ring();
  }

  void start() {
    const Round& round = view_->round;
    record_folder_ = options_.record_folder.empty() ? "" : detail::concat(options_.record_folder, "/attempt_", folder_number(round), "/record");
    const auto plans = plan_workers(options_.job, round, self_.node.id, record_folder_);
    if (record_folder_.empty() && plans.front().variables.contains("TESSERA_RECORD_DIR")) record_folder_ = plans.front().variables.at("TESSERA_RECORD_DIR");
    std::vector<int> ranks;
    for (const auto& plan : plans) ranks.push_back(plan.rank);
    comm::FlightRecord::remove_files(record_folder_, ranks, place_of(round, self_.node.id)->world_size);
    watch_.reset();
    self_.record = {.beat = 0, .round = round.number, .running = true, .attempts_before = self_.record.attempts_before};
    try {
      watch_ = std::make_unique<Watch>(plans);
    } catch (const ConfigError& error) {
      if (rules_.max_nodes == 1) throw;
      refuse(plans.front().rank, error.what());
    }
  }

  /// The other agents hear that this node's ranks cannot be started, as they hear of a rank that refuses its input: an agent that just went would seem lost.
  void refuse(int rank, const std::string& reason) {
    self_.failed = true;
    self_.record.running = false;
    self_.record.failures = {{.rank = rank, .wait_status = W_EXITCODE(2, 0), .report = detail::concat("config ", reason)}};
  }

  void stop(int signal) {
    const double grace_s = signal == SIGKILL ? 0 : asked_to_save() ? options_.grace_s : options_.failure_grace_s;
    if (watch_) watch_->stop(signal, duration(grace_s), Clock::now());
  }

  void forget_job() {
    const bool began = self_.began;
    watch_.reset();
    self_ = in_another_job(self_, view_->round);
    if (began) {
      if (options_.talkative) log().warn("the job that this node was of is gone, and another one has begun at {}: its ranks start with that one", rules_.place);
      waited_.restart();
      told_who_is_missing_ = told_who_has_the_places_ = false;
    }
    told_number_ = 0;
    wake_.ring();
  }

  int leave(const Step& step) {
    watch_.reset();
    say_goodbye();
    if (view_ && view_->round.phase == Phase::Finished && options_.talkative) show_last_lines(view_->round);
    std::fflush(stdout);
    if (!step.sentence.empty()) std::fprintf(stderr, "%s\n", step.sentence.c_str());
    return step.exit_code;
  }

  /// Whoever serves the store stays until the others have read how the job ended.
  void say_goodbye() {
    if (!options_.rendezvous.endpoint || cut_off()) return;
    self_.record.left = true;
    self_.record.running = false;
    link_->post(self_.record);
    for (waited_.restart(); waited_.elapsed_s() < rules_.dead_after_s;) {
      const bool others_left = std::ranges::all_of(view_->peers, [](const auto& peer) { return peer.second.record.left || peer.second.gone; });
      if (told_ && (others_left || !rendezvous_->serves() || view_->round.phase != Phase::Finished)) return;
      signals_.wait(wake_, milliseconds(options_.monitor_s));
      look_at_link();
    }
  }

  const AgentOptions& options_;
  CaughtSignals signals_;  // before threads start, whose calls they must not interrupt
  Wake wake_;
  Rules rules_;
  std::shared_ptr<Rendezvous> rendezvous_;
  Self self_{};
  Clock::time_point interrupted_at_{};
  std::unique_ptr<Link> link_{};
  std::optional<View> view_{};
  int64_t exchanges_ = 0, proposed_at_ = -1, told_number_ = 0;
  bool told_that_we_serve_ = false, told_that_we_wait_ = false, told_who_is_missing_ = false, told_who_has_the_places_ = false;
  bool told_ = false;  ///< the others can read our record
  int64_t tries_ = 0;
  bool connecting_ = true;
  std::string problem_{};
  PatientClock silence_{}, waited_{}, stuck_{};
  c10::intrusive_ptr<c10d::TCPStore> master_{};
  std::unique_ptr<Watch> watch_{};
  std::string record_folder_{};
};

/// Without, connections fail one after another for reasons that name nobody, and the end of ranks that wait for them takes long.
void check_open_files(const AgentOptions& options) {
  constexpr rlim_t own = 24;  // ours, or a rank's, in a job of no other ranks
  // Of each rank its report and its connection to the store, and what carries its output.
  const rlim_t of_a_rank = options.job.output.folder.empty() ? 3 : 6;
  const auto ranks = static_cast<rlim_t>(options.rendezvous.nproc);
  const rlim_t least = own + of_a_rank * ranks;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  require(limit.rlim_cur >= least, "ulimit -n = ", limit.rlim_cur, ": a process may have no more files open than that, and ", ranks,
          ranks == 1 ? " rank needs" : " ranks need", " at least ", least, "; raise it with `ulimit -n ", std::max<rlim_t>(1024, least), "`, or start fewer");
}

}  // namespace

int run_agent(const AgentOptions& options) {
  check_open_files(options);
  return Agent(options).run();
}

}  // namespace tessera::launch
