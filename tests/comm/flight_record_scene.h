#pragma once

#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "tessera/comm/flight_record/verdict.h"

/// Records of a job that was never run.
namespace tessera::comm::flight {

/// What a rank enters.
struct What {
  std::string op = "all_reduce";
  std::vector<int64_t> shape = {8};
  std::string dtype = "float32";
  std::string reduction = "sum";
  std::string site{};
  int peer = -1;
  int tag = 0;
  bool on_device = false;
};

class Scene {
 public:
  /// A world of `size`, started at 1000 s and last seen at `end_s`. Every rank has the group "world".
  Scene(int size, double end_s) {
    records_.world_size = size;
    std::vector<int> everyone(size);
    std::iota(everyone.begin(), everyone.end(), 0);
    for (int rank = 0; rank < size; ++rank)
      records_.ranks.push_back({.rank = rank, .world_size = size, .pid = 100 + rank, .host = "host", .started_s = 1000, .seen_s = end_s});
    group("world", everyone);
  }

  Scene& group(const std::string& name, const std::vector<int>& members) {
    for (const int rank : members) records_.ranks[rank].groups.push_back({.name = name, .members = members});
    return *this;
  }

  /// Rank enters a call of `group` at `entered_s`.
  Scene& enter(int rank, const std::string& group, double entered_s, State state = State::Waiting, const What& what = {}, double left_s = 0) {
    auto& record = records_.ranks[rank];
    RecordedCall call{.number = record.total_calls++, .state = state, .op = what.op, .shape = what.shape, .dtype = what.dtype, .reduction = what.reduction};
    while (record.groups[call.group].name != group) ++call.group;
    call.bytes = std::accumulate(what.shape.begin(), what.shape.end(), int64_t{4}, std::multiplies<>());
    call.peer = what.peer;
    call.tag = what.tag;
    call.site = what.site;
    call.entered_s = entered_s;
    call.left_s = left_s;
    call.on_device = what.on_device;
    call.sequence = call.is_message() ? ++messages_[{rank, call.group, call.op + std::to_string(what.peer) + "/" + std::to_string(what.tag)}]
                                      : ++record.groups[call.group].collectives;
    record.calls.push_back(call);
    return *this;
  }
  Scene& complete(int rank, const std::string& group, double entered_s, const What& what = {}) {
    return enter(rank, group, entered_s, State::Completed, what, entered_s + 0.001);
  }

  RankRecord& operator[](int rank) { return records_.ranks[rank]; }

  Scene& lose(int rank) {
    std::erase_if(records_.ranks, [&](const RankRecord& record) { return record.rank == rank; });
    records_.missing.push_back(rank);
    return *this;
  }

  const Records& records() const { return records_; }
  Verdict verdict() const { return explain(Merge(records_)); }
  std::string sentence() const { return verdict().sentence; }

 private:
  Records records_;
  std::map<std::tuple<int, uint32_t, std::string>, uint64_t> messages_;
};

}  // namespace tessera::comm::flight
