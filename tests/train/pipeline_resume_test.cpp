// What a checkpoint keeps of gradients' way, in runs whose model is cut into stages: the state of PowerSGD of every part, which follows its parameters into any
// other layout, and each stage's bucket layout.

#include "tessera/train/hook_state.h"
#include "tests/test_device.h"
#include "tests/train/resume_fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing_support::kLast;
using testing_support::kLosses;
using testing_support::kSaved;
using testing_support::Layout;
using testing_support::ResumeFixture;
using testing_support::Sets;
using testing_support::SliceCollector;

const Sets kPowerSgd{"comm.compression=powersgd", "comm.powersgd_rank=1", "comm.powersgd_start=1"};
const Sets kBothEnds{"pipeline.schedule=breadth_first", "pipeline.virtual_stages=2"};  // of a tied embedding, on every rank
const Sets kTwoStages{"mesh.pp=2"}, kFourStages{"mesh.pp=2", "pipeline.schedule=interleaved", "pipeline.virtual_stages=2"};

class PipelineResume : public ResumeFixture {
 protected:
  static Layout with(const char* name, int ranks, Sets sets, const Sets& more = {}) {
    sets.insert(sets.end(), more.begin(), more.end());
    return {name, ranks, sets};
  }

  /// What the hooks of `layout` carry after loading, put together.
  std::map<std::string, at::Tensor> hooks_loaded(const Layout& layout, const std::filesystem::path& checkpoint) const {
    const Config config = settings(layout, {"checkpoint.resume=" + checkpoint.string()});
    SliceCollector state;
    comm::run_ranks(layout.ranks, [&](comm::World& ranks) {
      const Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
      RankScope scope(config, ranks.local_size());
      const Stepper stepper(config, mesh, testing_support::test_device(), scope, open_inputs(config).resume);
      for (const auto& held : hook_tensors(hook_shares(stepper.run()), mesh[mesh_roles(config).batch])) state.add(held.slice.name, held.tensor, held.slice);
    });
    return state.whole();
  }

  /// The sum of all ranks' errors, by parameter.
  static std::map<std::string, at::Tensor> sums(const std::map<std::string, at::Tensor>& tensors) {
    std::map<std::string, at::Tensor> summed;
    for (const auto& [name, tensor] : tensors) {
      if (name.starts_with("hook.powersgd.error.")) summed[name] = tensor.sum(0);
    }
    return summed;
  }
};

TEST_F(PipelineResume, PowerSgdGoesOnToTheBit) {
  for (const Layout& layout :
       {with("pp2 x dp2", 4, kTwoStages, kPowerSgd), with("pp2 x v2 x dp2", 4, kFourStages, kPowerSgd), with("v2 x dp2", 2, kBothEnds, kPowerSgd)}) {
    const auto whole = run_saving(layout, {});
    ::testing::internal::CaptureStderr();
    expect_goes_on(layout, layout, {}, /*bound=*/0, whole);
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                AllOf(Not(HasSubstr("start afresh")), Not(HasSubstr("left unread")), Not(HasSubstr("bucket layout"))));
  }
}

/// Its start is counted in steps, also where a step holds several updates: a checkpoint is taken before it and after it.
TEST_F(PipelineResume, PowerSgdOfAsynchronousPipelinesBeginsByStepsAndGoesOnToTheBit) {
  for (const char* schedule : {"pipeline.schedule=pipedream", "pipeline.schedule=pipedream_2bw"}) {
    const Sets sets{"mesh.pp=2",          schedule, "model.tie_embeddings=false", "optim.max_grad_norm=0", "comm.compression=powersgd", "comm.powersgd_rank=1",
                    "batch.global_size=8"};
    const auto plain = run(with("never", 4, sets, {"comm.powersgd_start=100"}), {});
    for (const int64_t start : {2, 4}) {
      const std::string after = "comm.powersgd_start=" + std::to_string(start);
      SCOPED_TRACE(schedule + (", " + after));
      const std::string name = schedule + (" from " + std::to_string(start));
      const Layout layout = with(name.c_str(), 4, sets, {after});
      const auto whole = run_saving(layout, {});
      EXPECT_EQ(whole.at(start - 1).loss, plain.at(start - 1).loss) << "all updates until then are whole";
      EXPECT_EQ(whole.at(kLast - 1).loss == plain.at(kLast - 1).loss, start == kLast - 1 && schedule == std::string_view("pipeline.schedule=pipedream_2bw"));
      expect_goes_on(layout, layout, {}, /*bound=*/0, whole);
    }
  }
}

/// Nothing of the gradient is lost: errors of a tied embedding's two copies are terms of one sum.
TEST_F(PipelineResume, ErrorsOfPowerSgdFollowTheirParametersIntoAnyLayout) {
  const std::vector<Layout> layouts{with("dp2", 2, {}, kPowerSgd), with("pp2 x dp2", 4, kTwoStages, kPowerSgd),
                                    with("pp2 x v2 x dp3", 6, kFourStages, kPowerSgd), with("v2 x dp2", 2, kBothEnds, kPowerSgd)};
  for (const Layout& from : layouts) {
    run_saving(from, {"run.steps=3"});
    const auto want = sums(stored(saved(from, kSaved)));
    EXPECT_EQ(want.contains("hook.powersgd.error.embed_tokens.weight"), true);
    for (const Layout& to : layouts) {
      SCOPED_TRACE(std::string(from.name) + " to " + to.name);
      ::testing::internal::CaptureStderr();
      const auto got = sums(hooks_loaded(to, saved(from, kSaved)));
      EXPECT_THAT(::testing::internal::GetCapturedStderr(), AllOf(Not(HasSubstr("start afresh")), Not(HasSubstr("left unread"))));
      ASSERT_EQ(got.size(), want.size());
      for (const auto& [name, error] : want) EXPECT_TRUE(at::allclose(got.at(name), error, 1e-5, 1e-7)) << name;
    }
  }
}

TEST_F(PipelineResume, EachStageTakesUpItsOwnBucketPlan) {
  const Layout two = with("two", 4, kTwoStages), four = with("four", 4, kFourStages), cut = with("cut", 8, {"mesh.pp=2", "mesh.tp=2"});
  const auto whole = run_saving(two, {});
  const auto plans = checkpoint::read_manifest(saved(two, kSaved)).progress.at("bucket_plan");
  ASSERT_TRUE(plans.is_array());
  EXPECT_EQ(plans.size(), 2);
  ::testing::internal::CaptureStderr();
  expect_goes_on(two, two, {}, /*bound=*/0, whole);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("bucket layout")));
  ::testing::internal::CaptureStderr();
  expect_goes_on(two, four, {}, kLosses, whole);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("its bucket layout is of another layout"));
  EXPECT_EQ(said.find("bucket layout"), said.rfind("bucket layout")) << said;
  run_saving(cut, {"run.steps=3"});
  EXPECT_EQ(checkpoint::read_manifest(saved(cut, kSaved)).progress.at("bucket_plan").size(), 4);
}

}  // namespace
}  // namespace tessera
