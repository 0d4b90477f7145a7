/// The code of docs/optimizers.md, offload.md, precision.md and lora.md, compiled and run: what stands between `//: page: name` and `//:` here is what that
/// page shows. Each trains on several ranks what one rank trains alone.
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include "tessera/checkpoint/torch_optimizer.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/expert_parallel/expert_parallel.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/lora/lora.h"
#include "tessera/mesh/mesh.h"
#include "tessera/models/model.h"
#include "tessera/models/parallel_plans.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/sharing.h"
#include "tessera/offload/host_gradients.h"
#include "tessera/offload/host_optimizer.h"
#include "tessera/offload/paged_optimizer.h"
#include "tessera/optim/adafactor.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad_norm.h"
#include "tessera/precision/gradient_dtype.h"
#include "tessera/precision/loss_scale.h"
#include "tessera/precision/master_weights.h"
#include "tessera/precision/policy.h"
#include "tessera/quantize/quantize.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/checkpoint/files.h"
#include "tests/made_docs.h"
#include "tests/nn/net.h"
#include "tests/refusal.h"

namespace {

using tessera::comm::run_ranks;
using tessera::comm::World;
using tessera::testing_support::random_tensor;
using Values = std::map<std::string, at::Tensor>;
using Batches = std::vector<std::pair<torch::Tensor, torch::Tensor>>;

constexpr int64_t kRows = 6, kWords = 19;

/// A model that knows nothing of ranks; `hidden` is large enough for state in 8 bits.
struct Words : torch::nn::Module {
  Words() {
    register_module("embed", embed);
    register_module("hidden", hidden);
    register_module("head", head);
    tessera::testing_support::fill_parameters(*this);
  }
  torch::Tensor forward(const torch::Tensor& ids) { return head(torch::tanh(hidden(embed(ids)))); }
  torch::nn::Embedding embed{kWords, 64};
  torch::nn::Linear hidden{64, 64}, head{64, kWords};
};

/// Summed, and divided by the rows of all ranks.
torch::Tensor loss_of(const torch::Tensor& logits, const torch::Tensor& labels) {
  return torch::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum) / kRows;
}

torch::Tensor ids_of(const std::string& name, at::IntArrayRef sizes) { return ((random_tensor(sizes, name) + 1) * 0.5 * (kWords - 0.01)).to(at::kLong); }

/// This rank's rows.
Batches batches_of(World& world, int count, const std::string& name = "") {
  Batches batches;
  const auto [begin, rows] = tessera::chunk(kRows, world.size(), world.rank());
  for (int i = 0; i < count; ++i) {
    const std::string of = name + std::to_string(i);
    batches.emplace_back(ids_of("ids" + of, {kRows}).narrow(0, begin, rows), ids_of("labels" + of, {kRows}).narrow(0, begin, rows));
  }
  return batches;
}

std::unique_ptr<tessera::GradientSynchronizer> wrapped(const std::string& kind, torch::nn::Module& model, World& world) {
  if (kind == "ddp") return std::make_unique<tessera::DistributedDataParallel>(model, world.group());
  if (kind == "fully_shard") return tessera::fully_shard(model, world.group());
  return std::make_unique<tessera::ShardedDataParallel>(model, tessera::ShardGroups{.shard = world.group()}, tessera::ZeroOptions{.stage = 2});
}

Values values_of(const torch::nn::Module& model) {
  Values values;
  for (const auto& [name, tensor, aliases] : tessera::nn::unique_parameters(model)) values[name] = tensor.detach().clone();
  return values;
}

/// Of each tensor relative to its largest entry.
double difference(const Values& actual, const Values& expected) {
  double worst = actual.size() == expected.size() ? 0 : std::numeric_limits<double>::infinity();
  for (const auto& [name, value] : actual) worst = std::max(worst, ((value - expected.at(name)).abs().max() / expected.at(name).abs().max()).item<double>());
  return worst;
}

/// A program that trains `model`, all of which `wrapper` synchronizes.
using Program = std::function<void(World& world, Words& model, tessera::GradientSynchronizer& wrapper)>;

/// What `program` makes of the weights on as many ranks.
Values trained(int ranks, const std::string& kind, const Program& program) {
  Values values;
  run_ranks(ranks, [&](World& world) {
    Words model;
    {
      const auto wrapper = wrapped(kind, model, world);
      program(world, model, *wrapper);
      if (kind == "fully_shard") tessera::unshard(model);
    }
    if (world.rank() == 0) values = values_of(model);
  });
  return values;
}

