// Ranks as processes, and what may befall them: killed, stopped, gone, out of memory. Nothing may hang, and nothing may be left behind.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/shm_core/workload.h"

namespace tessera::comm::shm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// A directory that a process and its children share.
class ForkedDirectory : public Directory {
 public:
  ForkedDirectory() : table_(static_cast<Table*>(::mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~ForkedDirectory() override { ::munmap(table_, sizeof(Table)); }
  void set(const std::string& key, const std::string& value) override {
    auto& entry = table_->entries[table_->used++];
    std::snprintf(entry.key, sizeof entry.key, "%s", key.c_str());
    std::snprintf(entry.value, sizeof entry.value, "%s", value.c_str());
    entry.ready.store(true);
  }
  std::string get(const std::string& key) override {
    for (const auto end = Clock::now() + 20s; Clock::now() < end; ::usleep(200)) {
      for (const auto& entry : table_->entries) {
        if (entry.ready && key == entry.key) return entry.value;
      }
    }
    throw std::runtime_error("nobody sets " + key);
  }

 private:
  struct Table {
    std::atomic<int> used;
    struct Entry {
      std::atomic<bool> ready;
      char key[64], value[1024];
    } entries[100];
  };
  Table* table_;
};

/// `body` as n processes; what each ended with, as waitpid says it. `beside` runs here meanwhile, with their numbers.
std::vector<int> run_processes(Membership membership, const std::function<void(Rank&)>& body,
                               const std::function<void(const std::vector<pid_t>&)>& beside = {}) {
  ForkedDirectory directory;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < membership.size; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      try {
        membership.rank = rank;
        Rank self(membership, directory);
        body(self);
      } catch (const std::exception& error) {
        std::printf("rank %d: %s\n", rank, error.what());
        std::fflush(stdout);
        ::_exit(1);
      }
      ::_exit(0);
    }
    pids.push_back(pid);
  }
  if (beside) beside(pids);
  std::vector<int> statuses;
  for (const pid_t pid : pids) ::waitpid(pid, &statuses.emplace_back(), 0);
  return statuses;
}

void expect_success(const std::vector<int>& statuses) { CHECK(statuses == std::vector<int>(statuses.size(), 0)); }

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

size_t named_files() {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) files += entry.path().filename().string().starts_with("tessera-");
  return files;
}

void everything_works(Membership membership) {
  for (const int size : {2, 3, 5, 8}) {
    membership.size = size;
    expect_success(run_processes(membership, [](Rank& self) {
      everything(self);
      self.communicator.barrier();
    }));
  }
}

// Buffers in shared memory give the same bits, may be freed at once, and may meet ranks whose buffers are private.
void shared_buffers() {
  expect_success(run_processes({.size = 3, .alone_on_core = false}, [](Rank& self) {
    for (const size_t count : {size_t{1000}, size_t{70001}, size_t{1000003}}) {
      for (const bool one_is_private : {false, true}) {
        std::vector<float> plain = values(self.rank(), count);
        auto* const block = self.arena->allocate(count * sizeof(float));
        auto* const data = one_is_private && self.rank() == 1 ? plain.data() : reinterpret_cast<float*>(block);
        std::copy(plain.begin(), plain.end(), data);
        self.communicator.all_reduce(data, count, Type::Float, Reduction::Sum);
        for (size_t i = 0; i < count; ++i) CHECK(data[i] == sum_of(self.size(), i));
        std::vector<float> all(3 * count);
        self.communicator.all_gather(all.data(), data, count * sizeof(float));
        for (size_t i = 0; i < all.size(); ++i) CHECK(all[i] == sum_of(self.size(), i % count));
        self.arena->free(block);
      }
    }
    // Freed parts become one again.
    auto* const first = self.arena->allocate(100);
    auto* const second = self.arena->allocate(5000);
    auto* const third = self.arena->allocate(1);
    CHECK(first < second && second < third);
    self.arena->free(first);
    self.arena->free(third);
    self.arena->free(second);
    CHECK(self.arena->allocate(1 << 20) == first);
    self.communicator.barrier();
  }));
}

