// Stage 3 where it meets the rest: an unmodified module beside an intercepted one, recompute, evaluation and generation.

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"
#include "tessera/train/evaluate.h"
#include "tessera/train/generate.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tests/nn/collect.h"
#include "tests/nn/net.h"
#include "tests/test_device.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using testing_support::Batch;
using testing_support::SliceCollector;
using Tensors = std::map<std::string, at::Tensor>;

/// One text, of libtorch's modules or of ours.
template <class Base, class Linear, class Norm>
struct NetOf : Base {
  NetOf() : first(5, 14), second(14, 14), last(14, 3), norm(std::vector<int64_t>{14}) {
    this->register_module("layer0", first);
    this->register_module("layer1", second);
    this->register_module("norm", norm);
    this->register_module("last", last);
    gain = this->register_parameter("gain", at::ones({14}));
    testing_support::fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return last(norm(at::tanh(second(at::tanh(first(x)))) * gain)); }

  Linear first, second, last;
  Norm norm;
  at::Tensor gain;
};
using PlainNet = NetOf<torch::nn::Module, torch::nn::Linear, torch::nn::LayerNorm>;
using OurNetImpl = NetOf<nn::Module, nn::Linear, nn::LayerNorm>;
TESSERA_MODULE(OurNet);

struct Trained {
  Tensors gradients, weights;
};

/// Three steps of two micro-batches under `stage`, on all ranks.
template <class Make>
Trained train_net(int ranks, int stage, ShardTrigger trigger, Make make) {
  SliceCollector gradients, weights;
  comm::run_ranks(ranks, [&](comm::World& world) {
    auto [module, forward] = make();
    std::unique_ptr<GradientSynchronizer> synchronizer;
    std::vector<nn::NamedParameter> updated = nn::unique_parameters(*module);
    if (stage == 3) {
      synchronizer = fully_shard(*module, world.group(), {.wrap = "layer*", .trigger = trigger});
    } else {
      auto zero = std::make_unique<ShardedDataParallel>(*module, ShardGroups{.shard = world.group()}, ZeroOptions{.stage = stage});
      updated = zero->shards();
      synchronizer = std::move(zero);
    }
    for (int step = 0; step < 3; ++step) {
      const Batch mine = testing_support::part_of(testing_support::whole_batch(20, step), ranks, world.rank());
      synchronizer->begin_step();
      for (int pass = 0; pass < 2; ++pass) {
        const MicroBatchPosition position{.index = 2 * world.rank() + pass, .last = pass == 1};
        const Batch micro = testing_support::part_of(mine, 2, pass);
        synchronizer->before_micro_batch(position);
        testing_support::loss_of(forward(micro.x), micro.y, 20).backward();
        synchronizer->after_micro_batch(position);
      }
      synchronizer->finish();
      if (step == 2) gradients.add_gradients(updated);
      const at::NoGradGuard no_grad;
      for (const auto& p : updated) at::Tensor(p.tensor).sub_(p.tensor.grad(), 0.05);
      synchronizer->after_update();
    }
    weights.add_values(updated);
  });
  return {gradients.whole(), weights.whole()};
}

Trained train_plain(int ranks, int stage, ShardTrigger trigger) {
  return train_net(ranks, stage, trigger, [] {
    const auto net = std::make_shared<PlainNet>();
    return std::pair(net, [net](const at::Tensor& x) { return net->forward(x); });
  });
}

Trained train_ours(int ranks, int stage, ShardTrigger trigger) {
  return train_net(ranks, stage, trigger, [] {
    OurNet net;
    return std::pair(net.ptr(), [net](const at::Tensor& x) mutable { return net(x); });
  });
}

void expect_same(const Tensors& got, const Tensors& want) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, tensor] : want) EXPECT_TRUE(at::equal(got.at(name), tensor)) << name;
}

TEST(PlainModule, TrainsBitForBitAsTheInterceptedOneInEveryStage) {
  for (const int ranks : {1, 2, 3, 5}) {
    for (const int stage : {1, 2, 3}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, stage " + std::to_string(stage));
      const Trained plain = train_plain(ranks, stage, ShardTrigger::Automatic), ours = train_ours(ranks, stage, ShardTrigger::Automatic);
      expect_same(plain.gradients, ours.gradients);
      expect_same(plain.weights, ours.weights);
      if (stage < 3) continue;
      const Trained watched = train_ours(ranks, stage, ShardTrigger::Operators);
      expect_same(watched.gradients, ours.gradients);
    }
  }
}

class FullSharding : public testing_support::TrainFixture {
 protected:
  using Sets = std::vector<std::string>;

  Config few(const std::string& family, Sets sets) const {
    sets.insert(sets.end(), {"run.steps=3", "batch.global_size=6", "batch.micro_size=1", "run.threads=1", "zero.stage=3"});
    return config(family, sets);
  }

  void expect_same_bits(const std::string& family, const Sets& base, int world, const std::vector<Sets>& forms) const {
    const Trace plain = train(few(family, base), world);
    for (const Sets& form : forms) {
      SCOPED_TRACE(family + " " + ::testing::PrintToString(form) + " on " + std::to_string(world));
      Sets with = base;
      with.insert(with.end(), form.begin(), form.end());
      const Trace again = train(few(family, with), world);
      EXPECT_EQ(testing_support::difference(again.gradients, plain.gradients), 0);
      EXPECT_EQ(testing_support::difference(again.weights, plain.weights), 0);
      for (size_t i = 0; i < plain.steps.size(); ++i) EXPECT_EQ(again.steps[i].loss, plain.steps[i].loss) << "step " << i + 1;
    }
  }
};

