#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/comm/backends/factory.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"

/// Tests whose ranks are processes of mpirun: copies of the test's own program.
namespace tessera::comm::testing_support {

struct Finished {
  int exit_code = -1;
  std::string output;
};

inline std::string own_path() {
  char self[4096] = {};
  return ::readlink("/proc/self/exe", self, sizeof(self) - 1) < 0 ? std::string() : std::string(self);
}

/// What run_mpirun takes for ranks whose MPI has no tag above 32767 (tests/support/least_mpi.cpp).
inline std::string least_mpi() {
  const auto programs = own_path().substr(0, own_path().rfind('/'));
  return "-x LD_PRELOAD='" + programs.substr(0, programs.rfind('/')) + "/lib/libtessera_least_mpi.so'";
}

/// The test's name again under mpirun.
inline Finished run_mpirun(int n, const std::string& test, const std::string& options = {}) {
  const auto command = tessera::detail::concat(
      "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 OMP_NUM_THREADS=1 timeout -s KILL 60 mpirun -n ", n, " ",
      options, " '", own_path(), "' --gtest_filter=", test, " 2>&1");
  Finished finished;
  FILE* pipe = ::popen(command.c_str(), "r");
  if (!pipe) return finished;
  char buffer[4096];
  while (const auto count = std::fread(buffer, 1, sizeof buffer, pipe)) finished.output.append(buffer, count);
  const int status = ::pclose(pipe);
  finished.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return finished;
}

inline bool is_copy() { return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr; }
inline bool lacks_mpi() { return !has_engine("mpi") || std::system("command -v mpirun > /dev/null") != 0; }

/// Runs `body` as n ranks of mpirun; in a copy, as one of them. `test`: the name of the test that calls it.
inline void under_mpirun(int n, const std::string& test, const std::function<void(World&)>& body) {
  if (is_copy()) {
    auto world = World::from_environment({.backend = "mpi", .timeout = std::chrono::seconds(20)});
    world.guard([&] { body(world); });
    return;
  }
  if (lacks_mpi()) GTEST_SKIP() << "no MPI";
  const auto finished = run_mpirun(n, test);
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
}

}  // namespace tessera::comm::testing_support
