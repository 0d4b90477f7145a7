#include "tessera/launch/local.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/launch/agent.h"
#include "tessera/launch/job_end.h"
#include "tessera/launch/worker.h"

namespace tessera::launch {

std::vector<std::string> self_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> command;
  for (std::string argument; std::getline(file, argument, '\0');) command.push_back(argument);
  char path[4096];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof path);
  invariant(size > 0 && !command.empty(), "cannot read /proc/self: ", std::strerror(errno));
  command.front().assign(path, size);
  return command;
}

int run_local(const LocalOptions& options) {
  require(options.nproc >= 1, "nproc = ", options.nproc, ": at least one process; --nproc 2 starts two");
  require(!options.command.empty(), "no program to start: name one after --");
  AgentOptions agent;
  agent.job.command = options.command;
  agent.job.variables = inherited_variables();
  for (const auto& [name, value] : options.environment) agent.job.variables[name] = value;
  agent.rendezvous.nproc = options.nproc;
  agent.grace_s = options.grace_s;
  agent.failure_grace_s = std::min(agent.failure_grace_s, options.grace_s);
  return run_agent(agent);
}

bool report_failure(Failure kind, std::string_view reason) {
  const char* path = std::getenv("TESSERA_ERROR_FILE");
  if (path == nullptr) return false;
  std::ofstream file(path, std::ios::trunc);
  file << write_report({kind, std::string(reason)}) << std::flush;
  return file.good();
}

}  // namespace tessera::launch
