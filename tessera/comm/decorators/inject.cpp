#include "tessera/comm/decorators/inject.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <unistd.h>

#include "tessera/comm/waiting.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"

// A fault is a place and not a probability: rank, op and the number of the call, so that what was seen once happens again at the same call. Calls are counted
// over all groups of a rank, for groups come and go. A rank that hangs waits for its world's abort and not for ever, so that a test ends; a result is corrupted
// once it is there, as by a link that lies.

namespace tessera::comm {
namespace {

constexpr std::array<std::pair<std::string_view, FaultAction>, 7> kActions{{{"kill", FaultAction::Kill},
                                                                            {"stop", FaultAction::Stop},
                                                                            {"hang", FaultAction::Hang},
                                                                            {"delay", FaultAction::Delay},
                                                                            {"corrupt", FaultAction::Corrupt},
                                                                            {"error", FaultAction::Error},
                                                                            {"skip", FaultAction::Skip}}};

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\n";
  const auto begin = text.find_first_not_of(kBlank);
  return begin == std::string_view::npos ? std::string_view() : text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t end = 0; end != std::string_view::npos;) {
    end = text.find(separator);
    parts.push_back(trimmed(text.substr(0, end)));
    if (end != std::string_view::npos) text.remove_prefix(end + 1);
  }
  return parts;
}

template <class Number>
std::optional<Number> number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// Reads one fault, with the knob, the field and its value in every refusal.
class FaultReader {
 public:
  FaultReader(std::string_view text, const std::string& knob) : text_(text), knob_(knob) {}

  Fault read() {
    std::set<std::string_view> given;
    for (const auto part : split(text_, ',')) {
      const auto equals = part.find('=');
      check(equals != std::string_view::npos, part, "not a field=value; the fields are rank, op, count, attempt and do");
      const auto field = trimmed(part.substr(0, equals)), value = trimmed(part.substr(equals + 1));
      check(given.insert(field).second, part, "given twice; give each field once, and separate faults by ;");
      read_field(field, value, part);
    }
    check(given.contains("rank"), text_, "does not say which rank; add rank=1");
    check(given.contains("do"), text_, "does not say what happens; add do=kill, stop, hang, delay:200ms, corrupt, error or skip");
    return fault_;
  }

 private:
  void check(bool condition, std::string_view value, std::string_view rule) const { require(condition, knob_, ": ", value, ": ", rule); }

  void read_field(std::string_view field, std::string_view value, std::string_view part) {
    if (field == "rank") {
      const auto rank = number<int>(value);
      check(rank && *rank >= 0, part, "expected a rank of the world, from 0");
      fault_.rank = *rank;
    } else if (field == "op") {
      const bool known = value == "any" || std::ranges::find(kOperationNames, value) != kOperationNames.end();
      check(known, part, fmt::format("no such operation; there are any, {}", fmt::join(kOperationNames, ", ")));
      fault_.op = value;
    } else if (field == "count") {
      read_count(value, part);
    } else if (field == "attempt") {
      const auto attempt = number<int>(value);
      check(value == "any" || (attempt && *attempt >= 0), part, "expected a number of restarts, from 0 (the first attempt), or any");
      fault_.attempt = attempt;
    } else if (field == "do") {
      read_action(value, part);
    } else {
      check(false, part, "no such field; there are rank, op, count, attempt and do");
    }
  }

  void read_count(std::string_view value, std::string_view part) {
    const auto dots = value.find("..");
    const bool open = value.ends_with('+');
    const auto first = number<int64_t>(open ? value.substr(0, value.size() - 1) : value.substr(0, dots));
    const auto last = dots == std::string_view::npos ? first : number<int64_t>(value.substr(dots + 2));
    check(first && last && *first >= 1 && *last >= *first, part, "expected a call, from 1: 40, or 40..60, or 40+ for all from the 40th");
    fault_.first = *first;
    fault_.last = open ? Fault::kForever : *last;
  }

  void read_action(std::string_view value, std::string_view part) {
    const auto colon = value.find(':');
    const auto* const action = std::find_if(kActions.begin(), kActions.end(), [&](const auto& entry) { return entry.first == value.substr(0, colon); });
    check(action != kActions.end(), part, "no such fault; there are kill, stop, hang, delay:200ms, corrupt, error and skip");
    fault_.action = action->second;
    const bool delays = fault_.action == FaultAction::Delay;
    check(delays == (colon != std::string_view::npos), part, delays ? "says not how long; write delay:200ms or delay:2s" : "only delay takes a time");
    if (delays) fault_.delay = read_delay(value.substr(colon + 1), part);
  }

  std::chrono::milliseconds read_delay(std::string_view value, std::string_view part) const {
    const bool in_ms = value.ends_with("ms");
    const auto amount = in_ms || value.ends_with('s') ? number<double>(value.substr(0, value.size() - (in_ms ? 2 : 1))) : std::nullopt;
    constexpr double kLongest = 1e9;  // ms: eleven days
    const double milliseconds = amount ? *amount * (in_ms ? 1 : 1000) : -1;
    check(milliseconds >= 0 && milliseconds <= kLongest, part, "expected a time such as delay:200ms or delay:2s");
    return std::chrono::milliseconds(static_cast<int64_t>(milliseconds));
  }

  std::string_view text_;
  const std::string& knob_;
  Fault fault_;
};

