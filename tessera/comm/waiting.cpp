#include "tessera/comm/waiting.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

thread_local Clock::duration waited{};
thread_local Clock::time_point started;
thread_local int depth = 0;

}  // namespace

double waited_seconds() { return std::chrono::duration<double>(waited).count(); }

Waiting::Waiting() {
  if (depth++ == 0) started = Clock::now();
}
Waiting::~Waiting() {
  if (--depth == 0) waited += Clock::now() - started;
}

NotWaiting::NotWaiting() : start_(Clock::now()) {}
NotWaiting::~NotWaiting() {
  if (depth > 0) waited -= Clock::now() - start_;
}

}  // namespace tessera::comm
