#include "tessera/train/stop.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/core/error.h"

namespace tessera {
namespace {

TEST(StopSignals, KeepTheFirst) {
  EXPECT_EQ(StopSignals().received(), 0);
  const StopSignals signals{SIGTERM, SIGINT};
  ::raise(SIGINT);
  EXPECT_EQ(signals.received(), SIGINT);
  ::raise(SIGTERM);
  EXPECT_EQ(signals.received(), SIGINT);
}

TEST(StopSignals, StartAnewAndRestoreWhatWasThere) {
  struct sigaction before{}, after{};
  ::sigaction(SIGTERM, nullptr, &before);
  {
    const StopSignals signals;
    ::raise(SIGTERM);
    EXPECT_EQ(signals.received(), SIGTERM);
  }
  ::sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
  const StopSignals again;
  EXPECT_EQ(again.received(), 0);
  EXPECT_THROW(StopSignals(), InternalError);
}

TEST(StopSignals, MayLeaveOneIgnored) {
  struct sigaction before{}, interrupt{}, after{};
  ::sigaction(SIGTERM, nullptr, &before);
  ::sigaction(SIGINT, nullptr, &interrupt);
  {
    StopSignals signals{SIGTERM, SIGINT};
    signals.leave_ignored(SIGTERM);
    ::raise(SIGTERM);
    EXPECT_EQ(signals.received(), SIGTERM) << "until it goes";
  }
  ::sigaction(SIGTERM, &before, &after);
  EXPECT_EQ(after.sa_handler, SIG_IGN);
  ::sigaction(SIGINT, nullptr, &after);
  EXPECT_EQ(after.sa_handler, interrupt.sa_handler);
}

TEST(StopSignals, OneRequestMayComeTwice) {
  const StopSignals signals({SIGTERM}, std::chrono::hours(1));
  for (int i = 0; i < 3; ++i) ::raise(SIGTERM);
  EXPECT_EQ(signals.received(), SIGTERM);
}

TEST(StopSignals, TheSecondEndsTheProcess) {
  const pid_t child = ::fork();
  if (child == 0) {
    const StopSignals signals({SIGTERM}, std::chrono::nanoseconds(0));
    ::raise(SIGTERM);
    if (signals.received() != SIGTERM) ::_exit(3);
    ::raise(SIGTERM);
    ::_exit(4);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
}

}  // namespace
}  // namespace tessera
