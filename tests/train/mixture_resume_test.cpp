// A mixture's checkpoint goes on in any layout: stacked experts by their rows, and the routers' biases, which no optimizer knows.

#include <gmock/gmock.h>

#include "tests/train/resume_fixture.h"

namespace tessera {
namespace {

using namespace tessera::testing_support;

class MixtureResume : public ResumeFixture {
 protected:
  const Sets mixture{"model.family=mixtral", "model.experts=5", "model.experts_per_token=2", "model.router=sigmoid", "moe.bias_rate=0.01",
                     "optim.name=sgd",       "optim.lr=0.2"};
};

TEST_F(MixtureResume, EveryLayoutGoesOnInAnother) {
  const std::vector<Layout> all{{"one", 1, {}},
                                {"ddp3", 3, {}},
                                {"pp2", 2, {"mesh.pp=2"}},
                                {"fsdp4", 4, {"zero.stage=3"}},
                                {"zero2 of stages", 4, {"mesh.pp=2", "mesh.dp_shard=2", "zero.stage=2"}}};
  expect_each_goes_on(all, {0, 1, 3}, mixture, [](const std::map<std::string, at::Tensor>& state) {
    const auto bias = state.find("buffer.layers.1.feed_forward.router.bias");
    ASSERT_NE(bias, state.end());
    EXPECT_GT(bias->second.abs().max().item<float>(), 0);
  });
}

/// What is frozen is in no bucket, and the layout of buckets orders the sums of a ring.
TEST_F(MixtureResume, ExpertsTrainedBesideAdaptersGoOnBitForBit) {
  const Layout layout{"ddp3", 3, {"comm.algorithm=all_reduce=ring", "zero.bucket_bytes=1000000"}};
  Sets sets = mixture;
  sets.insert(sets.end(), {"optim.momentum=0.8", "lora.modules=layers.1.attention.*", "lora.trained=[\"layers.0.**\"]"});
  run_saving(layout, sets);
  sets.insert(sets.end(), {"checkpoint.resume=" + saved(layout, kSaved).string(), "checkpoint.dir=" + (folder_ / "again").string()});
  run(layout, sets);
  expect_same_bits(stored(folder_ / "again" / step_name(kLast)), stored(saved(layout, kLast)));
}

}  // namespace
}  // namespace tessera
