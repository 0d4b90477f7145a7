// Parameters that a plan of tensor parallelism does not name are whole on all ranks, and have to stay so.

#include <memory>
#include <string>

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/testing.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/mesh.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/norm.h"
#include "tessera/nn/sharing.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tests/refusal.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_support::refusal;

/// Queries and keys that are normalized head by head (Qwen3, OLMo 2), by a port whose plan does not say so.
struct NormedImpl : nn::Module {
  NormedImpl() {
    register_module("up", up);
    register_module("norm", norm);
    register_module("down", down);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor heads = norm(up(x).unflatten(-1, {-1, 4}));
    return down((heads * heads).flatten(-2));
  }
  nn::Linear up{6, 16};
  nn::RMSNorm norm{4};
  nn::Linear down{16, 6};
};
TESSERA_MODULE(Normed);

/// Beside a layer that is cut unevenly, too: GPT-2's vocabulary is odd.
struct NormedTokensImpl : nn::Module {
  NormedTokensImpl() {
    register_module("embed", embed);
    register_module("normed", normed);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& ids) { return normed(embed(ids)); }
  nn::Embedding embed{7, 6};
  Normed normed;
};
TESSERA_MODULE(NormedTokens);

TEST(WholeParts, AreWatchedBesideUnevenOnes) {
  run_ranks(2, [](World& world) {
    NormedTokens net = on_meta([] { return NormedTokens(); });
    const auto parallel =
        parallelize_module(net, world.group(), {{"embed", VocabParallelEmbedding{}}, {"normed.up", ColumnParallel{}}, {"normed.down", RowParallel{}}});
    materialize(net, 7, testing_support::test_device());
    const at::Tensor ids = at::arange(6).view({2, 3}).to(testing_support::test_device());
    EXPECT_THAT(refusal([&] {
                  for (int step = 0; step < 5; ++step) {
                    net->zero_grad();
                    net(ids).square().sum().backward();
                    const at::NoGradGuard no_grad;
                    for (const at::Tensor& parameter : net->parameters()) at::Tensor(parameter).sub_(parameter.grad(), 0.05);
                  }
                }),
                HasSubstr("'normed.norm.weight' is whole on all ranks of world"));
  });
}

/// Its collectives tell of themselves and move nothing, so that what ranks hold can't be compared: a step is timed and counted like that.
TEST(WholeParts, AreNotLookedAtInADryWorld) {
  const comm::GroupInfo info{.name = "tp", .rank = 0, .size = 2};
  const comm::Group group(info, comm::make_dry_engine(std::make_shared<comm::Recorder>(), info));
  Normed net = on_meta([] { return Normed(); });
  const auto parallel = parallelize_module(net, group, {{"up", ColumnParallel{}}, {"down", RowParallel{}}});
  materialize(net, 7, testing_support::test_device());
  const at::Tensor x = at::ones({2, 3, 6}, testing_support::test_device());
  for (int step = 0; step < 3; ++step) EXPECT_NO_THROW(net(x).square().sum().backward());
}

/// Each rank's gradient of what works on its heads is of these alone.
TEST(WholeParts, ThatWorkOnAPartAreRefusedOnceRanksDrift) {
  enum class Sums { Never, EachStep };
  for (const std::string wrapper : {"none", "fsdp"}) {
    for (const Sums sums : {Sums::Never, Sums::EachStep}) {
      if (wrapper == "fsdp" && sums == Sums::Never) continue;  // slices are looked at there alone
      for (const bool named : {false, true}) {
        run_ranks(wrapper == "fsdp" ? 4 : 2, [&](World& world) {
          const Mesh mesh(world, {{"dp", world.size() / 2}, {"tp", 2}});
          Normed net = on_meta([] { return Normed(); });
          ParallelPlan plan{{"up", ColumnParallel{}}, {"down", RowParallel{}}};
          if (named) plan.emplace_back("norm", SequenceParallel{});
          const auto parallel = parallelize_module(net, mesh["tp"], plan);
          const auto sharded = wrapper == "fsdp" ? fully_shard(net, mesh["dp"], {.device = testing_support::test_device()}) : nullptr;
          materialize(net, 7, testing_support::test_device());
          const at::Tensor x = at::ones({2, 3, 6}, testing_support::test_device()) / 3;
          const auto train = [&] {
            for (int step = 0; step < 5; ++step) {
              net->zero_grad();
              net(x).square().sum().backward();
              const auto updated = sharded ? sharded->updated() : nn::unique_parameters(*net);
              if (named || sums == Sums::EachStep) nn::sum_terms(parallel->group(), updated);
              const at::NoGradGuard no_grad;
              for (const auto& [name, tensor, aliases] : updated) at::Tensor(tensor).sub_(tensor.grad(), 0.05);
            }
          };
          if (named) {
            EXPECT_NO_THROW(train());
          } else {
            EXPECT_THAT(refusal(train), AllOf(HasSubstr("'norm.weight' is whole on all ranks of tp"), HasSubstr("Give it the style SequenceParallel")));
          }
        });
      }
    }
  }
}

}  // namespace
}  // namespace tessera
