#include "tessera/comm/decorators/inject.h"

#include <future>
#include <thread>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/check.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/waiting.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(ParseFaults, ReadsEveryField) {
  EXPECT_THAT(parse_faults(""), ::testing::IsEmpty());
  EXPECT_EQ(parse_faults("rank=1,op=all_reduce,count=40,do=kill"),
            (std::vector<Fault>{{.rank = 1, .op = "all_reduce", .first = 40, .last = 40, .action = FaultAction::Kill}}));
  EXPECT_EQ(parse_faults("do = hang , rank = 0"), (std::vector<Fault>{{.rank = 0, .op = "any", .first = 1, .last = 1, .action = FaultAction::Hang}}));
  const auto several = parse_faults("rank=0,count=2..5,do=delay:200ms;rank=3,count=7+,op=send,do=delay:1.5s,attempt=any;rank=2,do=stop,attempt=2;");
  ASSERT_EQ(several.size(), 3);
  EXPECT_EQ(several[0], (Fault{.rank = 0, .first = 2, .last = 5, .action = FaultAction::Delay, .delay = 200ms}));
  EXPECT_EQ(several[1],
            (Fault{.rank = 3, .op = "send", .first = 7, .last = Fault::kForever, .attempt = std::nullopt, .action = FaultAction::Delay, .delay = 1500ms}));
  EXPECT_EQ(several[2], (Fault{.rank = 2, .attempt = 2, .action = FaultAction::Stop}));
}

