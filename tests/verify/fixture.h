#pragma once

#include <string>
#include <vector>

#include "tessera/verify/verify.h"
#include "tests/train/fixture.h"

namespace tessera::testing_support {

/// Verifies small configurations of TrainFixture's.
class VerifyFixture : public TrainFixture {
 protected:
  VerifyReport run(const std::string& mesh, const std::string& family = "llama", const std::vector<std::string>& sets = {}, VerifyOptions options = {}) const {
    return verify(config(family, sets), parse_mesh(mesh), options);
  }

  /// Within all bounds, and no module by itself off by more than rounding.
  void expect_passes(const std::string& mesh, const std::string& family, const std::vector<std::string>& sets = {}) const {
    SCOPED_TRACE(family + " " + mesh + " " + ::testing::PrintToString(sets));
    VerifyReport report;
    try {
      report = run(mesh, family, sets);
    } catch (const std::exception& error) {
      FAIL() << error.what();  // of many, the others go on
    }
    EXPECT_TRUE(report.passed()) << to_string(report);
    EXPECT_FALSE(report.forward.first) << to_string(report);
    EXPECT_FALSE(report.backward.first) << to_string(report);
    EXPECT_GT(report.forward.compared, 0);
    EXPECT_GT(report.backward.compared, 0);
    EXPECT_EQ(report.forward.unseen + report.backward.unseen, 0) << to_string(report);
    EXPECT_EQ(report.routing.tokens > 0, family == "mixtral");
    EXPECT_EQ(report.routing.unseen, 0) << to_string(report);
    EXPECT_EQ(report.skipped, 0);
  }
};

}  // namespace tessera::testing_support
