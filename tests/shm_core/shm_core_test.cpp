// All of the shared-memory core on threads: as threads, whose buffers are read in place, and as processes, whose data passes through the slots. Built with the
// thread sanitizer, it proves that what is read was written before.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>

#include "tests/shm_core/workload.h"

namespace tessera::comm::shm {
namespace {

void aborted(Membership membership) {
  std::atomic<int> ended{0};
  const auto text = failure_of([&] {
    run(membership, [&](Rank& self) {
      if (self.rank() == 0) {
        self.session->abort();
        return;
      }
      float x = 1;
      const auto text = failure_of([&] { self.communicator.all_reduce(&x, 1, Type::Float, Reduction::Sum); });
      CHECK(text.find("aborted by rank 0 of group world") == 0);
      const auto late = failure_of([&] { self.mailbox.wait(self.mailbox.receive(&x, sizeof x, 0, 0)); });
      CHECK(late == text);
      ++ended;
    });
  });
  CHECK(ended == membership.size - 1);
}

/// A rank that gives up while others join, as where the store says that one has failed, is not waited for by those that had seen it join.
void given_up_while_joining(Membership membership) {
  struct Revoked : Directory {
    explicit Revoked(Directory& whole) : whole(whole) {}
    void set(const std::string& key, const std::string& value) override { whole.set(key, value); }
    std::string get(const std::string& key) override {
      const std::string value = whole.get(key);
      if (key.starts_with("joined/")) throw std::runtime_error("another rank has failed");
      return value;
    }
    Directory& whole;
  };
  LocalDirectory directory;
  std::atomic<int> ended{0};
  std::vector<std::thread> threads;
  const auto start = std::chrono::steady_clock::now();
  for (int rank = 0; rank < membership.size; ++rank) {
    membership.rank = rank;
    threads.emplace_back([&, membership] {
      Revoked revoked(directory);
      try {
        Rank self(membership, membership.rank == 0 ? static_cast<Directory&>(revoked) : directory);
        self.communicator.barrier();
      } catch (const std::exception&) {
        ++ended;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(ended == membership.size);
  CHECK(std::chrono::steady_clock::now() - start < membership.timeout / 2);
}

/// Where what an earlier group said is still there, rank 0's offer is to nobody, and its answer to others.
void answered_before_it_asked(Membership membership) {
  LocalDirectory directory;
  directory.set("offer", "0\n0\n\n");
  directory.set("answer", "shared");
  membership.rank = 1;
  CHECK(failure_of([&] { Session late(membership, directory); }).find("its answer is not to this group") != std::string::npos);
}

void timed_out(Membership membership) {
  membership.timeout = std::chrono::milliseconds(200);
  const auto text = failure_of([&] {
    run(membership, [&](Rank& self) {
      if (self.rank() == 1) {  // comes too late
        std::this_thread::sleep_for(std::chrono::milliseconds(400));
        return;
      }
      self.communicator.barrier();
    });
  });
  CHECK(text.find("timed out after ") != std::string::npos);
  CHECK(text.find("s waiting for rank 1") != std::string::npos);
}

void disagreeing(Membership membership) {
  const auto text = failure_of([&] {
    run(membership, [&](Rank& self) {
      std::vector<float> data(5);
      if (self.rank() == 0) {
        self.communicator.all_reduce(data.data(), 4, Type::Float, Reduction::Sum);
      } else {
        self.communicator.broadcast(data.data(), 20, 0);
      }
    });
  });
  CHECK(text.find("all_reduce (sum of float32) of 16 bytes") != std::string::npos);
  CHECK(text.find("broadcast of 20 bytes with root 0") != std::string::npos);
}

}  // namespace
}  // namespace tessera::comm::shm

int main() {
  using namespace tessera::comm::shm;
  try {
    for (const bool as_processes : {false, true}) {
      for (const int size : as_processes ? std::array{2, 5} : std::array{3, 8}) {
        const Membership membership{
            .size = size, .timeout = std::chrono::seconds(60), .alone_on_core = false, .as_processes = as_processes, .large_slot_bytes = 128 << 10};
        run(membership, everything);
        aborted(membership);
        given_up_while_joining(membership);
        answered_before_it_asked(membership);
        timed_out(membership);
        disagreeing(membership);
        std::printf("%d ranks as %s: fine\n", size, as_processes ? "processes" : "threads");
      }
    }
  } catch (const std::exception& error) {
    std::printf("failed: %s\n", error.what());
    return 1;
  }
  return 0;
}
