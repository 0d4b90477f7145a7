// Sharded data parallelism where techniques and optimizers meet: parity of training, bits of updates.

#include "tessera/comm/backends/record.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/sgd.h"
#include "tessera/precision/master_weights.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tests/nn/collect.h"
#include "tests/nn/net.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using testing_support::difference;
using testing_support::SliceCollector;
using testing_support::TrainFixture;

using testing_support::kGradients;
using testing_support::kLosses;

class Sharding : public TrainFixture {
 protected:
  Config sharded(const std::string& family, std::vector<std::string> sets) const {
    sets.insert(sets.end(), {"batch.micro_size=1", "zero.bucket_bytes=20000", "run.threads=1"});
    return config(family, sets);
  }

  void expect_equal_runs(const std::string& family, const std::vector<std::string>& sets,
                         const std::vector<std::pair<int, std::vector<std::string>>>& layouts) {
    const Trace one = train(sharded(family, sets), 1);
    for (const auto& [world, more] : layouts) {
      auto all = sets;
      all.insert(all.end(), more.begin(), more.end());
      SCOPED_TRACE(std::to_string(world) + " ranks, " + more.front());
      const Trace many = train(sharded(family, all), world);
      EXPECT_LE(difference(many.gradients, one.gradients), kGradients);
      ASSERT_EQ(many.steps.size(), one.steps.size());
      for (size_t i = 0; i < one.steps.size(); ++i) {
        EXPECT_NEAR(many.steps[i].loss, one.steps[i].loss, kLosses * one.steps[i].loss) << "step " << i + 1;
        EXPECT_NEAR(many.steps[i].grad_norm, one.steps[i].grad_norm, 2e-5 * one.steps[i].grad_norm) << "step " << i + 1;
      }
    }
    EXPECT_LT(one.steps.back().loss, one.steps.front().loss);
  }
};

/// Of what LoRA freezes Muon has nothing to bring together.
TEST_F(Sharding, MuonMeetsOverWhatIsTrainedAlone) {
  for (const int stage : {1, 3}) {
    const Config settings = sharded("llama", {"optim.name=muon", "lora.modules=layers.*.attention.*", "lora.rank=3", "zero.stage=" + std::to_string(stage)});
    constexpr int kRanks = 2;
    validate(settings, kRanks);
    const auto recorder = std::make_shared<comm::Recorder>();
    const auto world = comm::World::dry(kRanks, 0, recorder);
    const Mesh mesh(world, mesh_shape(settings.mesh, settings.zero.stage, kRanks));
    RankScope scope(settings, 1);
    Stepper stepper(settings, mesh, at::kMeta, scope);
    stepper.step(data::dry_batch(loader_options(settings, mesh), 1, at::kMeta));
    int64_t sent = 0;
    for (const auto& record : recorder->records()) {
      if (record.site.starts_with("optimizer") && record.dtype == at::kFloat && record.op != "all_reduce") sent += record.sent_bytes;
    }
    const int64_t elements = settings.model.layers * 4 * 2 * 3 * settings.model.dim;  // of A and B beside four matrices of a block
    EXPECT_EQ(sent, 8 * elements * (kRanks - 1) / kRanks) << stage;
  }
}

TEST_F(Sharding, StagesTrainAsOneDeviceDoes) {
  expect_equal_runs("llama", {"model.kv_heads=2", "run.steps=8"},
                    {{2, {"zero.stage=1"}},
                     {5, {"zero.stage=1"}},
                     {3, {"zero.stage=2"}},
                     {8, {"zero.stage=2"}},
                     {3, {"zero.stage=2", "zero.accumulate=whole"}},
                     {2, {"zero.stage=3"}},
                     {5, {"zero.stage=3"}}});
}

TEST_F(Sharding, HybridTrainsAsOneDeviceDoes) {
  expect_equal_runs("gpt2", {"model.dropout=0.1", "model.tie_embeddings=true", "run.steps=3"},
                    {{4, {"zero.stage=1", "mesh.dp_replicate=2"}}, {4, {"zero.stage=2", "mesh.dp_replicate=2"}}, {4, {"zero.stage=3", "mesh.dp_replicate=2"}}});
}

TEST_F(Sharding, SgdWithMomentumTrainsAsOneDeviceDoes) {
  expect_equal_runs("mlp", {"optim.name=sgd", "optim.momentum=0.9", "optim.decay_on=matrices"}, {{3, {"zero.stage=1"}}, {2, {"zero.stage=2"}}});
}

