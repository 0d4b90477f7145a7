#pragma once

#include <string>

#include "tessera/launch/rendezvous.h"
#include "tessera/launch/worker_plan.h"

/// One node's part of a launch. Not part of the public surface.
namespace tessera::launch {

struct AgentOptions {
  JobOptions job{};
  RendezvousOptions rendezvous{};
  bool master_is_rendezvous = false;  ///< workers share the agents' store, at the address and port that were given (static rendezvous)
  double grace_s = 30;                ///< between asking ranks to save and end, and ending them
  double failure_grace_s = 3;         ///< the same after a failure, when nothing can be saved
  double heartbeat_s = 0.5;
  double monitor_s = 0.1;
  std::string record_folder{};  ///< of flight records: FOLDER/attempt_0/record; empty: where TESSERA_RECORD_DIR of the workers says, if it does
  bool keeps_records = true;    ///< the folder outlives the job
  bool talkative = false;       ///< logs what happens
};

/// Runs this node's workers until the job ends, and returns its exit code: 0 every rank ended with 0; 2 a rank refused its input; 1 anything else. The last
/// line on standard error names the cause. SIGINT, SIGTERM and SIGHUP to this process reach the workers, whatever threads it has, and kill them the second
/// time. One at a time in a process. Throws ConfigError for a program that cannot be started, CommError where nobody can listen at the rendezvous.
int run_agent(const AgentOptions& options);

}  // namespace tessera::launch
