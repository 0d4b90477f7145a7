// What tests share that train recipes drawn by random_layout.h.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/precision/compute_format.h"
#include "tessera/train/compose.h"
#include "tessera/train/pipeline_layout.h"
#include "tests/train/resume_fixture.h"

namespace tessera::testing_support {

/// Recipes that were drawn (random_layout.h), trained for a few steps on ranks that are threads.
class RandomRuns : public ResumeFixture {
 protected:
  static constexpr int64_t kSavedAt = 2, kEnd = 4;

  /// The recipe on its ranks; nothing where it is refused, which is other tests' business.
  std::optional<std::pair<Config, int>> lawful(const std::string& family, const Sets& sets) const {
    Sets all{"run.threads=1", "optim.lr=1e-3", "comm.timeout_s=120", "mesh.dp_replicate=1", "run.steps=" + std::to_string(kEnd)};
    all.insert(all.end(), sets.begin(), sets.end());
    try {
      const Config made = config(family, all);
      const int ranks = made.mesh.dp_replicate.value_or(1) * made.mesh.dp_shard.value_or(1) * made.mesh.pp * made.mesh.cp * made.mesh.tp;
      validate(made, ranks);
      check_pipeline(made, mesh_shape(made.mesh, made.zero.stage, ranks));
      check_modules(made, mesh_shape(made.mesh, made.zero.stage, ranks));
      open_inputs(made);
      return std::pair(made, ranks);
    } catch (const ConfigError&) {
      return std::nullopt;
    }
  }

  /// What a run says of itself.
  struct Told {
    std::vector<StepResult> steps;
    std::map<int64_t, double> validations;  ///< by step
  };

  class ListensToAll : public Observer {
   public:
    explicit ListensToAll(Told& told) : told_(told) {}
    void after_step(const StepResult& result) override { told_.steps.push_back(result); }
    void after_validation(const ValidationResult& result) override { told_.validations[result.step] = result.loss; }

   private:
    Told& told_;
  };

  std::filesystem::path saved_in(const std::string& run) const { return folder_ / run / step_name(kSavedAt); }

  Told train(const std::pair<Config, int>& on, const std::string& resume, const std::string& into) const {
    auto [config, ranks] = on;
    if (!resume.empty()) config.checkpoint.resume = saved_in(resume).string();
    config.checkpoint.dir = (folder_ / into).string();
    config.checkpoint.every = kSavedAt;
    Told told;
    const auto body = [&](comm::World& world) {
      Trainer trainer(config, world, open_inputs(config));
      trainer.add_observer(std::make_unique<ListensToAll>(told));
      trainer.run();
    };
    comm::run_ranks(
        ranks, body,
        {.timeout = comm::world_options(config.comm).timeout, .backend = config.comm.backend, .algorithm = config.comm.algorithm, .check = config.comm.check});
    return told;
  }

  /// With what a run settles on by its machine.
  Config resumed(Config config, const std::string& from) const {
    if (!from.empty()) config.checkpoint.resume = saved_in(from).string();
    precision::settle_compute(config, at::kCPU, precision::Saying::Silent);
    return config;
  }

  /// What ranks hold before their first step, put together.
  std::map<std::string, at::Tensor> state_of(const std::pair<Config, int>& on) const {
    const auto& [config, ranks] = on;
    SliceCollector state;
    comm::run_ranks(ranks, [&, &config = config](comm::World& world) {
      const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world.size()));
      RankScope scope(config, world.local_size());
      const Stepper stepper(config, mesh, at::kCPU, scope, open_inputs(config).resume);
      const auto& run = stepper.run();
      for (const auto& held : checkpoint::training_tensors(*run.model, run.optimizer.get())) state.add(held.slice.name, held.tensor, held.slice);
    });
    return state.whole();
  }

  /// What a loss may be off in another layout: of the weights that were loaded, and after an update.
  static double bound(const Config& config, bool updated) {
    const auto& precision = config.precision;
    const bool wide = precision.params == "fp32" && precision.compute == "fp32" && precision.reduce == "fp32" && config.comm.compression == "none";
    return !wide ? 2e-2 : updated ? 1e-3 : kLosses;
  }
};

}  // namespace tessera::testing_support