std::string refusal_to_parse(const std::string& text, int size = 4, int attempt = 0) {
  try {
    parse_faults(text, size, attempt);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ParseFaults, RefusesWithFieldValueAndWayOut) {
  EXPECT_EQ(refusal_to_parse("rank=x,do=kill"), "--inject: rank=x: expected a rank of the world, from 0");
  EXPECT_THAT(refusal_to_parse("rank=-1,do=kill"), HasSubstr("rank=-1: expected a rank"));
  EXPECT_THAT(refusal_to_parse("do=kill"), AllOf(HasSubstr("--inject: do=kill: "), HasSubstr("add rank=1")));
  EXPECT_THAT(refusal_to_parse("rank=1"), AllOf(HasSubstr("rank=1: does not say what happens"), HasSubstr("delay:200ms")));
  EXPECT_THAT(refusal_to_parse("rank=1,op=allreduce,do=kill"), AllOf(HasSubstr("op=allreduce: no such operation"), HasSubstr("all_reduce")));
  EXPECT_THAT(refusal_to_parse("rank=1,do=explode"), AllOf(HasSubstr("do=explode: no such fault"), HasSubstr("corrupt")));
  EXPECT_THAT(refusal_to_parse("rank=1,do=delay"), HasSubstr("write delay:200ms"));
  EXPECT_THAT(refusal_to_parse("rank=1,do=kill:2s"), HasSubstr("do=kill:2s: only delay takes a time"));
  for (const std::string delay : {"200", "ms", "-1s", "1e99s", "nans", "2 s s"})
    EXPECT_THAT(refusal_to_parse("rank=1,do=delay:" + delay), HasSubstr("do=delay:" + delay + ": expected a time")) << delay;
  for (const std::string count : {"0", "x", "5..4", "3-5", "+", "1..", "1..2+"})
    EXPECT_THAT(refusal_to_parse("rank=1,do=kill,count=" + count), HasSubstr("count=" + count + ": expected a call")) << count;
  EXPECT_THAT(refusal_to_parse("rank=1,do=kill,attempt=some"), HasSubstr("attempt=some: expected a number of restarts"));
  EXPECT_THAT(refusal_to_parse("rank=1,rank=2,do=kill"), HasSubstr("rank=2: given twice"));
  EXPECT_THAT(refusal_to_parse("rank=1,when=now,do=kill"), HasSubstr("when=now: no such field"));
  EXPECT_THAT(refusal_to_parse("rank=1,kill"), HasSubstr("kill: not a field=value"));
  EXPECT_THAT(refusal_to_parse(" ; "), AllOf(HasSubstr("--inject: ' ; ': names no fault"), HasSubstr("leave it out")));
  EXPECT_EQ(refusal_to_parse("rank=4,do=kill"), "--inject: rank=4: this run has 4 ranks; name one of 0 to 3");
  EXPECT_THAT(refusal_to_parse("rank=0,do=kill", 1), HasSubstr("--nproc 2"));
  EXPECT_EQ(refusal_to_parse("rank=4,do=kill", 4, 1), "accepted");  // a restart may have fewer ranks
  EXPECT_EQ(refusal_to_parse("rank=3,do=kill"), "accepted");
}

TEST(ParseFaults, AreRefusedBeforeRanksMeet) {
  const Environment nobody_there{.rank = 0, .size = 2, .local_size = 2, .master_addr = "127.0.0.1", .master_port = 1, .launched = true};
  EXPECT_THROW(World::join(nobody_there, {.timeout = 5s, .inject = "rank=2,do=kill"}), ConfigError);
}

/// Runs with `faults` as `--inject` takes them.
void run_injected(int n, const std::string& faults, const std::function<void(World&)>& body, std::vector<Decorator> inner = {},
                  std::chrono::milliseconds timeout = 20s) {
  // A decorator of each rank: calls are counted per rank.
  std::vector<std::shared_ptr<Decorator>> of_rank;
  for (int rank = 0; rank < n; ++rank) of_rank.push_back(std::make_shared<Decorator>(fault_injection(parse_faults(faults), rank, 0)));
  inner.push_back([of_rank](std::shared_ptr<Engine> backend, const GroupInfo& group) {
    return (*of_rank[group.ranks.empty() ? group.rank : group.ranks[group.rank]])(std::move(backend), group);
  });
  run_ranks(n, body, {.timeout = timeout, .decorators = inner});
}

TEST(Inject, CountsTheCallsOfARankAcrossGroups) {
  for (const int n : {2, 3, 5}) {
    run_injected(n, "rank=1,op=all_reduce,count=3,do=error", [](World& world) {
      const auto group = world.subgroup(
          [&] {
            std::vector<int> all(world.size());
            std::iota(all.begin(), all.end(), 0);
            return all;
          }(),
          "dp");
      auto tensor = at::ones({2});
      all_reduce(group, tensor);
      barrier(group);
      all_reduce(world.group(), tensor);
      if (world.rank() != 1) return;
      try {
        all_reduce(group, tensor);
        ADD_FAILURE() << "no error";
      } catch (const CommError& error) {
        EXPECT_STREQ(error.what(), "all_reduce of group dp, rank 1: injected error at call 3");
      }
    });
  }
}

TEST(Inject, AFaultThatNeverHappenedIsSaid) {
  testing::internal::CaptureStderr();
  run_injected(2, "rank=0,op=barrier,count=2,do=delay:1ms;rank=1,count=100..101,do=kill;rank=1,op=send,count=3+,do=delay:2s", [](World& world) {
    for (int i = 0; i < 2; ++i) barrier(world.group());
  });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, Not(HasSubstr("rank=0")));
  EXPECT_THAT(said, HasSubstr("--inject: rank=1,op=any,count=100..101,do=kill never happened: rank 1 made 2 such calls"));
  EXPECT_THAT(said, HasSubstr("rank=1,op=send,count=3+,do=delay:2000ms never happened: rank 1 made 0 such calls"));
}

TEST(Inject, AnErrorReachesTheOthersAsItsCause) {
  try {
    run_injected(2, "rank=1,count=2,do=error", [](World& world) {
      auto tensor = at::ones({2});
      for (int i = 0; i < 3; ++i) all_reduce(world.group(), tensor);
    });
    FAIL() << "no error";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 1: all_reduce of group world, rank 1: injected error at call 2"));
  }
}

TEST(Inject, CorruptInvertsTheFirstElementOnOneRankAlone) {
  for (const bool async : {false, true}) {
    run_injected(3, "rank=2,op=all_reduce,count=2,do=corrupt;rank=0,op=barrier,do=corrupt;rank=1,op=all_gather,do=corrupt", [&](World& world) {
      for (int call = 1; call <= 3; ++call) {
        auto sum = at::full({2, 2}, 1, at::kInt);
        if (async) {
          auto pending = all_reduce_async(world.group(), sum);
          pending.wait();
        } else {
          all_reduce(world.group(), sum);
        }
        auto expected = at::full({2, 2}, 3, at::kInt);
        if (call == 2 && world.rank() == 2) expected[0][0] = ~3;
        EXPECT_TRUE(sum.equal(expected)) << sum;
      }
      barrier(world.group());  // has no result
      auto empty = at::empty({0});
      all_gather(world.group(), empty, empty);
    });
  }
}

