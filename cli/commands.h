#pragma once

#include <string>
#include <vector>

#include "cli/command_line.h"

namespace tessera::cli {

/// `--device`: what run.device is, over the file and behind what `--set` said before.
inline void add_device_option(Command command, std::vector<std::string>& sets) {
  command.add_option(
      "--device", [&sets](const std::string& device) { sets.push_back("run.device=" + device); }, "Where to compute: auto, cpu, cuda or cuda:N (run.device)");
}

/// Each adds one sub-command with its flags and what it does when chosen. A command returns its exit code through `exit_code`.
void add_train(Command app, int& exit_code);
void add_eval(Command app, int& exit_code);
void add_generate(Command app, int& exit_code);
void add_tokenize(Command app, int& exit_code);
void add_inspect(Command app, int& exit_code);
void add_convert(Command app, int& exit_code);
void add_plan(Command app, int& exit_code);
void add_schedule(Command app, int& exit_code);
void add_trace(Command app, int& exit_code);
void add_verify(Command app, int& exit_code);
void add_run(Command app, int& exit_code);
void add_bench(Command app, int& exit_code);

}  // namespace tessera::cli
