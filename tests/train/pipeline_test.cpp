// A model cut into stages gives the gradients, losses and weights of one device, whatever the schedule and whatever else cuts it.

#include <ATen/ops/equal.h>

#include "tessera/core/error.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using testing_support::difference;
using testing_support::kGradients;
using testing_support::kLosses;
using testing_support::TrainFixture;

class Pipeline : public TrainFixture {
 protected:
  Config piped(const std::string& family, std::vector<std::string> sets) const {
    sets.insert(sets.begin(), {"batch.micro_size=1", "model.layers=6", "run.steps=3"});
    return config(family, sets);
  }

  void expect_one_device(const std::string& family, int world, const std::vector<std::string>& layout, const std::vector<std::string>& sets = {}) {
    const auto trace = [&](int ranks, const std::vector<std::string>& more) {
      std::vector<std::string> all = sets;
      all.insert(all.end(), more.begin(), more.end());
      return train(piped(family, all), ranks);
    };
    const Trace one = trace(1, {}), many = trace(world, layout);
    std::string name;
    for (const auto& set : layout) name += set + " ";
    SCOPED_TRACE(name);
    EXPECT_LT(difference(many.gradients, one.gradients), kGradients);
    for (size_t step = 0; step < one.steps.size(); ++step) {
      EXPECT_NEAR(many.steps[step].loss, one.steps[step].loss, kLosses * one.steps[step].loss);
      EXPECT_NEAR(many.steps[step].grad_norm, one.steps[step].grad_norm, 2e-5 * one.steps[step].grad_norm);
    }
  }
};

TEST_F(Pipeline, OneFOneBEqualsOneDevice) {
  for (const int stages : {2, 3, 4, 8}) expect_one_device("llama", stages, {"mesh.pp=" + std::to_string(stages)});
}

TEST_F(Pipeline, EverySynchronousScheduleEqualsOneDevice) {
  for (const char* schedule : {"naive", "gpipe", "zb_h1"}) {
    expect_one_device("gpt2", 3, {"mesh.pp=3", std::string("pipeline.schedule=") + schedule}, {"model.dropout=0.1"});
  }
}

}  // namespace
}  // namespace tessera
