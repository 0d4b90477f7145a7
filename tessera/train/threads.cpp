#include "tessera/train/threads.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <thread>

#include "tessera/core/error.h"

namespace tessera {

int threads_per_rank(const RunConfig& run, int local_ranks, int cores, const std::optional<std::string>& omp) {
  if (run.threads) return *run.threads;
  if (run.deterministic) return 1;
  const std::string text = omp.value_or("");
  int wanted = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), wanted);
  const bool whole = end == text.data() + text.size() || *end == ',';
  require(error != std::errc::result_out_of_range && !(whole && wanted > most_threads), "OMP_NUM_THREADS = ", text, ": expected at most ", most_threads,
          " threads a rank; unset it, or set run.threads");
  if (error == std::errc() && whole && wanted >= 1) return wanted;
  return std::max(1, cores / std::max(1, local_ranks));
}

int threads_per_rank(const RunConfig& run, int local_ranks) {
  const char* const omp = std::getenv("OMP_NUM_THREADS");
  return threads_per_rank(run, local_ranks, static_cast<int>(std::thread::hardware_concurrency()), omp ? std::optional<std::string>(omp) : std::nullopt);
}

}  // namespace tessera