/// As it was given, but for the order of its fields.
std::string text_of(const Fault& fault) {
  std::string count = std::to_string(fault.first);
  if (fault.last == Fault::kForever) count += "+";
  if (fault.last != Fault::kForever && fault.last != fault.first) count += fmt::format("..{}", fault.last);
  const auto* const action = std::ranges::find(kActions, fault.action, [](const auto& entry) { return entry.second; });
  const std::string delay = fault.action == FaultAction::Delay ? fmt::format(":{}ms", fault.delay.count()) : "";
  return fmt::format("rank={},op={},count={},do={}{}", fault.rank, fault.op, count, action->first, delay);
}

/// The faults of one rank, with how many calls each has seen; shared by the rank's groups, which several threads may use.
class Faults {
 public:
  Faults(const std::vector<Fault>& faults, int rank, int attempt) {
    for (const auto& fault : faults)
      if (fault.rank == rank && fault.attempt.value_or(attempt) == attempt) planned_.emplace_back(fault);
  }

  ~Faults() {
    if (std::uncaught_exceptions() > 0) return;  // the run ended early, and what was to come is no surprise
    for (const auto& [fault, calls, struck] : planned_) {
      if (!struck) log().warn("--inject: {} never happened: rank {} made {} such calls", text_of(fault), fault.rank, calls.load());
    }
  }
  Faults(const Faults&) = delete;
  Faults& operator=(const Faults&) = delete;

  bool empty() const { return planned_.empty(); }

  /// What happens to this call, with its number: the first planned fault that it meets.
  std::optional<std::pair<Fault, int64_t>> next(Operation op) {
    std::optional<std::pair<Fault, int64_t>> met;
    for (auto& [fault, calls, struck] : planned_) {
      if (fault.op != "any" && fault.op != to_string(op)) continue;
      const int64_t call = ++calls;
      if (met || call < fault.first || call > fault.last) continue;
      met.emplace(fault, call);
      struck = true;
    }
    return met;
  }

  void hang() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return aborted_; });
  }
  void abort() {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    ended_.notify_all();
  }

 private:
  struct Planned {
    explicit Planned(const Fault& planned) : fault(planned) {}
    Fault fault;
    std::atomic<int64_t> calls = 0;
    std::atomic<bool> struck = false;
  };
  std::deque<Planned> planned_;  // never moved: atomics cannot be
  std::mutex mutex_;
  std::condition_variable ended_;
  bool aborted_ = false;
};

void invert_first_element(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    auto bytes = tensor.view(-1).narrow(0, 0, 1).view(at::kByte);
    bytes.bitwise_not_();
    return;
  }
}

class InjectEngine : public DecoratedEngine {
 public:
  InjectEngine(const GroupInfo& group, std::shared_ptr<Engine> inner, std::shared_ptr<Faults> faults)
      : DecoratedEngine(group, std::move(inner)), faults_(std::move(faults)) {}

  void abort() override {
    faults_->abort();
    DecoratedEngine::abort();
  }

  Work start(const Call& call) override {
    const auto met = faults_->next(call.op);
    if (!met) return inner()->start(call);
    const auto& [fault, number] = *met;
    switch (fault.action) {
      case FaultAction::Kill:
        ::kill(::getpid(), SIGKILL);
        break;
      case FaultAction::Stop:
        ::kill(::getpid(), SIGSTOP);
        break;
      case FaultAction::Hang:
        faults_->hang();
        throw CommError(text("hang", call, number, " ended by an abort"));
      case FaultAction::Delay: {
        const NotWaiting late;  // as if it had computed for longer
        std::this_thread::sleep_for(fault.delay);
        break;
      }
      case FaultAction::Corrupt:
        return staged_work({{.work = inner()->start(call), .after = [outputs = call.outputs] { invert_first_element(outputs); }}});
      case FaultAction::Error:
        throw CommError(text("error", call, number, ""));
      case FaultAction::Skip:
        return completed_work();
    }
    return inner()->start(call);
  }

 private:
  std::string text(const char* what, const Call& call, int64_t number, const char* how) const {
    return fmt::format("{} of group {}, rank {}: injected {} at call {}{}", to_string(call.op), group().name, group().rank, what, number, how);
  }

  std::shared_ptr<Faults> faults_;
};

}  // namespace

std::vector<Fault> parse_faults(const std::string& text, const std::string& knob) {
  std::vector<Fault> faults;
  for (const auto part : split(text, ';'))
    if (!part.empty()) faults.push_back(FaultReader(part, knob).read());
  require(text.empty() || !faults.empty(), knob, ": '", text, "': names no fault; write one, such as rank=1,do=kill, or leave it out");
  return faults;
}

std::vector<Fault> parse_faults(const std::string& text, int size, int attempt, const std::string& knob) {
  auto faults = parse_faults(text, knob);
  if (faults.empty() || attempt > 0) return faults;
  require(size > 1, knob, ": ", text, ": one rank alone makes no calls that a fault could hit; start several, as with --nproc 2");
  for (const auto& fault : faults) require(fault.rank < size, knob, ": rank=", fault.rank, ": this run has ", size, " ranks; name one of 0 to ", size - 1);
  return faults;
}

Decorator fault_injection(const std::vector<Fault>& faults, int rank, int attempt) {
  auto mine = std::make_shared<Faults>(faults, rank, attempt);
  return [mine](std::shared_ptr<Engine> inner, const GroupInfo& group) {
    return mine->empty() ? inner : std::make_shared<InjectEngine>(group, std::move(inner), mine);
  };
}

}  // namespace tessera::comm
