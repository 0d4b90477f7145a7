// Random recipes in random layouts (tests/train/random_layout.h), planned: whatever trains has a plan, with every rank in it, and what a rank needs is what the
// run takes, within what plans are known to leave out (docs/roadmap.md).
//
// TESSERA_SEED=n runs DISABLED_Many with that seed alone, TESSERA_SEEDS=n,m with those from n to m.

#include <numeric>
#include <optional>

#include "tessera/core/error.h"
#include "tessera/plan/dry_run.h"
#include "tessera/train/compose.h"
#include "tessera/train/pipeline_layout.h"
#include "tests/dice.h"
#include "tests/train/fixture.h"
#include "tests/train/random_layout.h"

namespace tessera {
namespace {

using testing_support::LayoutDice;
using testing_support::RandomLayout;

class RandomLayoutPlans : public testing_support::TrainFixture {
 protected:
  std::optional<std::pair<Config, int>> lawful(const RandomLayout& layout) const {
    std::vector<std::string> sets{"run.threads=1", "optim.lr=1e-3", "comm.timeout_s=120", "mesh.dp_replicate=1", "run.steps=3"};
    sets.insert(sets.end(), layout.sets.begin(), layout.sets.end());
    try {
      Config made = config(layout.family, sets);
      const int ranks = made.mesh.dp_replicate.value_or(1) * made.mesh.dp_shard.value_or(1) * made.mesh.pp * made.mesh.cp * made.mesh.tp;
      validate(made, ranks);
      check_pipeline(made, mesh_shape(made.mesh, made.zero.stage, ranks));
      check_modules(made, made.mesh.tp);
      return std::pair(std::move(made), ranks);
    } catch (const ConfigError&) {
      return std::nullopt;
    }
  }

  /// The largest total of each rank.
  static std::vector<int64_t> planned(const Config& config, int world) {
    std::vector<int64_t> peaks(static_cast<size_t>(world), -1);
    for (const auto& ranks : plan::dry_run(config, world).ranks) {
      for (const int rank : ranks.examples) peaks[static_cast<size_t>(rank)] = std::accumulate(ranks.peak_bytes.begin(), ranks.peak_bytes.end(), int64_t{0});
    }
    return peaks;
  }

  void run_seeds(uint64_t begin, uint64_t end, bool compared) const {
    const std::string lines = write_lines();
    for (uint64_t seed = begin; seed < end; ++seed) {
      const RandomLayout layout = LayoutDice(seed, lines).draw();
      const auto made = lawful(layout);
      if (!made) continue;
      SCOPED_TRACE("seed " + std::to_string(seed) + ": " + layout.text());
      try {
        const auto [config, world] = *made;
        const std::vector<int64_t> peaks = planned(config, world);
        for (int rank = 0; rank < world; ++rank) EXPECT_GT(peaks[static_cast<size_t>(rank)], 0) << "rank " << rank << " is in no class";
        if (!compared) continue;
        const auto real = train(config, world).peak_of_rank;
        for (int rank = 0; rank < world; ++rank) {
          const auto want = static_cast<double>(real[static_cast<size_t>(rank)]);
          EXPECT_NEAR(static_cast<double>(peaks[static_cast<size_t>(rank)]), want, 0.03 * want) << "rank " << rank << " of " << world;
        }
      } catch (const std::exception& error) {
        ADD_FAILURE() << std::string(error.what()).substr(0, 400);
      }
    }
  }
};

TEST_F(RandomLayoutPlans, WhateverTrainsHasAPlan) { run_seeds(0, 12, /*compared=*/false); }

TEST_F(RandomLayoutPlans, DISABLED_Many) {
  const auto [begin, end] = testing_support::seeds_asked(12, 1000);
  run_seeds(begin, end, /*compared=*/true);
}

}  // namespace
}  // namespace tessera
