#include "tessera/memory/host_memory.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(HostMemory, IsThatOfAMachine) {
  EXPECT_GT(host_memory_bytes(), int64_t{1} << 28);
  EXPECT_LT(host_memory_bytes(), int64_t{1} << 48);
}

}  // namespace
}  // namespace tessera
