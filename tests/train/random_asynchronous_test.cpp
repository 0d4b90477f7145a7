// Random recipes under PipeDream and PipeDream-2BW, with and without what may change no bit of a run: recomputation, optimizer state and activations that wait
// elsewhere, comm.check, the size of buckets. What these schedules compute is held against lists of versions in weight_stashing_test.cpp.
//
// TESSERA_SEED=n runs DISABLED_Many with that seed alone, TESSERA_SEEDS=n,m with those from n to m.

#include <optional>

#include <ATen/ops/equal.h>

#include "tessera/core/error.h"
#include "tessera/train/compose.h"
#include "tessera/train/pipeline_layout.h"
#include "tests/dice.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

class RandomAsynchronous : public testing_support::TrainFixture {
 protected:
  using Sets = std::vector<std::string>;

  struct Drawn {
    std::string family;
    Sets recipe, beside;  ///< `beside`: what may change no bit
    int ranks = 1;

    std::string text() const {
      std::string text = family;
      for (const std::string& set : recipe) text += " --set " + set;
      text += ", and with";
      for (const std::string& set : beside) text += " --set " + set;
      return text;
    }
  };

  class Recipes : private testing_support::Dice {
   public:
    Recipes(uint64_t seed, std::string folder) : Dice(seed * 6151 + 3), folder_(std::move(folder)) {}

    Drawn draw() {
      draw_model();
      draw_recomputation();
      draw_places();
      if (once_in(3)) beside("comm.check", "true");
      if (once_in(3)) beside("zero.bucket_bytes", one_of({"1", "3000"}));
      if (drawn_.beside.empty()) beside("comm.check", "true");
      return std::move(drawn_);
    }

   private:
    void set(const std::string& key, const std::string& value) { drawn_.recipe.push_back(key + "=" + value); }
    void set(const std::string& key, int value) { set(key, std::to_string(value)); }
    void beside(const std::string& key, const std::string& value) { drawn_.beside.push_back(key + "=" + value); }

    void draw_model() {
      drawn_.family = one_of({"llama", "llama", "gpt2", "mixtral", "mlp"});
      const int pp = 2 + below(3), replicate = 1 + below(2), tp = drawn_.family == "mlp" || pp > 2 ? 1 : 1 + below(2);
      drawn_.ranks = pp * replicate * tp;
      set("mesh.pp", pp);
      set("mesh.dp_replicate", replicate);
      set("mesh.tp", tp);
      set("model.layers", pp + below(3));
      set("batch.micro_size", 1);
      set("batch.global_size", replicate * (1 + below(7)));
      if (once_in(3)) set("model.dropout", "0.1");
      const bool groups = once_in(2), synchronous = !groups && once_in(2);
      set("pipeline.schedule", groups ? "pipedream_2bw" : "pipedream");
      if (synchronous) set("pipeline.vertical_sync", "true");
      if ((groups || synchronous) && once_in(3)) set("model.tie_embeddings", "true");
      set("optim.name", one_of({"adamw", "sgd", "lion", "adafactor", "adam8bit", "muon"}));
      if (once_in(4)) set("optim.state_dtype", "bf16");
      if (once_in(4)) set("optim.groups", one_of({R"(["layers.0: name = lion, lr = 0.001"])", R"(["*norm*: weight_decay = 0"])"}));
      if (once_in(4)) set("precision.params", "bf16");
      if (once_in(3)) set("precision.compute", "bf16");
      if (once_in(5)) set("precision.master", "bf16");
      if (once_in(6)) set("run.kernels", "reference");
      if (once_in(6)) {
        set("lora.modules", drawn_.family == "mlp" ? "layers.*" : "layers.*.attention.*");
        set("lora.dropout", "0.2");
      }
    }

    void draw_recomputation() {
      if (once_in(2)) return;
      const int form = below(4);
      beside("recompute.mode", form < 2 ? "full" : "selective");
      if (form == 0) beside("recompute.segment", "2");
      if (form == 1 && once_in(2)) beside("recompute.every", "3");
      if (form == 2) beside("recompute.keep", one_of({R"(["mm", "addmm"])", R"(["mul", "add"])", R"(["add", "tessera::swiglu"])"}));
    }

    void draw_places() {
      if (!once_in(4)) {
        beside("offload.optimizer", one_of({"host", "disk", R"({ "layers.0" = "disk", "layers.*" = "host" })", R"({ "layers.*" = "host" })"}));
        if (!once_in(3)) beside("offload.update", "device");
      }
      if (once_in(4)) {
        beside("offload.activations", one_of({"host", "disk"}));
        beside("offload.min_bytes", "256");
      }
      beside("offload.dir", folder_);
    }

    std::string folder_;
    Drawn drawn_;
  };

  /// Nothing where it is refused, which is other tests' business.
  std::optional<Config> lawful(const Drawn& drawn, const Sets& more) const {
    Sets all{"run.threads=1", "run.steps=3", "optim.lr=3e-3", "optim.max_grad_norm=0", "comm.timeout_s=60"};
    for (const Sets& sets : {drawn.recipe, more}) all.insert(all.end(), sets.begin(), sets.end());
    try {
      Config made = config(drawn.family, all);
      validate(made, drawn.ranks);
      check_pipeline(made, mesh_shape(made.mesh, made.zero.stage, drawn.ranks));
      check_modules(made, mesh_shape(made.mesh, made.zero.stage, drawn.ranks));
      return made;
    } catch (const ConfigError& refusal) {
      if (std::getenv("TESSERA_SHOW_REFUSALS") != nullptr) std::cout << refusal.what() << "\n";
      return std::nullopt;
    }
  }

  void run_seeds(uint64_t begin, uint64_t end) const {
    uint64_t ran = 0;
    for (uint64_t seed = begin; seed < end; ++seed) {
      const Drawn drawn = Recipes(seed, folder_.string()).draw();
      const auto plain = lawful(drawn, {}), with = lawful(drawn, drawn.beside);
      if (!plain || !with) continue;
      ++ran;
      SCOPED_TRACE("seed " + std::to_string(seed) + ": " + drawn.text());
      try {
        const Trace want = train(*plain, drawn.ranks), got = train(*with, drawn.ranks);
        EXPECT_EQ(got.weights.size(), want.weights.size());
        for (const auto& [name, value] : want.weights) EXPECT_TRUE(at::equal(got.weights.at(name), value)) << name;
        for (size_t step = 0; step < want.steps.size(); ++step) EXPECT_EQ(got.steps[step].loss, want.steps[step].loss) << "step " << step + 1;
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    }
    if (end - begin > 1) EXPECT_GE(2 * ran, end - begin) << "most recipes are refused: the dice test nothing";
  }
};

TEST_F(RandomAsynchronous, WhatMayChangeNoBitChangesNone) { run_seeds(0, 12); }

TEST_F(RandomAsynchronous, DISABLED_Many) {
  const auto [begin, end] = testing_support::seeds_asked(12, 500);
  run_seeds(begin, end);
}

}  // namespace
}  // namespace tessera
