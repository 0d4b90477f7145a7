// Random recipes in random layouts (random_layout.h) that save, go on as if nothing had happened, and in another random layout from the very bits that were
// saved, some of them in other number formats or micro-batches.
//
// TESSERA_SEED=n runs DISABLED_Many with that seed alone, TESSERA_SEEDS=n,m with those from n to m.

#include <fstream>
#include <optional>

#include <ATen/ops/allclose.h>

#include "tests/dice.h"
#include "tests/train/random_layout.h"
#include "tests/train/random_runs.h"
#include "tests/train/random_schedule.h"

namespace tessera {
namespace {

using testing_support::asynchronous;
using testing_support::by_file;
using testing_support::compressed;
using testing_support::Dice;
using testing_support::LayoutDice;
using testing_support::RandomLayout;
using testing_support::Sets;

class RandomResume : public testing_support::RandomRuns {
 protected:
  /// What a run would say that goes on as it was saved.
  void expect_nothing_changed(const Config& config, const std::string& from) const {
    const Config now = resumed(config, from);
    EXPECT_THAT(changes_since(*open_inputs(now).resume, now), testing::IsEmpty());
  }

  /// False where it is refused.
  bool goes_on(uint64_t seed) const {
    const std::string lines = write_lines();
    RandomLayout first;
    std::optional<std::pair<Config, int>> from;
    const auto tried = [&](RandomLayout layout) {
      first = std::move(layout);
      from = lawful(first.family, first.sets);
      return from.has_value();
    };
    bool flushes = true;
    for (const RandomLayout& less : LayoutDice(seed, lines).draw().ever_less()) {
      const RandomLayout named = compressed(with_rest(less, seed), seed), without = asynchronous(named, seed), own = by_file(named, seed, folder_);
      flushes = without.sets == named.sets || !tried(without);
      if (!flushes || (own.sets != named.sets && tried(own)) || tried(named)) break;
    }
    if (!from) return false;
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + first.text());
    const Told whole = train(*from, "", "whole"), again = train(*from, "whole", "again");
    EXPECT_EQ(again.steps.size(), kEnd - kSavedAt);
    for (size_t i = 0; i < again.steps.size(); ++i)
      EXPECT_EQ(again.steps[i].loss, whole.steps[kSavedAt + i].loss) << "the same layout, step " << again.steps[i].step;
    for (const auto& [step, loss] : again.validations) EXPECT_EQ(loss, whole.validations.at(step)) << "the same layout, behind step " << step;
    expect_nothing_changed(from->first, "whole");
    expect_same_bits(stored(folder_ / "again" / step_name(kEnd)), stored(folder_ / "whole" / step_name(kEnd)));
    for (uint64_t other = 1; flushes && other < 9; ++other) {  // without a flush stages are part of what is trained
      const auto to = moved(first, compressed(LayoutDice(seed * 1000 + other, lines).draw(), seed), seed);
      if (!to) continue;
      go_on_in(*from, *to, whole);
      break;
    }
    std::filesystem::remove_all(folder_ / "whole");
    std::filesystem::remove_all(folder_ / "again");
    return true;
  }

  /// With a format of products that is the machine's to choose, where none is drawn, several threads a rank, and validations.
  RandomLayout with_rest(RandomLayout layout, uint64_t seed) const {
    Dice dice(seed * 31337 + 1);
    const bool wide = std::ranges::none_of(layout.sets, [](const std::string& set) { return set.starts_with("precision."); });
    if (wide && dice.once_in(3)) layout.sets.emplace_back("precision.compute=auto");
    if (dice.once_in(6)) layout.sets.emplace_back("run.threads=2");
    if (dice.once_in(3)) layout.sets.insert(layout.sets.end(), {write_held_out(), "run.validate_every=1"});
    return layout;
  }

  /// A few windows.
  std::string write_held_out() const {
    std::ofstream text(folder_ / "held_out.txt");
    for (int i = 0; i < 30; ++i) text << "abcdefgh"[i * i % 8] << "the "[i % 4] << (i % 5 == 0 ? "\n" : "");
    return "data.validation_files=[\"" + (folder_ / "held_out.txt").string() + "\"]";
  }