size_t mapped_bytes() {
  std::ifstream statm("/proc/self/statm");
  size_t pages = 0;
  statm >> pages;
  return pages * page_size();
}

// Rank 1 has no addresses for another's arena: all take the slots, and go on doing so. What meets first says it, whatever it is.
void arenas_that_one_cannot_map() {
  for (const bool dealt_first : {false, true}) {
    expect_success(run_processes({.size = 3, .alone_on_core = false}, [&](Rank& self) {
      const auto before = mapped_bytes();
      const auto one_arena = Arena::address_space(self.size());
      if (self.rank() == 1) {
        const rlimit limit{before + one_arena / 2, RLIM_INFINITY};
        CHECK(::setrlimit(RLIMIT_AS, &limit) == 0);
      }
      constexpr size_t kCount = 90001;
      auto* const data = reinterpret_cast<float*>(self.arena->allocate(kCount * sizeof(float)));
      const std::vector<size_t> parts(3, kCount / 3 * sizeof(float));
      for (int i = 0; i < 3; ++i) {
        std::vector<float> got(kCount);
        for (const bool deals : {dealt_first, !dealt_first}) {
          std::ranges::copy(values(self.rank(), kCount), data);
          if (deals) {
            self.communicator.all_to_all(got.data(), data, parts, parts);
            for (size_t k = 0; k < 3 * (kCount / 3); ++k) {
              CHECK(got[k] == value(static_cast<int>(k / (kCount / 3)), static_cast<size_t>(self.rank()) * (kCount / 3) + k % (kCount / 3)));
            }
          } else {
            self.communicator.all_reduce(data, kCount, Type::Float, Reduction::Sum);
            for (size_t k = 0; k < kCount; ++k) CHECK(data[k] == sum_of(3, k));
          }
        }
      }
      CHECK(mapped_bytes() - before < one_arena);  // nobody keeps what is not read
    }));
  }
}

// Each rank maps all of a group's arenas, and has other groups.
void address_space_is_shared_out() {
  CHECK(Arena::address_space(2) == static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * page_size() || Arena::address_space(2) == size_t{8} << 40);
  for (const int ranks : {2, 64, 384, 4095}) {
    CHECK(Arena::address_space(ranks) % page_size() == 0);
    CHECK(Arena::address_space(ranks) * static_cast<size_t>(ranks) <= size_t{16} << 40);
  }
  expect_success(run_processes({.size = 2, .alone_on_core = false}, [](Rank& self) {
    CHECK(self.arena->allocate(Arena::address_space(2) + 1) == nullptr);
    CHECK(self.arena->allocate(1) == self.arena->data());
    self.communicator.barrier();
  }));
}

// Rank 1 dies in the middle of what the others go on with.
void killed(bool in_message) {
  const auto statuses = run_processes({.size = 3, .alone_on_core = false}, [&](Rank& self) {
    std::vector<float> data(300000);
    self.communicator.barrier();
    const auto pid = std::to_string(self.session->control(1).pid);
    const auto start = Clock::now();
    const auto text = failure_of([&] {
      for (int i = 0;; ++i) {
        if (self.rank() == 1 && i == 5) ::raise(SIGKILL);
        if (in_message) {
          if (self.rank() != 1) self.mailbox.wait(self.mailbox.receive(data.data(), 4, 1, i));
          for (const int peer : {0, 2}) {
            if (self.rank() == 1) self.mailbox.wait(self.mailbox.send(data.data(), 4, peer, i));
          }
        } else {
          self.communicator.all_reduce(data.data(), data.size(), Type::Float, Reduction::Sum);
        }
      }
    });
    CHECK(contains(text, "rank 1 of group world (pid " + pid + ") has died"));
    CHECK(Clock::now() - start < 10s);  // far below the timeout
  });
  CHECK(statuses[0] == 0 && statuses[2] == 0 && WIFSIGNALED(statuses[1]));
}

