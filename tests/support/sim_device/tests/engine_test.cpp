#include "tests/support/sim_device/engine.h"

#include <array>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <thread>

#include <gmock/gmock.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/comm/backends/factory.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/decorators/flight_record.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/flight_record/flight_record.h"
#include "tessera/comm/flight_record/reader.h"
#include "tessera/comm/leave_in_order.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/unmeasured.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tests/comm/failing_engine.h"
#include "tests/comm/mpirun.h"
#include "tests/support/sim_device/tests/support.h"

namespace tessera::sim {
namespace {

using comm::World;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::StartsWith;
using enum Report::Kind;

class SimEngineTest : public SimDevice {
 protected:
  void SetUp() override {
    SimDevice::SetUp();
    register_engine();
  }
  static at::TensorOptions here() { return at::TensorOptions(c10::impl::VirtualGuardImpl(sim_type()).getDevice()); }
};

void move_everything(World& world) {
  const auto& group = world.group();
  const int ranks = world.size(), rank = world.rank();
  const at::TensorOptions here(c10::impl::VirtualGuardImpl(sim_type()).getDevice());
  const at::Tensor sum = at::full({7}, rank + 1.0, here);
  all_reduce(group, sum);
  EXPECT_TRUE(at::equal(sum.cpu(), at::full({7}, ranks * (ranks + 1) / 2.0F)));
  const at::Tensor all = at::empty({ranks * 3}, here), part = at::empty({3}, here);
  all_gather(group, all, at::full({3}, static_cast<double>(rank), here));
  EXPECT_TRUE(at::equal(all.cpu().view({ranks, 3}).select(1, 2), at::arange(ranks).to(at::kFloat)));
  reduce_scatter(group, part, all);
  EXPECT_TRUE(at::equal(part.cpu(), at::full({3}, static_cast<float>(ranks * rank))));
  const at::Tensor root = at::full({5}, static_cast<double>(rank), here);
  broadcast(group, root, ranks - 1);
  EXPECT_TRUE(at::equal(root.cpu(), at::full({5}, ranks - 1.0F)));
  const at::Tensor dealt = at::empty({ranks}, here);
  all_to_all(group, dealt, at::full({ranks}, static_cast<double>(rank), here));
  EXPECT_TRUE(at::equal(dealt.cpu(), at::arange(ranks).to(at::kFloat)));
  const at::Tensor gathered = rank == 0 ? at::empty({ranks, 2}, here) : at::Tensor(), back = at::empty({2}, here);
  gather(group, gathered, at::full({2}, static_cast<double>(rank), here), 0);
  scatter(group, back, gathered, 0);
  EXPECT_TRUE(at::equal(back.cpu(), at::full({2}, static_cast<float>(rank))));
  const at::Tensor came = at::empty({4}, here);
  auto receive = recv_async(group, came, (rank + ranks - 1) % ranks);
  send_async(group, at::full({4}, static_cast<double>(rank), here), (rank + 1) % ranks).wait();
  receive.wait();
  EXPECT_TRUE(at::equal(came.cpu(), at::full({4}, static_cast<float>((rank + ranks - 1) % ranks))));
  const at::Tensor host = at::ones({3});
  all_reduce(group, host);
  EXPECT_TRUE(at::equal(host, at::full({3}, static_cast<float>(ranks))));
}

TEST_F(SimEngineTest, MovesWhatTheCpusEnginesMove) {
  for (const int ranks : {2, 3}) comm::run_ranks(ranks, move_everything);
}

TEST_F(SimEngineTest, MovesTypesThatNcclHasNotAndSumsComplexNumbers) {
  comm::run_ranks(3, [](World& world) {
    const int ranks = world.size(), rank = world.rank();
    for (const auto dtype : {at::kShort, at::kUInt32, at::kComplexHalf, at::kComplexFloat, at::kComplexDouble}) {
      const at::Tensor own = at::full({3}, static_cast<double>(rank), here()).to(dtype), all = at::empty({ranks, 3}, here().dtype(dtype));
      all_gather(world.group(), all, own);
      EXPECT_TRUE(at::equal(all.cpu().to(at::kComplexFloat).select(1, 2), at::arange(ranks).to(at::kComplexFloat))) << dtype;
    }
    const at::Tensor sum = at::full({2}, c10::complex<double>(1, rank), here().dtype(at::kComplexFloat)), part = at::empty({1}, sum.options());
    all_reduce(world.group(), sum);
    EXPECT_TRUE(at::equal(sum.cpu(), at::full({2}, c10::complex<double>(3, 3), at::kComplexFloat)));
    reduce_scatter(world.group(), part, at::full({ranks}, c10::complex<double>(0, rank), sum.options()));
    EXPECT_TRUE(at::equal(part.cpu(), at::full({1}, c10::complex<double>(0, 3), at::kComplexFloat)));
  });
}

// gloo and shm alone: through pinned memory (comm/backends/staged.h).
TEST_F(SimEngineTest, EnginesOfTheHostTakeDeviceTensors) {
  for (const std::string backend : {"gloo", "shm"}) comm::run_ranks(3, move_everything, {.backend = backend});
}

// Some hosts have two ranks, and of those two share a device.
TEST_F(SimEngineTest, TwoLevelsTakeDeviceTensors) {
  comm::run_ranks(6,
                  [](World& world) {
                    EXPECT_EQ(world.group().engine()->name(), "two_level");
                    move_everything(world);
                  },
                  {.hosts = {0, 1, 0, 1, 0, 2}});
}

TEST_F(SimEngineTest, MpiTakesDeviceTensors) { comm::testing_support::under_mpirun(2, "SimEngineTest.MpiTakesDeviceTensors", move_everything); }

// Five ranks, four devices.
TEST_F(SimEngineTest, RanksThatShareADeviceMeetOnTheHost) {
  comm::run_ranks(5, [](World& world) {
    EXPECT_EQ(world.group().engine()->name(), "shm");
    move_everything(world);
    const int rank = world.rank();
    if (rank < 4) EXPECT_EQ(world.subgroup({0, 1, 2, 3}, "each its own").engine()->name(), "shm+simulated");
    if (rank % 4 == 0) EXPECT_EQ(world.subgroup({0, 4}, "one").engine()->name(), "shm");
  });
}

/// How "nccl" by name forms a group of ranks on `devices`, or refuses it: of each rank the engine's name, or why.
std::vector<std::string> named_groups(const std::vector<at::Device>& devices) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int ranks = static_cast<int>(devices.size());
  std::vector<std::string> formed(devices.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const comm::Environment environment{.rank = rank, .size = ranks, .local_rank = rank, .local_size = ranks};
      const auto factory = comm::make_auto_factory({.backend = "nccl", .environment = environment, .device = devices[rank]}, sim_type());
      try {
        formed[rank] = factory->connect({.name = "world", .rank = rank, .size = ranks, .timeout = std::chrono::seconds(30)}, store)->name();
      } catch (const ConfigError& error) {
        formed[rank] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return formed;
}

TEST_F(SimEngineTest, AnEngineOfDevicesByNameIsThatBesideTheHosts) { EXPECT_THAT(named_groups({second, first, {sim_type(), 3}}), Each("shm+simulated")); }

TEST_F(SimEngineTest, AnEngineOfDevicesByNameIsRefusedWhereRanksShareOne) {
  EXPECT_THAT(named_groups({first, second, first}),
              Each(AllOf(StartsWith("comm.backend = nccl: ranks 0, 2 share a device, and each rank of a group has to have one of its own;"),
                         HasSubstr("set comm.backend = auto"))));
  EXPECT_THAT(named_groups({first, at::kCPU}),
              Each(StartsWith("comm.backend = nccl: rank 1 computes on no " + c10::DeviceTypeName(sim_type(), true) + " device")));
}

// On all ranks alike: so it is the user's to mend, and nobody's connection is to blame.
TEST_F(SimEngineTest, ARefusalOfAGroupIsARefusalOfTheWorld) {
  comm::register_device_engine(sim_type(), [](const comm::EngineOptions&) -> std::unique_ptr<comm::EngineFactory> { throw ConfigError("refused"); });
  EXPECT_THAT([] { comm::run_ranks(2, [](World&) {}); }, ::testing::ThrowsMessage<ConfigError>(EndsWith(": refused")));
  register_engine();
}

// The work of a device is broken off, and who reads from it, waits or begins anew is told why.
TEST_F(SimEngineTest, AFailureOfADeviceEndsAllRanks) {
  std::array<std::atomic<bool>, 2> failed{};
  std::array<std::string, 2> ends;
  comm::run_ranks(2,
                  [&](World& world) {
                    const int rank = world.rank();
                    const at::Tensor x = at::zeros({8}, here());
                    all_reduce(world.group(), x);
                    if (rank == 1) failed[1] = true;
                    try {
                      for (const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60); std::chrono::steady_clock::now() < give_up;) {
                        all_reduce_async(world.group(), x).wait();
                        host_read(x.sum(), 0);
                      }
                    } catch (const CommError& error) {
                      ends[rank] = error.what();
                    }
                  },
                  {.decorators = {comm::testing_support::fails_unseen(failed)}});
  EXPECT_THAT(ends, Each(EndsWith("group world: a call did not end on the device")));
}

/// An engine whose work ends when the test says so, and of which nobody who waits hears.
class HeldEngine final : public comm::DecoratedEngine {
 public:
  class HeldWork final : public c10d::Work {
   public:
    void end() { finish(); }
    bool wait(std::chrono::milliseconds) override { return true; }  // the stream waits
  };
  explicit HeldEngine(const comm::GroupInfo& group) : DecoratedEngine(group, {}) {}
  comm::Work start(const comm::Call&) override { return work; }
  c10::intrusive_ptr<HeldWork> work = c10::make_intrusive<HeldWork>();
};

// No host asks and none waits; the record's thread sees what the device has come to, and its end.
TEST_F(SimEngineTest, AFlightRecordTellsHowFarADeviceHasCome) {
  std::string dir = ::testing::TempDir() + "flightXXXXXX";
  ASSERT_NE(mkdtemp(dir.data()), nullptr);
  const comm::GroupInfo group{.name = "world", .rank = 0, .size = 2};
  const auto held = std::make_shared<HeldEngine>(group);
  {
    const auto recorded = comm::flight_recording(dir, {.rank = 0, .size = 2})(held, group);
    const auto last = [&] { return comm::flight::read_record(comm::FlightRecord::file_of(dir, 0)).calls.back(); };
    const auto wait_for = [&](comm::flight::State state) {
      const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (last().state != state && std::chrono::steady_clock::now() < give_up) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_EQ(last().state, state);
    };
    const at::Tensor x = at::ones({4}, here()), host = at::ones({4});
    auto work = recorded->start({.op = comm::Operation::AllReduce, .inputs = {x}, .outputs = {x}, .reduction = comm::Op::Sum});
    EXPECT_TRUE(last().on_device);
    EXPECT_EQ(last().state, comm::flight::State::InFlight);
    EXPECT_TRUE(work->wait());
    wait_for(comm::flight::State::Begun);
    held->work->end();
    wait_for(comm::flight::State::Completed);

    held->work = c10::make_intrusive<HeldEngine::HeldWork>();
    work = recorded->start({.op = comm::Operation::AllReduce, .inputs = {x}, .outputs = {x}, .reduction = comm::Op::Sum});
    work.reset();  // nor is it asked for once it is gone
    EXPECT_EQ(held->work.use_count(), 1);

    work = recorded->start({.op = comm::Operation::AllReduce, .inputs = {host}, .outputs = {host}, .reduction = comm::Op::Sum});
    EXPECT_FALSE(last().on_device);
    const auto before = last().number;
    {
      const comm::Unmeasured captured;
      EXPECT_EQ(recorded->start({.op = comm::Operation::AllReduce, .inputs = {x}, .outputs = {x}, .reduction = comm::Op::Sum}).get(), held->work.get());
    }
    EXPECT_EQ(last().number, before) << "what a graph captures is none of the record's";
  }
  std::filesystem::remove_all(dir);
}

TEST_F(SimEngineTest, StagedResultsComeBehindWhoeverReadsTheirMemory) {
  comm::run_ranks(2,
                  [](World& world) {
                    const at::Tensor x = at::ones({1000}, here());
                    if (world.rank() == 0) return send(world.group(), x, 1);
                    const at::Tensor before = x + 1;
                    recv(world.group(), x, 0);
                    x.add_(before);
                  },
                  {.backend = "shm"});
  EXPECT_THAT(kinds(), SizeIs(0));
}

TEST_F(SimEngineTest, FindsResultsThatAreUsedBeforeTheWait) {
  comm::run_ranks(2, [](World& world) {
    const at::Tensor x = at::ones({1000}, here());
    auto pending = all_reduce_async(world.group(), x);
    x + 1;
    pending.wait();
  });
  EXPECT_THAT(kinds(), ElementsAre(Race, Race));  // on both ranks
}

TEST_F(SimEngineTest, FindsInputsThatAreOverwrittenBeforeTheWait) {
  comm::run_ranks(2, [](World& world) {
    const at::Tensor x = at::ones({1000}, here()), all = at::empty({2000}, here());
    auto pending = all_gather_async(world.group(), all, x);
    x + 1;  // may be read
    x.add_(1);
    pending.wait();
  });
  EXPECT_THAT(kinds(), ElementsAre(Race, Race));
}

TEST_F(SimEngineTest, AWaitSaysNothingOfMessagesOnAnotherWay) {
  for (const bool both : {true, false}) {
    comm::run_ranks(2, [&](World& world) {
      const at::Tensor out = at::ones({1000}, here()), in = at::empty({1000}, here());
      const int peer = 1 - world.rank();
      auto sent = send_async(world.group(), out, peer);
      auto received = recv_async(world.group(), in, peer);
      received.wait();
      if (both) sent.wait();
      out.add_(in);
      if (!both) sent.wait();
    });
    EXPECT_THAT(kinds(), SizeIs(both ? 0 : 2));
  }
}

TEST_F(SimEngineTest, FindsWorkThatIsDropped) {
  comm::run_ranks(2, [](World& world) {
    at::Tensor x = at::ones({1000}, here());
    static_cast<void>(all_reduce_async(world.group(), x));
    x = at::Tensor();
    at::ones({10}, here());
  });
  EXPECT_THAT(kinds(), ElementsAre(FreedInUse, FreedInUse));
}

TEST_F(SimEngineTest, WorkMayBeDroppedByAFailure) {
  comm::run_ranks(2, [](World& world) {
    const auto fail_in_its_midst = [&] {
      at::Tensor x = at::ones({1000}, here());
      const auto under_way = all_reduce_async(world.group(), x);
      throw std::runtime_error("planted");
    };
    EXPECT_THROW(fail_in_its_midst(), std::runtime_error);
    at::ones({10}, here());
  });
  EXPECT_THAT(kinds(), SizeIs(0));
}

TEST_F(SimEngineTest, WhatAnAbortedEngineRefusesIsNotUnderWay) {
  comm::run_ranks(2, [](World& world) {
    world.abort();
    at::Tensor x = at::ones({1000}, here());
    EXPECT_ANY_THROW(static_cast<void>(recv_async(world.group(), x, 1 - world.rank())));
    x = at::Tensor();
    at::ones({10}, here());
  });
  EXPECT_THAT(kinds(), SizeIs(0));
}

// A pass that fails drops what is on its way; what it had is used for something else.
TEST_F(SimEngineTest, WorkMayBeLeftInOrder) {
  for (const std::string backend : {"auto", "shm"}) {
    comm::run_ranks(2,
                    [](World& world) {
                      at::Tensor x = at::ones({1000}, here()), all = at::empty({2000}, here());
                      const comm::LeaveInOrder leaving;
                      static_cast<void>(all_reduce_async(world.group(), x));
                      static_cast<void>(all_gather_async(world.group(), all, x));
                      x.add_(1);
                      x = all = at::Tensor();
                      at::ones({1000}, here());
                    },
                    {.backend = backend});
  }
  EXPECT_THAT(kinds(), SizeIs(0));
}

}  // namespace
}  // namespace tessera::sim
