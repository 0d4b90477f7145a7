#include "tessera/comm/meeting/slurm.h"

#include "tests/fuzz/target.h"

/// SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE.
TESSERA_FUZZ_TARGET(slurm) {
  using namespace tessera;
  const std::string list(input);
  fuzz::accepts("SLURM_NODES", [&] {
    for (const auto& name : comm::expand_nodes(list, "SLURM_NODES")) fuzz::expect(!name.empty(), "a node without a name");
  });
  fuzz::accepts("SLURM_TASKS", [&] {
    for (const int count : comm::expand_counts(list, "SLURM_TASKS")) fuzz::expect(count >= 1, "a node with ", count, " tasks");
  });
}
