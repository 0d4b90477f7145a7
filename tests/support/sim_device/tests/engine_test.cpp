#include "tests/support/sim_device/engine.h"

#include <gmock/gmock.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/leave_in_order.h"
#include "tessera/comm/testing.h"
#include "tests/support/sim_device/tests/support.h"

namespace tessera::sim {
namespace {

using comm::World;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::SizeIs;
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

// gloo and shm alone: through pinned memory (comm/backends/staged.h).
TEST_F(SimEngineTest, EnginesOfTheHostTakeDeviceTensors) {
  for (const std::string backend : {"gloo", "shm"}) comm::run_ranks(3, move_everything, {.backend = backend});
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
