#include "cli/bench/bench.h"

#include <functional>
#include <memory>

#include "cli/commands.h"
#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

/// Time or calls, and what refuses both at once, and none. Copies that answer in --rows are given both.
std::function<void()> add_limits(Command& command, BenchFlags& flags, const std::string& about_iterations) {
  const Option seconds = command.add_option("--seconds", flags.seconds, "Time to measure each case").shows_default();
  const Option iterations = command.add_option("--iterations", flags.iterations, about_iterations);
  return [&flags, seconds, iterations] {
    if (!iterations.given()) return;
    require(flags.iterations != 0, "--iterations = 0: measures nothing; give 1 or more, or leave it out to measure by --seconds");
    require(!seconds.given() || !flags.rows.empty(), "--iterations = ", flags.iterations, ": stands in place of --seconds; give one of them");
  };
}

void add_comm(Command bench, int& exit_code) {
  auto flags = std::make_shared<BenchCommFlags>();
  auto command = bench.add_command("comm", "Time collectives: by operation, size, algorithm and backend");
  command.add_option("--op", flags->ops, "Operations, or all").separated_by(',').shows_default();
  command.add_option("--backend", flags->backends, "Backends, or all").separated_by(',').shows_default();
  command.add_option("--algorithm", flags->algorithms, "Algorithms, or all; engine is the backend's own").separated_by(',').shows_default();
  command.add_option("--bytes", flags->bytes, "Sizes of the whole: 4096, 4K, 1M").separated_by(',').shows_default();
  command.add_option("--nproc", flags->nproc, "Ranks to start on this machine (default 2)");
  command.add_option("--dtype", flags->dtype, "Type of the elements").shows_default();
  command.add_option("--buffer", flags->buffers, "plain, or shared: memory in which the backend can reduce in place").shows_default();
  command.add_option("--interface", flags->interface, "Network interface, host or address (comm.interface)");
  command.add_option("--device", flags->device, "Where tensors lie: auto, cpu, cuda or cuda:N (run.device)").shows_default();
  const auto check_limits = add_limits(command, *flags, "Calls to measure of each case, instead of --seconds");
  command.add_option("--table", flags->table, "Write the fastest algorithm by operation and size, for comm.table");
  command.add_option("--svg", flags->svg, "Draw time and bus bandwidth over bytes");
  command.add_option("--rows", flags->rows).hidden();  // hidden: how copies answer
  command.add_flag("--json", flags->json, "Print JSON, a row a line");
  command.when_chosen([flags, check_limits, &exit_code] {
    check_limits();
    exit_code = bench_comm(*flags);
  });
}

void add_tp(Command bench, int& exit_code) {
  auto flags = std::make_shared<BenchTpFlags>();
  auto command = bench.add_command("tp", "Time a tensor-parallel layer's computation and communication, for growing hidden size");
  command.add_option("--hidden", flags->hidden, "Hidden sizes of the layer").separated_by(',').shows_default();
  command.add_option("--tokens", flags->tokens, "Tokens of the sequence that goes through it").shows_default();
  command.add_option("--head-dim", flags->head_dim, "Features of an attention head").shows_default();
  command.add_flag("--sequence-parallel", flags->sequence_parallel, "Cut norms and residual stream along the sequence (tensor.sequence_parallel)");
  command.add_flag("--overlap", flags->overlap, "Let products hide what is sent (tensor.overlap)");
  command.add_option("--dtype", flags->dtype, "What products compute in: fp32, bf16").shows_default();
  command.add_option("--backend", flags->backend, "Backend of the collectives").shows_default();
  command.add_option("--nproc", flags->nproc, "Ranks that the layer is cut over, started on this machine (default 2)");
  command.add_option("--interface", flags->interface, "Network interface, host or address (comm.interface)");
  command.add_option("--device", flags->device, "Where tensors lie: auto, cpu, cuda or cuda:N (run.device)").shows_default();
  const auto check_limits = add_limits(command, *flags, "Passes to measure of each case, instead of --seconds");
  command.add_option("--svg,--out", flags->svg, "Draw counts and times over the hidden size, beside the square-cube law");
  command.add_option("--rows", flags->rows).hidden();  // hidden: how copies answer
  command.add_flag("--json", flags->json, "Print JSON, a row a line");
  command.when_chosen([flags, check_limits, &exit_code] {
    check_limits();
    exit_code = bench_tp(*flags);
  });
}