TEST_F(Sharding, AWrongPartIsFound) {
  const Trace one = train(sharded("llama", {}), 1);
  const Trace halved = train(sharded("llama", {"zero.stage=2"}), 2, [](Composition& run) {
    for (const auto& shard : run.updated) {
      if (shard.name == "norm.weight") shard.tensor.grad().mul_(0.5);
    }
  });
  EXPECT_GT(difference(halved.gradients, one.gradients), kGradients);
  const Trace dropped = train(sharded("llama", {"zero.stage=2", "batch.global_size=13"}), 2);  // as if one sample's contribution had been dropped
  EXPECT_GT(difference(dropped.gradients, one.gradients), kGradients);
}

/// Lengths of all kinds: below and above a vector, odd, one, none.
struct Lengths : torch::nn::Module {
  explicit Lengths(at::ScalarType dtype) {
    int64_t i = 0;
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{1}, {}, {0, 4}, {7, 5}, {33, 31}, {64}, {3, 3, 11}, {129, 17}, {100}}) {
      register_parameter("p" + std::to_string(i++), at::zeros(shape, dtype));
    }
    testing_support::fill_parameters(*this);
  }
};

using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(const std::vector<nn::NamedParameter>&)>;
constexpr int kUpdates = 3;

at::Tensor gradient_of(const nn::NamedParameter& parameter, int step) {
  const Slice& slice = nn::slice_of(parameter.tensor);
  const at::Tensor whole = testing_support::random_tensor(slice.shape, parameter.name + "." + std::to_string(step));
  at::Tensor part = at::empty(slice.local_shape());
  copy_slices({Slice::whole(slice.name, slice.shape)}, {whole}, slice, part);
  return part;
}

void run_updates(optim::Optimizer& optimizer, const std::vector<nn::NamedParameter>& parameters) {
  for (int step = 0; step < kUpdates; ++step) {
    for (const auto& parameter : parameters) parameter.tensor.mutable_grad() = gradient_of(parameter, step);
    optimizer.step(0.01);
  }
}

void expect_same_bits(const MakeOptimizer& make, at::ScalarType dtype = at::kFloat) {
  Lengths alone(dtype);
  const auto parameters = nn::unique_parameters(alone);
  for (const auto& p : parameters) nn::set_slice(p.tensor, Slice::whole(p.name, p.tensor.sizes().vec()));
  const auto whole = make(parameters);
  run_updates(*whole, parameters);
  for (const int ranks : {2, 3, 5, 8}) {
    SliceCollector values, state;
    comm::run_ranks(ranks, [&](comm::World& world) {
      Lengths model(dtype);
      ShardedDataParallel zero(model, {.shard = world.group()}, {.stage = 2});
      const auto optimizer = make(zero.shards());
      run_updates(*optimizer, zero.shards());
      values.add_values(zero.shards());
      for (const auto& held : optimizer->state()) state.add(held.parameter + "." + held.state, held.tensor, held.slice);
      EXPECT_EQ(optimizer->update_counts(), whole->update_counts());
    });
    for (const auto& p : parameters) EXPECT_TRUE(at::equal(values.whole().at(p.name), p.tensor)) << p.name << " on " << ranks << " ranks";
    for (const auto& held : whole->state()) {
      EXPECT_TRUE(at::equal(state.whole().at(held.parameter + "." + held.state), held.tensor)) << held.parameter << " on " << ranks << " ranks";
    }
  }
}

TEST(ShardedUpdates, OfAdamWHaveTheBitsOfWholeOnes) {
  expect_same_bits([](const auto& parameters) { return std::make_unique<optim::AdamW>(optim::decay_groups(parameters, "matrices", 0.1)); });
}

TEST(ShardedUpdates, OfSgdHaveTheBitsOfWholeOnes) {
  expect_same_bits(
      [](const auto& parameters) { return std::make_unique<optim::Sgd>(optim::decay_groups(parameters, "all", 0.1), optim::SgdOptions{.momentum = 0.9}); });
}

TEST(ShardedUpdates, OfMasterWeightsHaveTheBitsOfWholeOnes) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    expect_same_bits([&](const auto& parameters) { return precision::make_optimizer(OptimConfig(), {.params = dtype, .compute = dtype}, 1, parameters); },
                     dtype);
  }
}

TEST(ShardedUpdates, RoundedStochasticallyHaveTheBitsOfWholeOnes) {
  const precision::Policy policy{.params = at::kBFloat16, .compute = at::kBFloat16, .master = at::kBFloat16};
  expect_same_bits([&](const auto& parameters) { return precision::make_optimizer(OptimConfig(), policy, 1, parameters); }, at::kBFloat16);
}

}  // namespace
}  // namespace tessera
