#include "tessera/comm/backends/factory.h"

#include <algorithm>
#include <array>

#include <fmt/ranges.h>

#include "tessera/comm/backends/extremum.h"
#include "tessera/comm/backends/mpi/library.h"
#include "tessera/comm/backends/staged.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

std::string nothing_missing(const Environment&) { return {}; }
int64_t no_scratch(const Call&) { return 0; }
#ifndef TESSERA_CUDA
std::string without_cuda(const Environment&) {
  return "this build has no CUDA; build the preset cuda against a torch that has it (TORCH_DIR), or set comm.backend = auto";
}
#endif

std::unique_ptr<EngineFactory> make_auto(const EngineOptions& options) { return make_auto_factory(options); }
#ifdef TESSERA_CUDA
// What ranks tell each other of themselves (agreements, reports, texts of a checkpoint) lies on the host, and goes over the engines of "auto" there.
std::unique_ptr<EngineFactory> make_nccl_beside_host(const EngineOptions& options) { return make_auto_factory(options, at::kCUDA); }
#endif

struct Entry {
  std::string_view name;
  std::unique_ptr<EngineFactory> (*make)(const EngineOptions& options);
  int64_t (*scratch)(const Call& call);
  bool of_host = false;                                                      ///< takes tensors of the CPU alone
  std::string (*missing)(const Environment& environment) = nothing_missing;  ///< why it cannot be had, with the way out; empty: it can
};

// Every backend.
constexpr std::array kEngines{
    Entry{"auto", make_auto, no_scratch},  // that of one host
    Entry{"gloo", make_gloo_factory, gloo_scratch_bytes, true},
    Entry{"shm", make_shm_factory, no_scratch, true},
    Entry{"mpi", make_mpi_factory, mpi_scratch_bytes, true, mpi_missing},
#ifdef TESSERA_CUDA
    Entry{"nccl", make_nccl_beside_host, ordered_bytes, false, nccl_missing},
#else
    Entry{"nccl", nullptr, ordered_bytes, false, without_cuda},
#endif
};

const Entry& find(const std::string& backend) {
  const auto* entry = std::find_if(kEngines.begin(), kEngines.end(), [&](const Entry& e) { return e.name == backend; });
  if (entry == kEngines.end()) {  // asked for every call of a plan: what this build has is looked up where it is said
    throw ConfigError(
        detail::concat("comm.backend = ", backend, ": there is no such backend; this build has ", fmt::format("{}", fmt::join(engine_names(), ", "))));
  }
  return *entry;
}

const Entry& find_usable(const std::string& backend, const Environment& environment) {
  const auto& entry = find(backend);
  const auto missing = entry.missing(environment);
  require(missing.empty(), "comm.backend = ", backend, ": ", missing);
  return entry;
}

/// Engines that take tensors of accelerators by way of the host.
class StagedFactory final : public EngineFactory {
 public:
  explicit StagedFactory(std::unique_ptr<EngineFactory> of_host) : of_host_(std::move(of_host)) {}
  std::shared_ptr<Engine> connect(const GroupInfo& group, const c10::intrusive_ptr<c10d::Store>& store) override {
    return stage_on_host(group, of_host_->connect(group, store));
  }

 private:
  std::unique_ptr<EngineFactory> of_host_;
};

}  // namespace

std::vector<std::string> engine_names() {
  std::vector<std::string> names;
  for (const auto& engine : kEngines) {
    if (engine.missing({}).empty()) names.emplace_back(engine.name);
  }
  return names;
}

bool has_engine(const std::string& backend) {
  const auto names = engine_names();
  return std::find(names.begin(), names.end(), backend) != names.end();
}

void check_engine_name(const std::string& backend, const Environment& environment) { find_usable(backend, environment); }
int64_t scratch_bytes(const std::string& backend, const Call& call) { return find(backend).scratch(call); }

std::unique_ptr<EngineFactory> make_factory(const EngineOptions& options) {
  const auto& entry = find_usable(options.backend, options.environment);
  auto factory = entry.make(options);
  return entry.of_host ? std::make_unique<StagedFactory>(std::move(factory)) : std::move(factory);
}

}  // namespace tessera::comm
