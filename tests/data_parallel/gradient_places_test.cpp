#include <gmock/gmock.h>

#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tests/nn/language_model.h"

/// Gradients that the embedding and the head compute in the buckets themselves.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

class Places : public ::testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Ddp, Places, ::testing::Combine(::testing::Values(1, 2, 3, 5), ::testing::Bool()));

TEST_P(Places, GiveTheGradientsOfOneProcess) {
  const auto [ranks, tied] = GetParam();
  for (const int passes : {1, 3}) {
    std::vector<int64_t> firsts;
    for (int i = 0; i < ranks * passes; ++i) firsts.push_back(i);
    const auto wanted = gradients_of_losses(tied, firsts);
    run_ranks(ranks, [&](World& world) {
      LanguageModel model(tied);
      DistributedDataParallel ddp(model, world.group());
      for (int step = 0; step < 3; ++step) {  // the second with the buckets of the order seen in the first
        ddp.begin_step();
        for (int pass = 0; pass < passes; ++pass) {
          const Attachment local = pass + 1 < passes ? ddp.no_sync() : Attachment();
          model.loss(world.rank() * passes + pass).backward();
        }
        ddp.finish();
        EXPECT_LT(largest_difference(model.gradients(), wanted), parity);
      }
    });
  }
}

TEST(DdpPlaces, AreTakenByTheFirstGradientAndNotCopied) {
  run_ranks(2, [&](World& world) {
    LanguageModel model(/*tied=*/false);
    DistributedDataParallel ddp(model, world.group());
    std::vector<const void*> computed_at;
    const auto listening =
        nn::GradientDispatcher::of(model.head->weight).listen([&](const at::Tensor& p) { computed_at.push_back(p.grad().const_data_ptr()); });
    ddp.begin_step();
    const at::Tensor loss = model.loss(world.rank());
    EXPECT_TRUE(nn::GradientDispatcher::of(model.head->weight).is_place_taken());
    EXPECT_FALSE(nn::GradientDispatcher::of(model.embedding->weight).is_place_taken()) << "before its backward pass";
    loss.backward();
    EXPECT_TRUE(nn::GradientDispatcher::of(model.embedding->weight).is_place_taken());
    ddp.finish();
    EXPECT_EQ(computed_at, std::vector<const void*>{model.head->weight.grad().const_data_ptr()});
    EXPECT_FALSE(nn::GradientDispatcher::take_place(model.head->weight).defined()) << "none outside a step";
  });
}

TEST(DdpPlaces, AForwardPassWithoutBackwardSpoilsNothing) {
  const auto wanted = gradients_of_losses(false, {0, 1});
  run_ranks(2, [&](World& world) {
    LanguageModel model(/*tied=*/false);
    DistributedDataParallel ddp(model, world.group());
    ddp.begin_step();
    const at::Tensor unused = model.loss(7);  // has the place
    model.loss(world.rank()).backward();
    ddp.finish();
    EXPECT_LT(largest_difference(model.gradients(), wanted), parity);
  });
}

TEST(DdpPlaces, BackwardPassesInAnotherOrderThanForwardPasses) {
  const auto wanted = gradients_of_losses(false, {0, 1, 5, 6});
  run_ranks(2, [&](World& world) {
    LanguageModel model(/*tied=*/false);
    DistributedDataParallel ddp(model, world.group());
    ddp.begin_step();
    Attachment local = ddp.no_sync();
    const at::Tensor first = model.loss(world.rank()), second = model.loss(5 + world.rank());
    second.backward();
    local.detach();
    first.backward();  // the place was this one's
    ddp.finish();
    EXPECT_LT(largest_difference(model.gradients(), wanted), parity);
  });
}

TEST(DdpPlaces, AGradientThatComesAfterItsPlaceWasGivenUpIsRefused) {
  run_ranks(2, [&](World& world) {
    LanguageModel model(/*tied=*/false);
    DistributedDataParallel ddp(model, world.group());
    ddp.begin_step();
    const at::Tensor first = model.loss(0), ids = at::zeros({1, 2}, at::kLong);
    model.loss(ids, at::ones({1, 2, LanguageModel::kDim})).backward();  // the bucket goes on waiting for the embedding
    EXPECT_THAT(refusal([&] { first.backward(); }), HasSubstr("'head.weight' got another gradient"));
  });
}

}  // namespace
}  // namespace tessera
