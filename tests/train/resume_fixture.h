// A small run that saves and goes on, in any layout: ranks are threads.
#pragma once

#include <functional>
#include <map>

#include <gmock/gmock.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/train/replay.h"
#include "tessera/train/trainer.h"
#include "tests/test_device.h"
#include "tests/train/fixture.h"

namespace tessera::testing_support {

using testing_support::SliceCollector;
using Sets = std::vector<std::string>;

inline constexpr int64_t kSaved = 3, kLast = 5;

struct Layout {
  const char* name;
  int ranks;
  Sets sets;
};

inline const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{{"one", 1, {}},
                                       {"ddp3", 3, {}},
                                       {"zero1x2", 2, {"zero.stage=1"}},
                                       {"zero3x4", 4, {"zero.stage=3"}},
                                       {"hybrid2x2", 4, {"zero.stage=2", "mesh.dp_replicate=2"}},
                                       {"hybrid2x2 of stage 3", 4, {"zero.stage=3", "mesh.dp_replicate=2"}}};
  return all;
}

inline bool cuts_layers(const Layout& layout) {
  return std::ranges::any_of(layout.sets, [](const std::string& set) { return set.starts_with("mesh.tp") || set.starts_with("mesh.e"); });
}

class Listener : public Observer {
 public:
  explicit Listener(std::vector<StepResult>& steps) : steps_(steps) {}
  void after_step(const StepResult& result) override { steps_.push_back(result); }

 private:
  std::vector<StepResult>& steps_;
};

class ResumeFixture : public TrainFixture {
 protected:
  Config settings(const Layout& layout, const Sets& more) const {
    Sets sets{"model.kv_heads=2",       "model.tie_embeddings=true",         "batch.global_size=4", "batch.micro_size=1", "run.threads=1",
              "zero.bucket_bytes=9000", "run.steps=" + std::to_string(kLast)};
    for (const Sets& added : {layout.sets, more}) sets.insert(sets.end(), added.begin(), added.end());
    return config("llama", sets);
  }

  /// Trains to the end; returns the steps that were run.
  std::vector<StepResult> run(const Layout& layout, const Sets& sets, const OpenOptions& open = {}) const {
    const Config config = settings(layout, sets);
    std::vector<StepResult> steps;
    const auto body = [&](comm::World& ranks) {
      validate(config, ranks.size());
      Trainer trainer(config, ranks, open_inputs(config, open));
      trainer.add_observer(std::make_unique<Listener>(steps));
      trainer.run();
    };
    comm::run_ranks(layout.ranks, body, {.backend = config.comm.backend, .algorithm = config.comm.algorithm, .check = config.comm.check});
    return steps;
  }

  std::filesystem::path saved(const Layout& layout) const { return folder_ / layout.name; }
  std::filesystem::path saved(const Layout& layout, int64_t step) const { return saved(layout) / step_name(step); }
  static std::string step_name(int64_t step) {
    const std::string digits = std::to_string(step);
    return "step-" + std::string(8 - digits.size(), '0') + digits;
  }

  /// The whole run, with a checkpoint on its way and at its end.
  std::vector<StepResult> run_saving(const Layout& layout, Sets sets) const {
    sets.insert(sets.end(), {"checkpoint.dir=" + saved(layout).string(), "checkpoint.every=" + std::to_string(kSaved)});
    return run(layout, sets);
  }

  /// The training state that `layout` holds after loading, put together: weights, masters, optimizer state.
  std::map<std::string, at::Tensor> loaded(const Layout& layout, const Sets& sets, const std::filesystem::path& checkpoint) const {
    auto all = sets;
    all.push_back("checkpoint.resume=" + checkpoint.string());
    const Config config = settings(layout, all);
    SliceCollector state;
    comm::run_ranks(layout.ranks, [&](comm::World& ranks) {
      validate(config, ranks.size());
      const Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
      RankScope scope(config, ranks.local_size());
      const Stepper stepper(config, mesh, testing_support::test_device(), scope, open_inputs(config).resume);
      const auto& run = stepper.run();
      for (const auto& held : checkpoint::training_tensors(*run.model, run.optimizer.get())) state.add(held.slice.name, held.tensor, held.slice);
    });
    return state.whole();
  }

