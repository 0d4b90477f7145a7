// A run that goes on on another kind of device than the one that saved. On the simulated accelerator `auto` is that one; on a machine without any both are the
// CPU, and this is a run that resumes.

#include "tests/train/resume_fixture.h"

namespace tessera {
namespace {

using testing_support::kLast;
using testing_support::kLosses;
using testing_support::kSaved;
using testing_support::Layout;
using testing_support::layouts;
using testing_support::Sets;

class DeviceChange : public testing_support::ResumeFixture {};

TEST_F(DeviceChange, ARunGoesOnFromTheCpuToADeviceAndBack) {
  for (const size_t which : {size_t{0}, size_t{2}, size_t{3}}) {
    for (const auto& [from, to] : {std::pair{"cpu", "auto"}, std::pair{"auto", "cpu"}}) {
      Layout layout = layouts()[which];
      const std::string name = std::string(layout.name) + " from " + from;
      layout.name = name.c_str();
      const Sets saving{std::string("run.device=") + from, "checkpoint.async=true", "checkpoint.staging_bytes=4096"};
      const auto whole = run_saving(layout, saving);
      const auto rest = run(layout, {std::string("run.device=") + to, "checkpoint.resume=" + saved(layout, kSaved).string()});
      ASSERT_EQ(rest.size(), static_cast<size_t>(kLast - kSaved)) << name;
      for (size_t i = 0; i < rest.size(); ++i) {
        const StepResult& want = whole[static_cast<size_t>(kSaved) + i];
        EXPECT_NEAR(rest[i].loss, want.loss, kLosses * want.loss) << name << ", step " << want.step;
      }
    }
  }
}

}  // namespace
}  // namespace tessera
