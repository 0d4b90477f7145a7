#include "tessera/comm/flight_record/merge.h"

#include <algorithm>
#include <set>
#include <tuple>

// No rank knows what another did, but each has counted: the n-th collective of a group is the same meeting on all its members, and so is the n-th message one
// way under one tag. Counters outlive the ring of entries, so whether a rank has come to a collective is known also where what it did there is not.

namespace tessera::comm::flight {
namespace {

/// Of an all_to_all, in which rows without elements may have any shape.
bool gives_nothing(const RecordedCall& call) { return call.op == "all_to_all" && call.bytes == 0; }

/// Bytes of each row that an all_to_all gives.
int64_t row_of(const RecordedCall& call) { return call.bytes / (call.shape.empty() ? 1 : std::max<int64_t>(1, call.shape[0])); }

// What must be the same on all ranks that meet. The two ends of a message differ in name and may differ in shape. How many rows of an all_to_all it gives is
// each rank's own, as is their shape. Who gives none is taken to mean rows as `other` gives, and so is everyone where all give as many bytes, which may be cut
// into equal parts: these may be rows of any size.
auto signature(const RecordedCall& call, const RecordedCall& other, bool equal_parts) {
  const bool message = call.is_message();
  const bool rooted = call.op == "broadcast" || call.op == "reduce" || call.op == "gather" || call.op == "scatter";
  std::vector<int64_t> shape = call.shape;
  if (message) shape = {call.bytes};
  if (call.op == "all_to_all") shape = {row_of(call.bytes == 0 || equal_parts ? other : call)};
  return std::tuple(message ? std::string("message") : call.op, std::move(shape), message ? std::string() : call.dtype, call.reduction,
                    rooted ? call.peer : -1);
}

}  // namespace

Merge::Merge(const Records& records) : records_(records) {
  for (const auto& record : records.ranks) by_rank_[record.rank] = &record;
  merge_groups();
  count_calls();
  for (const auto& record : records.ranks) find_waits(record);
}

const RankRecord* Merge::record_of(int rank) const {
  const auto found = by_rank_.find(rank);
  return found == by_rank_.end() ? nullptr : found->second;
}

void Merge::merge_groups() {
  std::map<std::tuple<std::string, std::vector<int>, int>, int> known;
  for (const auto& record : records_.ranks) {
    std::map<std::pair<std::string, std::vector<int>>, int> repetitions;
    auto& numbers = numbers_[record.rank];
    for (const auto& group : record.groups) {
      const int repetition = repetitions[{group.name, group.members}]++;
      const auto [entry, is_new] = known.try_emplace({group.name, group.members, repetition}, static_cast<int>(groups_.size()));
      if (is_new) groups_.push_back({.name = group.name, .members = group.members});
      numbers.push_back(entry->second);
      auto& all = groups_[entry->second].collectives;
      all = std::max(all, group.collectives);
      entered_[{record.rank, Stream{.group = entry->second}}] = group.collectives;
    }
  }
}

// The file counts collectives for ever, and messages only as long as their entries last.
void Merge::count_calls() {
  for (const auto& record : records_.ranks) {
    for (const auto& call : record.calls) {
      const auto meeting = meeting_of(record, call);
      auto& entered = entered_[{record.rank, meeting.stream}];
      entered = std::max(entered, meeting.sequence);
    }
  }
}

Meeting Merge::meeting_of(const RankRecord& record, const RecordedCall& call) const {
  Stream stream{.group = numbers_.at(record.rank)[call.group]};
  if (call.is_message()) {
    stream.source = record.rank;
    stream.destination = groups_[stream.group].members.at(call.peer);
    if (call.op == "recv") std::swap(stream.source, stream.destination);
    stream.tag = call.tag;
  }
  return {stream, call.sequence};
}

std::vector<int> Merge::participants(const Stream& stream) const {
  if (stream.source >= 0) return {stream.source, stream.destination};
  return groups_[stream.group].members;
}

bool Merge::has_entered(int rank, const Meeting& meeting) const {
  const auto found = entered_.find({rank, meeting.stream});
  return found != entered_.end() && found->second >= meeting.sequence;
}

// Of a stream, only calls after the last one that completed are open: an earlier failure was lived with.
void Merge::find_waits(const RankRecord& record) {
  std::map<Stream, std::vector<const RecordedCall*>> open;
  for (const auto& call : record.calls) {
    auto& calls = open[meeting_of(record, call).stream];
    if (call.state == State::Completed) {
      std::erase_if(calls, [&](const RecordedCall* earlier) { return earlier->sequence < call.sequence; });
    } else {
      calls.push_back(&call);
    }
  }
  for (const auto& [stream, calls] : open) {
    if (calls.empty()) continue;
    if (auto wait = judge(record, calls); wait.blocks || !wait.absent.empty()) waits_.push_back(std::move(wait));
  }
}

Wait Merge::judge(const RankRecord& record, const std::vector<const RecordedCall*>& open) const {
  const auto blocks = [](const RecordedCall* call) { return call->state != State::InFlight; };
  Wait wait;
  wait.record = &record;
  wait.until_s = record.seen_s;
  for (const auto* call : open) {
    wait.blocks = wait.blocks || blocks(call);
    if (call->state == State::Failed) {
      wait.failed = true;
      wait.until_s = call->left_s;
    }
  }
  const auto describe = [&](const RecordedCall* call) {
    wait.call = call;
    wait.meeting = meeting_of(record, *call);
    wait.absent.clear();
    wait.unknown.clear();
    for (const int rank : participants(wait.meeting.stream)) {
      if (record_of(rank) == nullptr) {
        wait.unknown.push_back(rank);
      } else if (!has_entered(rank, wait.meeting)) {
        wait.absent.push_back(rank);
      }
    }
    return !wait.absent.empty();
  };
  for (const auto* call : open) {
    // The earliest that somebody has not come to: that it blocks in a later one may be for this one alone.
    if (describe(call)) return wait;
  }
  const auto blocked = std::ranges::find_if(open, blocks);
  describe(blocked == open.end() ? open.front() : *blocked);
  return wait;
}

std::vector<int> Merge::only_enqueued(const Meeting& meeting) const {
  std::vector<int> ranks;
  for (const auto& record : records_.ranks) {
    const bool enqueued =
        std::ranges::any_of(record.calls, [&](const RecordedCall& call) { return call.is_only_enqueued() && meeting_of(record, call) == meeting; });
    if (enqueued) ranks.push_back(record.rank);
  }
  return ranks;
}

Mismatch Merge::first_mismatch() const {
  struct Entered {
    Meeting meeting;
    const RankRecord* record;
    const RecordedCall* call;
  };
  std::vector<Entered> all;
  for (const auto& record : records_.ranks) {
    for (const auto& call : record.calls) all.push_back({meeting_of(record, call), &record, &call});
  }
  std::ranges::stable_sort(all, {}, &Entered::meeting);

  Mismatch first;
  double first_s = 0;
  for (auto begin = all.begin(); begin != all.end();) {
    const auto end = std::find_if(begin, all.end(), [&](const Entered& entered) { return entered.meeting != begin->meeting; });
    std::map<int64_t, std::vector<const RecordedCall*>> rows;
    std::set<int64_t> amounts;
    for (auto entered = begin; entered != end; ++entered) {
      if (entered->call->op == "all_to_all") amounts.insert(entered->call->bytes);
      if (entered->call->op == "all_to_all" && !gives_nothing(*entered->call)) rows[row_of(*entered->call)].push_back(entered->call);
    }
    const auto most = std::ranges::max_element(rows, {}, [](const auto& calls) { return calls.second.size(); });
    const RecordedCall& other = most == rows.end() ? *begin->call : *most->second.front();
    const auto signature_of = [&](const RecordedCall& call) { return signature(call, other, amounts.size() == 1); };
    const auto expected = signature_of(*begin->call);
    const bool alike = std::all_of(begin, end, [&](const Entered& entered) { return entered.call == begin->call || signature_of(*entered.call) == expected; });
    if (!alike && (first.sides.empty() || begin->call->entered_s < first_s)) {
      first_s = begin->call->entered_s;
      std::map<decltype(signature_of(other)), Side> sides;
      for (auto entered = begin; entered != end; ++entered) {
        auto& side = sides[signature_of(*entered->call)];
        side.ranks.push_back(entered->record->rank);
        if (side.call == nullptr || !gives_nothing(*entered->call)) side.call = entered->call;
      }
      first = {begin->meeting, {}};
      for (auto& [what, side] : sides) first.sides.push_back(std::move(side));
      // The fewest are the likeliest to be wrong.
      std::ranges::stable_sort(first.sides, {}, [](const Side& side) { return std::pair(side.ranks.size(), -side.ranks.back()); });
    }
    begin = end;
  }
  return first;
}

}  // namespace tessera::comm::flight
