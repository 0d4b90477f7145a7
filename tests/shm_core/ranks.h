#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/backends/shm/core/communicator.h"
#include "tessera/comm/backends/shm/core/mailbox.h"

/// The shared-memory core without libtorch and without a test framework: small enough to be built whole under a sanitizer.
namespace tessera::comm::shm {

/// A directory in this process.
class LocalDirectory : public Directory {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(30), [&] { return values_.contains(key); })) throw std::runtime_error("nobody sets " + key);
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

/// What a rank has.
struct Rank {
  Rank(const Membership& membership, Directory& directory)
      : session(std::make_shared<Session>(membership, directory)),
        arena(session->one_process() || membership.as_processes ? nullptr : std::make_shared<Arena>(*session)),
        communicator(session, arena),
        mailbox(session) {}
  int rank() const { return session->rank(); }
  int size() const { return session->size(); }
  std::shared_ptr<Session> session;
  std::shared_ptr<Arena> arena;  ///< of processes
  Communicator communicator;
  Mailbox mailbox;
};

/// Runs `body` as n ranks on n threads; rethrows the first exception.
inline void run(Membership membership, const std::function<void(Rank&)>& body) {
  LocalDirectory directory;
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < membership.size; ++rank) {
    membership.rank = rank;
    threads.emplace_back([&, membership] {
      try {
        Rank self(membership, directory);
        body(self);
        self.communicator.barrier();
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

/// Throws, with the place, where a check does not hold.
#define CHECK(condition) \
  if (!(condition)) throw std::runtime_error(std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #condition)

/// The failure that `body` ends with.
template <class Body>
std::string failure_of(const Body& body) {
  try {
    body();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "no failure";
}

}  // namespace tessera::comm::shm