void expect_one_devices(const std::string& what, double tolerance, const Program& program) {
  const Values alone = trained(1, "ddp", program);
  for (const int ranks : {2, 3}) {
    for (const std::string kind : {"ddp", "zero", "fully_shard"}) {
      EXPECT_LT(difference(trained(ranks, kind, program), alone), tolerance) << what << ", " << ranks << " ranks, " << kind;
    }
  }
}

TEST(OwnLoops, EveryOptimizerUnderEveryWrapper) {
  for (const std::string name : {"adamw", "sgd", "lion", "adam8bit", "adafactor", "muon"}) {
    expect_one_devices(name, 2e-5, [&](World& world, Words& model, tessera::GradientSynchronizer& wrapper) {
      const Batches batches = batches_of(world, 3);
      //: optimizers: by name
      tessera::OptimConfig config;  // the keys of [optim]
      config.name = name;           // "muon"
      config.weight_decay = 0.01;
      auto whole = tessera::optim::whole_model(model, wrapper);
      whole.heads.insert("head.weight");  // a plain Linear that makes logits: Muon leaves it to AdamW
      auto optimizer = tessera::zero_optimizer(
          wrapper, [&](const std::vector<tessera::nn::NamedParameter>& updated) { return tessera::optim::make_optimizer(config, updated, whole); });
      for (const auto& [ids, labels] : batches) {
        optimizer.zero_grad();
        loss_of(model.forward(ids), labels).backward();
        tessera::clip_grad_norm(wrapper, /*max_norm=*/1.0);
        optimizer.step(/*lr=*/1e-2);
      }
      //:
      EXPECT_EQ(whole.looked_up, std::set<std::string>{"embed.weight"});
    });
  }
}

TEST(OwnLoops, AnOptimizerByItsClass) {
  expect_one_devices("adafactor", 2e-5, [&](World& world, Words& model, tessera::GradientSynchronizer& wrapper) {
    //: optimizers: by class
    auto optimizer = tessera::zero_optimizer(wrapper, [&](const std::vector<tessera::nn::NamedParameter>& updated) {
      return std::make_unique<tessera::optim::Adafactor>(tessera::optim::decay_groups(updated, "matrices", /*weight_decay=*/0.01),
                                                         tessera::optim::AdafactorOptions{.momentum = 0.9}, tessera::optim::whole_model(model, wrapper));
    });
    //:
    for (const auto& [ids, labels] : batches_of(world, 3)) {
      optimizer.zero_grad();
      loss_of(model.forward(ids), labels).backward();
      optimizer.step(1e-2);
    }
  });
}

TEST(OwnLoops, AnOptimizerOnTheHost) {
  for (const bool delayed : {false, true}) {
    const at::Device device = at::kCPU;
    const Program program = [&](World& world, Words& model, tessera::GradientSynchronizer& wrapper) {
      const Batches batches = batches_of(world, 4);
      //: offload: host optimizer
      auto optimizer = tessera::zero_optimizer(wrapper, [&](const std::vector<tessera::nn::NamedParameter>& updated) {
        const auto make = [](const std::vector<tessera::nn::NamedParameter>& copies) {  // on the host, of what this rank updates
          return std::make_unique<tessera::optim::AdamW>(tessera::optim::decay_groups(copies, "matrices", /*weight_decay=*/0.01));
        };
        return std::make_unique<tessera::HostOptimizer>(updated, device, make, tessera::HostOptimizer::kPieceBytes, delayed);  // true: one step late
      });
      for (const auto& [ids, labels] : batches) {
        optimizer.zero_grad();
        loss_of(model.forward(ids), labels).backward();
        tessera::clip_grad_norm(wrapper, /*max_norm=*/1.0);
        optimizer.step(/*lr=*/1e-2);
      }
      //:
    };
    expect_one_devices(delayed ? "delayed" : "host", 2e-5, program);
  }
}

