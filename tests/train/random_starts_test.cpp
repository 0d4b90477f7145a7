// Runs that begin from what another run left: from a checkpoint of another model (checkpoint.partial), from a folder of Hugging Face's, from an adapter of
// PEFT's. Recipes are drawn (random_layout.h); on one rank and in a random layout such a run begins with the same bits, and trains alike.
//
// TESSERA_SEED=n runs DISABLED_Many with that seed alone, TESSERA_SEEDS=n,m with those from n to m.

#include <ATen/ops/allclose.h>

#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/peft.h"
#include "tests/dice.h"
#include "tests/train/random_layout.h"
#include "tests/train/random_runs.h"

namespace tessera {
namespace {

using testing_support::Dice;
using testing_support::LayoutDice;
using testing_support::RandomLayout;
using testing_support::Sets;

/// Of a setting, what was said last.
std::string last_of(const Sets& sets, const std::string& key) {
  const auto found = std::ranges::find_if(sets.rbegin(), sets.rend(), [&](const std::string& set) { return set.starts_with(key + "="); });
  return found == sets.rend() ? "" : found->substr(key.size() + 1);
}

class RandomStarts : public testing_support::RandomRuns {
 protected:
  using On = std::pair<Config, int>;
  enum class Kind : uint8_t { Adapters, Layers, Width, Head, Optimizer, HuggingFace, Peft, kCount };

  /// What a run that begins from the first one's says otherwise; nothing where the first has no such.
  std::optional<Sets> begins(Kind kind, const RandomLayout& first, const On& from, Dice& dice) const {
    const Config& config = from.first;
    const bool adapted = !config.lora.modules.empty(), mixture = config.model.experts > 0;
    switch (kind) {
      case Kind::Adapters:
        if (adapted) return partial(R"(["**.lora_a", "**.lora_b"])", {"lora.rank=" + std::to_string(config.lora.rank + 1)});
        return partial(R"(["**.lora_a", "**.lora_b"])", {adapters(first), "lora.rank=2"});
      case Kind::Layers: {
        const bool more = config.model.layers == 1 || dice.once_in(2);
        const int64_t now = config.model.layers + (more ? 1 : -1);
        return partial("[\"layers." + std::to_string(std::min(now, config.model.layers)) + ".**\"]", {"model.layers=" + std::to_string(now)});
      }
      case Kind::Width:
        if (mixture && dice.once_in(2)) {
          const std::string experts = "model.experts=" + std::to_string(config.model.experts + 1);
          return partial(R"(["**.experts.*", "**.router.*"])", {experts});
        }
        return partial("[\"layers." + std::string(first.family == "mlp" ? "**" : "*.feed_forward.**") + "\"]",
                       {"model.ffn_dim=" + std::to_string(*config.model.ffn_dim + 4)});
      case Kind::Head:
        return partial("[\"head.**\"]", {std::string("model.tie_embeddings=") + (config.model.tie_embeddings ? "false" : "true")});
      case Kind::Optimizer:
        return partial("[\"layers.0.**\"]",
                       {"optim.groups=[\"layers.0: name = " + std::string(config.optim.name == "lion" ? "adamw" : "lion") + ", lr = 0.001\"]"});
      case Kind::HuggingFace:
        if (adapted) return std::nullopt;
        return exported("base", config) ? std::optional(from_hf()) : std::nullopt;
      case Kind::Peft: {
        if (adapted || !exported("base", config)) return std::nullopt;
        Sets on_top = from_hf();
        on_top.insert(on_top.end(), {adapters(first), "lora.rank=" + std::to_string(1 + dice.below(3))});
        Sets sets = first.sets;
        sets.insert(sets.end(), on_top.begin(), on_top.end());
        const auto adapter = lawful(first.family, sets);
        if (!adapter) return std::nullopt;
        train(*adapter, "", "adapter");
        try {
          checkpoint::export_peft(saved_in("adapter"), adapter->first.model, adapter->first.lora, folder_ / "peft");
        } catch (const ConfigError&) {
          return std::nullopt;
        }
        on_top.push_back("lora.from_peft=" + (folder_ / "peft").string());
        return on_top;
      }
      case Kind::kCount:
        break;
    }
    return std::nullopt;
  }

  Sets partial(const std::string& patterns, const Sets& more) const {
    Sets sets{"checkpoint.resume=" + saved_in("base").string(), "checkpoint.partial=" + patterns};
    sets.insert(sets.end(), more.begin(), more.end());
    return sets;
  }

  static std::string adapters(const RandomLayout& first) { return std::string("lora.modules=layers.*") + (first.family == "mlp" ? "" : ".attention.*"); }

