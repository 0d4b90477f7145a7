#pragma once

#include "tessera/comm/testing.h"
#include "tessera/data/loader.h"
#include "tessera/memory/history.h"
#include "tessera/mesh/mesh.h"
#include "tessera/models/flops.h"
#include "tessera/train/state_bytes.h"
#include "tessera/train/stepper.h"
#include "tests/test_device.h"

namespace tessera::testing_support {

/// What rank 0 holds between the backward pass and the update of its second step, and at the peak of that step.
struct HeldBytes {
  MemoryByCategory held{}, peak{};
  MemoryByCategory beside{};  ///< the device, when most was there
  double parameters = 0;      ///< of the whole model

  double per_parameter(MemoryCategory category) const { return static_cast<double>(held[static_cast<size_t>(category)]) / parameters; }
  /// (w, g, k) as measured.
  BytesPerParameter state() const {
    return {.weight = per_parameter(MemoryCategory::Parameters),
            .gradient = per_parameter(MemoryCategory::Gradients),
            .state = per_parameter(MemoryCategory::Optimizer)};
  }
  BytesPerParameter beside_device() const {
    const auto of = [&](MemoryCategory category) { return static_cast<double>(beside[static_cast<size_t>(category)]) / parameters; };
    return {.weight = of(MemoryCategory::Parameters), .gradient = of(MemoryCategory::Gradients), .state = of(MemoryCategory::Optimizer)};
  }
  /// What no formula of parameters knows of: activations, outputs, buffers of communication.
  int64_t buffers_at_peak() const {
    int64_t bytes = total_of(peak);
    for (const auto category : {MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer}) bytes -= peak[static_cast<size_t>(category)];
    return bytes;
  }
};

/// A LLaMA of 0.9 M parameters, with so little text that little else is there.
inline Config formula_config(const std::vector<std::string>& sets) {
  Config config = parse_config(
      "[model]\nfamily = \"llama\"\ndim = 128\nlayers = 4\nheads = 4\nffn_dim = 384\nvocab_size = 256\n[data]\nfiles = [\"none\"]\nseq_len = 8\n"
      "[batch]\nglobal_size = 8\n[optim]\nlr = 1e-3\n[zero]\nbucket_bytes = 500000\n[run]\nsteps = 2\n",
      ".", sets);
  resolve(config);
  return config;
}

/// Trains two steps on `ranks` threads.
inline HeldBytes held_bytes(const Config& config, int ranks) {
  HeldBytes result{.parameters = static_cast<double>(num_parameters(config.model))};
  validate(config, ranks);
  const auto body = [&](comm::World& world) {
    const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world.size()));
    RankScope scope(config, world.local_size());
    Stepper stepper(config, mesh, testing_support::test_device(), scope);
    for (int step = 1; step <= 2; ++step) {
      scope.memory().reset_peak();
      auto batch = data::dry_batch(loader_options(config, mesh), step, at::kCPU);
      for (auto& micro : batch.micro_batches) micro.tokens.fill_(step), micro.labels.fill_(1);
      MemoryByCategory held{};
      stepper.step(batch, {.gradients_ready = [&] { held = scope.memory().current_by_category(); }});
      if (world.rank() == 0) result.held = held, result.peak = scope.memory().peak_by_category(), result.beside = scope.memory().host_peak_by_category();
    }
  };
  comm::run_ranks(ranks, body, {.backend = "shm"});  // Gloo's worker may hold on to tensors for a while
  return result;
}

}  // namespace tessera::testing_support
