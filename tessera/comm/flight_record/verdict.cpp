#include "tessera/comm/flight_record/verdict.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <set>

#include <fmt/format.h>

#include "tessera/comm/flight_record/text.h"

// When one rank is missing, soon everybody waits, most of them for ranks that wait themselves. The culprit is found from the other end: a wait for somebody who
// waits for nobody is where a chain begins, and the earliest of those is named, the later ones being other chains or consequences. Where there is none, each
// rank that is awaited waits too, so following them from anywhere must come round.

namespace tessera::comm::flight {
namespace {

// A process that lives shows it several times a second; clocks of hosts may differ a little.
constexpr double kSilence_s = 3;
// A call that failed sooner did not fail for having waited.
constexpr double kPatience_s = 1;

bool contains(const std::vector<int>& ranks, int rank) { return std::ranges::find(ranks, rank) != ranks.end(); }

std::vector<int> ranks_of(const std::vector<const Wait*>& waits) {
  std::set<int> ranks;
  for (const auto* wait : waits) ranks.insert(wait->rank());
  return {ranks.begin(), ranks.end()};
}

std::string verb(size_t ranks, const char* of_one, const char* of_many) { return ranks == 1 ? of_one : of_many; }

double longest(const std::vector<const Wait*>& waits) {
  double most = 0;
  for (const auto* wait : waits) most = std::max(most, wait->waited_s());
  return most;
}

/// The waits that count, and who waits for whom.
class Waiting {
 public:
  explicit Waiting(const Merge& merge) {
    const bool anyone_blocks = std::ranges::any_of(merge.waits(), [](const Wait& wait) { return wait.blocks && !wait.awaited().empty(); });
    for (const auto& wait : merge.waits()) {
      if (!wait.blocks && anyone_blocks) continue;  // in flight, and its rank goes on
      (wait.awaited().empty() ? stalled_ : waits_).push_back(&wait);
    }
    for (const auto* wait : waits_) waiting_.insert(wait->rank());
  }

  /// For ranks that have not come, and in calls to which all have come.
  const std::vector<const Wait*>& for_others() const { return waits_; }
  const std::vector<const Wait*>& stalled() const { return stalled_; }

  std::vector<int> ranks() const {
    std::set<int> all = waiting_;
    for (const auto* wait : stalled_) all.insert(wait->rank());
    return {all.begin(), all.end()};
  }

  /// Of those awaited in `wait`, the ranks that wait for nobody themselves.
  std::vector<int> roots(const Wait& wait) const {
    std::vector<int> roots;
    std::ranges::copy_if(wait.awaited(), std::back_inserter(roots), [&](int rank) { return !waiting_.contains(rank); });
    return roots;
  }

  /// The earliest wait for a root; null where all that is awaited waits too.
  const Wait* first_for_a_root() const {
    const Wait* first = nullptr;
    for (const auto* wait : waits_) {
      if (!roots(*wait).empty() && (first == nullptr || wait->call->entered_s < first->call->entered_s)) first = wait;
    }
    return first;
  }

  const Wait* wait_of(int rank) const {
    const auto found = std::ranges::find(waits_, rank, &Wait::rank);
    return found == waits_.end() ? nullptr : *found;
  }
  const Wait* stall_of(int rank) const {
    const auto found = std::ranges::find(stalled_, rank, &Wait::rank);
    return found == stalled_.end() ? nullptr : *found;
  }

