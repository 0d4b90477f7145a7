#include "tessera/core/parallel.h"

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <dirent.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

class Threads {
 public:
  explicit Threads(int n) : before_(at::get_num_threads()) { at::set_num_threads(n); }
  ~Threads() { at::set_num_threads(before_); }

 private:
  int before_;
};

int num_process_threads() {
  int count = 0;
  DIR* tasks = opendir("/proc/self/task");
  while (const dirent* entry = readdir(tasks)) count += entry->d_name[0] != '.';
  closedir(tasks);
  return count;
}

TEST(ParallelFor, CoversTheRangeOnce) {
  for (const int threads : {1, 2, 3}) {
    const Threads set(threads);
    for (const int64_t n : {0, 1, 2, 3, 7, 1000}) {
      for (const int64_t grain : {1, 3, 2000}) {
        std::vector<std::atomic<int>> visits(n + 5);
        parallel_for(5, n + 5, grain, [&](int64_t first, int64_t last) {
          EXPECT_LT(first, last);
          EXPECT_GE(last - first, std::min(n, grain));
          for (int64_t i = first; i < last; ++i) ++visits[i];
        });
        for (int64_t i = 0; i < n + 5; ++i) EXPECT_EQ(visits[i], i >= 5);
      }
    }
  }
  parallel_for(3, 1, 1, [](int64_t, int64_t) { FAIL() << "an empty range"; });
}

TEST(ParallelFor, RunsOnAsManyThreadsAsTorchHas) {
  std::mutex mutex;
  std::set<std::thread::id> ids;
  const auto collect = [&](int64_t, int64_t) {
    EXPECT_TRUE(at::get_num_threads() == 1 || in_parallel_region());
    const std::lock_guard lock(mutex);
    ids.insert(std::this_thread::get_id());
  };
  {
    const Threads set(2);
    parallel_for(0, 2, 1, collect);
    EXPECT_EQ(ids.size(), 2u);
  }
  ids.clear();
  const Threads set(1);
  parallel_for(0, 100, 1, collect);
  EXPECT_EQ(ids, std::set{std::this_thread::get_id()});
}

TEST(ParallelFor, SharesTorchsPool) {
  const Threads set(2);
  const auto a = at::ones({1 << 20});
  a.add(1);                                                    // wakes torch's pool
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // threads that other tests left idle are ending
  const int before = num_process_threads();
  for (int i = 0; i < 20; ++i) {
    a.add(1);
    parallel_for(0, 2, 1, [](int64_t, int64_t) {});
  }
  EXPECT_LE(num_process_threads(), before);
  std::vector<int> torch_numbers(2, -1);
  parallel_for(0, 2, 1, [&](int64_t first, int64_t) { torch_numbers[first] = at::get_thread_num(); });
  EXPECT_EQ(torch_numbers, (std::vector<int>{0, 1}));
}

TEST(ParallelFor, IsSerialInsideAParallelRegion) {
  const Threads set(2);
  parallel_for(0, 2, 1, [&](int64_t, int64_t) {
    const auto outer = std::this_thread::get_id();
    int calls = 0;
    parallel_for(0, 10, 1, [&](int64_t first, int64_t last) {
      EXPECT_EQ(std::this_thread::get_id(), outer);
      EXPECT_EQ(last - first, 10);
      ++calls;
    });
    EXPECT_EQ(calls, 1);
  });
  EXPECT_FALSE(in_parallel_region());
}

TEST(ParallelFor, RethrowsAfterAllPartsEnded) {
  const Threads set(2);
  std::atomic<int> ended = 0;
  EXPECT_THROW(parallel_for(0, 2, 1,
                            [&](int64_t first, int64_t) {
                              if (first == 1) throw std::runtime_error("part 1");
                              std::this_thread::sleep_for(std::chrono::milliseconds(20));
                              ++ended;
                            }),
               std::runtime_error);
  EXPECT_EQ(ended, 1);
  EXPECT_THROW(parallel_for(0, 1, 1, [](int64_t, int64_t) { throw std::runtime_error("serial"); }), std::runtime_error);
}

}  // namespace
}  // namespace tessera
