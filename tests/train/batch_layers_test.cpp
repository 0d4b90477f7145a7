// Layers that see the whole batch, under every way to share gradients: equal to one device that holds the batch.

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>

#include "tessera/comm/collectives.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/contrastive_loss.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/sync_batch_norm.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tests/nn/collect.h"
#include "tests/nn/net.h"

namespace tessera {
namespace {

using namespace testing_support;

constexpr int64_t kSamples = 7, kIn = 5, kHidden = 6, kOut = 4;  // uneven for 2, 3 and 5 ranks

/// `Norm`: libtorch's BatchNorm1d on one device, ours on ranks.
template <class Norm>
struct NormalizedImpl : nn::Module {
  NormalizedImpl() : first(kIn, kHidden), norm(kHidden), second(kHidden, kOut) {
    register_module("first", first);
    register_module("norm", norm);
    register_module("second", second);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(norm(first(x)))); }
  nn::Linear first;
  Norm norm;
  nn::Linear second;
};

/// Two towers whose embeddings are to find each other.
struct TowersImpl : nn::Module {
  explicit TowersImpl(comm::Group ranks = {}) : left(kIn, kOut), right(kIn, kOut), group(std::move(ranks)) {
    register_module("left", left);
    register_module("right", right);
    temperature = register_parameter("temperature", at::full({}, 1.5));
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) {
    return nn::contrastive_loss_sum(group, left(x), right(y), temperature.exp(), kSamples) / static_cast<double>(kSamples);
  }
  nn::Linear left, right;
  at::Tensor temperature;
  comm::Group group;
};

/// How gradients are shared: DDP (0), or a stage.
std::unique_ptr<GradientSynchronizer> share(torch::nn::Module& module, const comm::Group& group, int stage, std::vector<nn::NamedParameter>& updated) {
  if (stage == 3) {
    auto sharded = fully_shard(module, group, {});
    updated = nn::unique_parameters(module);
    return sharded;
  }
  updated = nn::unique_parameters(module);
  if (stage == 0) return std::make_unique<DistributedDataParallel>(module, group, DdpOptions{});
  auto zero = std::make_unique<ShardedDataParallel>(module, ShardGroups{.shard = group}, ZeroOptions{.stage = stage});
  updated = zero->shards();
  return zero;
}

void expect_gradients(const std::map<std::string, at::Tensor>& got, const torch::nn::Module& one, const std::string& where) {
  for (const auto& parameter : nn::unique_parameters(one)) {
    const at::Tensor want = parameter.tensor.grad();
    // The bias ahead of a normalization has no gradient in exact arithmetic: the mean takes it out. It is measured by the weight's.
    const double scale = parameter.name == "first.bias" ? 1 : std::max(want.abs().max().item<double>(), 1e-30);
    EXPECT_LE((got.at(parameter.name) - want).abs().max().item<double>(), parity * scale) << parameter.name << where;
  }
}

class BatchLayers : public ::testing::TestWithParam<std::tuple<int, int>> {};
std::string name_of(const ::testing::TestParamInfo<std::tuple<int, int>>& info) {
  const auto [world, stage] = info.param;
  return (stage == 0 ? std::string("Ddp") : "Stage" + std::to_string(stage)) + "On" + std::to_string(world);
}
INSTANTIATE_TEST_SUITE_P(SharedBy, BatchLayers, ::testing::Combine(::testing::Values(2, 3, 5), ::testing::Values(0, 1, 2, 3)), name_of);

TEST_P(BatchLayers, SyncBatchNormTrainsAsOneDeviceDoes) {
  const auto [world, stage] = GetParam();
  const at::Tensor x = random_tensor({kSamples, kIn}, "x"), dy = random_tensor({kSamples, kOut}, "dy");
  const auto one = std::make_shared<NormalizedImpl<torch::nn::BatchNorm1d>>();
  (one->forward(x) * dy).sum().backward();
  SliceCollector gradients;
  comm::run_ranks(world, [&, stage = stage](comm::World& ranks) {
    const auto model = std::make_shared<NormalizedImpl<nn::SyncBatchNorm>>();
    EXPECT_EQ(nn::synchronize_batch_norms(*model, ranks.group()), 1);
    std::vector<nn::NamedParameter> updated;
    const auto shared = share(*model, ranks.group(), stage, updated);
    const auto [begin, size] = chunk(kSamples, ranks.size(), ranks.rank());
    shared->begin_step();
    (nn::call(*model, x.narrow(0, begin, size)) * dy.narrow(0, begin, size)).sum().backward();
    shared->finish();
    if (stage > 0 || ranks.rank() == 0) gradients.add_gradients(updated);
    EXPECT_LE((model->norm->running_mean - one->norm->running_mean).abs().max().item<double>(), parity);
    EXPECT_LE((model->norm->running_var - one->norm->running_var).abs().max().item<double>(), parity);
  });
  expect_gradients(gradients.whole(), *one, " of SyncBatchNorm");
}

TEST_P(BatchLayers, ContrastiveLossTrainsAsOneDeviceDoes) {
  const auto [world, stage] = GetParam();
  const at::Tensor x = random_tensor({kSamples, kIn}, "x"), y = random_tensor({kSamples, kIn}, "y");
  const auto one = std::make_shared<TowersImpl>();
  const at::Tensor loss = one->forward(x, y);
  loss.backward();
  SliceCollector gradients;
  comm::run_ranks(world, [&, stage = stage](comm::World& ranks) {
    const auto model = std::make_shared<TowersImpl>(ranks.group());
    std::vector<nn::NamedParameter> updated;
    const auto shared = share(*model, ranks.group(), stage, updated);
    const auto [begin, size] = chunk(kSamples, ranks.size(), ranks.rank());
    shared->begin_step();
    const at::Tensor part = nn::call(*model, x.narrow(0, begin, size), y.narrow(0, begin, size));
    part.backward();
    shared->finish();
    if (stage > 0 || ranks.rank() == 0) gradients.add_gradients(updated);
    at::Tensor sum = part.detach().clone();
    comm::all_reduce(ranks.group(), sum);
    EXPECT_NEAR(sum.item<double>(), loss.item<double>(), 1e-6 * loss.item<double>());
  });
  expect_gradients(gradients.whole(), *one, " of the contrastive loss");
}

}  // namespace
}  // namespace tessera
