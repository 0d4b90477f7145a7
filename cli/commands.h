#pragma once

#include <CLI/CLI.hpp>

namespace tessera::cli {

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