TEST(OwnLoops, StateOnDisk) {
  const tessera::checkpoint::TemporaryFolder temporary;
  const std::filesystem::path folder = temporary.path();
  expect_one_devices("paged", 2e-5, [&](World& world, Words& model, tessera::GradientSynchronizer& wrapper) {
    //: offload: paged optimizer
    auto optimizer = tessera::zero_optimizer(wrapper, [&](const std::vector<tessera::nn::NamedParameter>& updated) {
      const auto make = [](const std::vector<tessera::nn::NamedParameter>& parameters) {
        return std::make_unique<tessera::optim::AdamW>(tessera::optim::decay_groups(parameters, "matrices", /*weight_decay=*/0.01));
      };
      return std::make_unique<tessera::PagedOptimizer>(updated, tessera::PagedOptimizerOptions{.place = tessera::OffloadPlace::Disk, .dir = folder}, make);
    });
    //:
    for (const auto& [ids, labels] : batches_of(world, 4)) {
      optimizer.zero_grad();
      loss_of(model.forward(ids), labels).backward();
      optimizer.step(1e-2);
    }
  });
}

TEST(OwnLoops, GradientsOnTheHost) {
  const at::Device device = at::kCPU;
  const auto train = [&](int ranks) {
    Values values;
    run_ranks(ranks, [&](World& world) {
      const std::vector<Batches> steps = {batches_of(world, 2, "a"), batches_of(world, 2, "b"), batches_of(world, 2, "c")};
      Words model;
      //: offload: host gradients
      const auto sums = std::make_shared<tessera::HostSums>(device, /*in_flight_bytes=*/int64_t{25} << 20);
      auto zero =
          std::make_unique<tessera::ShardedDataParallel>(model, tessera::ShardGroups{.shard = world.group()}, tessera::ZeroOptions{.stage = 2, .relay = sums});
      const auto parts = zero->updated();
      tessera::HostGradients host(std::move(zero), parts, sums);
      tessera::optim::AdamW optimizer(tessera::optim::decay_groups(host.updated(), "matrices", /*weight_decay=*/0.01));  // the copies on the host
      for (const auto& passes : steps) {
        host.begin_step();  // clears the gradients
        for (size_t i = 0; i < passes.size(); ++i) {
          const auto& [ids, labels] = passes[i];
          const tessera::MicroBatchPosition position{.index = static_cast<int64_t>(i) * world.size() + world.rank(), .last = i + 1 == passes.size()};
          host.before_micro_batch(position);
          (loss_of(model.forward(ids), labels) / static_cast<double>(passes.size())).backward();
          host.after_micro_batch(position);
        }
        host.finish();
        tessera::clip_grad_norm(host, /*max_norm=*/1.0);
        optimizer.step(/*lr=*/1e-2);
        host.after_update();  // parameters go back to the device
      }
      //:
      if (world.rank() == 0) values = values_of(model);
    });
    return values;
  };
  EXPECT_LT(difference(train(2), train(1)), 2e-5);
  EXPECT_LT(difference(train(3), train(1)), 2e-5);
}

/// Small, on tessera's layers; of [model] in a recipe.
tessera::Config small_config() {
  tessera::Config config;
  config.model.family = "llama";
  config.model.dim = 16;
  config.model.layers = 2;
  config.model.heads = 2;
  config.model.ffn_dim = 24;
  config.model.vocab_size = kWords;
  config.model.max_seq_len = 8;
  tessera::resolve(config);
  return config;
}

/// Sequences, and the tokens behind theirs.
Batches sequences_of(int parts, int part, int count) {
  Batches batches;
  const auto [begin, rows] = tessera::chunk(kRows, parts, part);
  for (int i = 0; i < count; ++i) {
    const auto text = ids_of("text" + std::to_string(i), {kRows, 9}).narrow(0, begin, rows);
    batches.emplace_back(text.narrow(1, 0, 8).contiguous(), text.narrow(1, 1, 8).contiguous());
  }
  return batches;
}

TEST(OwnLoops, AModelInThePolicysFormats) {
  auto config = small_config();
  config.precision.params = "bf16";
  const uint64_t seed = 1;
  //: precision: model
  const auto policy = tessera::precision::policy_from(config.precision);  // or a Policy of your own
  auto model = tessera::on_meta([&] { return tessera::make_model(config.model); });
  tessera::precision::apply(*model, policy);  // before memory is given: weights are drawn once, in their dtype
  tessera::materialize(*model, seed);
  auto optimizer = tessera::precision::make_optimizer(config.optim, policy, seed, tessera::nn::unique_parameters(*model),
                                                      tessera::optim::whole_model(*model));  // masters where the policy has them
  //:
  EXPECT_EQ(model->parameters().front().scalar_type(), at::kBFloat16);
  const auto [ids, labels] = sequences_of(1, 0, 1).front();
  model->loss_sum(ids, labels).backward();
  optimizer->step(1e-2);
  EXPECT_EQ(optimizer->kind(), "adamw");
}

