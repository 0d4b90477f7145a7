#include "tessera/recompute/recompute.h"

#include <string>
#include <vector>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/optim/sgd.h>

#include "tessera/comm/testing.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/lora/lora.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/operators.h"
#include "tessera/precision/policy.h"
#include "tessera/recompute/budget.h"
#include "tessera/train/compose.h"
#include "tessera/train/flop_rates.h"
#include "tessera/train/recompute_blocks.h"
#include "tessera/train/stage_costs.h"
#include "tests/nn/net.h"
#include "tests/test_device.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

const std::string kFull = "recompute.mode=full", kSelective = "recompute.mode=selective";

class RecomputeRun : public testing_support::TrainFixture {
 protected:
  using Sets = std::vector<std::string>;

  void expect_same_bits(const std::string& family, const Sets& base, int world, const std::vector<Sets>& forms = {{kFull}}) {
    const Trace plain = train(config(family, base), world);
    for (const auto& form : forms) {
      SCOPED_TRACE(family + " " + form.back() + " on " + std::to_string(world) + " ranks");
      Sets with = base;
      with.insert(with.end(), form.begin(), form.end());
      const Trace again = train(config(family, with), world);
      EXPECT_EQ(testing_support::difference(again.gradients, plain.gradients), 0);
      EXPECT_EQ(testing_support::difference(again.weights, plain.weights), 0);
      for (size_t i = 0; i < plain.steps.size(); ++i) {
        EXPECT_EQ(again.steps[i].loss, plain.steps[i].loss) << "step " << i + 1;
        EXPECT_EQ(again.steps[i].grad_norm, plain.steps[i].grad_norm) << "step " << i + 1;
      }
    }
  }

  /// Two steps of a few micro-batches, and `more`.
  static Sets few(const Sets& more = {}) {
    Sets sets{"run.steps=2", "batch.global_size=6", "run.threads=1"};
    sets.insert(sets.end(), more.begin(), more.end());
    return sets;
  }
};

TEST_F(RecomputeRun, HasTheSameBitsOnAnyNumberOfRanks) {
  for (const int world : {1, 2, 3}) expect_same_bits("llama", few(), world);
  expect_same_bits("gpt2", few({"model.dropout=0.1"}), 3);
  expect_same_bits("mlp", few({"model.dropout=0.1"}), 2);
}

TEST_F(RecomputeRun, HasTheSameBitsInEveryForm) {
  const std::vector<Sets> forms = {{kSelective},
                                   {kFull, "recompute.every=2"},
                                   {kFull, "recompute.modules=layers.*.feed_forward"},
                                   {kFull, "recompute.modules=layers.**"},  // blocks, and everything inside them again
                                   {kFull, "recompute.modules=head"},
                                   {kFull, "recompute.budget_bytes=45000"},
                                   {kSelective, "recompute.keep=[\"mm\", \"addmm\"]"},
                                   {kSelective, "recompute.keep=[\"tessera::swiglu\", \"tessera::activate\"]"}};
  expect_same_bits("llama", few({"model.dropout=0.1"}), 1, forms);
  expect_same_bits("gpt2", few({"model.dropout=0.1"}), 2, forms);
}

/// Beside a pass run operators like its own that are not computed again: rows of masks, a router's sums, gathers, choices by plain operators.
TEST_F(RecomputeRun, HasTheSameBitsWithOperatorsThatAreEverywhere) {
  const std::vector<Sets> forms = {{kSelective, "recompute.keep=[\"add\"]"}, {kSelective, "recompute.keep=[\"mul\", \"_to_copy\"]"}};
  expect_same_bits("llama", few({"model.dropout=0.1"}), 1, forms);
  expect_same_bits("llama", few({"lora.modules=layers.*.attention.*", "lora.dropout=0.2"}), 1, forms);
  expect_same_bits("mixtral", few({"model.dropout=0.1", "moe.capacity_factor=1"}), 1, forms);
  expect_same_bits("mixtral", few({"run.kernels=reference"}), 1, forms);
  const Sets of_casts{kSelective, "recompute.modules=layers.*.feed_forward", "recompute.keep=[\"_to_copy\"]"};
  for (const char* resharded : {"zero.reshard_after_forward=true", "zero.reshard_after_forward=false"}) {  // gathers cast
    expect_same_bits("llama", few({"zero.stage=3", "zero.wrap=layers.*.*.*", "precision.compute=bf16", resharded}), 2, {of_casts});
  }
}