  /// What a run that goes on may say otherwise than the one that saved.
  static Sets changed(const RandomLayout& first, uint64_t seed) {
    Dice dice(seed * 27644437 + 7);
    if (!dice.once_in(3)) return {};
    const auto is_set = [&](const char* text) {
      return std::ranges::any_of(first.sets, [&](const std::string& set) { return set.find(text) != std::string::npos; });
    };
    const bool apart = !is_set("expert_choice") && !is_set("capacity_factor");  // which look at all of a micro-batch
    if (apart && dice.once_in(3)) return {"batch.micro_size=" + std::to_string(1 + dice.below(3))};
    if (dice.once_in(3)) return {dice.one_of<const char*>({"optim.state_dtype=bf16", "optim.state_dtype=fp32"})};
    if (dice.once_in(3)) return {dice.one_of<const char*>({"precision.master=bf16", "precision.master=fp32"})};
    if (is_set("loss_scale")) return {};
    return {"precision.params=" + std::string(dice.one_of<const char*>({"bf16", "fp32"})),
            dice.once_in(2) ? "precision.compute=bf16" : "precision.compute=fp32"};
  }

  static bool updates_late(const Sets& sets) { return std::ranges::find(sets, "offload.delayed_update=true") != sets.end(); }

  /// The one's recipe in the other's layout, with changes where these are lawful. An update that is made late is part of the recipe.
  std::optional<std::pair<Config, int>> moved(const RandomLayout& first, const RandomLayout& second, uint64_t seed) const {
    if (updates_late(first.sets) != updates_late(second.sets)) return std::nullopt;
    Sets sets;
    for (const std::string& set : first.sets) {
      if (!RandomLayout::is_of_layout(set)) sets.push_back(set);
    }
    for (const std::string& set : second.sets) {
      if (RandomLayout::is_of_layout(set)) sets.push_back(set);
    }
    for (const Sets& more : {changed(first, seed), Sets()}) {
      Sets all = sets;
      all.insert(all.end(), more.begin(), more.end());
      const Sets by_name = all;
      all = by_file({.family = first.family, .sets = all}, seed + 1, folder_).sets;
      auto made = lawful(first.family, all);
      if (!made) made = lawful(first.family, all = by_name);
      if (!made) continue;
      last_ = ::testing::PrintToString(all);
      return made;
    }
    return std::nullopt;
  }

  void go_on_in(const std::pair<Config, int>& from, const std::pair<Config, int>& to, const Told& whole) const {
    SCOPED_TRACE("goes on as " + last_);
    const auto state = state_of({resumed(to.first, "whole"), to.second}), saved = stored(saved_in("whole"));
    for (const auto& [name, tensor] : saved) {
      const auto found = state.find(name);
      if (found == state.end()) continue;
      if (found->second.scalar_type() == tensor.scalar_type()) {
        EXPECT_TRUE(at::equal(found->second, tensor)) << name;
      } else {
        EXPECT_TRUE(at::allclose(found->second.to(at::kFloat), tensor.to(at::kFloat), /*rtol=*/0x1p-7, /*atol=*/1e-30)) << name << ", in fewer bits";
      }
    }
    const auto off = [&](bool updated) { return std::max(bound(from.first, updated), bound(to.first, updated)); };
    const Told told = train(to, "whole", "other");
    EXPECT_EQ(told.steps.size(), kEnd - kSavedAt);
    for (size_t i = 0; i < told.steps.size(); ++i) {
      const double want = whole.steps[kSavedAt + i].loss;
      EXPECT_NEAR(told.steps[i].loss, want, off(i > 0) * want) << "step " << told.steps[i].step;
    }
    for (const auto& [step, loss] : told.validations) {
      if (from.first.model.router == "expert_choice") break;  // experts choose among the windows of a pass, which other ranks deal otherwise
      EXPECT_NEAR(loss, whole.validations.at(step), off(step > kSavedAt) * loss) << "behind step " << step;
    }
    std::filesystem::remove_all(folder_ / "other");
  }

  void run_seeds(uint64_t begin, uint64_t end) const {
    uint64_t ran = 0;
    for (uint64_t seed = begin; seed < end && !HasFailure(); ++seed) {
      try {
        ran += goes_on(seed) ? 1 : 0;
      } catch (const std::exception& error) {
        ADD_FAILURE() << "seed " << seed << ": " << LayoutDice(seed, write_lines()).draw().text() << "\n goes on as " << last_ << "\n" << error.what();
      }
    }
    if (end - begin > 1 && testing_support::asked_text().empty() && !HasFailure())
      EXPECT_GE(2 * ran, end - begin) << "most layouts are refused: the dice test nothing";
  }

 private:
  mutable std::string last_;
};

TEST_F(RandomResume, GoesOnInAnyLayout) { run_seeds(5000, 5004); }

TEST_F(RandomResume, DISABLED_Many) {
  const auto [begin, end] = testing_support::seeds_asked(5004, 6000);
  run_seeds(begin, end);
}

}  // namespace
}  // namespace tessera
