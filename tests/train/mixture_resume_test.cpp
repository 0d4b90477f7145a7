// A mixture's checkpoint goes on in any layout: stacked experts by their rows, and the routers' biases, which no optimizer knows.

#include <algorithm>
#include <map>
#include <mutex>

#include <gmock/gmock.h>

#include "tessera/train/hook_state.h"
#include "tests/train/resume_fixture.h"

namespace tessera {
namespace {

using namespace tessera::testing_support;
using ::testing::HasSubstr;
using ::testing::Not;

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

/// Which experts' rows are a rank's of mesh.tp, mesh.ep and expert_tp say. Of others nothing is owed there.
TEST_F(MixtureResume, ErrorsOfPowerSgdAreOfTheExpertsThatARankHas) {
  const auto hooks_of = [&](const Layout& layout, const Sets& sets) {
    const Config config = settings(layout, sets);
    std::map<std::string, at::Tensor> state;
    std::mutex mutex;
    comm::run_ranks(layout.ranks, [&](comm::World& ranks) {
      const Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
      RankScope scope(config, ranks.local_size());
      const Stepper stepper(config, mesh, testing_support::test_device(), scope, open_inputs(config).resume);
      const std::lock_guard lock(mutex);
      for (const auto& held : hook_tensors(hook_shares(stepper.run()), mesh[mesh_roles(config).batch]))
        state[detail::concat(held.slice.name, " of rank ", ranks.rank())] = held.tensor.clone();
    });
    return state;
  };
  const auto owed = [](const std::map<std::string, at::Tensor>& state, const std::string& part) {
    double most = 0;
    for (const auto& [name, tensor] : state) {
      if (name.starts_with("hook.powersgd.error.") && name.find(part) != std::string::npos) most = std::max(most, tensor.abs().max().item<double>());
    }
    return most;
  };
  Sets sets = mixture;
  sets.insert(sets.end(), {"model.experts=4", "model.ffn_dim=24", "comm.compression=powersgd", "comm.powersgd_rank=2", "comm.powersgd_start=0"});
  const Layout by_expert{"ep2", 4, {"mesh.tp=2", "mesh.ep=2"}}, by_row{"expert_tp2", 4, {"mesh.tp=2", "mesh.expert_tp=2"}};
  run_saving(by_expert, sets);
  sets.push_back("checkpoint.resume=" + saved(by_expert, kSaved).string());
  ::testing::internal::CaptureStderr();
  const auto same = hooks_of(by_expert, sets);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("start afresh")));
  EXPECT_GT(owed(same, ".experts."), 0);
  ::testing::internal::CaptureStderr();
  const auto other = hooks_of(by_row, sets);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("start afresh"));
  EXPECT_EQ(owed(other, ".experts."), 0);
  EXPECT_EQ(owed(other, ".attention."), owed(same, ".attention."));
}

}  // namespace
}  // namespace tessera