/// What a run by scaled losses has seen.
struct Scaled {
  std::vector<double> losses;
  int64_t skipped = 0;
  double scale = 0;
};

TEST(OwnLoops, ScaledLosses) {
  const tessera::checkpoint::TemporaryFolder temporary;
  auto config = small_config();
  config.precision.params = config.precision.compute = "fp16";
  config.precision.loss_scale = "dynamic";
  config.precision.growth_steps = 2;
  const uint64_t seed = 1;
  const auto train = [&](int ranks, const std::string& kind) {
    Scaled seen;
    run_ranks(ranks, [&](World& world) {
      std::vector<Batches> steps(6);
      for (size_t step = 0; step < steps.size(); ++step) {
        for (auto& batch : sequences_of(world.size(), world.rank(), 2)) steps[step].push_back(batch);
      }
      Scaled mine;
      size_t at = 0;
      std::shared_ptr<tessera::LanguageModel> model;
      /// Of a model that overflows in its third step.
      const auto loss_of = [&](const torch::Tensor& ids, const torch::Tensor& labels) {
        const auto loss = model->loss_sum(ids, labels) / static_cast<double>(kRows * 8);
        const torch::Tensor all = loss.detach().clone();
        tessera::comm::all_reduce(world.group(), all);
        mine.losses.push_back(all.item<double>());
        return at++ == 5 ? loss * 1e4 : loss;
      };
      const auto policy = tessera::precision::policy_from(config.precision);
      model = tessera::on_meta([&] { return tessera::make_model(config.model); });
      tessera::precision::apply(*model, policy);
      std::unique_ptr<tessera::GradientSynchronizer> made;
      if (kind == "fully_shard") {
        //: precision: fully_shard
        auto sharded = tessera::fully_shard(*model, world.group(),
                                            {.param_dtype = policy.compute,
                                             .reduce_dtype = policy.gradient_dtype(),
                                             .gradient_dtype = policy.gradient_dtype(),
                                             .cast = tessera::precision::cast_at_use(*model, policy)});
        tessera::materialize(*model, seed);
        //:
        made = std::move(sharded);
      } else {
        tessera::materialize(*model, seed);
        if (kind == "ddp") {
          made = std::make_unique<tessera::DistributedDataParallel>(*model, world.group(), tessera::DdpOptions{.reduce_dtype = policy.gradient_dtype()});
        } else {
          made = std::make_unique<tessera::ShardedDataParallel>(*model, tessera::ShardGroups{.shard = world.group()},
                                                                tessera::ZeroOptions{.stage = 2, .reduce_dtype = policy.gradient_dtype()});
        }
        tessera::precision::take_gradients_in(*policy.gradient_dtype(), tessera::nn::unique_parameters(*model));
      }
      tessera::GradientSynchronizer& wrapper = *made;
      //: precision: loop
      auto optimizer = tessera::zero_optimizer(wrapper, [&](const std::vector<tessera::nn::NamedParameter>& updated) {
        return tessera::precision::make_optimizer(config.optim, policy, seed, updated, tessera::optim::whole_model(*model, wrapper));
      });
      tessera::precision::LossScale scale(config.precision);
      for (const auto& passes : steps) {
        optimizer.zero_grad();  // a skipped step has left its gradients, too
        for (size_t i = 0; i < passes.size(); ++i) {
          const auto held = i + 1 < passes.size() ? wrapper.no_sync() : tessera::Attachment();
          const auto& [ids, labels] = passes[i];
          (loss_of(ids, labels) / static_cast<double>(passes.size()) * scale.value()).backward();  // the same value in all passes of a step
        }
        scale.unscale(wrapper.updated());
        const torch::Tensor norm = tessera::clip_grad_norm(wrapper, /*max_norm=*/1.0);   // of all ranks: finite on each of them, or on none
        const auto decision = scale.after_backward(std::isfinite(norm.item<double>()));  // halves or doubles the value for the next step
        if (decision == tessera::precision::LossScale::Decision::Update) optimizer.step(/*lr=*/1e-2);
        if (decision == tessera::precision::LossScale::Decision::Stop) throw std::runtime_error("gradients are not finite at any scale");
      }
      //:
      mine.skipped = scale.skipped();
      mine.scale = scale.value();
      const std::filesystem::path folder = temporary.path() / (kind + std::to_string(ranks));
      const int64_t step = 6;
      //: precision: save
      const auto written = tessera::checkpoint::save(folder, step, *model, optimizer.inner(), world.group(), {{"loss_scale", scale.state()}});
      //:
      tessera::precision::LossScale again(config.precision);
      {
        auto& scale = again;
        //: precision: load
        const auto resumed = tessera::checkpoint::load(written, *model, optimizer.inner());
        scale.restore(resumed.progress.at("loss_scale"), written.string());
        //:
      }
      EXPECT_EQ(again.state(), scale.state());
      if (world.rank() == 0) seen = mine;
    });
    return seen;
  };
  const Scaled alone = train(1, "ddp");
  EXPECT_EQ(alone.skipped, 1);
  EXPECT_EQ(alone.scale, 131072) << "doubled, halved, doubled";
  for (const std::string kind : {"ddp", "zero", "fully_shard"}) {
    const Scaled two = train(2, kind);
    EXPECT_EQ(two.skipped, 1) << kind;
    EXPECT_EQ(two.scale, 131072) << kind;
    for (size_t i = 0; i < alone.losses.size(); ++i) EXPECT_NEAR(two.losses[i], alone.losses[i], 3e-3 * alone.losses[i]) << kind << ", pass " << i;
  }
}

