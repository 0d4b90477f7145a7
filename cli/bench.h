#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/bench/row.h"

/// `tessera bench comm`: what its files share.
namespace tessera::cli {

struct BenchFlags {
  std::vector<std::string> ops{"all_reduce"};
  std::vector<std::string> backends{"auto"};
  std::vector<std::string> algorithms{"engine"};
  std::vector<std::string> bytes{"1K", "4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M"};
  std::string dtype = "fp32";
  std::string buffers = "plain";
  std::string interface{};
  std::optional<int> nproc{};
  double seconds = 0.5;
  int64_t iterations = 0;
  std::string table{}, svg{};
  std::string rows{};  ///< a file that takes the rows instead of standard output: how copies answer
  bool json = false;
};

/// What the flags come to, after every check that needs no process.
struct BenchPlan {
  std::vector<std::string> ops, backends, algorithms;
  std::vector<int64_t> bytes;
  at::ScalarType dtype = at::kFloat;
  comm::bench::Buffers buffers = comm::bench::Buffers::Plain;
  comm::bench::Limits limits{};
  int nproc = 2;
};

/// Measures one backend with one algorithm in this process, one of the ranks. Collective. Every rank gets the rows.
std::vector<comm::bench::Row> measure_here(const BenchFlags& flags, const BenchPlan& plan, const std::string& backend, const std::string& algorithm);

/// Measures one backend with one algorithm in `plan.nproc` copies of this command on this host: under mpirun for the backend mpi, else started by us.
/// Throws ConfigError and CommError where a copy says so; returns nothing where the copies failed and their reason is on standard error already.
std::optional<std::vector<comm::bench::Row>> measure_in_copies(const BenchFlags& flags, const BenchPlan& plan, const std::string& backend,
                                                               const std::string& algorithm);

/// Refuses what starting copies would need and this host lacks (mpirun).
void check_launchers(const BenchPlan& plan);

}  // namespace tessera::cli