TEST_F(RecomputeRun, HasTheSameBitsWithTheDeterministicTreeTiedWeightsAndReferenceKernels) {
  expect_same_bits("llama", few({"run.deterministic=true"}), 2);
  expect_same_bits("gpt2", few({"model.tie_embeddings=true"}), 2);
  expect_same_bits("llama", few({"run.kernels=reference"}), 1, {{kFull}, {kSelective}});
}

TEST_F(RecomputeRun, HasTheSameBitsInEveryPrecision) {
  const std::vector<Sets> precisions = {{"precision.compute=bf16"},
                                        {"precision.params=bf16", "precision.compute=bf16"},
                                        {"precision.params=bf16", "precision.compute=bf16", "precision.master=bf16"},
                                        {"precision.params=fp16", "precision.compute=fp16", "precision.loss_scale=dynamic"},
                                        {"precision.compute=fp16", "precision.loss_scale=1024"},
                                        {"precision.compute=fp8"},
                                        {"precision.compute=fp8", "precision.fp8_scales=row"}};
  const std::vector<Sets> forms = {
      {kFull}, {kSelective}, {kSelective, "recompute.keep=[\"mm\", \"addmm\", \"_scaled_mm\"]"}, {kFull, "recompute.budget_bytes=60000"}};
  for (const auto& precision : precisions) {
    auto sets = few(precision);
    sets.push_back("model.dropout=0.1");
    expect_same_bits("llama", sets, 1, forms);
    if (precision.size() == 1) expect_same_bits("gpt2", sets, 2);
  }
}

/// Weights that are gathered block by block are there for the second pass, too; what they are gathered in is another order of the same arithmetic.
TEST_F(RecomputeRun, HasTheSameBitsUnderSharding) {
  const std::vector<Sets> forms = {{kFull}, {kFull, "recompute.every=2"}, {kFull, "recompute.modules=layers.**"}, {kSelective}};
  for (const std::string stage : {"1", "2", "3"}) {
    for (const int world : {2, 3}) expect_same_bits("llama", few({"zero.stage=" + stage}), world, world == 2 ? forms : std::vector<Sets>{{kFull}});
    expect_same_bits("gpt2", few({"zero.stage=" + stage, "mesh.dp_replicate=2", "batch.global_size=8", "model.dropout=0.1", "model.tie_embeddings=true"}), 4);
  }
  for (const std::string ahead : {"0", "2"}) expect_same_bits("llama", few({"zero.stage=3", "model.layers=4", "zero.prefetch=" + ahead}), 2);
  expect_same_bits("llama", few({"zero.stage=3", "zero.wrap=layers.*.*"}), 2);  // units inside of what is recomputed
  expect_same_bits("llama", few({"zero.stage=2", "zero.accumulate=whole"}), 2);
  expect_same_bits("llama", few({"zero.stage=3", "precision.params=bf16", "precision.compute=bf16"}), 2);
}

/// What a stage ends with belongs to no unit: dropout behind the last block, computed again before backward has come to a unit.
TEST_F(RecomputeRun, HasTheSameBitsWhereAStageEndsBetweenUnits) {
  expect_same_bits("gpt2",
                   few({"model.layers=4", "zero.stage=3", "zero.wrap=layers.0", "mesh.pp=2", "mesh.tp=2", "tensor.overlap=true", "model.dropout=0.1",
                        "offload.params=host", "offload.gradients=host", "offload.optimizer=host"}),
                   4);
}

