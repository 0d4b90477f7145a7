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
  for (size_t from = 0; from < all.size(); ++from) {
    const auto whole = run_saving(all[from], mixture);
    const auto state = stored(saved(all[from], kSaved));
    const auto bias = state.find("buffer.layers.1.feed_forward.router.bias");
    ASSERT_NE(bias, state.end());
    EXPECT_GT(bias->second.abs().max().item<float>(), 0);
    for (const size_t to : {from, (from + 1) % all.size(), (from + 3) % all.size()}) {
      SCOPED_TRACE(std::string(all[from].name) + " goes on as " + all[to].name);
      ResumeFixture::expect_same_bits(loaded(all[to], mixture, saved(all[from], kSaved)), state);
      expect_goes_on(all[from], all[to], mixture, kLosses, whole);
    }
  }
}

}  // namespace
}  // namespace tessera