TEST_F(FullSharding, MovesTheSameBitsWheneverItMovesThem) {
  const std::vector<Sets> forms = {
      {"zero.prefetch=0"}, {"zero.prefetch=3"}, {"zero.prefetch=3", "zero.prefetch_bytes=9000"}, {"zero.reshard_after_forward=false"}};
  expect_same_bits("llama", {}, 2, forms);
  expect_same_bits("gpt2", {"model.tie_embeddings=true", "model.dropout=0.1"}, 3, forms);
  expect_same_bits("llama", {"precision.compute=bf16"}, 2, forms);
}

TEST_F(FullSharding, RecomputesBitForBit) {
  const std::string full = "recompute.mode=full", selective = "recompute.mode=selective";
  const std::vector<Sets> forms = {{full},
                                   {full, "zero.prefetch=2"},
                                   {full, "zero.prefetch=0"},
                                   {full, "zero.reshard_after_forward=false"},
                                   {full, "recompute.every=2"},
                                   {full, "recompute.modules=layers.**"},
                                   {full, "recompute.modules=layers.*.feed_forward"},
                                   {full, "recompute.modules=head"},
                                   {selective},
                                   {selective, "recompute.keep=[\"mm\", \"addmm\"]"}};
  expect_same_bits("llama", {"model.dropout=0.1"}, 2, forms);
  expect_same_bits("gpt2", {"model.dropout=0.1", "model.tie_embeddings=true"}, 3, {{full}, {selective}});
  // Units inside what is recomputed.
  expect_same_bits("llama", {"zero.wrap=layers.*.*"}, 2, {{full}, {full, "zero.prefetch=3"}, {selective}});
  expect_same_bits("llama", {"precision.compute=bf16"}, 2, {{full}, {selective}});
}

TEST_F(FullSharding, EvaluatesAndGeneratesBetweenSteps) {
  struct Seen {
    std::vector<double> losses;  ///< of evaluation before, a step, evaluation after, a step
    std::vector<int64_t> text;
  };
  const auto run = [&](int world, bool evaluates) {
    Seen seen;
    const Config settings = few("llama", {"model.tie_embeddings=true"});
    const auto text = corpus(settings);
    comm::run_ranks(world, [&](comm::World& ranks) {
      validate(settings, ranks.size());
      Mesh mesh(ranks, mesh_shape(settings.mesh, settings.zero.stage, ranks.size()));
      RankScope scope(settings, ranks.local_size());
      Stepper stepper(settings, mesh, testing_support::test_device(), scope);
      data::Loader loader(text, loader_options(settings, mesh));
      Seen mine;
      for (int i = 0; i < 2; ++i) {
        if (evaluates) {
          mine.losses.push_back(evaluate(stepper.forward_only(), text, 16, 40, mesh[mesh_roles(settings).batch]).loss);
          if (i == 0) mine.text = generate(stepper.forward_only(), {1, 2, 3}, 20, {});
        }
        mine.losses.push_back(stepper.step(loader.next()).loss);
      }
      if (ranks.rank() == 0) seen = mine;
    });
    return seen;
  };
  const Seen alone = run(1, true), many = run(3, true), without = run(3, false);
  EXPECT_EQ(many.text, alone.text);
  for (size_t i = 0; i < alone.losses.size(); ++i) EXPECT_NEAR(many.losses[i], alone.losses[i], 5e-6 * alone.losses[i]);
  EXPECT_EQ(many.losses[1], without.losses[0]);
  EXPECT_EQ(many.losses[3], without.losses[1]);
}

TEST_F(FullSharding, RefusesPatternsAndUnitsBeforeThereAreRanks) {
  const auto check = [&](const Sets& sets) {
    const Config given = few("llama", sets);
    check_modules(given, mesh_shape(given.mesh, given.zero.stage, 1));
  };
  const auto refused = [&](const Sets& sets) { return testing_support::refusal([&] { check(sets); }); };
  const std::string nowhere = refused({"zero.wrap=layer.*"});
  EXPECT_NE(nowhere.find("zero.wrap = 'layer.*': no module matches 'layer.*'"), std::string::npos) << nowhere;
  EXPECT_NE(nowhere.find("the nearest path is 'layers'"), std::string::npos) << nowhere;
  const std::string large = refused({"run.memory_limit_bytes=20000"});
  EXPECT_NE(large.find("unit 'norm' (with 'head.weight') alone takes 24960 bytes while it is gathered, more than unit_bytes_limit (run.memory_limit_bytes) = "
                       "20000"),
            std::string::npos)
      << large;
  check({"run.memory_limit_bytes=30000"});
  const std::string group = refused({"optim.groups=[\"layers.*.atention: lr_factor = 2\"]"});
  EXPECT_NE(group.find("'layers.*.atention' matches no module and no parameter; the nearest path is 'layers.0.attention'"), std::string::npos) << group;
  const std::string adapted = refused({"lora.modules=nosuch"});
  EXPECT_NE(adapted.find("lora.modules = 'nosuch': no module matches 'nosuch'"), std::string::npos) << adapted;
  EXPECT_EQ(adapted.find("Impl"), std::string::npos) << adapted;
  const std::string frozen = refused({"lora.modules=layers.**", "quantize.modules=layers.*.attention.*, nosuch"});
  EXPECT_NE(frozen.find("quantize.modules = 'nosuch': no module matches 'nosuch'"), std::string::npos) << frozen;
  const std::string again = refused({"recompute.mode=full", "recompute.modules=blocks.*"});
  EXPECT_NE(again.find("recompute.modules = 'blocks.*': no module matches 'blocks.*'"), std::string::npos) << again;
}

}  // namespace
}  // namespace tessera
