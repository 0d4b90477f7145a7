// Which places may be combined, and what the refusals of the others say.

#include <gmock/gmock.h>

#include "tests/config/rules.h"

namespace tessera {
namespace {

using config_rules::refusal;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Validate, OffloadTakesAllOfStage3OrNothing) {
  const auto offload = [](Config& c, const char* params, const char* gradients, const char* optimizer) {
    c.offload.params = params, c.offload.gradients = gradients, c.offload.optimizer = optimizer;
  };
  for (const int stage : {0, 1, 2}) {
    EXPECT_EQ(refusal([&](Config& c) { c.zero.stage = stage, offload(c, "host", "host", "host"); }),
              "offload.params = host: what waits on the host are slices that a unit fetches when it is used, which zero.stage = 3 alone has, and zero.stage "
              "is " +
                  std::to_string(stage) +
                  "; set zero.stage = 3 (one rank is enough) with offload.params, offload.gradients and offload.optimizer = host, or offload.optimizer = host "
                  "alone");
  }
  EXPECT_EQ(
      refusal([&](Config& c) { c.zero.stage = 3, offload(c, "host", "device", "host"); }),
      "offload.params = host: offload.gradients = device, and the host's cores update parameters, so these, their gradients and the optimizer's state lie "
      "there together; set offload.params, offload.gradients and offload.optimizer to host, or offload.optimizer alone");
  EXPECT_EQ(refusal([&](Config& c) { c.zero.stage = 3, offload(c, "host", "host", "disk"); }), "(accepted)");
  EXPECT_EQ(refusal([&](Config& c) { c.zero.stage = 3, offload(c, "host", "host", "host"); }), "(accepted)");
  for (const int stage : {0, 1, 2, 3}) EXPECT_EQ(refusal([&](Config& c) { c.zero.stage = stage, offload(c, "device", "device", "host"); }), "(accepted)");
}

TEST(Validate, GradientsGoToTheHostBelowStage3) {
  const auto streamed = [](Config& c) { c.offload.gradients = "host", c.offload.optimizer = "host"; };
  for (const int stage : {0, 1, 2}) EXPECT_EQ(refusal([&](Config& c) { streamed(c), c.zero.stage = stage; }), "(accepted)");
  for (const int stage : {0, 1, 2}) EXPECT_EQ(refusal([&](Config& c) { streamed(c), c.zero.stage = stage; }, 2), "(accepted)");
  EXPECT_EQ(refusal([&](Config& c) { streamed(c), c.mesh.tp = 2; }, 2), "(accepted)");
  EXPECT_THAT(refusal([&](Config& c) { streamed(c), c.zero.stage = 3; }), StartsWith("offload.gradients = host: offload.params = device"));
  EXPECT_THAT(refusal([&](Config& c) { c.offload.gradients = "host"; }), StartsWith("offload.gradients = host: offload.optimizer = device"));
  EXPECT_THAT(refusal([&](Config& c) { streamed(c), c.run.deterministic = true; }), StartsWith("offload.gradients = host: takes each"));
  EXPECT_THAT(refusal([&](Config& c) { streamed(c), c.offload.update = "device"; }), StartsWith("offload.update = device: offload.gradients = host"));
}

TEST(Validate, SlicesGoToDiskWithTheirGradients) {
  const auto disk = [](Config& c, const char* gradients, const char* optimizer) {
    c.zero.stage = 3, c.offload.params = "disk", c.offload.gradients = gradients, c.offload.optimizer = optimizer;
  };
  for (const char* state : {"disk", "host"}) EXPECT_EQ(refusal([&](Config& c) { disk(c, "disk", state); }), "(accepted)");
  EXPECT_EQ(refusal([&](Config& c) { disk(c, "host", "disk"); }),
            "offload.params = disk: offload.gradients = host, and the host's cores update parameters, so these, their gradients and the optimizer's state lie "
            "there together; set offload.params, offload.gradients and offload.optimizer to disk, or offload.optimizer alone");
  EXPECT_THAT(refusal([&](Config& c) { disk(c, "disk", "device"); }), StartsWith("offload.params = disk: offload.optimizer = device"));
  EXPECT_THAT(refusal([&](Config& c) { disk(c, "disk", "disk"), c.zero.stage = 2; }), StartsWith("offload.params = disk: what waits on disk are slices"));
  EXPECT_THAT(refusal([&](Config& c) { disk(c, "disk", "disk"), c.offload.update = "device"; }), StartsWith("offload.update = device: offload.params = disk"));
  EXPECT_THAT(refusal([](Config& c) { c.offload.gradients = "disk", c.offload.optimizer = "disk"; }),
              AllOf(StartsWith("offload.gradients = disk: with zero.stage = 0 all gradients go to the host"), HasSubstr("set offload.gradients = host, or ")));
}

TEST(Validate, PatternsOfSlicesTakeTheirGradientsAndStateAlong) {
  const ByPattern layers = [] {
    ByPattern places;
    places.by_pattern = {{"layers.*", "host"}};
    return places;
  }();
  const auto with = [&](const auto& more) {
    return refusal([&](Config& c) {
      c.zero.stage = 3, c.offload.params = layers;
      resolve(c);
      more(c);
    });
  };
  EXPECT_EQ(with([](Config&) {}), "(accepted)");
  EXPECT_EQ(with([](Config& c) { c.offload.optimizer = "disk"; }), "(accepted)");
  EXPECT_EQ(with([](Config& c) { c.offload.optimizer.by_pattern = {{"**", "host"}}; }), "(accepted)");
  EXPECT_EQ(with([](Config& c) { c.offload.gradients = "host"; }),
            "offload.params = { \"layers.*\" = \"host\" }: offload.gradients = host, and the host's cores update parameters, so these, their gradients and the "
            "optimizer's state lie there together; leave offload.gradients and offload.optimizer out, which then follow");
  EXPECT_THAT(with([](Config& c) { c.zero.stage = 2; }), HasSubstr("which zero.stage = 3 alone has, and zero.stage is 2; set zero.stage = 3 (one rank"));
  EXPECT_EQ(with([](Config& c) {
              for (ByPattern* places : {&c.offload.params, &c.offload.gradients, &c.offload.optimizer}) places->by_pattern["layers.0"] = "device";
            }),
            "(accepted)")
      << "an exception; the model says whether it is one";
  EXPECT_EQ(refusal([](Config& c) { c.offload.optimizer.by_pattern = {{"head", "device"}}; }),
            "offload.optimizer: 'head' = device: is no exception from any other pattern, and what no pattern names stays on the device; take the pattern out");
  // Said by somebody, it is not filled in, and is saved as it was said.
  Config said = config_rules::good();
  said.offload.params = layers, said.given = {"offload.optimizer"};
  resolve(said);
  EXPECT_EQ(said.offload.gradients, layers);
  EXPECT_EQ(said.offload.optimizer, ByPattern("device"));
  EXPECT_EQ(parse_config(to_toml(said), ".").offload, said.offload);
}

TEST(Validate, PatternsOfStateAloneGoWithGradientsOnTheDevice) {
  const auto with = [&](const auto& more, int world = 1) {
    return refusal(
        [&](Config& c) {
          c.offload.optimizer.by_pattern = {{"layers.0", "disk"}, {"layers.*", "host"}};
          more(c);
        },
        world);
  };
  for (const int stage : {0, 1, 2, 3}) EXPECT_EQ(with([&](Config& c) { c.zero.stage = stage; }), "(accepted)");
  EXPECT_EQ(with([](Config& c) { c.offload.update = "device"; }), "(accepted)");
  EXPECT_THAT(with([](Config& c) { c.offload.gradients = "host"; }), HasSubstr("offload.gradients = host: takes all gradients to the host"));
  EXPECT_THAT(with([](Config& c) { c.offload.delayed_update = true; }), HasSubstr("would have some parameters updated late and others not"));
  EXPECT_THAT(with([](Config& c) { c.optim.name = "muon", c.zero.stage = 2; }, 2), StartsWith("offload.optimizer = disk: state comes piece by piece"));
}

TEST(Validate, StateThatComesPieceByPieceIsThatOfElementsOrOfWholeParameters) {
  const auto disk = [](Config& c) { c.offload.optimizer = "disk"; };
  EXPECT_EQ(refusal([&](Config& c) { disk(c), c.optim.name = "muon", c.optim.state_dtype = "fp32"; }), "(accepted)");
  EXPECT_THAT(refusal([&](Config& c) { disk(c), c.optim.name = "muon", c.zero.stage = 2; }, 2), StartsWith("offload.optimizer = disk: state comes"));
  EXPECT_THAT(refusal([&](Config& c) { c.offload.optimizer = "host", c.offload.update = "device", c.optim.name = "adam8bit", c.zero.stage = 1; }, 2),
              StartsWith("offload.update = device: state comes"));
  EXPECT_THAT(refusal([&](Config& c) { disk(c), c.optim.groups = {"layers.1: name = muon"}, c.zero.stage = 1; }, 2),
              HasSubstr("and optim.groups = layers.1: name = muon asks"))
      << "not optim.name, which is adamw";
  EXPECT_THAT(refusal([&](Config& c) { disk(c), c.mesh.pp = 2, c.pipeline.post_validate = true; }, 2), StartsWith("pipeline.post_validate = true"));
}

TEST(Validate, DelayedUpdatesAreOfTheHost) {
  const auto delayed = [](Config& c) { c.offload.optimizer = "host", c.offload.delayed_update = true; };
  EXPECT_EQ(refusal([&](Config& c) { delayed(c); }), "(accepted)");
  EXPECT_THAT(refusal([](Config& c) { c.offload.delayed_update = true; }), StartsWith("offload.delayed_update = true: an update that runs"));
  EXPECT_THAT(refusal([&](Config& c) { delayed(c), c.offload.update = "device"; }), StartsWith("offload.delayed_update = true: an update that runs"));
  EXPECT_THAT(refusal([&](Config& c) { delayed(c), c.offload.gradients = "host"; }), StartsWith("offload.delayed_update = true: offload.gradients"));
  EXPECT_THAT(refusal([&](Config& c) { delayed(c), c.optim.name = "muon", c.zero.stage = 1; }, 2), StartsWith("offload.delayed_update = true: optim.name"));
}

TEST(Validate, ActivationsWaitWhereTheirModulesSay) {
  EXPECT_EQ(refusal([](Config& c) { c.offload.activations = "host"; }), "(accepted)");
  EXPECT_EQ(refusal([](Config& c) { c.offload.activations.by_pattern = {{"layers.0", "disk"}, {"layers.1", "host"}}; }), "(accepted)");
  EXPECT_THAT(refusal([](Config& c) { c.offload.activations.by_pattern = {{"layers.0", "device"}}; }), StartsWith("offload.activations: 'layers.0' = device"));
  EXPECT_THAT(refusal([](Config& c) { c.offload.fraction = 1.1; }), StartsWith("offload.fraction = 1.1"));
  EXPECT_THAT(refusal([](Config& c) { c.offload.min_bytes = -1; }), StartsWith("offload.min_bytes = -1"));
  EXPECT_THAT(refusal([](Config& c) { c.offload.budget_bytes = -1; }), StartsWith("offload.budget_bytes = -1"));
  EXPECT_THAT(refusal([](Config& c) { c.offload.prefetch = -1; }), StartsWith("offload.prefetch = -1"));
}

}  // namespace
}  // namespace tessera
