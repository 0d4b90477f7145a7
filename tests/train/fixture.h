#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "tessera/comm/testing.h"
#include "tessera/config/config.h"
#include "tessera/data/corpus.h"
#include "tessera/data/loader.h"
#include "tessera/data/tokenizer.h"
#include "tessera/mesh/mesh.h"
#include "tessera/train/stepper.h"
#include "tests/nn/collect.h"
#include "tests/on_the_cpu.h"
#include "tests/test_device.h"

namespace tessera::testing_support {

inline constexpr double kGradients = 1e-5;  // of a tensor's largest entry
inline constexpr double kLosses = 5e-6;     // relative

/// A folder with a small text, and a small model's recipe. Ends with the test.
class TrainFixture : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("tessera-" + std::to_string(getpid()) + "-" + ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
    std::ofstream text(folder_ / "text.txt");
    uint32_t state = 1;
    for (int i = 0; i < 4000; ++i) {
      state = state * 1664525u + 1013904223u;
      text << "abcdefgh"[state >> 29] << (i % 7 == 0 ? " " : "the ");
    }
  }
  /// Lines of 1 to 27 letters, some of them followed by a blank one.
  std::string write_lines() const {
    std::ofstream text(folder_ / "lines.txt");
    uint32_t state = 5;
    const auto draw = [&](uint32_t n) { return (state = state * 1664525u + 1013904223u) / 65536 % n; };
    for (int i = 0; i < 120; ++i) {
      for (uint32_t n = 1 + draw(i % 9 == 0 ? 27 : 9); n > 0; --n) text << "abcdefgh"[draw(8)];
      text << (i % 11 == 0 ? "\n\n" : "\n");
    }
    return "data.files=[\"" + (folder_ / "lines.txt").string() + "\"]";
  }
  /// Lines that take sixteen columns each.
  std::string write_even_lines() const {
    std::ofstream text(folder_ / "even_lines.txt");
    uint32_t state = 7;
    for (int i = 0; i < 100; ++i) {
      for (int letter = 0; letter < 16; ++letter) text << "abcdefgh"[(state = state * 1664525u + 1013904223u) >> 29];
      text << '\n';
    }
    return "data.files=[\"" + (folder_ / "even_lines.txt").string() + "\"]";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  Config config(const std::string& family, const std::vector<std::string>& sets = {}) const {
    const std::string text = "[model]\nfamily = \"" + family +
                             "\"\ndim = 24\nlayers = 2\nheads = 4\nffn_dim = 40\nvocab_size = 259\n[data]\nfiles = [\"text.txt\"]\nseq_len = 16\n"
                             "[batch]\nglobal_size = 14\nmicro_size = 2\n[optim]\nlr = 1e-2\nmax_grad_norm = 1.0\n[run]\nsteps = 6\nseed = 3\n";
    std::vector<std::string> all{"data.cache_dir=" + (folder_ / "cache").string()};
    if (family == "mixtral") all.insert(all.end(), {"model.experts=5", "model.experts_per_token=2", "moe.balance_loss=0.05", "moe.z_loss=0.01"});
    all.insert(all.end(), sets.begin(), sets.end());
    Config config = parse_config(text, folder_, all);
    resolve(config);
    return config;
  }

  std::shared_ptr<const data::Corpus> corpus(const Config& config) const {
    const auto tokenizer = data::Tokenizer::load("byte");
    return data::Corpus::open_or_build({config.data.files.at(0)}, *tokenizer, config.data.cache_dir, 0, "data.files",
                                       data::documents_named(config.data.documents));
  }

  struct Trace {
    std::vector<StepOutcome> steps;
    std::map<std::string, at::Tensor> gradients;  ///< of the recorded step, before clipping
    std::map<std::string, at::Tensor> weights;    ///< after the last step
    MemoryByCategory peak{};                      ///< at the largest total of all steps
    std::vector<int64_t> peak_of_rank;            ///< the largest total of all steps, for every rank
  };

  /// Trains `world` ranks as threads; returns what rank 0 saw. `plant` may spoil gradients before they are recorded.
  Trace train(const Config& config, int world, const std::function<void(Composition&)>& plant = {}, int64_t recorded_step = 2) const {
    Trace trace;
    trace.peak_of_rank.resize(world);
    const bool sharded = config.zero.stage > 0 || config.mesh.tp != 1 || config.mesh.pp > 1 || config.mesh.ep * config.mesh.expert_tp > 1;
    testing_support::SliceCollector gradients, weights;
    const auto text = corpus(config);
    const auto body = [&](comm::World& ranks) {
      validate(config, ranks.size());
      Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
      RankScope scope(config, ranks.local_size());
      const at::Device device = OnTheCpu::now() ? at::Device(at::kCPU) : test_device();
      Stepper stepper(config, mesh, device, scope);
      data::Loader loader(text, loader_options(config, mesh));
      const bool first = ranks.rank() == 0;
      int64_t peak = -1;
      for (int64_t step = 1; step <= config.run.steps; ++step) {
        scope.memory().reset_peak();
        const auto outcome = stepper.step(loader.next(), {.gradients_ready = [&] {
                                            if (plant) plant(stepper.run());
                                            if (step == recorded_step && (first || sharded)) gradients.add_gradients(stepper.run().updated);
                                          }});
        const bool more = scope.memory().peak() > peak;
        if (more) trace.peak_of_rank[ranks.rank()] = peak = scope.memory().peak();
        if (!first) continue;
        trace.steps.push_back(outcome);
        if (more) trace.peak = scope.memory().peak_by_category();
      }
      if (first || sharded) weights.add_values(stepper.run().updated);
    };
    comm::run_ranks(world, body, {.decorators = decorators_, .backend = config.comm.backend, .algorithm = config.comm.algorithm, .check = config.comm.check});
    trace.gradients = gradients.whole();
    trace.weights = weights.whole();
    return trace;
  }

  std::filesystem::path folder_;
  std::vector<comm::Decorator> decorators_;  ///< of every rank's engines in train()
};

/// Largest difference of two sets of tensors, each relative to the largest entry of `want`'s. A key's bias adds the same number to all of a query's scores,
/// which the softmax takes out again: in exact arithmetic its gradient is zero, so what is left of it is measured by the query's bias.
inline double difference(const std::map<std::string, at::Tensor>& got, const std::map<std::string, at::Tensor>& want) {
  EXPECT_EQ(got.size(), want.size());
  double worst = 0;
  for (const auto& [name, tensor] : want) {
    std::string measure = name;
    if (const auto key = name.find("wk.bias"); key != std::string::npos) measure.replace(key, 2, "wq");
    const double scale = want.at(measure).abs().max().item<double>();
    worst = std::max(worst, (got.at(name) - tensor).abs().max().item<double>() / std::max(scale, 1e-30));
  }
  return worst;
}

}  // namespace tessera::testing_support