 private:
  std::vector<const Wait*> waits_, stalled_;
  std::set<int> waiting_;
};

std::string text_of(const Merge& merge, const Wait& wait) { return call_text(*wait.call, merge.group_of(wait.meeting)) + site_text(wait.call->site); }

// What else the records say of ranks that did not come: the first that holds.
std::string excuse(const Merge& merge, const Waiting& waiting, const std::vector<int>& culprits, double until_s) {
  std::vector<int> left, silent;
  const RankRecord* placed = nullptr;
  double silence_s = 0;
  const Wait* stall = nullptr;
  for (const int rank : culprits) {
    const auto* record = merge.record_of(rank);
    if (record == nullptr) continue;
    if (stall == nullptr) stall = waiting.stall_of(rank);
    if (placed == nullptr && !record->place.empty()) placed = record;
    if (record->closed) {
      left.push_back(rank);
    } else if (until_s - record->seen_s > kSilence_s) {
      silent.push_back(rank);
      silence_s = std::max(silence_s, until_s - record->seen_s);
    }
  }
  const auto place = placed ? fmt::format("; rank {} {} at {}", placed->rank, placed->closed ? "ended" : "is", placed->place) : "";
  const auto inside = stall == nullptr ? "" : text_of(merge, *stall);
  if (!silent.empty()) {
    return fmt::format("; {} gave no sign of life for the last {}{}{}{}", rank_list(silent), seconds_text(silence_s), stall ? ", inside " : "", inside, place);
  }
  if (stall != nullptr) return fmt::format("; rank {} {} {}{}", stall->rank(), stall->failed ? "had failed in" : "is still inside", inside, place);
  if (placed) return place;
  if (!left.empty()) return fmt::format("; {} had left the world", rank_list(left));
  return {};
}

Verdict never_entered(const Merge& merge, const Waiting& waiting, const Wait& wait) {
  std::vector<const Wait*> together, behind;
  for (const auto* other : waiting.for_others()) (other->meeting == wait.meeting ? together : behind).push_back(other);
  const auto culprits = waiting.roots(wait);
  const auto waiters = ranks_of(together);
  auto others = ranks_of(behind);
  std::erase_if(others, [&](int rank) { return contains(waiters, rank); });

  const auto& group = merge.group_of(wait.meeting);
  const auto what = wait.call->is_message() ? counterpart_text(*wait.call, group, wait.rank()) : call_text(*wait.call, group);
  const auto* never = wait.absent.empty() ? "left no record and may never have entered" : "never entered";
  std::string sentence = fmt::format("{} {} {}{}; ", rank_list(culprits), never, what, site_text(wait.call->site));
  const double waited_s = longest(together);
  const bool failed_at_once = waited_s < kPatience_s && std::ranges::all_of(together, &Wait::failed);
  sentence += failed_at_once ? fmt::format("it failed on {} after {}", rank_list(waiters), seconds_text(waited_s))
                             : fmt::format("{} {} {}", rank_list(waiters), verb(waiters.size(), "waits", "wait"), seconds_text(waited_s));
  if (!others.empty()) sentence += fmt::format(", and behind {} {}", verb(waiters.size(), "it", "them"), rank_list(others));
  sentence += excuse(merge, waiting, culprits, wait.until_s);
  return {Verdict::Kind::NeverEntered, sentence, culprits, waiting.ranks(), !failed_at_once};
}

// Everyone who is awaited waits: following any wait comes round to where it has been.
Verdict deadlock(const Merge& merge, const Waiting& waiting) {
  std::vector<int> path;
  int rank = waiting.for_others().front()->rank();
  while (!contains(path, rank)) {
    path.push_back(rank);
    rank = waiting.wait_of(rank)->awaited().front();
  }
  path.erase(path.begin(), std::ranges::find(path, rank));
  std::string sentence = fmt::format("{} wait for each other: ", rank_list(path));
  std::vector<const Wait*> waits;
  for (const int member : path) {
    const auto& wait = *waiting.wait_of(member);
    sentence += fmt::format("{}rank {} in {} for rank {}", waits.empty() ? "" : ", ", member, text_of(merge, wait), wait.awaited().front());
    waits.push_back(&wait);
  }
  sentence += fmt::format("; they wait {}", seconds_text(longest(waits)));
  return {Verdict::Kind::Deadlock, sentence, path, waiting.ranks(), true};
}

Verdict stalled(const Merge& merge, const Waiting& waiting) {
  const auto* first = *std::ranges::min_element(waiting.stalled(), {}, [](const Wait* wait) { return wait->call->entered_s; });
  std::vector<const Wait*> together;
  std::ranges::copy_if(waiting.stalled(), std::back_inserter(together), [&](const Wait* wait) { return wait->meeting == first->meeting; });
  const auto inside = ranks_of(together);
  const auto what = text_of(merge, *first);
  double until_s = 0;
  for (const auto* wait : together) until_s = std::max(until_s, wait->until_s);
  std::vector<int> silent;
  double silence_s = 0;
  for (const auto* wait : together) {
    if (wait->failed || until_s - wait->record->seen_s <= kSilence_s) continue;
    silent.push_back(wait->rank());
    silence_s = std::max(silence_s, until_s - wait->record->seen_s);
  }
  const auto waited = seconds_text(longest(together));
  if (const auto behind = merge.only_enqueued(first->meeting); !behind.empty()) {
    return {Verdict::Kind::Stalled,
            fmt::format("{} {} enqueued {}, but {} not come to it; {} {} {}{}", rank_list(behind), verb(behind.size(), "has", "have"), what,
                        verb(behind.size(), "its device has", "their devices have"), rank_list(inside), verb(inside.size(), "waits", "wait"), waited,
                        excuse(merge, waiting, behind, until_s)),
            behind, waiting.ranks(), true};
  }
  if (!silent.empty() && silent.size() < inside.size()) {
    std::vector<int> others;
    std::ranges::copy_if(inside, std::back_inserter(others), [&](int rank) { return !contains(silent, rank); });
    return {Verdict::Kind::Stalled,
            fmt::format("{} gave no sign of life for the last {}, inside {}; {} {} {}", rank_list(silent), seconds_text(silence_s), what, rank_list(others),
                        verb(others.size(), "waits", "wait"), waited),
            silent, waiting.ranks(), true};
  }
  const bool all_failed = std::ranges::all_of(together, &Wait::failed);
  const auto state = all_failed ? fmt::format("{} failed on {} after {}", what, rank_list(inside), waited)
                                : fmt::format("{} {} inside {} for {}", rank_list(inside), verb(inside.size(), "is", "are"), what, waited);
  return {Verdict::Kind::Stalled, state + "; every rank had entered it alike, so look at the link or the engine", inside, waiting.ranks()};
}

Verdict mismatched(const Merge& merge, const Waiting& waiting, const Mismatch& mismatch) {
  constexpr size_t shown = 3;
  const auto& group = merge.group_of(mismatch.meeting);
  const auto& sides = mismatch.sides;
  const auto differs = [&](auto field) { return std::ranges::any_of(sides, [&](const Side& side) { return field(*side.call) != field(*sides[0].call); }); };
  const bool reductions = differs([](const RecordedCall& call) { return call.reduction; });
  const bool roots = !sides[0].call->is_message() && differs([](const RecordedCall& call) { return call.peer; });
  std::string sentence;
  for (size_t i = 0; i < std::min(sides.size(), shown); ++i) {
    const auto& call = *sides[i].call;
    sentence += fmt::format("{}{} entered {}", i == 0 ? "" : i == 1 ? " while " : ", and ", rank_list(sides[i].ranks), call_text(call, group));
    if (roots && call.peer >= 0) sentence += fmt::format(" with root {}", group.members.at(call.peer));
    if (reductions && !call.reduction.empty()) sentence += " of a " + call.reduction;
    if (const auto data = data_text(call); !data.empty()) sentence += " " + data;
    sentence += site_text(call.site);
  }
  if (sides.size() > shown) sentence += fmt::format(", and others in {} more ways", sides.size() - shown);
  return {Verdict::Kind::Mismatch, sentence, sides[0].ranks, waiting.ranks(), true};
}

Verdict at_ease(const Merge& merge) {
  const RankRecord* idle = nullptr;
  double longest_s = -1;
  for (const auto& record : merge.records().ranks) {
    const double since = record.calls.empty() ? record.started_s : record.calls.back().ended() ? record.calls.back().left_s : record.calls.back().entered_s;
    if (record.closed || record.seen_s - since <= longest_s) continue;
    idle = &record;
    longest_s = record.seen_s - since;
  }
  if (idle == nullptr) return {Verdict::Kind::Nothing, "no rank waits: all have left the world", {}, {}};
  auto sentence = fmt::format("no rank waits in a collective; rank {} is outside of any for {}, ", idle->rank, seconds_text(longest_s));
  if (idle->calls.empty()) {
    sentence += "and has entered none";
  } else {
    const auto& last = idle->calls.back();
    sentence += "its last was " + call_text(last, idle->groups[last.group]) + site_text(last.site);
  }
  return {Verdict::Kind::Outside, sentence, {idle->rank}, {}};
}

Verdict choose(const Merge& merge, const Waiting& waiting) {
  if (const auto mismatch = merge.first_mismatch(); !mismatch.sides.empty()) return mismatched(merge, waiting, mismatch);
  if (const auto* wait = waiting.first_for_a_root()) return never_entered(merge, waiting, *wait);
  if (!waiting.for_others().empty()) return deadlock(merge, waiting);
  if (!waiting.stalled().empty()) return stalled(merge, waiting);
  return at_ease(merge);
}

}  // namespace

Verdict explain(const Merge& merge) {
  auto verdict = choose(merge, Waiting(merge));
  auto missing = merge.records().missing;
  std::erase_if(missing, [&](int rank) { return contains(verdict.culprits, rank); });
  if (!missing.empty()) verdict.sentence += "; no record of " + rank_list(missing);
  return verdict;
}

const char* name_of(Verdict::Kind kind) {
  return std::array{"mismatch", "never_entered", "deadlock", "stalled", "outside", "nothing"}[static_cast<size_t>(kind)];
}

}  // namespace tessera::comm::flight