TEST(OwnLoops, Adapters) {
  const auto config = small_config();
  const auto model = tessera::make_model(config.model);
  //: lora: attach
  auto adapted = tessera::lora::attach(*model, {.modules = {"layers.*.attention.*"}, .rank = 8, .alpha = 16});  // before the model is cut or sharded
  //:
  int64_t trained = 0;
  for (const auto& parameter : model->parameters()) trained += parameter.requires_grad();
  EXPECT_EQ(trained, 2 * 4 * 2);
}

/// One rank has a model whole, with the codes of the same blocks.
TEST(OwnLoops, AdaptersBesideFourBitsInEveryLayout) {
  const auto config = small_config();
  Values pretrained;
  {
    const auto model = tessera::on_meta([&] { return tessera::make_model(config.model); });
    tessera::materialize(*model, 7);
    pretrained = values_of(*model);
  }
  const auto train = [&](int ranks, int tp, std::vector<double>& seen) {
    run_ranks(ranks, [&](World& world) {
      const uint64_t seed = 1;
      const Batches batches(4, sequences_of(ranks / tp, world.rank() / tp, 1).front());
      const double tokens = kRows * 8;
      std::vector<double> losses;
      //: lora: quantized
      const tessera::Mesh mesh(world, {{"dp", world.size() / tp}, {"tp", tp}});
      auto model = tessera::on_meta([&] { return tessera::make_model(config.model); });
      // 1. adapters, which freezes the rest
      auto adapted = tessera::lora::attach(*model, {.modules = {"layers.*.attention.*", "layers.*.feed_forward.*"}, .rank = 4, .alpha = 8});
      // 2. layers are cut, A and B with them
      auto parallel = tessera::parallelize_module(*model, mesh["tp"], tessera::parallel_plan(*model, /*sequence_parallel=*/true));
      // 3. frozen weights become codes, one whole matrix at a time
      const auto fill = [&](const torch::Tensor& weight, const torch::Tensor& whole) { whole.copy_(pretrained.at(tessera::nn::slice_of(weight).name)); };
      const tessera::quantize::Options fewer_bits{.modules = {"layers.*.feed_forward.*"},
                                                  .form = {.format = tessera::kernels::WeightFormat::Nf4, .block = 64},
                                                  .sharding = {.group = mesh["dp"]}};  // as fully_shard below: each rank keeps some rows
      const auto report = tessera::quantize::quantize_weights(*model, fewer_bits, at::kCPU, fill);
      // 4. what is left is sharded, and gets memory
      auto sharded = tessera::fully_shard(*model, mesh["dp"], {.wrap = "layers.*"});
      tessera::materialize(*model, seed);  // draws A
      {
        const torch::NoGradGuard no_grad;  // frozen weights that are not quantized: this rank's part of each
        for (auto& [name, parameter, aliases] : tessera::nn::unique_parameters(*model)) {
          if (const auto whole = pretrained.find(name); whole != pretrained.end()) {
            parameter.copy_(tessera::take(whole->second, tessera::nn::slice_of(parameter)).reshape_as(parameter));
          }
        }
      }
      tessera::optim::AdamW optimizer(tessera::optim::decay_groups(sharded->updated(), "all", /*weight_decay=*/0.01));
      for (const auto& [ids, labels] : batches) {
        model->zero_grad();
        const torch::Tensor loss = model->loss_sum(ids, labels) / tokens;  // of the whole batch: gradients are summed
        loss.backward();
        tessera::nn::sum_terms(parallel->group(), sharded->updated(), mesh[{"dp", "tp"}]);  // of A and B what is whole on several tp ranks
        optimizer.step(/*lr=*/1e-2);
        losses.push_back(loss.item<double>());
      }
      //:
      EXPECT_EQ(report.weights.size(), 6u);
      EXPECT_GE(report.bytes, report.elements / 2);
      const int64_t elements = 6 * config.model.dim * *config.model.ffn_dim / tp;
      EXPECT_EQ(report.elements, elements / (ranks / tp)) << "of a rank";
      for (double& each : losses) {
        const auto all = torch::tensor({each}, at::kDouble);
        tessera::comm::all_reduce(mesh["dp"], all);
        each = all.item<double>();
      }
      if (world.rank() == 0) seen = losses;
    });
  };
  std::vector<double> alone;
  train(1, 1, alone);
  EXPECT_LT(alone.back(), alone.front());
  for (const auto& [ranks, tp] : {std::pair(2, 1), {2, 2}, {4, 2}}) {
    std::vector<double> losses;
    train(ranks, tp, losses);
    for (size_t i = 0; i < alone.size(); ++i) EXPECT_NEAR(losses[i], alone[i], 1e-5 * alone[i]) << tp << " of " << ranks << ", step " << i;
  }
}

