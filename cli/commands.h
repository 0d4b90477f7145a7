#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace tessera::cli {

/// `--device`: what run.device is, over the file and behind what `--set` said before.
inline void add_device_option(CLI::App& command, std::vector<std::string>& sets) {
  command.add_option_function<std::string>(
      "--device", [&sets](const std::string& device) { sets.push_back("run.device=" + device); }, "Where to compute: auto, cpu, cuda or cuda:N (run.device)");
}

/// Each adds one sub-command with its flags and what it does when chosen. A command returns its exit code through `exit_code`.
void add_train(CLI::App& app, int& exit_code);
void add_eval(CLI::App& app, int& exit_code);
void add_generate(CLI::App& app, int& exit_code);
void add_tokenize(CLI::App& app, int& exit_code);
void add_inspect(CLI::App& app, int& exit_code);
void add_convert(CLI::App& app, int& exit_code);
void add_plan(CLI::App& app, int& exit_code);
void add_schedule(CLI::App& app, int& exit_code);
void add_trace(CLI::App& app, int& exit_code);
void add_verify(CLI::App& app, int& exit_code);
void add_run(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);

}  // namespace tessera::cli
