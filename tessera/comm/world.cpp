#include "tessera/comm/world.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/comm/algorithms/choice.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/decorators/check.h"
#include "tessera/comm/decorators/failure_notice.h"
#include "tessera/comm/decorators/inject.h"
#include "tessera/comm/decorators/standard.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/failure_watch.h"
#include "tessera/comm/meeting/disagreement.h"
#include "tessera/comm/meeting/endpoint.h"
#include "tessera/comm/meeting/network.h"
#include "tessera/comm/meeting/rendezvous.h"
#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/json_text.h"
#include "tessera/core/read_check.h"
#include "tessera/core/rng.h"

// Ending is harder than beginning: a connection or a store that goes early looks to its peers like a crash. So a rank counts itself out, waits until all have,
// and only then closes; who serves the store goes last, when all others have looked for the last time. With an exception under way it is the other way round:
// engines wait at their end for what is pending, which will not come, so connections are broken first, and the cause is in the store before they are.
// A group forms between its members alone. Each counts how often it has made one of that name and those members; the number is part of the key under which they
// meet.

namespace tessera::comm {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using Clock = std::chrono::steady_clock;

const std::string kFailure = "failure", kFailures = "failures", kLeft = "left", kAllLeft = "all_left", kGone = "gone";

std::string read_failure(const Store& store) noexcept {
  try {
    if (store && store->check({kFailure})) return store->get_to_str(kFailure);
  } catch (...) {  // the store went with its host: nothing more to learn
  }
  return {};
}

// Where this rank listens for others: on the interface that leads to the master. Names such as Debian's 127.0.1.1 lead to loopback, where other hosts are not.
std::string interface_towards(const Meeting& meeting, const Environment& environment) {
  const bool one_host = environment.local_size == environment.size || is_loopback(environment.master_addr);
  if (one_host || !is_loopback(meeting.local_address)) return meeting.local_address;
  const auto addresses = local_addresses();
  return addresses.empty() ? meeting.local_address : addresses.front();
}

// Of a table's rows in use: files may lie elsewhere on each host.
std::string content_of(const std::vector<TableRow>& rows) {
  if (rows.empty()) return "no rows";
  const auto text = json_text(nlohmann::json(rows));
  return "content " + hash_hex(text.data(), text.size());
}

// Polls with growing pauses, for a store's own wait cannot look at two keys.
template <class Predicate>
bool poll_until(Clock::time_point deadline, Predicate done) {
  for (auto pause = std::chrono::microseconds(50);; pause = std::min(2 * pause, std::chrono::microseconds(20000))) {
    if (done()) return true;
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace

struct World::State {
  Environment environment;
  WorldOptions options;
  Store store;                         // null when alone or dry
  std::shared_ptr<Recorder> recorder;  // dry worlds only
  ScratchBytes dry_scratch;            // dry worlds only
  std::unique_ptr<EngineFactory> factory;
  std::vector<Decorator> decorators;  // of every group, the last is outermost
  Group everyone;

  std::mutex mutex;
  std::map<std::string, int> formed;             // groups so far, by name and members
  std::vector<std::shared_ptr<Engine>> engines;  // kept to the end: a group that closes early looks like a failure to its peers
  std::optional<bool> left;
  const std::shared_ptr<FailureNotice> notice = std::make_shared<FailureNotice>();
  std::unique_ptr<FailureWatch> watch;  // last: its thread uses the rest

  bool serves_store() const { return environment.rank == 0 && !environment.agent_store; }

  Group make_group(GroupInfo info) {
    if (info.size == 1) return {std::move(info), std::shared_ptr<Engine>()};
    info.timeout = options.timeout;
    auto made = recorder ? connect_dry(info) : connect(info);
    for (const auto& decorate : decorators) made = decorate(std::move(made), info);
    if (made->fails_unseen()) made = end_by_notice(info, std::move(made), notice);
    {
      const std::lock_guard lock(mutex);
      engines.push_back(made);
    }
    if (made->fails_unseen()) watch_failures();
    return Group(std::move(info), std::move(made), [store = store] { return read_failure(store); });
  }

  std::vector<std::shared_ptr<Engine>> all_engines() {
    const std::lock_guard lock(mutex);
    return engines;
  }

  void abort_engines() noexcept {
    for (const auto& engine : all_engines()) {
      try {
        engine->abort();
      } catch (...) {  // the others must be closed all the same
      }
    }
  }

  void report_failure(const std::string& cause) noexcept {
    if (!store) return;
    try {
      if (store->add(kFailures, 1) == 1) store->set(kFailure, detail::concat("rank ", environment.rank, " failed: ", cause));
    } catch (...) {  // without the store nobody can be told
    }
  }

  // Work of a device is broken off here also where another rank has failed: nothing tells the device, and who reads from it would stand there until the
  // timeout.
  void watch_failures() {
    const auto here = [this] {
      for (const auto& engine : all_engines()) {
        if (std::string cause = engine->failure(); !cause.empty()) return cause;
      }
      return std::string();
    };
    const auto found = [this](const std::string& cause, bool is_own) {
      notice->give(cause);
      if (is_own) report_failure(cause);
      abort_engines();
    };
    const std::lock_guard lock(mutex);
    if (watch || left) return;
    watch = std::make_unique<FailureWatch>(environment.size, FailureWatch::Questions{here, [this] { return read_failure(store); }, found});
  }

  // Whatever a group's members do to find each other.
  auto meet(const GroupInfo& info, const auto& work) {
    const auto start = Clock::now();
    try {
      return work();
    } catch (const ConfigError&) {
      throw;
    } catch (...) {
      const auto cause = message_of(std::current_exception());
      const auto failure = read_failure(store);
      throw CommError(detail::concat("group ", info.name, ", rank ", info.rank, " of ", info.size, ": could not connect to all members: ", cause, "; waited ",
                                     seconds_since(start), failure.empty() ? "" : "; ", failure));
    }
  }

  // A rank that makes its engines otherwise than the others, or its collectives by other messages, meets nobody, or ends inside of one, before anything can be
  // compared by collectives.
  void compare_what_engines_are_made_of(const GroupInfo& info) {
    const Settings mine{{"comm.backend", options.backend},
                        {"comm.algorithm", options.algorithm},
                        {"comm.table", content_of(options.rows)},
                        {"comm.check", options.check ? "true" : "false"}};
    meet(info, [&] { compare_in_store(*store, environment.rank, environment.size, mine, options.timeout); });
  }

  std::shared_ptr<Engine> connect(const GroupInfo& info) {
    const auto members = info.ranks.empty() ? "all" : fmt::format("{:016x}", hash_string(fmt::format("{}", fmt::join(info.ranks, ","))));
    auto key = fmt::format("group/{}/{}", info.name, members);
    {
      const std::lock_guard lock(mutex);
      key += fmt::format("/{}", formed[key]++);
    }
    return meet(info, [&] { return factory->connect(info, c10::make_intrusive<c10d::PrefixStore>(key, store)); });
  }

  // Where ranks compare what they ask for, that takes memory as well; of its notes the recorder hears as little as one around a real world's groups.
  std::shared_ptr<Engine> connect_dry(const GroupInfo& info) const {
    if (!options.check) return make_dry_engine(recorder, info, dry_scratch);
    return make_record_engine(recorder, info, checking()(make_dry_engine(nullptr, info, dry_scratch), info));
  }

  Group subgroup(const std::vector<int>& ranks, const std::string& name) {
    const auto self = std::find(ranks.begin(), ranks.end(), environment.rank);
    invariant(self != ranks.end(), "group ", name, ": rank ", environment.rank, " asks for a group without itself");
    auto sorted = ranks;
    std::sort(sorted.begin(), sorted.end());
    invariant(sorted.front() >= 0 && sorted.back() < environment.size, "group ", name, ": members ", sorted.front(), " to ", sorted.back(), " of a world of ",
              environment.size);
    invariant(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(), "group ", name, ": a rank is named twice");
    return make_group({.name = name, .rank = static_cast<int>(self - ranks.begin()), .size = static_cast<int>(ranks.size()), .ranks = ranks});
  }
};

WorldOptions world_options(const CommConfig& config) {
  const std::chrono::milliseconds timeout(std::llround(1000 * config.timeout_s));
  return {.backend = config.backend,
          .interface = config.interface,
          .timeout = timeout,
          .algorithm = config.algorithm,
          .table = config.table,
          .check = config.check};
}

World::World(std::shared_ptr<State> state) : state_(std::move(state)), exceptions_(std::uncaught_exceptions()) {
  auto& self = *state_;
  const auto& environment = self.environment;
  try {
    const GroupInfo everyone{.name = "world", .rank = environment.rank, .size = environment.size};
    if (self.store) self.compare_what_engines_are_made_of(everyone);
    self.everyone = self.make_group(everyone);
  } catch (const ConfigError&) {
    leave();  // all refuse it, by what they read from each other: nobody may take the store along before the others have read
    throw;
  }
}

World::World(World&&) noexcept = default;

World& World::operator=(World&& other) noexcept {
  if (this != &other) {
    finish();
    state_ = std::move(other.state_);
    exceptions_ = other.exceptions_;
  }
  return *this;
}

World::~World() { finish(); }

// An engine's end waits for what is still pending in it, so connections that have no end to hope for are broken first.
void World::finish() noexcept {
  if (!state_) return;  // moved from
  const bool unwinding = std::uncaught_exceptions() > exceptions_;
  state_->watch.reset();
  if (unwinding || !leave()) abort();
}

World World::from_environment(const WorldOptions& options) {
  auto completed = options;
  const auto complete = [](std::string& field, const char* variable) {
    const char* value = std::getenv(variable);
    if (field.empty() && value) field = value;
  };
  complete(completed.record_dir, "TESSERA_RECORD_DIR");
  complete(completed.inject, "TESSERA_INJECT");
  return join(read_environment(), completed);
}

World World::join(const Environment& environment, const WorldOptions& options) {
  check_engine_name(options.backend, environment);
  if (!options.interface.empty()) check_interface(options.interface);
  parse_faults(options.inject, environment.size, environment.restart_count);  // refuses before anybody meets
  check_choice(options);
  if (environment.size == 1) return join_in(environment, Store(), options);
  auto meeting = rendezvous(environment, options.timeout, options.backend);
  meeting.store->setTimeout(options.timeout);
  auto local = options;
  if (local.interface.empty()) local.interface = interface_towards(meeting, environment);
  return join_in(environment, std::move(meeting.store), local);
}

World World::join(const Environment& environment, Store store, const WorldOptions& options) {
  invariant(environment.size == 1 || store.defined(), "a world of ", environment.size, " has no store to meet in");
  if (environment.size > 1) store = next_world(std::move(store), environment, Arrival::Unannounced).store;
  return join_in(environment, std::move(store), options);
}

World World::join_in(const Environment& environment, Store store, const WorldOptions& options) {
  check_engine_name(options.backend);
  auto state = std::make_shared<State>();
  state->environment = environment;
  state->options = with_table_read(options);
  if (environment.size > 1) {
    state->store = std::move(store);
    state->factory =
        make_factory({.backend = options.backend, .interface = options.interface, .environment = environment, .host = options.host, .device = options.device});
    state->decorators = standard_decorators({.environment = environment, .options = state->options, .store = state->store});
  }
  return World(std::move(state));
}

World World::alone(const WorldOptions& options) { return join(Environment{}, Store(), options); }

World World::dry(int size, int rank, std::shared_ptr<Recorder> recorder, const WorldOptions& options) {
  invariant(recorder != nullptr, "a dry world has no recorder");
  auto state = std::make_shared<State>();
  state->environment = {.rank = rank, .size = size, .local_rank = rank, .local_size = size};
  state->options = with_table_read(options);
  state->recorder = std::move(recorder);
  state->dry_scratch = ScratchOf(state->options);
  state->decorators = options.decorators;
  return World(std::move(state));
}

int World::rank() const { return state_->environment.rank; }
int World::size() const { return state_->environment.size; }
int World::local_rank() const { return state_->environment.local_rank; }
int World::local_size() const { return state_->environment.local_size; }
bool World::is_dry() const { return state_->recorder != nullptr; }
const WorldOptions& World::options() const { return state_->options; }
Group World::group() const { return state_->everyone; }
Group World::subgroup(const std::vector<int>& ranks, const std::string& name) const { return state_->subgroup(ranks, name); }

void World::guard(const std::function<void()>& body) const {
  const auto notice = state_->notice;
  const ReadCheck behind_reads([&] { notice->require_none(); });
  const auto say = [&] {
    report_failure(message_of(std::current_exception()));
    abort();
  };
  try {
    body();
  } catch (const Error&) {
    say();
    throw;
  } catch (...) {
    say();
    notice->require_none();  // what a device's library says once its work is broken off explains nothing
    throw;
  }
}

void World::report_failure(const std::string& cause) const noexcept {
  if (state_) state_->report_failure(cause);
}

std::string World::reported_failure() const noexcept { return state_ ? read_failure(state_->store) : std::string(); }

void World::abort() const noexcept {
  if (state_) state_->abort_engines();
}

bool World::leave(std::chrono::milliseconds patience) noexcept {
  if (!state_) return true;
  if (state_->left) return *state_->left;
  state_->watch.reset();  // ranks that leave close what others still watch
  const auto& store = state_->store;
  bool all = true;
  if (store) {
    const auto deadline = Clock::now() + patience;
    try {
      if (store->add(kLeft, 1) == size()) store->set(kAllLeft, "1");
      poll_until(deadline, [&] { return store->check({kAllLeft}) || store->check({kFailure}); });
      all = store->check({kAllLeft});
      // Whoever serves the store goes last, lest the others' last look at it ends in an error.
      const auto gone = store->add(kGone, 1);
      if (state_->serves_store() && all) all = gone == size() || poll_until(deadline, [&] { return store->add(kGone, 0) == size(); });
    } catch (...) {  // the store is gone, and with it who served it
      all = false;
    }
  }
  state_->left = all;
  return all;
}

WorldView::WorldView(const World& world) : state_(world.state_) {}
int WorldView::rank() const { return state_->environment.rank; }
int WorldView::size() const { return state_->environment.size; }
bool WorldView::is_dry() const { return state_->recorder != nullptr; }
Group WorldView::group() const { return state_->everyone; }
Group WorldView::subgroup(const std::vector<int>& ranks, const std::string& name) const { return state_->subgroup(ranks, name); }

}  // namespace tessera::comm