TEST(OwnLoops, CodesAreMadeBeforeUnits) {
  const auto config = small_config();
  run_ranks(2, [&](World& world) {
    auto model = tessera::on_meta([&] { return tessera::make_model(config.model); });
    const auto adapted = tessera::lora::attach(*model, {.modules = {"layers.*.attention.*"}});
    const auto sharded = tessera::fully_shard(*model, world.group());
    EXPECT_THAT(tessera::testing_support::refusal([&] { tessera::quantize::quantize_weights(*model, {.modules = {"layers.*.feed_forward.*"}}, at::kCPU); }),
                ::testing::HasSubstr("'layers.0.feed_forward.w1.weight' is a part of a sharded unit; call quantize_weights before fully_shard"));
  });
}

/// Muon's matrices where tensor parallelism has cut them, and fully_shard once more.
TEST(OwnLoops, WholeModelsOfCutLayers) {
  auto config = small_config();
  config.model.family = "gpt2";
  const std::string alike = "layers.0.attention.wo.bias";  // whole on each rank of tp; begins as zeros, so that Adafactor's steps do not hang on its own size
  for (const std::string name : {"muon", "adafactor"}) {
    at::Tensor expected;
    const auto train = [&](int ranks, int tp, bool replicated) {
      std::vector<double> losses;
      run_ranks(ranks, [&](World& world) {
        const tessera::Mesh mesh(world, {{"dp", world.size() / tp}, {"tp", tp}});
        auto model = tessera::on_meta([&] { return tessera::make_model(config.model); });
        auto parallel = tessera::parallelize_module(*model, mesh["tp"], tessera::parallel_plan(*model, true));
        std::unique_ptr<tessera::GradientSynchronizer> sharded;
        if (!replicated) sharded = tessera::fully_shard(*model, mesh["dp"], {.wrap = "layers.*"});
        tessera::materialize(*model, 1);
        if (replicated) sharded = std::make_unique<tessera::DistributedDataParallel>(*model, mesh["dp"]);
        tessera::OptimConfig optim;
        optim.name = name;
        //: optimizers: cut
        const auto whole = tessera::optim::whole_model(*model, *sharded, mesh[{"dp", "tp"}]);  // the ranks that cut layers, and those that shard what is left
        //:
        const auto optimizer = tessera::optim::make_optimizer(optim, sharded->updated(), whole);
        for (const auto& [ids, labels] : sequences_of(ranks / tp, world.rank() / tp, 4)) {
          model->zero_grad();
          const torch::Tensor loss = model->loss_sum(ids, labels) / static_cast<double>(kRows * 8);
          loss.backward();
          tessera::nn::sum_terms(parallel->group(), sharded->updated(), mesh[{"dp", "tp"}]);
          optimizer->step(1e-2);
          const auto all = torch::tensor({loss.item<double>()}, at::kDouble);
          tessera::comm::all_reduce(mesh["dp"], all);
          if (world.rank() == 0) losses.push_back(all.item<double>());
        }
        for (const auto& [of, updated, aliases] : sharded->updated()) {
          if (of != alike) continue;
          if (ranks == 1) expected = updated.detach().clone();
          const at::Tensor part = tessera::take(expected, tessera::nn::slice_of(updated)).reshape_as(updated);
          if (part.numel() > 0) EXPECT_LT((updated - part).abs().max().item<double>(), 1e-3 * expected.abs().max().item<double>()) << name << ", " << tp;
        }
      });
      return losses;
    };
    const auto alone = train(1, 1, false);
    for (const bool replicated : {false, true}) {
      for (const auto& [ranks, tp] : {std::pair(2, 1), {2, 2}, {4, 2}}) {
        const auto losses = train(ranks, tp, replicated);
        for (size_t i = 0; i < alone.size(); ++i) {
          EXPECT_NEAR(losses[i], alone[i], 2e-5 * alone[i]) << name << ", " << tp << " of " << ranks << (replicated ? " under DDP" : "") << ", step " << i;
        }
      }
    }
  }
}

