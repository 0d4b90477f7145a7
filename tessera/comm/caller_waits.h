#pragma once

#include "tessera/comm/waiting.h"

namespace tessera::comm {

/// While alive on a thread: whoever starts a send or receive on it waits for it at once. c10d's options say so for the other collectives (asyncOp); engines
/// that have to wake a thread to make progress behind the caller's back can do without it then.
class CallerWaits {
 public:
  CallerWaits();
  ~CallerWaits();
  CallerWaits(const CallerWaits&) = delete;
  CallerWaits& operator=(const CallerWaits&) = delete;

  static bool now();

 private:
  Waiting waiting_;  ///< all of it, so that what is started and waited for inside reads no clock
  bool before_;
};

}  // namespace tessera::comm
