#include "cli/bench/bench.h"

#include <memory>

#include "cli/commands.h"

namespace tessera::cli {
namespace {

void add_comm(CLI::App& bench, int& exit_code) {
  auto flags = std::make_shared<BenchCommFlags>();
  auto* command = bench.add_subcommand("comm", "Time collectives: by operation, size, algorithm and backend");
  command->add_option("--op", flags->ops, "Operations, or all")->delimiter(',')->capture_default_str();
  command->add_option("--backend", flags->backends, "Backends, or all")->delimiter(',')->capture_default_str();
  command->add_option("--algorithm", flags->algorithms, "Algorithms, or all; engine is the backend's own")->delimiter(',')->capture_default_str();
  command->add_option("--bytes", flags->bytes, "Sizes of the whole: 4096, 4K, 1M")->delimiter(',')->capture_default_str();
  command->add_option("--nproc", flags->nproc, "Ranks to start on this machine (default 2)");
  command->add_option("--dtype", flags->dtype, "Type of the elements")->capture_default_str();
  command->add_option("--buffer", flags->buffers, "plain, or shared: memory in which the backend can reduce in place")->capture_default_str();
  command->add_option("--interface", flags->interface, "Network interface, host or address (comm.interface)");
  command->add_option("--device", flags->device, "Where tensors lie: auto, cpu, cuda or cuda:N (run.device)")->capture_default_str();
  command->add_option("--seconds", flags->seconds, "Time to measure each case")->capture_default_str();
  command->add_option("--iterations", flags->iterations, "Calls to measure of each case, instead of --seconds");
  command->add_option("--table", flags->table, "Write the fastest algorithm by operation and size, for comm.table");
  command->add_option("--svg", flags->svg, "Draw time and bus bandwidth over bytes");
  command->add_option("--rows", flags->rows)->group("");  // hidden: how copies answer
  command->add_flag("--json", flags->json, "Print JSON, a row a line");
  command->callback([flags, &exit_code] { exit_code = bench_comm(*flags); });
}

void add_tp(CLI::App& bench, int& exit_code) {
  auto flags = std::make_shared<BenchTpFlags>();
  auto* command = bench.add_subcommand("tp", "Time a tensor-parallel layer's computation and communication, for growing hidden size");
  command->add_option("--hidden", flags->hidden, "Hidden sizes of the layer")->delimiter(',')->capture_default_str();
  command->add_option("--tokens", flags->tokens, "Tokens of the sequence that goes through it")->capture_default_str();
  command->add_option("--head-dim", flags->head_dim, "Features of an attention head")->capture_default_str();
  command->add_flag("--sequence-parallel", flags->sequence_parallel, "Cut norms and residual stream along the sequence (tensor.sequence_parallel)");
  command->add_flag("--overlap", flags->overlap, "Let products hide what is sent (tensor.overlap)");
  command->add_option("--dtype", flags->dtype, "What products compute in: fp32, bf16")->capture_default_str();
  command->add_option("--backend", flags->backend, "Backend of the collectives")->capture_default_str();
  command->add_option("--nproc", flags->nproc, "Ranks that the layer is cut over, started on this machine (default 2)");
  command->add_option("--interface", flags->interface, "Network interface, host or address (comm.interface)");
  command->add_option("--device", flags->device, "Where tensors lie: auto, cpu, cuda or cuda:N (run.device)")->capture_default_str();
  command->add_option("--seconds", flags->seconds, "Time to measure each case")->capture_default_str();
  command->add_option("--iterations", flags->iterations, "Passes to measure of each case, instead of --seconds");
  command->add_option("--svg,--out", flags->svg, "Draw counts and times over the hidden size, beside the square-cube law");
  command->add_option("--rows", flags->rows)->group("");  // hidden: how copies answer
  command->add_flag("--json", flags->json, "Print JSON, a row a line");
  command->callback([flags, &exit_code] { exit_code = bench_tp(*flags); });
}

void add_pp(CLI::App& bench, int& exit_code) {
  auto flags = std::make_shared<BenchPpFlags>();
  auto* command = bench.add_subcommand("pp", "Time pipelines: the executor's overhead, schedules, micro-batches, and what crosses a boundary");
  command->add_option("--dim", flags->dim, "Hidden size of the model, for overhead, schedules and micro-batches")->capture_default_str();
  command->add_option("--layers", flags->layers, "Its blocks")->capture_default_str();
  command->add_option("--tokens", flags->tokens, "Tokens of a sequence")->capture_default_str();
  command->add_option("--global-size", flags->global_size, "Sequences of a step")->capture_default_str();
  command->add_option("--schedule", flags->schedules, "Schedules to time with 8 micro-batches")->delimiter(',')->capture_default_str();
  command->add_option("--micro-batches", flags->micro_batches, "Into how many GPipe cuts the same batch")->delimiter(',')->capture_default_str();
  command->add_option("--hidden", flags->hidden, "Hidden sizes of the boundary")->delimiter(',')->capture_default_str();
  command->add_option("--backend", flags->backend, "Backend of the messages")->capture_default_str();
  command->add_option("--nproc", flags->nproc, "Ranks of the pipeline, started on this machine (default 2)");
  command->add_option("--interface", flags->interface, "Network interface, host or address (comm.interface)");
  command->add_option("--seconds", flags->seconds, "Time to measure each case")->capture_default_str();
  command->add_option("--iterations", flags->iterations, "Steps to measure of each case, instead of --seconds");
  command->add_option("--svg,--out", flags->svg, "Draw bubble and time over micro-batches, and the boundary beside the square-cube law");
  command->add_option("--rows", flags->rows)->group("");  // hidden: how copies answer
  command->add_flag("--json", flags->json, "Print JSON, a row a line");
  command->callback([flags, &exit_code] { exit_code = bench_pp(*flags); });
}

}  // namespace

void add_bench(CLI::App& app, int& exit_code) {
  auto* bench = app.add_subcommand("bench", "Measure this machine");
  bench->require_subcommand(1);
  add_comm(*bench, exit_code);
  add_tp(*bench, exit_code);
  add_pp(*bench, exit_code);
}

}  // namespace tessera::cli
