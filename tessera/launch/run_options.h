#pragma once

#include <string>
#include <vector>

#include "tessera/launch/agent.h"
#include "tessera/launch/flags.h"

/// `tessera run`'s command line. Not part of the public surface.
namespace tessera::launch {

/// What this machine has, for --nproc-per-node.
struct Devices {
  int cpus = 1, gpus = 0;
};

/// What `tessera run ARGUMENTS` is to do. Flags, defaults and variables (PET_NNODES, ...) are torchrun's; docs/launch.md lists the differences. Opens nothing.
/// Throws ConfigError with flag, value, rule and way out.
AgentOptions parse_run(const std::vector<std::string>& arguments, const Lookup& environment, const Devices& devices);

/// The help text.
std::string describe_run();

}  // namespace tessera::launch