/// Experts dealt over the ranks that cut the other layers, which take the same tokens or each a part of the sequence.
TEST(OwnLoops, ExpertsOverTheRanksOfTheCut) {
  auto config = small_config();
  config.model.family = "mixtral";
  config.model.experts = 4;
  config.model.experts_per_token = 2;
  constexpr double max_norm = 0.2;
  struct Seen {
    std::vector<double> losses, norms;
  };
  const auto train = [&](int ranks, int tp, bool sequence, const std::string& wrapped) {
    Seen seen;
    run_ranks(ranks, [&](World& world) {
      const tessera::Mesh mesh(world, {{"dp", world.size() / tp}, {"tp", tp}});
      auto model = tessera::on_meta([&] { return tessera::make_model(config.model); });
      const auto dealt = tessera::expert_parallel(*model, mesh["tp"], {.same_tokens = sequence ? tessera::comm::Group::self() : mesh["tp"]});
      const auto parallel = tessera::parallelize_module(*model, mesh["tp"], tessera::parallel_plan(*model, sequence));
      for (const auto& expert : tessera::nn::unique_parameters(*model, tessera::experts_of(*model, true))) {
        EXPECT_EQ(tessera::nn::counted_once({expert}).size(), 1u) << expert.name << " is on no other rank";
      }
      std::unique_ptr<tessera::GradientSynchronizer> wrapper;
      if (wrapped == "fsdp") wrapper = tessera::fully_shard(*model, mesh["dp"], {.wrap = "layers.*"});
      tessera::materialize(*model, 1);
      if (wrapped == "ddp") wrapper = std::make_unique<tessera::DistributedDataParallel>(*model, mesh["dp"]);
      tessera::optim::AdamW optimizer(tessera::optim::decay_groups(wrapper->updated(), "all", /*weight_decay=*/0.0));
      for (const auto& [ids, labels] : sequences_of(ranks / tp, world.rank() / tp, 3)) {
        model->zero_grad();
        const torch::Tensor loss = model->loss_sum(ids, labels) / static_cast<double>(kRows * 8);
        loss.backward();
        tessera::nn::sum_terms(parallel->group(), wrapper->updated(), mesh[{"dp", "tp"}]);
        const double norm = tessera::clip_grad_norm(*model, max_norm).item<double>();
        optimizer.step(1e-2);
        const auto all = torch::tensor({loss.item<double>()}, at::kDouble);
        tessera::comm::all_reduce(mesh["dp"], all);
        if (world.rank() == 0) seen.losses.push_back(all.item<double>()), seen.norms.push_back(norm);
      }
    });
    return seen;
  };
  const Seen alone = train(1, 1, false, "ddp");
  EXPECT_GT(alone.norms.back(), 1.2 * max_norm) << "nothing is clipped";
  for (const bool sequence : {false, true}) {
    for (const std::string wrapped : {"ddp", "fsdp"}) {
      for (const auto& [ranks, tp] : {std::pair(2, 2), {4, 2}}) {
        const Seen seen = train(ranks, tp, sequence, wrapped);
        for (size_t i = 0; i < alone.losses.size(); ++i) {
          EXPECT_NEAR(seen.losses[i], alone.losses[i], 2e-5 * alone.losses[i])
              << wrapped << ", " << tp << " of " << ranks << ", sequence " << sequence << ", step " << i;
          EXPECT_NEAR(seen.norms[i], alone.norms[i], 5e-5 * alone.norms[i])
              << wrapped << ", " << tp << " of " << ranks << ", sequence " << sequence << ", step " << i;
        }
      }
    }
  }
  run_ranks(2, [&](World& world) {
    auto model = tessera::on_meta([&] { return tessera::make_model(config.model); });
    const auto parallel = tessera::parallelize_module(*model, world.group(), tessera::parallel_plan(*model, false));
    EXPECT_THAT(tessera::testing_support::refusal([&] { (void)tessera::expert_parallel(*model, world.group()); }),
                ::testing::HasSubstr("call expert_parallel before it"));
  });
}

