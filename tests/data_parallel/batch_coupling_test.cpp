#include "tessera/data_parallel/batch_coupling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "tessera/comm/testing.h"
#include "tessera/nn/sync_batch_norm.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

struct CoupledNet : torch::nn::Module {
  CoupledNet() {
    features = register_module("features", torch::nn::Sequential(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2)));
    norm = register_module("norm", torch::nn::BatchNorm2d(3));
    register_module("layer_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({2})));
  }
  torch::nn::Sequential features{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
};

TEST(BatchCoupling, FindsBatchNormsByPath) {
  const CoupledNet net;
  const auto found = find_batch_coupled(net);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].path, "features.1");
  EXPECT_EQ(found[0].type, "BatchNorm1d");
  EXPECT_EQ(found[1].path, "norm");
  EXPECT_EQ(found[1].type, "BatchNorm2d");
}

TEST(BatchCoupling, FrozenStatisticsAreNotCoupled) {
  CoupledNet net;
  net.norm->eval();
  EXPECT_EQ(find_batch_coupled(net).size(), 1u);
  torch::nn::BatchNorm3d without(torch::nn::BatchNorm3dOptions(2).track_running_stats(false));
  without->eval();
  EXPECT_EQ(find_batch_coupled(*without).size(), 1u);
  comm::run_ranks(2, [](comm::World& world) {
    nn::SyncBatchNorm shared(torch::nn::BatchNormOptions(2).track_running_stats(false));
    shared->synchronize(world.group());
    EXPECT_EQ(find_batch_coupled(*shared, 2).size(), 0u);
    shared->eval();
    EXPECT_EQ(find_batch_coupled(*shared, 2).size(), 1u) << "each rank goes by its own samples then";
  });
}

TEST(BatchCoupling, ReportsWhereItMatters) {
  const CoupledNet net;
  EXPECT_EQ(batch_coupling_report(net, 1, 1), "");
  EXPECT_EQ(batch_coupling_report(*torch::nn::Linear(2, 2), 4, 4), "");
  const std::string text = batch_coupling_report(net, 2, 3);
  EXPECT_THAT(text, HasSubstr("'features.1' (BatchNorm1d), 'norm' (BatchNorm2d) go by the statistics of one micro-batch"));
  EXPECT_THAT(text, HasSubstr("2 data-parallel ranks x 3 micro-batches"));
  EXPECT_THAT(text, HasSubstr("SyncBatchNorm"));
  EXPECT_NE(batch_coupling_report(net, 1, 2), "");
  EXPECT_NE(batch_coupling_report(net, 2, 1), "");
}

TEST(BatchCoupling, NamesAFewOfMany) {
  torch::nn::Sequential many;
  for (int i = 0; i < 11; ++i) many->push_back(torch::nn::BatchNorm1d(1));
  const torch::nn::Sequential counts(torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 3).scale_grad_by_freq(true)));
  EXPECT_THAT(batch_coupling_report(*counts, 2, 1), HasSubstr("'0' (Embedding with scale_grad_by_freq) goes by"));
  EXPECT_THAT(batch_coupling_report(*many, 2, 1), HasSubstr("'7' (BatchNorm1d) and 3 more go"));
}

}  // namespace
}  // namespace tessera