void add_pp(Command bench, int& exit_code) {
  auto flags = std::make_shared<BenchPpFlags>();
  auto command = bench.add_command("pp", "Time pipelines: the executor's overhead, schedules, micro-batches, and what crosses a boundary");
  command.add_option("--dim", flags->dim, "Hidden size of the model, for overhead, schedules and micro-batches").shows_default();
  command.add_option("--layers", flags->layers, "Its blocks").shows_default();
  command.add_option("--tokens", flags->tokens, "Tokens of a sequence").shows_default();
  command.add_option("--global-size", flags->global_size, "Sequences of a step").shows_default();
  command.add_option("--schedule", flags->schedules, "Schedules to time with 8 micro-batches").separated_by(',').shows_default();
  command.add_option("--micro-batches", flags->micro_batches, "Into how many GPipe cuts the same batch").separated_by(',').shows_default();
  command.add_option("--hidden", flags->hidden, "Hidden sizes of the boundary").separated_by(',').shows_default();
  command.add_option("--backend", flags->backend, "Backend of the messages").shows_default();
  command.add_option("--nproc", flags->nproc, "Ranks of the pipeline, started on this machine (default 2)");
  command.add_option("--interface", flags->interface, "Network interface, host or address (comm.interface)");
  command.add_option("--device", flags->device, "Where tensors lie: auto, cpu, cuda or cuda:N (run.device)").shows_default();
  const auto check_limits = add_limits(command, *flags, "Steps to measure of each case, instead of --seconds");
  command.add_option("--svg,--out", flags->svg, "Draw bubble and time over micro-batches, and the boundary beside the square-cube law");
  command.add_option("--rows", flags->rows).hidden();  // hidden: how copies answer
  command.add_flag("--json", flags->json, "Print JSON, a row a line");
  command.when_chosen([flags, check_limits, &exit_code] {
    check_limits();
    exit_code = bench_pp(*flags);
  });
}

void add_cp(Command bench, int& exit_code) {
  auto flags = std::make_shared<BenchCpFlags>();
  auto command = bench.add_command("cp", "Time attention to a sequence that is cut over ranks, beside one device, and show what it keeps in memory");
  command.add_option("--length", flags->lengths, "Lengths of the sequence").separated_by(',').shows_default();
  command.add_option("--heads", flags->heads, "Query heads").shows_default();
  command.add_option("--kv-heads", flags->kv_heads, "Key-value heads").shows_default();
  command.add_option("--head-dim", flags->head_dim, "Features of a head").shows_default();
  command.add_option("--method", flags->methods, "Ways to reach the keys of other ranks (context.method); ring_no_overlap waits for each block")
      .separated_by(',')
      .shows_default();
  command.add_option("--dtype", flags->dtype, "What attention computes in: fp32, bf16").shows_default();
  command.add_option("--backend", flags->backend, "Backend of the messages").shows_default();
  command.add_option("--nproc", flags->nproc, "Ranks that the sequence is cut over, started on this machine (default 2)");
  command.add_option("--interface", flags->interface, "Network interface, host or address (comm.interface)");
  command.add_option("--device", flags->device, "Where tensors lie: auto, cpu, cuda or cuda:N (run.device)").shows_default();
  const auto check_limits = add_limits(command, *flags, "Rounds to measure, instead of --seconds");
  command.add_option("--svg,--out", flags->svg, "Draw time over the length");
  command.add_option("--rows", flags->rows).hidden();  // hidden: how copies answer
  command.add_flag("--json", flags->json, "Print JSON, a row a line");
  command.when_chosen([flags, check_limits, &exit_code] {
    check_limits();
    exit_code = bench_cp(*flags);
  });
}

void add_device(Command bench, int& exit_code) {
  auto flags = std::make_shared<BenchDeviceFlags>();
  flags->seconds = 0.2;
  auto command = bench.add_command("device", "Measure this CPU as a device, for tessera plan --device: products, memory, attention, operators, all-reduces");
  command.add_option("--nproc", flags->nproc, "Ranks to time all-reduces with (default 2); 1: none");
  command.add_option("--threads", flags->threads, "Threads of a rank (default: as many as there are)");
  const auto check_limits = add_limits(command, *flags, "Calls to measure of each case, instead of --seconds");
  command.add_option("-o,--output", flags->output, "Where the device's file goes (TOML)");
  command.add_option("--svg", flags->svg, "Draw what narrower number formats buy here, beside data sheets by generation");
  command.add_option("--from", flags->from, "Measure nothing, and draw a file that was written before").needs("--svg");
  command.when_chosen([flags, check_limits, &exit_code] {
    check_limits();
    exit_code = bench_device(*flags);
  });
}

}  // namespace

void add_bench(Command app, int& exit_code) {
  auto bench = app.add_command("bench", "Measure this machine");
  bench.requires_command();
  add_comm(bench, exit_code);
  add_tp(bench, exit_code);
  add_pp(bench, exit_code);
  add_cp(bench, exit_code);
  add_device(bench, exit_code);
}

}  // namespace tessera::cli