/// As others do it, quantized first and adapted then: the order is another here, and is said.
TEST(OwnLoops, WhatIsInFewBitsIsNeitherAdaptedNorCut) {
  run_ranks(2, [](World& world) {
    const auto quantized = [] {
      tessera::nn::Linear linear(64, 64);
      linear->weight.set_requires_grad(false);
      torch::nn::init::zeros_(linear->bias);
      const auto net = std::make_shared<torch::nn::Module>("net");
      net->register_module("layer", linear);
      tessera::quantize::quantize_weights(*net, {.modules = {"layer"}}, at::kCPU);
      return net;
    };
    const auto adapted = quantized(), cut = quantized();
    EXPECT_THAT(tessera::testing_support::refusal([&] { (void)tessera::lora::attach(*adapted, {.modules = {"layer"}}); }),
                ::testing::HasSubstr("LoRA of 'layer': its weight is gone, into fewer bits; attach LoRA before quantize_weights"));
    EXPECT_THAT(tessera::testing_support::refusal([&] { (void)tessera::parallelize_module(*cut, world.group(), {{"layer", tessera::ColumnParallel{}}}); }),
                ::testing::HasSubstr("'layer': its weight is gone, into fewer bits; call parallelize_module before quantize_weights"));
  });
}

/// Terms go innermost, and apart on the ranks of a wrapper: behind either, they are not attached anew.
TEST(OwnLoops, AdaptersAreNotAttachedAgainBehindAWrapper) {
  run_ranks(2, [](World& world) {
    tessera::nn::Linear linear(8, 8);
    const auto net = std::make_shared<torch::nn::Module>("net");
    net->register_module("layer", linear);
    auto adapted = tessera::lora::attach(*net, {.modules = {"layer"}});
    const tessera::DistributedDataParallel ddp(*net, world.group(), {.replicas = tessera::ReplicaStart::Broadcast});
    adapted.detach();
    EXPECT_THAT(tessera::testing_support::refusal([&] { adapted = tessera::lora::attach(*net, {.modules = {"layer"}}); }),
                ::testing::HasSubstr("LoRA of 'layer': the model is wrapped already"));
  });
}

/// How adapters lie along a weight stays with them in another dtype, and goes with another shape: cut by guess, ranks would part.
TEST(OwnLoops, AdaptersThatWereCastAreCutAndThoseOfAnotherShapeAreNot) {
  run_ranks(2, [](World& world) {
    for (const bool cast : {true, false}) {
      tessera::nn::Linear linear(8, 8);
      const auto net = std::make_shared<torch::nn::Module>("net");
      net->register_module("layer", linear);
      const auto adapted = tessera::lora::attach(*net, {.modules = {"layer"}});
      const auto cut = [&] {
        return tessera::parallelize_module(*net, world.group(), {{"layer", tessera::ColumnParallel{}}}, {.replicas = tessera::ReplicaStart::Broadcast});
      };
      if (cast) {
        net->to(at::kBFloat16);
        const auto parallel = cut();
        EXPECT_EQ(net->named_parameters()["layer.lora_b"].size(0), 4);
        EXPECT_EQ(net->named_parameters()["layer.lora_a"].size(1), 8);
      } else {
        net->named_parameters()["layer.lora_a"].set_data(at::ones({3, 8}));
        EXPECT_THAT(tessera::testing_support::refusal([&] { (void)cut(); }), ::testing::HasSubstr("'layer.lora_a' does not know how it lies along its weight"));
      }
    }
  });
}

TEST(OwnLoops, ThePagesShowWhatIsCompiled) {
  for (const std::string page : {"optimizers", "offload", "precision", "lora"}) {
    tessera::testing_support::expect_page_shows(page + ".md", "tests/train/own_loops_test.cpp", page + ": ");
  }
}

}  // namespace