/// tanh(w2 tanh(w1 x)): the last thing that backward asks for is no unit's.
struct BareEndImpl : nn::Module {
  BareEndImpl() {
    register_module("w1", w1);
    register_module("w2", w2);
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(w2(at::tanh(w1(x)))); }
  nn::Linear w1{5, 5}, w2{5, 5};
};
TESSERA_MODULE(BareEnd);

struct BareEndsImpl : nn::Module {
  BareEndsImpl() {
    register_module("layers", layers);
    for (auto* each : {&a, &b}) layers->push_back(each->ptr());
    nn::assign_paths(*this);
    testing_support::fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return b(a(x)); }
  torch::nn::ModuleList layers;
  BareEnd a, b;
};
TESSERA_MODULE(BareEnds);

/// What so many ranks have trained is what one has, which sets `expected`.
void expect_one_ranks(const torch::nn::Module& model, int ranks, std::vector<at::Tensor>& expected) {
  std::vector<at::Tensor> weights;
  for (const at::Tensor& weight : model.parameters()) weights.push_back(weight.detach().cpu());
  if (ranks == 1) expected = weights;
  EXPECT_LT(testing_support::largest_difference(weights, expected), 1e-5) << ranks << " ranks";
}

TEST(RecomputeLoop, EndsBetweenUnitsInAPlainLoop) {
  std::vector<at::Tensor> expected;
  for (const int ranks : {1, 2, 3}) {
    comm::run_ranks(ranks, [&](comm::World& world) {
      BareEnds model;
      model->to(testing_support::test_device());
      const auto again = recompute(model);
      const auto sharded = fully_shard(model, world.group(), {.wrap = "layers.*.*"});
      torch::optim::SGD sgd(model->parameters(), 0.5);
      const auto [begin, rows] = chunk(6, world.size(), world.rank());
      for (int step = 0; step < 3; ++step) {
        sgd.zero_grad();
        for (int micro = 0; micro < 2; ++micro) {
          const auto held = micro == 0 ? sharded->no_sync() : Attachment();
          const at::Tensor x = testing_support::random_tensor({6, 5}, std::to_string(2 * step + micro)).to(testing_support::test_device());
          model(x.narrow(0, begin, rows)).sum().backward();
        }
        sgd.step();
      }
      unshard(model);
      if (world.rank() == 0) expect_one_ranks(*model, ranks, expected);
    });
  }
}

/// Holds a Linear that cannot be intercepted.
struct AroundLibtorchsImpl : nn::Module {
  AroundLibtorchsImpl() {
    register_module("inner", inner);
    nn::assign_paths(*this);
    testing_support::fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(inner(at::tanh(inner(x)))); }
  torch::nn::Linear inner{5, 5};
};
TESSERA_MODULE(AroundLibtorchs);

/// The pass is made again while a node of libtorch's own asks for what it saved.
TEST(RecomputeLoop, AdaptersBesideLibtorchsLinearAreInThePassThatIsMadeAgain) {
  std::vector<std::vector<at::Tensor>> gradients;
  for (const bool is_recomputed : {false, true}) {
    AroundLibtorchs model;
    const auto adapted = lora::attach(*model, {.modules = {"inner"}, .rank = 2, .alpha = 4});
    for (const auto& each : model->named_parameters()) {
      if (each.key().ends_with("lora_b")) each.value().data().copy_(testing_support::random_tensor(each.value().sizes(), "b"));
    }
    const auto again = is_recomputed ? recompute(model, {.modules = ""}) : Attachment();
    model(testing_support::random_tensor({6, 5}, "x")).square().sum().backward();
    auto& of_adapters = gradients.emplace_back();
    for (const at::Tensor& weight : model->parameters()) {
      if (weight.requires_grad()) of_adapters.push_back(weight.grad());
    }
    ASSERT_EQ(of_adapters.size(), 2);
  }
  for (const int i : {0, 1}) EXPECT_TRUE(at::equal(gradients[0][i], gradients[1][i])) << i;
}

