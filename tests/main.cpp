// GoogleTest's main but for its end: libtorch's statics give back what they hold operator by operator, which takes longer than most suites do.
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include <gtest/gtest.h>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int exit_code = RUN_ALL_TESTS();
  std::cout.flush();
  std::fflush(nullptr);
  std::quick_exit(exit_code);  // which MPI has to hear of
}