void stopped() {
  const auto statuses = run_processes(
      {.size = 2, .timeout = 300ms},
      [](Rank& self) {
        self.communicator.barrier();
        if (self.rank() == 1) ::raise(SIGSTOP);
        const auto text = failure_of([&] { self.communicator.barrier(); });
        CHECK(contains(text, "timed out after ") && contains(text, " s waiting for rank 1"));
      },
      [](const std::vector<pid_t>& pids) {
        siginfo_t ended{};
        ::waitid(P_PID, static_cast<id_t>(pids[0]), &ended, WEXITED | WNOWAIT);
        ::kill(pids[1], SIGCONT);  // it wakes up, and learns that rank 0 gave up
      });
  expect_success(statuses);
}

void left() {
  expect_success(run_processes({.size = 3, .alone_on_core = false}, [](Rank& self) {
    self.communicator.barrier();
    if (self.rank() == 2) return;
    const auto text = failure_of([&] { self.communicator.barrier(); });
    CHECK(contains(text, "rank 2 of group world (pid "));
    CHECK(contains(text, ") has left"));
  }));
}

/// A file system in memory, for as long as this lives.
struct SmallFolder {
  explicit SmallFolder(const std::string& size) {
    CHECK(::mkdtemp(path) != nullptr);
    CHECK(::mount("tmpfs", path, "tmpfs", 0, ("size=" + size).c_str()) == 0);
  }
  ~SmallFolder() {
    ::umount(path);
    ::rmdir(path);
  }
  char path[32] = "/tmp/tessera-shm-XXXXXX";
};

// A folder of 256 KiB: too small for the group. One of 1 MiB: too small for its first large collective. All ranks say so, and no SIGBUS.
void full_folder() {
  if (::geteuid() != 0) return void(std::printf("full folder: not root, nothing to mount\n"));
  for (const std::string size : {"256k", "1m"}) {
    const SmallFolder mounted(size);
    const std::string folder = mounted.path;
    const bool forms = size == "1m";
    const auto statuses = run_processes({.size = 3, .folder = folder, .alone_on_core = false, .large_slot_bytes = 512 << 10}, [&](Rank& self) {
      CHECK(forms);
      std::vector<float> data(100000);
      const auto text = failure_of([&] { self.communicator.all_reduce(data.data(), data.size(), Type::Float, Reduction::Sum); });
      CHECK(contains(text, "shared memory: cannot reserve 1.0 MiB in " + folder + ", where "));
      CHECK(contains(
          text, " of 1.0 MiB are free; free space there, enlarge it (mount -o remount,size=...), or name another folder in TESSERA_SHM_DIR: No space left"));
    });
    CHECK(statuses == std::vector<int>(3, forms ? 0 : 1 << 8));
    CHECK(std::filesystem::is_empty(folder));
  }
}

void two_hosts() {
  ForkedDirectory directory;
  std::thread other([&] {
    const auto text = failure_of([&] { Session({.rank = 1, .size = 2, .host = "b", .host_name = "beta"}, directory); });
    CHECK(contains(text, "rank 0 is on alpha, but rank 1 on beta; use backend gloo"));
  });
  const auto text = failure_of([&] { Session({.rank = 0, .size = 2, .host = "a", .host_name = "alpha"}, directory); });
  other.join();
  CHECK(contains(text, "comm.backend = shm needs all ranks of a group on one host"));
}

}  // namespace
}  // namespace tessera::comm::shm

int main() {
  using namespace tessera::comm::shm;
  try {
    const auto before = named_files();
    const Membership small{.alone_on_core = false, .large_slot_bytes = 128 << 10};
    auto hidden = small;
    hidden.files_are_hidden = true;
    everything_works(small);
    everything_works(hidden);
    shared_buffers();
    arenas_that_one_cannot_map();
    address_space_is_shared_out();
    killed(false);
    killed(true);
    stopped();
    left();
    full_folder();
    two_hosts();
    CHECK(named_files() == before);
  } catch (const std::exception& error) {
    std::printf("failed: %s\n", error.what());
    return 1;
  }
  std::printf("fine\n");
  return 0;
}
