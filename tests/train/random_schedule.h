// Draws schedules of pipelines that nobody wrote: stages wherever, backwards whole or in halves, in any order that ends; as files, which is how users bring
// theirs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tessera/pipeline/schedules/csv.h"
#include "tests/dice.h"
#include "tests/train/random_layout.h"

namespace tessera::testing_support {

/// Each rank holds a stage at least. One action after the other is put behind those of its rank, of all whose inputs are there by then: so none waits in vain.
inline schedules::Schedule random_schedule(Dice& dice, int ranks, int stages, int micro_batches) {
  using schedules::Action;
  using schedules::Kind;
  schedules::Schedule drawn{.name = "drawn", .micro_batches = micro_batches, .rank_of = {}, .actions = {}};
  for (int stage = 0; stage < stages; ++stage) drawn.rank_of.push_back(stage < ranks ? stage : dice.below(ranks));
  for (int stage = stages; stage-- > 1;) std::swap(drawn.rank_of[static_cast<size_t>(stage)], drawn.rank_of[static_cast<size_t>(dice.below(stage + 1))]);
  drawn.actions.resize(static_cast<size_t>(ranks));
  const int halves = dice.below(3);          // no backward, each, or some are cut
  const int eager = dice.one_of({1, 2, 6});  // forwards are taken as often as anything else, or rather
  std::vector<Action> ready;
  for (int micro = 0; micro < micro_batches; ++micro) ready.push_back({.kind = Kind::Forward, .stage = 0, .micro_batch = micro});
  const auto backward = [&](int stage, int micro) {
    const bool cut = halves == 1 || (halves == 2 && dice.once_in(2));
    ready.push_back({.kind = cut ? Kind::BackwardInput : Kind::Backward, .stage = stage, .micro_batch = micro});
  };
  while (!ready.empty()) {
    auto next = ready.begin() + dice.below(static_cast<int>(ready.size()));
    for (int again = 1; again < eager && next->kind != Kind::Forward; ++again) next = ready.begin() + dice.below(static_cast<int>(ready.size()));
    const Action action = *next;
    ready.erase(next);
    drawn.actions[static_cast<size_t>(drawn.rank_of[static_cast<size_t>(action.stage)])].push_back(action);
    const int stage = action.stage, micro = action.micro_batch;
    switch (action.kind) {
      case Kind::Forward:
        if (stage + 1 == stages) backward(stage, micro);
        if (stage + 1 < stages) ready.push_back({.kind = Kind::Forward, .stage = stage + 1, .micro_batch = micro});
        break;
      case Kind::BackwardInput:
        ready.push_back({.kind = Kind::BackwardWeight, .stage = stage, .micro_batch = micro});
        [[fallthrough]];
      case Kind::Backward:
        if (stage > 0) backward(stage - 1, micro);
        break;
      default:
        break;
    }
  }
  return drawn;
}

/// Of six pipelines one, without a flush between updates, and without what cannot be had there.
inline RandomLayout asynchronous(RandomLayout layout, uint64_t seed) {
  Dice dice(seed * 3144134 + 29);
  const bool staged = std::ranges::any_of(layout.sets, [](const std::string& set) { return set.starts_with("mesh.pp=") && set != "mesh.pp=1"; });
  if (!staged || !dice.once_in(6)) return layout;
  std::erase_if(layout.sets, [](const std::string& set) {
    const auto of_others = {
        "pipeline.", "zero.", "optim.max_grad_norm=", "precision.loss_scale=", "run.deterministic=", "model.tie_embeddings=", "comm.compression="};
    return std::ranges::any_of(of_others, [&](const char* key) { return set.starts_with(key); });
  });
  const bool twice = dice.once_in(2);
  layout.sets.insert(layout.sets.end(), {"zero.stage=0", "optim.max_grad_norm=0", std::string("pipeline.schedule=") + (twice ? "pipedream_2bw" : "pipedream")});
  if (twice) layout.sets.push_back("pipeline.per_update=" + std::to_string(1 + dice.below(4)));
  if (!twice && dice.once_in(2)) layout.sets.emplace_back("pipeline.vertical_sync=true");
  return layout;
}

/// Of three pipelines one, by a schedule of its own. Its file lies in `folder`.
inline RandomLayout by_file(RandomLayout layout, uint64_t seed, const std::filesystem::path& folder) {
  Dice dice(seed * 2750159 + 13);
  const auto number = [&](const std::string& key) {
    int value = 1;
    for (const std::string& set : layout.sets) {
      if (set.starts_with(key + "=")) value = std::stoi(set.substr(key.size() + 1));
    }
    return value;
  };
  const int ranks = number("mesh.pp"), stages = ranks * number("pipeline.virtual_stages");
  if (ranks == 1 || !dice.once_in(3)) return layout;
  const int windows = number("batch.global_size") / number("batch.micro_size"), data = number("mesh.dp_replicate") * number("mesh.dp_shard");
  const std::filesystem::path file = folder / ("schedule-" + std::to_string(seed) + ".csv");
  std::ofstream(file) << schedules::to_csv(random_schedule(dice, ranks, stages, (windows + data - 1) / data));
  std::erase_if(layout.sets, [](const std::string& set) {
    const auto of_others = {"pipeline.schedule=", "pipeline.memory_limit=", "pipeline.kept=", "pipeline.costs="};
    return std::ranges::any_of(of_others, [&](const char* key) { return set.starts_with(key); });
  });
  layout.sets.push_back("pipeline.schedule=" + file.string());
  return layout;
}

}  // namespace tessera::testing_support
