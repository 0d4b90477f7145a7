// GoogleTest's main but for its end: libtorch's statics give back what they hold operator by operator, which takes longer than most suites do.
#include <cstdio>
#include <iostream>

#include <gtest/gtest.h>
#include <unistd.h>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int exit_code = RUN_ALL_TESTS();
  std::cout.flush();
  std::fflush(nullptr);
  _exit(exit_code);
}