  static std::map<std::string, at::Tensor> stored(const std::filesystem::path& checkpoint) {
    const auto manifest = checkpoint::read_manifest(checkpoint);
    std::vector<checkpoint::SlicedTensor> targets;
    std::map<std::string, at::Tensor> tensors;
    for (const auto& [name, tensor] : manifest.tensors) {
      tensors[name] = at::empty(tensor.shape, checkpoint::dtype_from_name(tensor.dtype));
      targets.push_back({tensors[name], Slice::whole(name, tensor.shape)});
    }
    checkpoint::load(checkpoint, manifest, targets);
    return tensors;
  }

  static void expect_same_bits(const std::map<std::string, at::Tensor>& got, const std::map<std::string, at::Tensor>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (const auto& [name, tensor] : want) EXPECT_TRUE(at::equal(got.at(name), tensor)) << name;
  }

  void expect_goes_on(const Layout& source, const Layout& target, const Sets& sets, double bound, const std::vector<StepResult>& whole) const {
    SCOPED_TRACE(std::string(source.name) + " to " + target.name);
    const auto from = saved(source, kSaved);
    auto all = sets;
    all.insert(all.end(), {"checkpoint.resume=" + from.string(), "checkpoint.dir=" + (folder_ / "resumed").string()});
    const auto steps = run(target, all);
    ASSERT_EQ(steps.size(), kLast - kSaved);
    // The first loss is of the loaded weights, each micro-batch computed alone and added up in their order: the same arithmetic in every layout of whole
    // layers.
    if (!cuts_layers(source) && !cuts_layers(target)) EXPECT_EQ(steps.front().loss, whole[kSaved].loss);
    for (size_t i = 0; i < steps.size(); ++i) {
      const StepResult& want = whole[kSaved + i];
      EXPECT_EQ(steps[i].step, want.step);
      EXPECT_EQ(steps[i].lr, want.lr);
      EXPECT_EQ(steps[i].extras.contains("loss_scale"), want.extras.contains("loss_scale"));
      if (want.extras.contains("loss_scale")) EXPECT_EQ(steps[i].extras.at("loss_scale"), want.extras.at("loss_scale")) << want.step;
      if (&source == &target) {
        EXPECT_EQ(steps[i].loss, want.loss) << want.step;
        EXPECT_EQ(steps[i].grad_norm, want.grad_norm) << want.step;
      } else {
        EXPECT_NEAR(steps[i].loss, want.loss, bound * want.loss) << want.step;
      }
    }
    if (&source == &target) expect_same_bits(stored(folder_ / "resumed" / step_name(kLast)), stored(saved(source, kLast)));
    std::filesystem::remove_all(folder_ / "resumed");
  }

  /// Each of `all` saves, and goes on as those that come so many `places` behind it in the list: with the bits that were saved, and then as if nothing had
  /// happened. `look` sees what was saved.
  void expect_each_goes_on(const std::vector<Layout>& all, const std::vector<size_t>& places, const Sets& sets = {},
                           const std::function<void(const std::map<std::string, at::Tensor>&)>& look = {}) const {
    for (size_t from = 0; from < all.size(); ++from) {
      const auto whole = run_saving(all[from], sets);
      const auto state = stored(saved(all[from], kSaved));
      if (look) look(state);
      for (const size_t place : places) {
        const Layout& to = all[(from + place) % all.size()];
        SCOPED_TRACE(std::string(all[from].name) + " goes on as " + to.name);
        expect_same_bits(loaded(to, sets, saved(all[from], kSaved)), state);
        expect_goes_on(all[from], to, sets, kLosses, whole);
      }
    }
  }
};

}  // namespace tessera::testing_support
