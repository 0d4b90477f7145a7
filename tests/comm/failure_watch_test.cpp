#include "tessera/comm/failure_watch.h"

#include <array>
#include <cstdlib>
#include <thread>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/c10d_engine.h"
#include "tessera/comm/backends/environment_defaults.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tests/comm/failing_engine.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using testing_support::fails_unseen;

/// What ends `body`, done again and again, for a minute at most.
std::string how_it_ends(const std::function<void()>& body) {
  try {
    for (const auto give_up = std::chrono::steady_clock::now() + 60s; std::chrono::steady_clock::now() < give_up; std::this_thread::sleep_for(2ms)) body();
  } catch (const CommError& error) {
    return error.what();
  }
  return "it does not";
}

struct Failures : ::testing::Test {
  std::array<std::atomic<bool>, 3> failed{};
  std::array<std::string, 3> ends{};

  RunOptions options() { return {.timeout = 60s, .decorators = {fails_unseen(failed)}}; }
};

// Nobody waits in a collective: ranks compute, and read what came of it.
TEST_F(Failures, EndRanksThatReadResults) {
  run_ranks(
      3,
      [&](World& world) {
        const int rank = world.rank();
        barrier(world.group());
        if (rank == 1) failed[1] = true;
        ends[rank] = how_it_ends([] { host_read(at::ones({1}), 0); });
      },
      options());
  EXPECT_EQ(ends[1], "group world: a call did not end on the device");
  for (const int rank : {0, 2}) EXPECT_EQ(ends[rank], "rank 1 failed: group world: a call did not end on the device");
}

// A message that never comes, a collective that the others have left: both are broken off, in the words of the failure.
TEST_F(Failures, EndRanksThatWaitForOthersAndThoseThatBegin) {
  run_ranks(
      3,
      [&](World& world) {
        const int rank = world.rank();
        barrier(world.group());
        if (rank == 2) failed[2] = true;
        ends[rank] = how_it_ends([&] {
          if (rank == 0) recv(world.group(), at::empty({1}), 1);
          if (rank == 1) barrier(world.group());
          if (rank == 2) static_cast<void>(send_async(world.group(), at::ones({1}), 0, 5));
        });
      },
      options());
  for (const int rank : {0, 1}) EXPECT_THAT(ends[rank], EndsWith("rank 2 failed: group world: a call did not end on the device"));
  EXPECT_EQ(ends[2], "group world: a call did not end on the device");
}

// What a device's library throws once its work is broken off says nothing of the cause.
TEST_F(Failures, SpeakForWhatFollowsFromThem) {
  run_ranks(
      2,
      [&](World& world) {
        const int rank = world.rank();
        barrier(world.group());
        if (rank == 0) failed[0] = true;
        ends[rank] = how_it_ends([&] {
          world.guard([] {
            how_it_ends([] { host_read(at::ones({1}), 0); });
            throw std::runtime_error("unspecified launch failure");
          });
        });
      },
      options());
  EXPECT_EQ(ends[0], "group world: a call did not end on the device");
  EXPECT_EQ(ends[1], "rank 0 failed: group world: a call did not end on the device");
}

TEST(FailureNotice, KeepsTheFirstCause) {
  FailureNotice notice;
  EXPECT_NO_THROW(notice.require_none());
  notice.give("rank 3 failed: out of memory");
  notice.give("rank 1 failed: aborted");
  EXPECT_TRUE(notice.given());
  EXPECT_THAT([&] { notice.require_none(); }, ::testing::ThrowsMessage<CommError>("rank 3 failed: out of memory"));
}

TEST(FailureWatch, AsksOthersMoreRarelyTheMoreThereAre) {
  for (const int ranks : {2, 400}) {
    std::atomic<int> here = 0, elsewhere = 0;
    std::atomic<bool> done = false;
    {
      const FailureWatch watch(ranks, {.here = [&] { return ++here, std::string(); },
                                       .elsewhere = [&] { return ++elsewhere == 2 ? std::string("rank 7 failed: x") : std::string(); },
                                       .found =
                                           [&](const std::string& cause, bool is_own) {
                                             EXPECT_EQ(cause, "rank 7 failed: x");
                                             EXPECT_FALSE(is_own);
                                             done = true;
                                           }});
      while (!done) std::this_thread::sleep_for(10ms);
    }
    EXPECT_EQ(here, ranks == 2 ? 2 : 4);
    EXPECT_EQ(elsewhere, 2);
  }
}

/// As far as failures go: ProcessGroupNCCL, whose watchdog found something.
class FailedBackend final : public c10d::Backend {
 public:
  explicit FailedBackend(c10d::ErrorType error) : Backend(/*rank=*/0, /*size=*/2), error_(error) {}
  const std::string getBackendName() const override { return "nccl"; }
  c10d::ErrorType getError() override { return error_; }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override { return completed_work(); }

 private:
  c10d::ErrorType error_;
};

TEST(C10dFailure, IsWhatTheBackendFound) {
  const auto found = [](c10d::ErrorType error) {
    C10dEngine engine(c10::make_intrusive<FailedBackend>(error));
    EXPECT_TRUE(engine.fails_unseen());
    engine.start({.op = Operation::Barrier});
    return engine.failure();
  };
  EXPECT_EQ(found(c10d::ErrorType::SUCCESS), "");
  EXPECT_THAT(found(c10d::ErrorType::TIMEOUT),
              AllOf(HasSubstr("within comm.timeout_s"), EndsWith("of 1 calls that this rank has asked for, the last was barrier")));
  EXPECT_THAT(found(c10d::ErrorType::COMM_ERROR), StartsWith("NCCL lost a peer"));
  EXPECT_THAT(found(c10d::ErrorType::REMOTE_ERROR), StartsWith("NCCL failed on another rank"));
}

TEST(EnvironmentDefaults, LeaveWhatIsSetAlone) {
  setenv("TESSERA_TEST_OLD_NAME", "3", 1);
  setenv("TESSERA_TEST_SET", "2", 1);
  set_environment_defaults({{{"TESSERA_TEST_UNSET"}, "0"}, {{"TESSERA_TEST_SET"}, "0"}, {{"TESSERA_TEST_NEW_NAME", "TESSERA_TEST_OLD_NAME"}, "0"}});
  EXPECT_STREQ(std::getenv("TESSERA_TEST_UNSET"), "0");
  EXPECT_STREQ(std::getenv("TESSERA_TEST_SET"), "2");
  EXPECT_EQ(std::getenv("TESSERA_TEST_NEW_NAME"), nullptr);
  for (const char* name : {"TESSERA_TEST_UNSET", "TESSERA_TEST_SET", "TESSERA_TEST_OLD_NAME"}) unsetenv(name);
}

}  // namespace
}  // namespace tessera::comm
