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

}  // namespace
}  // namespace tessera
