// In what type, and where, gradients are held, computed and sent.

#include <cmath>
#include <numeric>

#include <gmock/gmock.h>

#include "tests/nn/language_model.h"
#include "tests/zero/support.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using namespace testing_support;

/// Gradients are rounded once for each rank that sums them, and added up over micro-batches in fp32.
TEST(ZeroGradients, CrossInFewerBits) {
  for (const auto& [network, roundoff] : std::vector<std::pair<at::ScalarType, double>>{{at::kBFloat16, 1.0 / 256}, {at::kHalf, 1.0 / 2048}}) {
    for (Way way : ways) {
      way.network = network;
      for (const auto& [ranks, replicas] : std::vector<std::pair<int, int>>{{2, 1}, {3, 1}, {8, 1}, {4, 2}}) {
        const double difference = trained_difference(ranks, replicas, way, 2);
        EXPECT_LT(difference, (ranks + 1) * roundoff) << network << ", stage " << way.stage << ", " << ranks << " ranks";
        EXPECT_GT(difference, parity) << "nothing was rounded";
      }
      ShardLayout layout;
      int64_t gradients = 0, parameters = 0, elements = 0;
      for (const auto& record : records_of_a_step(2, 1, way, 1, layout)) (record.op == "all_gather" ? parameters : gradients) += record.sent_bytes;
      for (const auto& bucket : layout.buckets) elements += layout.numel(bucket);
      EXPECT_EQ(gradients, 2 * elements / 2);
      EXPECT_EQ(parameters, 4 * elements / 2);
    }
  }
}

TEST(ZeroGradients, OfComplexParametersKeepTheirDtype) {
  for (const int stage : {1, 2}) {
    for (const ZeroOptions& options : {ZeroOptions{.stage = stage, .reduce_dtype = at::kFloat}, ZeroOptions{.stage = stage, .network_dtype = at::kBFloat16},
                                       ZeroOptions{.stage = stage, .network_dtype = at::kHalf}}) {
      run_ranks(2, [&](World& world) {
        torch::nn::Module module;
        const at::Tensor weight = module.register_parameter("weight", at::ones({4}, at::kComplexFloat));
        ShardedDataParallel zero(module, {.shard = world.group()}, options);
        at::real(weight * at::complex(at::ones({4}), at::full({4}, world.rank() + 1.0f))).sum().backward();
        const at::Tensor part = zero.shards()[0].tensor.grad();
        EXPECT_TRUE(at::equal(part, at::full(part.sizes(), c10::complex<double>(2, -3), at::kComplexFloat)));
      });
    }
  }
}

TEST(ZeroGradients, AMeanInFp16DoesNotOverflow) {
  for (const Way& way : ways) {
    for (const auto& [ranks, replicas] : std::vector<std::pair<int, int>>{{2, 1}, {3, 1}, {4, 2}}) {
      run_ranks(ranks, [&](World& world) {
        torch::nn::Module module;
        const at::Tensor weight = module.register_parameter("weight", at::ones({8}, at::kHalf));
        ZeroOptions options = options_of(way);
        options.average = true;
        ShardedDataParallel zero(module, groups_of(world, replicas), options);
        (weight * 40000.0).sum().backward();
        const at::Tensor part = zero.shards()[0].tensor.grad();
        EXPECT_TRUE(at::allclose(part, at::full_like(part, 40000.0), 0x1p-10)) << part;
      });
    }
  }
}

/// Terms of a mean in fp16 are divided where they lie, which is no clear of the program's, though they are all zeros.
TEST(ZeroGradients, AMeanInFp16IsNoClearOfWhatAFailedPassWouldAddTo) {
  for (const int stage : {1, 2}) {
    for (const int ranks : {2, 3}) {
      run_ranks(ranks, [&](World& world) {
        torch::nn::Module module;
        for (const char* const name : {"late", "rank", "zeros"}) module.register_parameter(name, at::ones({40}, at::kHalf));
        ShardedDataParallel zero(module, {.shard = world.group()}, {.stage = stage, .sizes = {.bucket_bytes = 16, .first_bucket_bytes = 16}, .average = true});
        const auto pass = [&](double of_rank, double of_zeros, bool fails) {
          at::Tensor late = module.parameters()[0] * 1;
          if (fails) late.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
          (late.sum() + (module.parameters()[1] * of_rank).sum() + (module.parameters()[2] * of_zeros).sum()).backward();
        };
        pass(1, 1, false);
        std::vector<at::Tensor> before;
        for (const auto& part : zero.updated()) before.push_back(part.tensor.grad().clone());
        EXPECT_THROW(pass(world.rank(), 0, true), std::runtime_error);
        for (size_t i = 0; i < before.size(); ++i) {
          const at::Tensor now = zero.updated()[i].tensor.grad();
          ASSERT_TRUE(now.defined()) << i;
          EXPECT_TRUE(at::equal(now, before[i])) << i;
        }
      });
    }
  }
}

