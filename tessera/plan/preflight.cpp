#include "tessera/plan/preflight.h"

#include <algorithm>

#include <fmt/format.h>

#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/fit.h"
#include "tessera/plan/settings.h"
#include "tessera/train/threads.h"

namespace tessera::plan {
namespace {

int64_t needs(const RankClass& ranks) { return total_of(ranks.peak_bytes) + total_of(ranks.host_bytes); }

/// Of the host that needs most, where each has so many ranks one after another.
template <class Needs>
int64_t of_host(const DryRun& run, int local_ranks, Needs needs) {
  int64_t most = 0;
  for (int first = 0; first < run.world; first += local_ranks) {
    int64_t all = 0;
    for (int rank = first; rank < std::min(run.world, first + local_ranks); ++rank)
      all += needs(run.ranks[static_cast<size_t>(run.class_of[static_cast<size_t>(rank)])]);
    most = std::max(most, all);
  }
  return most;
}

std::string way_out(const Config& config, int world) {
  const FitSearch search = find_fit(config, world, config.run.memory_limit_bytes);
  if (search.fits) return fmt::format("{} would need {}", flags_of(search.best()->sets), format_bytes(total_of(search.best()->peak)));
  return "nothing that tessera plan tried fits; raise it, use more ranks or a smaller model";
}

}  // namespace

int64_t disk_bytes_of_host(const Config& config, int world, int local_ranks) {
  return of_host(dry_run(config, world), local_ranks, [](const RankClass& ranks) { return ranks.disk_bytes; });
}

std::string preflight(const Config& asked, int world, int local_ranks, int64_t host_memory, const DryRunOptions& options) {
  Config config = asked;
  config.run.threads = threads_per_rank(config.run, local_ranks);  // scratch goes with them
  const DryRun run = dry_run(config, world, options);
  const RankClass& largest = largest_class(run);
  const int64_t peak = total_of(largest.peak_bytes);
  if (!run.fits()) {
    throw ConfigError(fmt::format("run.memory_limit_bytes = {}: --preflight: a step needs {} on rank {} at its peak; {}", run.memory_limit, peak,
                                  largest.examples.front(), way_out(config, world)));
  }
  const int64_t on_host = of_host(run, local_ranks, needs);
  if (host_memory > 0 && on_host > host_memory) {
    throw ConfigError(
        fmt::format("model: --preflight: the {} rank{} on {} need {} at their peaks, and {} has {}; use more hosts or a smaller model, or set "
                    "run.memory_limit_bytes = {} to be told which settings would fit",
                    local_ranks, local_ranks == 1 ? "" : "s", local_ranks == world ? "this host" : "a host", format_bytes(on_host),
                    local_ranks == world ? "it" : "this one", format_bytes(host_memory), host_memory / local_ranks));
  }
  int64_t calls = 0;
  for (const auto& sum : largest.collectives) calls += sum.count;
  return fmt::format("preflight: {} rank{} would meet in all calls of a step; rank {} needs most, {} at the peak{}, and makes {} of them", world,
                     world == 1 ? "" : "s", largest.examples.front(), format_bytes(peak),
                     run.memory_limit > 0 ? fmt::format(" of {}", format_bytes(run.memory_limit)) : "", calls);
}

}  // namespace tessera::plan
