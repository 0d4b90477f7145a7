#include "tessera/core/error.h"

#include <filesystem>
#include <string>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Message, PrintsEachPartAsAStreamDoes) {
  const std::string name = "mesh.tp";
  const std::vector<int64_t> sizes = {2, 3};
  EXPECT_EQ(
      detail::concat(name, " = ", 3, std::string_view(": "), 0.5, ' ', std::string("of ") + name, c10::IntArrayRef(sizes), std::filesystem::path("a b"), true),
      "mesh.tp = 3: 0.5 of mesh.tp[2, 3]\"a b\"1");
  EXPECT_EQ(detail::concat(), "");
  EXPECT_EQ(detail::concat("a\0b", std::string_view("c\0d", 3)), std::string("ac\0d", 4));
}

TEST(Message, IsMadeOnlyWhereARuleIsBroken) {
  EXPECT_NO_THROW(require(true, "unused"));
  try {
    require(false, "batch.micro_size = ", 0, ": at least 1");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "batch.micro_size = 0: at least 1");
  }
  try {
    invariant(false, "stage ", 2);
    FAIL();
  } catch (const InternalError& error) {
    EXPECT_STREQ(error.what(), "internal error: stage 2");
  }
}

}  // namespace
}  // namespace tessera