TEST(ZeroGradients, AnOverflowOnTheNetworkIsSeen) {
  run_ranks(3, [&](World& world) {
    Net net;
    ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2, .network_dtype = at::kHalf});
    zero.begin_step();
    (loss_of(net.forward(whole_batch(samples).x), whole_batch(samples).y, samples) * 1e9).backward();
    zero.finish();
    double sum = 0;
    for (const auto& shard : zero.shards()) sum += shard.tensor.grad().abs().sum().item<double>();
    EXPECT_FALSE(std::isfinite(sum));
  });
}

TEST(ZeroGradients, ComputedInTheBucketsAreThoseOfOneProcess) {
  for (const bool tied : {false, true}) {
    for (const int passes : {1, 3}) {
      for (const int ranks : {1, 2, 3, 5}) {
        std::vector<int64_t> firsts(ranks * passes);
        std::iota(firsts.begin(), firsts.end(), 0);
        const auto wanted = gradients_of_losses(tied, firsts);
        for (const Way& way : ways) {
          SliceCollector gradients;
          run_ranks(ranks, [&](World& world) {
            LanguageModel model(tied);
            ShardedDataParallel zero(model, {.shard = world.group()}, options_of(way));
            for (int step = 0; step < 2; ++step) {
              zero.begin_step();
              for (int pass = 0; pass < passes; ++pass) {
                const MicroBatchPosition position{.index = pass, .last = pass + 1 == passes};
                zero.before_micro_batch(position);
                model.loss(world.rank() * passes + pass).backward();
                zero.after_micro_batch(position);
              }
              zero.finish();
            }
            gradients.add_gradients(zero.shards());
          });
          std::vector<at::Tensor> got;
          for (const auto& parameter : nn::unique_parameters(LanguageModel(tied))) got.push_back(gradients.whole().at(parameter.name));
          EXPECT_LT(largest_difference(got, wanted), parity) << "stage " << way.stage << ", " << ranks << " ranks, " << passes << " passes, tied: " << tied;
        }
      }
    }
  }
}

/// Used twice, a weight has its place taken by the first use, and the sum of both made elsewhere.
TEST(ZeroGradients, OfAWeightThatIsUsedTwiceAreThoseOfOneProcess) {
  LanguageModel one(/*tied=*/false);
  const auto loss = [](LanguageModel& model, int64_t first) { return model.loss(first) + model.loss(first + 3) * 2; };
  for (const int64_t first : {0, 1, 2, 3}) loss(one, first).backward();
  for (const Way& way : ways) {
    SliceCollector gradients;
    run_ranks(2, [&](World& world) {
      LanguageModel model(/*tied=*/false);
      ShardedDataParallel zero(model, {.shard = world.group()}, options_of(way));
      zero.begin_step();
      for (const int pass : {0, 1}) {
        const MicroBatchPosition position{.index = pass, .last = pass == 1};
        zero.before_micro_batch(position);
        loss(model, 2 * world.rank() + pass).backward();
        zero.after_micro_batch(position);
      }
      zero.finish();
      gradients.add_gradients(zero.shards());
    });
    const auto got = gradients.whole();
    EXPECT_LT(largest_difference({got.at("embedding.weight"), got.at("head.weight")}, one.gradients()), parity) << "stage " << way.stage;
  }
}

TEST(ZeroGradients, OvertakingOneThatIsComputedInPlaceAreThoseOfTheStep) {
  for (const Way& way : ways) {
    run_ranks(2, [&](World& world) {
      LanguageModel model(/*tied=*/false);
      ShardedDataParallel zero(model, {.shard = world.group()}, options_of(way));
      zero.begin_step();
      const at::Tensor loss = model.loss(0);  // has taken the place of head.weight's gradient
      (model.head->weight.sum() + model.embedding->weight.sum()).backward();
      EXPECT_THAT(refusal([&] { loss.backward(); }), HasSubstr("got another gradient after its bucket was reduced"));
      zero.finish();
    });
  }
}

}  // namespace
}  // namespace tessera
