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
  std::thread thread(std::move(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace tessera::comm
