#include "tessera/comm/backends/record.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/traffic.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"

namespace tessera::comm {
namespace {

// Every collective once, with 4-byte elements.
void call_everything(const Group& group, at::Device device) {
  const int n = group.size();
  const bool is_root = group.rank() == 0;
  const auto ones = [&](std::vector<int64_t> shape) { return at::ones(shape, at::device(device)); };
  all_reduce(group, ones({3, n}));
  reduce(group, ones({5}), 0);
  all_gather(group, ones({n * 2, 3}), ones({2, 3}));
  reduce_scatter(group, ones({2, 3}), ones({n * 2, 3}));
  all_to_all(group, ones({n * 2}), ones({n * 2}));
  broadcast(group, ones({7}), 0);
  gather(group, is_root ? ones({n, 4}) : at::Tensor(), ones({1, 4}), 0);
  scatter(group, ones({1, 4}), is_root ? ones({n, 4}) : at::Tensor(), 0);
  if (group.rank() == 0) send(group, ones({6}), 1, 3);
  if (group.rank() == 1) recv(group, ones({6}), 0, 3);
  std::vector<int64_t> to(n), from(n);
  for (int other = 0; other < n; ++other) to[other] = from[other] = group.rank() + other;
  const int64_t rows = int64_t{n} * group.rank() + n * (n - 1) / 2;
  all_to_all(group, ones({rows, 2}), ones({rows, 2}), from, to);
  barrier(group);
}

struct Row {
  std::string op;
  int64_t bytes, sent_bytes;
  bool operator==(const Row&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const Row& row) { return out << row.op << " " << row.bytes << " " << row.sent_bytes; }
};

std::vector<Row> rows_of(const Recorder& recorder) {
  std::vector<Row> rows;
  for (const auto& record : recorder.records()) rows.push_back({record.op, record.bytes, record.sent_bytes});
  return rows;
}

// The comments of collectives.h, in numbers: n = 4, 4 bytes an element, rank 1.
const std::vector<Row> kDocumented{
    {"all_reduce", 48, 72},      // 2 S (n-1)/n
    {"reduce", 20, 20},          // S
    {"all_gather", 96, 72},      // S (n-1)/n
    {"reduce_scatter", 96, 72},  // S (n-1)/n
    {"all_to_all", 32, 24},      // S (n-1)/n
    {"broadcast", 28, 28},       // S
    {"gather", 64, 16},          // k, as this rank is not the root
    {"scatter", 64, 0},          // the root alone sends
    {"recv", 24, 0},             //
    {"all_to_all", 80, 64},      // 10 rows of 8 bytes; 2 of them stay
    {"barrier", 0, 0},
};

TEST(Record, LogsTheDocumentedTrafficOnMetaAndCpuTensors) {
  for (const auto device : {at::kMeta, at::kCPU}) {
    const auto recorder = std::make_shared<Recorder>();
    const auto world = World::dry(4, 1, recorder);
    call_everything(world.group(), device);
    EXPECT_EQ(rows_of(*recorder), kDocumented);
  }
}

TEST(Record, OfARealRunIsThatOfTheDryOne) {
  std::vector<std::shared_ptr<Recorder>> real(4);
  for (auto& recorder : real) recorder = std::make_shared<Recorder>();
  run_ranks(
      4, [](World& world) { call_everything(world.group(), at::kCPU); },
      {.decorators = {[&](std::shared_ptr<Engine> inner, const GroupInfo& group) { return make_record_engine(real[group.rank], group, std::move(inner)); }}});
  for (int rank = 0; rank < 4; ++rank) {
    const auto dry = std::make_shared<Recorder>();
    call_everything(World::dry(4, rank, dry).group(), at::kMeta);
    EXPECT_EQ(real[rank]->records(), dry->records()) << "rank " << rank;
    const auto checked = std::make_shared<Recorder>();
    call_everything(World::dry(4, rank, checked, {.check = true}).group(), at::kMeta);
    EXPECT_EQ(checked->records(), dry->records()) << "rank " << rank << ", whose notes are no calls";
  }
}

// Tensors that a collective makes for itself count in a dry run just as in a real one.
TEST(Record, ADryRunAllocatesWhatARealOneDoes) {
  const std::vector<std::function<void(const Group&, at::TensorOptions)>> calls{
      [](const Group& group, at::TensorOptions options) { all_reduce(group, at::empty({1000}, options)); },
      [](const Group& group, at::TensorOptions options) { all_gather(group, at::empty({2000}, options), at::empty({20, 50}, options).t()); },
      [](const Group& group, at::TensorOptions options) { reduce_scatter(group, at::empty({1000}, options), at::empty({2000}, options)); },
      [](const Group& group, at::TensorOptions options) {
        all_gather_uneven(group, {at::empty({100}, options), at::empty({900}, options)}, at::empty({group.rank() == 0 ? 100 : 900}, options));
      },
      [](const Group& group, at::TensorOptions options) {
        reduce_scatter_uneven(group, at::empty({group.rank() == 0 ? 100 : 900}, options), {at::empty({100}, options), at::empty({900}, options)});
      },
      [](const Group& group, at::TensorOptions options) { all_to_all(group, at::empty({2000}, options), at::empty({2000}, options)); },
      [](const Group& group, at::TensorOptions options) { broadcast(group, at::empty({2000}, options)); },
      [](const Group& group, at::TensorOptions options) { gather(group, at::empty({2000}, options), at::empty({20, 50}, options).t()); },
      [](const Group& group, at::TensorOptions options) { scatter(group, at::empty({1000}, options), at::empty({40, 50}, options).t()); },
      [](const Group& group, at::TensorOptions options) {
        const at::Tensor moved = at::empty({3000}, options);  // two parts and a piece of one, where messages are checked
        group.rank() == 0 ? send(group, moved, 1) : recv(group, moved, 0);
      },
  };
  const auto peak = [](const Group& group, const auto& call, at::Device device) {
    MemoryTracker tracker;
    const TrackMemory tracking(tracker);
    call(group, at::device(device));
    return std::pair(tracker.peak(), tracker.at_peak(MemoryCategory::Comm));
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    for (const bool check : {false, true}) {
      const auto body = [&](World& world) {
        const auto dry = World::dry(2, world.rank(), std::make_shared<Recorder>(), {.check = check});
        EXPECT_EQ(peak(world.group(), calls[i], at::kCPU), peak(dry.group(), calls[i], at::kMeta))
            << "call " << i << ", rank " << world.rank() << (check ? ", checked" : "");
      };
      run_ranks(2, body, {.check = check});
    }
  }
}

TEST(Record, HoldsEveryFieldAndBecomesJson) {
  const auto recorder = std::make_shared<Recorder>();
  const auto world = World::dry(1024, 5, recorder);
  const auto group = world.subgroup({4, 5, 6}, "tp");
  {
    const CallSite outer("layers.3");
    const CallSite site("layers.3.mlp");
    all_gather(group, at::empty({6, 2}, at::device(at::kMeta).dtype(at::kBFloat16)), at::empty({2, 2}, at::device(at::kMeta).dtype(at::kBFloat16)));
  }
  EXPECT_EQ(CallSite::current(), "");
  send(world.group(), at::zeros({}), 1023, 9);
  const nlohmann::json json = recorder->records();
  EXPECT_EQ(json[0].dump(), R"({"bytes":24,"dtype":"bfloat16","elements":12,"group":"tp","group_rank":1,"group_size":3,"op":"all_gather","peer":-1,)"
                            R"("sent_bytes":16,"sequence":0,"shape":[6,2],"site":"layers.3.mlp","tag":0})");
  EXPECT_EQ(json[1]["sequence"], 1);
  EXPECT_EQ(json[1]["group"], "world");
  EXPECT_EQ(json[1]["peer"], 1023);
  EXPECT_EQ(json[1]["tag"], 9);
  EXPECT_EQ(json[1]["bytes"], 4);
  EXPECT_EQ(json[1]["site"], "");
}

TEST(Record, ComputesNothingAndIsDoneAtOnce) {
  const auto recorder = std::make_shared<Recorder>();
  const auto world = World::dry(16384, 16383, recorder);
  EXPECT_TRUE(world.is_dry());
  auto tensor = at::ones({3});
  auto pending = all_reduce_async(world.group(), tensor);
  EXPECT_TRUE(pending.done());
  pending.wait();
  EXPECT_TRUE(tensor.equal(at::ones({3})));
}

TEST(Record, OfAGroupOfOneIsEmpty) {
  const auto recorder = std::make_shared<Recorder>();
  const auto world = World::dry(1, 0, recorder);
  all_reduce(world.group(), at::ones({3}, at::device(at::kMeta)));
  EXPECT_TRUE(recorder->records().empty());
}

TEST(Traffic, FollowsTheFormulas) {
  EXPECT_EQ(traffic(Operation::AllReduce, 4, 4096), (Traffic{6, 6144}));
  EXPECT_EQ(traffic(Operation::AllReduce, 3, 10), (Traffic{4, 13}));  // odd lengths: rounded down
  EXPECT_EQ(traffic(Operation::AllGather, 5, 50), (Traffic{4, 40}));
  EXPECT_EQ(traffic(Operation::ReduceScatter, 2, 50), (Traffic{1, 25}));
  EXPECT_EQ(traffic(Operation::AllToAll, 8, 64), (Traffic{7, 56}));
  EXPECT_EQ(traffic(Operation::Broadcast, 8, 64), (Traffic{7, 64}));
  EXPECT_EQ(traffic(Operation::Reduce, 2, 64), (Traffic{1, 64}));
  EXPECT_EQ(traffic(Operation::Gather, 4, 64), (Traffic{1, 16}));
  EXPECT_EQ(traffic(Operation::Scatter, 4, 64), (Traffic{3, 48}));
  EXPECT_EQ(traffic(Operation::Send, 4, 64), (Traffic{1, 64}));
  EXPECT_EQ(traffic(Operation::Recv, 4, 64), (Traffic{1, 0}));
  EXPECT_EQ(traffic(Operation::Barrier, 4, 0), (Traffic{1, 0}));
  EXPECT_EQ(traffic(Operation::AllReduce, 1, 64), Traffic{});
}

}  // namespace
}  // namespace tessera::comm
