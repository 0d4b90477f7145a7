#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/config/detail.h"
#include "tessera/core/error.h"

// A captured step does the same each time, with the numbers that the host had when it was captured, and without the host. What needs another number in each
// step (the step's own random numbers, a loss scale that moves), what asks the host in its midst, and engines that work on the host cannot be in it. Beside
// these stands what could be captured and has not been tried.

namespace tessera::detail {

void validate_graph(const Config& config, const std::function<int(const std::string&)>& size_of) {
  if (!config.run.graph) return;
  struct Refusal {
    bool set;
    std::string setting, why, way_out;
  };
  const auto axis = [&](const char* name) { return concat("mesh.", name, " = ", size_of(name)); };
  const auto& [offload, comm] = std::tie(config.offload, config.comm);
  const bool offloads = !offload.params.is("device") || !offload.gradients.is("device") || !offload.optimizer.is("device") || !offload.activations.is("device");
  const std::vector<Refusal> refusals = {
      {config.run.device == "cpu", "run.device = cpu", "a CPU has no graphs", "set run.device = cuda"},
      {config.model.dropout > 0, concat("model.dropout = ", config.model.dropout), "masks are other ones in each step", "set model.dropout = 0"},
      {!config.lora.modules.empty(), "lora.modules", "a step with adapters has not been captured", "leave lora.modules out"},
      {!config.quantize.modules.empty(), "quantize.modules", "a step with quantised weights has not been captured", "leave quantize.modules out"},
      {config.data.documents != "none", concat("data.documents = ", config.data.documents), "where documents end decides what is computed",
       "set data.documents = none"},
      {config.precision.loss_scale == "dynamic", "precision.loss_scale = dynamic", "the scale is another number when it moves", "set a number, or none"},
      {config.model.experts > 0, concat("model.experts = ", config.model.experts), "the host reads how many rows each expert gets",
       "take a family without experts"},
      {offloads, "offload", "the host takes part in what is not on the device", "leave offload.* out"},
      {size_of("pp") > 1, axis("pp"), "messages between stages have not been captured", "set mesh.pp = 1"},
      {size_of("cp") > 1, axis("cp"), "messages of cut sequences have not been captured", "set mesh.cp = 1"},
      {comm.backend != "auto" && comm.backend != "nccl", concat("comm.backend = ", comm.backend), "it moves messages by way of the host",
       "set comm.backend = nccl"},
      {comm.algorithm != "auto" || !comm.table.empty(), "comm.algorithm or comm.table", "plans of messages are carried out by the host",
       "set comm.algorithm = auto and leave comm.table out"},
      {comm.check, "comm.check = true", "ranks compare what they ask for on the host", "set comm.check = false"},
      {comm.compression == "powersgd", "comm.compression = powersgd", "its first steps differ from later ones", "set comm.compression = bf16"},
  };
  for (const auto& [set, setting, why, way_out] : refusals) {
    require(!set, "run.graph = true with ", setting, ": a captured step does the same each time, without the host, and ", why, "; ", way_out,
            ", or run.graph = false");
  }
}

}  // namespace tessera::detail
