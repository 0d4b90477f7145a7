// The bound of an all-reduce inside one host: n threads, each with a buffer; thread t adds the t-th part of all buffers and writes the sum into each of
// them, all parts at once. Nothing is handed over and nobody waits for data: n reads, n - 1 additions and n writes per element, and no copy besides.
//   tessera_memory_bound --threads 2 --bytes 134217728 --seconds 0.5
#include <algorithm>
#include <barrier>
#include <thread>

#include "bench/peers/arguments.h"

namespace {

using Buffers = std::vector<std::vector<float>>;

void add_part(Buffers& buffers, size_t begin, size_t end) {
  constexpr size_t block = 2048;  // stays in the first cache between its additions and its writes
  float sum[block];
  for (size_t at = begin; at < end; at += block) {
    const size_t count = std::min(block, end - at);
    std::copy_n(buffers[0].data() + at, count, sum);
    for (size_t other = 1; other < buffers.size(); ++other) {
      const float* from = buffers[other].data() + at;
      for (size_t i = 0; i < count; ++i) sum[i] += from[i];
    }
    for (auto& buffer : buffers) std::copy_n(sum, count, buffer.data() + at);
  }
}

/// Threads as ranks: each leaves its numbers in a place of its own.
class Team {
 public:
  explicit Team(size_t threads) : barrier_(static_cast<std::ptrdiff_t>(threads)), numbers_(threads) {}

  tessera::bench::Ranks ranks(size_t thread) {
    return {.barrier = [this] { barrier_.arrive_and_wait(); },
            .slowest =
                [this, thread](const std::vector<double>& mine) {
                  numbers_[thread] = mine;
                  barrier_.arrive_and_wait();
                  auto most = mine;
                  for (const auto& others : numbers_) {
                    for (size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], others[i]);
                  }
                  barrier_.arrive_and_wait();
                  return most;
                }};
  }

 private:
  std::barrier<> barrier_;
  std::vector<std::vector<double>> numbers_;
};

}  // namespace

int main(int argc, char** argv) {
  const auto arguments = peer::read_arguments(argc, argv);
  const auto threads = static_cast<size_t>(std::max(1, arguments.threads));
  for (const int64_t bytes : arguments.bytes) {
    const size_t elements = static_cast<size_t>(bytes) / sizeof(float);
    Buffers buffers(threads);
    Team team(threads);
    const auto work = [&](size_t thread) {
      buffers[thread].assign(elements, 0.0f);
      const auto ranks = team.ranks(thread);
      ranks.barrier();
      const auto call = [&] { add_part(buffers, elements * thread / threads, elements * (thread + 1) / threads); };
      const auto timing = measure(ranks, call, arguments.limits);
      if (thread == 0) peer::print_row("read_add_write", "memory", bytes, static_cast<int>(threads), timing);
    };
    std::vector<std::jthread> others;
    for (size_t thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
    work(0);
  }
  return 0;
}