TEST(Inject, DelayHoldsEveryCallOfARangeAndCountsAsComputing) {
  run_injected(2, "rank=1,op=all_reduce,count=2..3,do=delay:60ms", [](World& world) {
    std::vector<double> seconds;
    auto tensor = at::ones({2});
    const double before = waited_seconds();
    for (int call = 0; call < 4; ++call) {
      const auto start = Clock::now();
      all_reduce(world.group(), tensor);
      seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
    EXPECT_LT(seconds[0], 0.06);
    EXPECT_GE(seconds[1] + seconds[2], 0.12);
    const double waited = waited_seconds() - before, total = std::accumulate(seconds.begin(), seconds.end(), 0.0);
    if (world.rank() == 0) {
      EXPECT_NEAR(waited, total, 0.02);
    } else {
      EXPECT_LE(waited, total - 0.119);
    }
  });
}

TEST(Inject, SkipPutsARankOneCallAheadAndTheCheckNamesIt) {
  try {
    run_injected(2, "rank=1,op=all_reduce,count=2,do=skip",
                 [](World& world) {
                   auto tensor = at::ones({4});
                   auto gathered = at::empty({2});
                   all_reduce(world.group(), tensor);
                   all_reduce(world.group(), tensor);
                   all_gather(world.group(), gathered, at::ones({1}));
                 },
                 {checking()});
    FAIL() << "no error";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("collective #2 of world: rank 0 asks for all_reduce of [4] float32; rank 1 asks for all_gather of [2] float32"));
  }
}

TEST(Inject, AHangLastsUntilTheWorldIsAborted) {
  std::atomic<bool> ended = false;
  EXPECT_THROW(run_injected(
                   2, "rank=1,op=barrier,do=hang",
                   [&](World& world) {
                     auto tensor = at::ones({1});
                     all_reduce(world.group(), tensor);
                     if (world.rank() == 0) {
                       EXPECT_THROW(barrier(world.group()), CommError);  // times out
                       return;
                     }
                     auto hanging = std::async(std::launch::async, [&] {
                       try {
                         barrier(world.group());
                       } catch (const CommError& error) {
                         EXPECT_THAT(error.what(), HasSubstr("injected hang at call 1"));
                         ended = true;
                         throw;
                       }
                     });
                     EXPECT_EQ(hanging.wait_for(300ms), std::future_status::timeout);
                     world.abort();
                     hanging.get();
                   },
                   {}, 150ms),
               CommError);
  EXPECT_TRUE(ended);
}

TEST(Inject, OnlyInItsAttempt) {
  for (const int attempt : {0, 1, 2}) {
    const auto decorate = fault_injection(parse_faults("rank=0,attempt=1,do=error"), 0, attempt);
    const std::shared_ptr<Engine> none;
    EXPECT_EQ(decorate(none, {.size = 2}) != nullptr, attempt == 1) << "a rank without faults gets no decorator";
    EXPECT_FALSE(fault_injection(parse_faults("rank=0,do=error,attempt=any"), 1, attempt)(none, {.size = 2}) != nullptr);
    EXPECT_TRUE(fault_injection(parse_faults("rank=0,do=error,attempt=any"), 0, attempt)(none, {.size = 2}) != nullptr);
  }
}

/// How a child process ends that makes a barrier under `fault`; a stopped one is told apart, and then killed.
int status_under(const std::string& fault) {
  const pid_t child = ::fork();
  if (child == 0) {
    const auto backend = fault_injection(parse_faults("rank=0,do=" + fault), 0, 0)({}, {.size = 2});
    backend->start({.op = Operation::Barrier});
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, WUNTRACED);
  const int seen = status;
  if (WIFSTOPPED(status)) {
    ::kill(child, SIGKILL);
    ::waitpid(child, &status, 0);
  }
  return seen;
}

TEST(Inject, KillAndStopHitTheProcess) {
  const int killed = status_under("kill"), stopped = status_under("stop"), skipped = status_under("skip");
  EXPECT_TRUE(WIFSIGNALED(killed) && WTERMSIG(killed) == SIGKILL);
  EXPECT_TRUE(WIFSTOPPED(stopped) && WSTOPSIG(stopped) == SIGSTOP);
  EXPECT_TRUE(WIFEXITED(skipped) && WEXITSTATUS(skipped) == 0);
}

}  // namespace
}  // namespace tessera::comm
