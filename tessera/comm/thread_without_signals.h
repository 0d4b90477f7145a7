#pragma once

#include <csignal>
#include <thread>
#include <utility>

namespace tessera::comm {

/// A thread that works beside a program: signals are for the program's own threads.
std::thread start_thread_without_signals(auto body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  struct Restore {
    const sigset_t& before;
    ~Restore() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  } const restore{before};  // also where no thread is to be had
  return std::thread(std::move(body));
}

}  // namespace tessera::comm