  bool exported(const std::string& run, const Config& config) const {
    try {
      checkpoint::export_hugging_face(saved_in(run), config.model, folder_ / "hf", {});
      return true;
    } catch (const ConfigError&) {  // a model that has no such files
      return false;
    }
  }

  Sets from_hf() const { return {"model.from_hf=" + (folder_ / "hf").string(), "data.tokenizer=byte", "run.steps=" + std::to_string(kSavedAt)}; }

  std::optional<On> in_layout(const RandomLayout& first, const Sets& layout, const Sets& begin) const {
    Sets sets;
    std::ranges::copy_if(first.sets, std::back_inserter(sets), [](const std::string& set) { return !RandomLayout::is_of_layout(set); });
    std::ranges::copy_if(layout, std::back_inserter(sets), [](const std::string& set) { return RandomLayout::is_of_layout(set); });
    // An update that is made late, and what crosses in fewer bits, are parts of the recipe.
    for (const char* recipe : {"offload.delayed_update", "comm.compression"}) {
      if (last_of(layout, recipe) != last_of(first.sets, recipe)) return std::nullopt;
    }
    sets.insert(sets.end(), begin.begin(), begin.end());
    last_ = ::testing::PrintToString(sets);
    return lawful(first.family, sets);
  }

  /// False where it is refused.
  bool begins_alike(uint64_t seed) const {
    const std::string lines = write_lines();
    Dice dice(seed * 92821 + 13);
    RandomLayout first;
    std::optional<On> from;
    for (const RandomLayout& less : LayoutDice(seed, lines).draw().ever_less()) {
      first = less;
      if ((from = lawful(first.family, first.sets))) break;
    }
    if (!from || from->first.offload.delayed_update) return false;
    from->first.run.steps = kSavedAt;
    train(*from, "", "base");
    constexpr int kKinds = static_cast<int>(Kind::kCount);
    for (int kind = dice.below(kKinds), tried = 0; tried < kKinds; ++tried) {
      const auto begin = begins(static_cast<Kind>((kind + tried) % kKinds), first, *from, dice);
      const auto alone = begin ? in_layout(first, {}, *begin) : std::nullopt;
      for (uint64_t other = 1; alone && other < 9; ++other) {
        const auto apart = in_layout(first, LayoutDice(seed * 1000 + other, lines).draw().sets, *begin);
        if (!apart || apart->second == 1) continue;
        SCOPED_TRACE("seed " + std::to_string(seed) + ": " + first.text() + "\n begins as " + ::testing::PrintToString(*begin) + "\n on " + last_);
        expect_alike(*alone, *apart);
        return true;
      }
      for (const char* folder : {"hf", "peft", "adapter"}) std::filesystem::remove_all(folder_ / folder);
    }
    return false;
  }

  void expect_alike(const On& alone, const On& apart) const {
    const auto want = state_of({resumed(alone.first, ""), alone.second}), got = state_of({resumed(apart.first, ""), apart.second});
    for (const auto& [name, tensor] : want) {
      const auto found = got.find(name);
      if (found != got.end()) EXPECT_TRUE(at::equal(found->second, tensor)) << name;
    }
    const Told one = train(alone, "", "alone"), other = train(apart, "", "apart");
    ASSERT_EQ(one.steps.size(), other.steps.size());
    const double cut = std::max(bound(alone.first, false), bound(apart.first, false)), updated = std::max(bound(alone.first, true), bound(apart.first, true));
    for (size_t i = 0; i < one.steps.size(); ++i)
      EXPECT_NEAR(other.steps[i].loss, one.steps[i].loss, (i == 0 ? cut : updated) * one.steps[i].loss) << "step " << one.steps[i].step;
  }

  void run_seeds(uint64_t begin, uint64_t end) const {
    uint64_t ran = 0;
    for (uint64_t seed = begin; seed < end && !HasFailure(); ++seed) {
      try {
        ran += begins_alike(seed) ? 1 : 0;
      } catch (const std::exception& error) {
        ADD_FAILURE() << "seed " << seed << ": " << LayoutDice(seed, write_lines()).draw().text() << "\n" << error.what();
      }
      for (const char* run : {"base", "alone", "apart", "adapter", "hf", "peft"}) std::filesystem::remove_all(folder_ / run);
    }
    if (end - begin > 1 && testing_support::asked_text().empty() && !HasFailure()) EXPECT_GE(3 * ran, end - begin) << "most are refused: the dice test nothing";
  }

 private:
  mutable std::string last_;
};

TEST_F(RandomStarts, AreThoseOfOneRank) { run_seeds(0, 6); }

TEST_F(RandomStarts, DISABLED_Many) {
  const auto [begin, end] = testing_support::seeds_asked(6, 500);
  run_seeds(begin, end);
}

}  // namespace
}  // namespace tessera
