#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/world.h"

/// Many ranks on one machine, for tests and for `tessera verify`.
namespace tessera::comm {

struct RunOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  ///< of each collective
  std::vector<Decorator> decorators{};
  std::string interface = "127.0.0.1";
  std::string backend = "auto";
  std::string algorithm = "auto";
  std::string table{};       ///< comm.table
  bool check = false;        ///< comm.check
  std::vector<int> hosts{};  ///< per rank, the host that it plays; empty: all are here
};

/// Runs `body` as n ranks on n threads over `options.backend` and a store in memory (a few milliseconds). Each rank computes with one thread.
/// The first exception is rethrown as an exception of the same kind (tessera's errors) or std::runtime_error, with "rank R: " before its text; the other
/// ranks' collectives then end with an error, so a failing rank never hangs the caller. GoogleTest's assertions work inside `body`.
void run_ranks(int n, const std::function<void(World&)>& body, const RunOptions& options = {});

/// The same as n processes, each a new copy of this GoogleTest program that runs the test `test` ("Suite.Name") alone and joins over TCP as under torchrun.
/// In a copy the call runs `body` and returns, so whatever else the test does, the copies do as well: make this its only statement. Throws
/// std::runtime_error with the output of a rank that failed, assertions included, or after `seconds`; no process outlives the call. With `programs` that many
/// times, one after the other, in the one store of the launcher.
void run_rank_processes(int n, const std::string& test, const std::function<void(World&)>& body, int seconds = 60, const std::string& backend = "auto",
                        int programs = 1);

}  // namespace tessera::comm