/// Its pass asks for a gradient, whose product by the weight's transpose is libtorch's own, also when the pass is made again.
struct GradientInsideImpl : nn::Module {
  GradientInsideImpl() {
    register_module("inner", inner);
    nn::assign_paths(*this);
    testing_support::fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::AutoGradMode with_gradients(true);
    const at::Tensor energy = at::mm(at::tanh(inner(x)), inner->weight).square().sum();
    return torch::autograd::grad({energy}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  }
  torch::nn::Linear inner{7, 5};
};
TESSERA_MODULE(GradientInside);

TEST(RecomputeLoop, AdaptersLeaveTheGradientsOfAPassThatIsMadeAgainAlone) {
  std::vector<at::Tensor> gradients;
  for (const bool is_recomputed : {false, true}) {
    GradientInside model;
    const auto adapted = lora::attach(*model, {.modules = {"inner"}, .rank = 2, .alpha = 4});
    for (const auto& each : model->named_parameters()) {
      if (each.key().ends_with("lora_b")) each.value().data().copy_(testing_support::random_tensor(each.value().sizes(), "b"));
    }
    const auto again = is_recomputed ? recompute(model, {.modules = ""}) : Attachment();
    model(testing_support::random_tensor({6, 7}, "x").requires_grad_()).square().sum().backward();
    for (const auto& each : model->named_parameters()) {
      if (each.key().ends_with("lora_a")) gradients.push_back(each.value().grad());
    }
  }
  ASSERT_EQ(gradients.size(), 2);
  EXPECT_TRUE(at::allclose(gradients[0], gradients[1], 1e-5, 1e-6));
}

/// What it makes is weighed by what a teacher says, which is looked at alone.
struct TaughtImpl : nn::Module {
  explicit TaughtImpl(BareEnds teacher) : teacher(std::move(teacher)) {
    register_module("own", own);
    nn::assign_paths(*this);
    testing_support::fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor said = [&] {
      const at::NoGradGuard no_grad;
      return teacher(x);
    }();
    return own(x) * said;
  }
  BareEnd own;
  BareEnds teacher;  // no part of it
};
TESSERA_MODULE(Taught);

/// A model that a recomputed module evaluates is evaluated, in backward, too: none of its gradients are due.
TEST(RecomputeLoop, ATeacherThatIsLookedAtHasNoBackwardPass) {
  std::vector<at::Tensor> expected;
  for (const int ranks : {1, 2}) {
    comm::run_ranks(ranks, [&](comm::World& world) {
      BareEnds teacher;
      Taught model(teacher);
      model->to(testing_support::test_device());
      teacher->to(testing_support::test_device());
      const auto again = recompute(model, {.modules = ""});
      const auto of_teacher = fully_shard(teacher, world.group(), {.wrap = "layers.*.*"});
      const auto sharded = fully_shard(model, world.group());
      torch::optim::SGD sgd(model->parameters(), 0.5);
      const auto [begin, rows] = chunk(6, world.size(), world.rank());
      for (int step = 0; step < 3; ++step) {
        sgd.zero_grad();
        const at::Tensor x = testing_support::random_tensor({6, 5}, std::to_string(step)).to(testing_support::test_device());
        model(x.narrow(0, begin, rows)).sum().backward();
        for (const at::Tensor& weight : teacher->parameters()) EXPECT_FALSE(weight.grad().defined());
        sgd.step();
      }
      unshard(model);
      if (world.rank() == 0) expect_one_ranks(*model, ranks, expected);
    });
  }
}

TEST_F(RecomputeRun, CountsWhatItRunsAgainOnAllRanks) {
  const auto flops = [&](const Sets& more, int world) { return train(config("mlp", few(more)), world).steps.back().flops; };
  const StepFlops plain = flops({}, 1), full = flops({kFull}, 1), other = flops({kFull, "recompute.every=2"}, 1);
  EXPECT_EQ(plain.recomputed, 0);
  // Of a block's two products the first runs again, on 6 sequences of 16 tokens.
  EXPECT_EQ(full.recomputed, 2.0 * 6 * 16 * 2 * 24 * 40);
  EXPECT_EQ(full.run - plain.run, full.recomputed);
  EXPECT_EQ(other.recomputed, full.recomputed / 2);
  EXPECT_EQ(flops({kFull}, 3).recomputed, full.recomputed);
  EXPECT_EQ(flops({kFull, "zero.stage=3"}, 3).run, full.run);
  // Four micro-batches on three ranks: two are padding, and run.
  const Sets four{kFull, "batch.global_size=8"};
  EXPECT_EQ(flops(four, 3).run, 1.5 * flops(four, 1).run);
}

TEST(FlopRates, RecomputationRaisesHfuAndNotMfu) {
  Config config = parse_config("[model]\nfamily = \"mlp\"\ndim = 8\nlayers = 2\nffn_dim = 16\nvocab_size = 32\n[data]\nseq_len = 4\n", "/", {});
  resolve(config);
  const double model = 6.0 * (2 * 2 * 8 * 16 + 32 * 8);  // a token
  auto rates = flop_rates(config, {.run = 1000 * model, .recomputed = 0}, 1000, /*step_s=*/0.5, /*ranks=*/4);
  EXPECT_DOUBLE_EQ(rates.at("tflops_per_device"), 1000 * model / 0.5 / 4 / 1e12);
  EXPECT_DOUBLE_EQ(rates.at("hardware_tflops_per_device"), rates.at("tflops_per_device"));
  EXPECT_FALSE(rates.contains("mfu")) << "of what, is not known";
  config.log.peak_tflops = 0.001;
  rates = flop_rates(config, {.run = 1000 * model}, 1000, 0.5, 4);
  const auto again = flop_rates(config, {.run = 1250 * model, .recomputed = 250 * model}, 1000, 0.5, 4);
  EXPECT_EQ(again.at("mfu"), rates.at("mfu"));
  EXPECT_DOUBLE_EQ(rates.at("mfu"), rates.at("tflops_per_device") / 0.001);
  EXPECT_DOUBLE_EQ(again.at("hfu"), 1.25 * rates.at("hfu"));
  EXPECT_EQ(again.at("recomputed_flops"), 250 * model);
}

/// Activations of one micro-batch of recipes/bench_matmul.toml's model, in shape alone.
struct Activations {
  int64_t kept = 0;         ///< bytes at the end of forward
  int64_t activations = 0;  ///< those of the category: without the gradients that the fused loss keeps
  int64_t peak = 0;         ///< most bytes from then on, parameters and their gradients left out
  double flops = 0;
};

Activations measure(const std::vector<std::string>& sets) {
  std::vector<std::string> all{"data.cache_dir=/"};
  all.insert(all.end(), sets.begin(), sets.end());
  Config config = parse_config(
      "[model]\nfamily = \"llama\"\ndim = 1024\nlayers = 8\nheads = 16\nffn_dim = 2752\nvocab_size = 4096\n[data]\nseq_len = 256\n[batch]\n"
      "global_size = 4\nmicro_size = 4\n[optim]\nlr = 1e-3\n[run]\nsteps = 1\n",
      "/", all);
  resolve(config);
  const auto model = on_meta([&] { return make_model(config.model); });
  precision::apply(*model, precision::policy_from(config.precision));
  materialize(*model, 1, at::kMeta);
  for (const auto& p : model->parameters()) p.mutable_grad() = at::empty_like(p);
  const auto attached = recompute_blocks(config, *model, pipeline_layout(config, 1));
  const auto counter = std::make_shared<nn::FlopCounter>();
  const nn::OperatorScope counted(counter);
  MemoryTracker tracker;
  const TrackMemory tracking(tracker);
  const MemoryScope scope(MemoryCategory::Activations);
  const at::Tensor tokens = at::empty({4, 256}, at::TensorOptions(at::kLong).device(at::kMeta));
  const at::Tensor loss = model->loss_sum(tokens, tokens);
  Activations result{.kept = tracker.current(), .activations = tracker.current(MemoryCategory::Activations)};
  tracker.reset_peak();
  loss.backward();
  result.peak = tracker.peak();
  result.flops = counter->flops();
  return result;
}

TEST(RecomputeMemory, ABlockIsKeptAsItsInputAndThePeakIsTheCheckpointsAndOneBlock) {
  const Activations plain = measure({}), full = measure({kFull});
  const int64_t layers = 8, tokens = 4 * 256, stream = 4 * tokens * 1024;
  const int64_t block = (plain.kept - full.kept) / layers + stream;  // what one block keeps, its input included
  // What is left of the eight blocks is the stream that enters each.
  const int64_t outside = plain.kept - layers * block;  // embedding, norm, head and loss
  EXPECT_EQ(full.kept - outside, layers * stream);
  EXPECT_GE(block, 12 * stream);
  EXPECT_GE(plain.activations, 12 * full.activations);
  // Backward of the last block begins with all checkpoints and this one block, and works as it does without recompute.
  const int64_t working = plain.peak - plain.kept;
  const auto expected = static_cast<double>(full.kept + block - stream + working);
  EXPECT_NEAR(static_cast<double>(full.peak), expected, 0.03 * expected);
  // Again: attention's four products of weights and its own two, and two of the three products of the feed-forward part, for the last saves its input and ends.
  const double per_token = 4.0 * 1024 * 1024 + 2.0 * 1024 * 2752 + 2.0 * 256 * 1024;
  EXPECT_EQ(full.flops - plain.flops, 2.0 * static_cast<double>(layers * tokens) * per_token);
}

TEST(RecomputeMemory, SelectiveAndBudgetLieBetween) {
  const Activations plain = measure({}), full = measure({kFull}), core = measure({kSelective}), kept = measure({kSelective, "recompute.keep=[\"mm\"]"});
  EXPECT_LT(core.kept, plain.kept);
  EXPECT_GT(core.kept, kept.kept);
  EXPECT_GT(kept.kept, full.kept);
  EXPECT_EQ(core.flops - plain.flops, 8 * 2.0 * 2 * 4 * 256 * 256 * 1024) << "attention's two products";
  EXPECT_EQ(kept.flops, core.flops);
  double flops = plain.flops;
  for (const int64_t share : {4, 2, 1}) {  // of what the blocks keep
    const int64_t budget = (plain.kept - full.kept) / 5 * share;
    const Activations within = measure({kFull, "recompute.budget_bytes=" + std::to_string(budget)});
    EXPECT_LE(within.kept, budget + full.kept);
    EXPECT_GT(within.flops, flops) << "less memory costs more";
    flops = within.flops;
  }
}

/// Which holds the layers of its stages alone: no more of them are computed again than these ask for, and a rank pays for its own.
TEST(RecomputeMemory, ABudgetIsThatOfEachRankOfAPipeline) {
  const auto parsed = [](const std::vector<std::string>& sets) {
    std::vector<std::string> all{"data.cache_dir=/", "mesh.pp=2", "pipeline.split=[\"4\", \"6\"]"};
    all.insert(all.end(), sets.begin(), sets.end());
    Config config = parse_config(
        "[model]\nfamily = \"llama\"\ndim = 64\nlayers = 8\nheads = 4\nffn_dim = 96\nvocab_size = 128\n[data]\nseq_len = 32\n[batch]\nglobal_size = 4\n"
        "micro_size = 2\n[optim]\nlr = 1e-3\n[run]\nsteps = 1\n",
        "/", all);
    resolve(config);
    return config;
  };
  const Config plain = parsed({});
  const auto model = on_meta([&] { return make_model(plain.model); });
  materialize(*model, 1, at::kMeta);
  const at::Tensor tokens = at::empty({2, 32}, at::TensorOptions(at::kLong).device(at::kMeta));
  const auto costs = measure_recompute(*model, "layers.*", [&] { model->loss_sum(tokens, tokens); });
  const auto kept = [&](size_t begin, size_t end) {
    int64_t bytes = 0;
    for (size_t i = begin; i < end; ++i) bytes += costs[i].input_bytes + costs[i].inner_bytes;
    return bytes;
  };
  const PipelineLayout layout = pipeline_layout(plain, 2);  // 3 layers, and 5
  const auto again = [&](int64_t budget) {
    const auto with = stage_flops(parsed({kFull, "recompute.budget_bytes=" + std::to_string(budget)}), layout), without = stage_flops(plain, layout);
    return std::pair(with[0].total() - without[0].total(), with[1].total() - without[1].total());
  };
  const double layer = again(kept(3, 8) - 1).second;
  EXPECT_GT(layer, 0) << "one of five layers, where its bytes are one too many";
  EXPECT_EQ(again(kept(3, 8)), std::pair(0.0, 0.0));
  EXPECT_EQ(again(kept(3, 8) - 1).first, 0);
  EXPECT_EQ(again(kept(3, 7) - costs[7].input_bytes), std::pair(0.0, 2 * layer));
  EXPECT_EQ(again(kept(0, 3) - 1).first, layer);

  const int64_t inputs = 5 * costs[7].input_bytes;  // below which no choice helps
  const auto check = [&](int64_t budget) {
    const Config given = parsed({kFull, "recompute.budget_bytes=" + std::to_string(budget)});
    check_modules(given, mesh_shape(given.mesh, given.zero.stage, 2));
  };
  EXPECT_NO_THROW(check(inputs));
  EXPECT_NO_THROW(pipeline_layout(parsed({kFull, "pipeline.split=[\"cost\"]", "recompute.budget_bytes=" + std::to_string(inputs)}), 2));
  EXPECT_THROW(check(inputs - 1), ConfigError);
}

/// Which layers of a stage are computed again follows from the cut; a cut that takes the first ones of the model for dear would be uneven.
TEST(RecomputeMemory, ABudgetLeavesACutByCostEven) {
  const auto cut = [](const std::string& budget, int64_t layers, int ranks) {
    Config config = parse_config(
        "[model]\nfamily = \"llama\"\ndim = 64\nheads = 4\nffn_dim = 96\nvocab_size = 16\n[data]\nseq_len = 32\n[batch]\nglobal_size = 4\n"
        "micro_size = 2\n[optim]\nlr = 1e-3\n[run]\nsteps = 1\n[recompute]\nmode = \"full\"\n",
        "/",
        {"data.cache_dir=/", "pipeline.split=[\"cost\"]", "recompute.budget_bytes=" + budget, "model.layers=" + std::to_string(layers),
         "pipeline.schedule=interleaved", "pipeline.virtual_stages=2"});
    resolve(config);
    std::vector<int64_t> links;
    for (const ChainRange& stage : pipeline_layout(config, ranks).links) links.push_back(stage.end - stage.begin);
    return links;
  };
  EXPECT_THAT(cut("1000000", 16, 2), ::testing::ElementsAre(5, 4, 4, 5)) << "with the embedding and a small head at the ends";
  const auto refused = testing_support::refusal([&] { cut("1000", 16, 2); });
  EXPECT_THAT(refused, ::testing::HasSubstr("budget_bytes = 1000")) << "the number that was given";
}

}  // namespace
}  // namespace tessera
