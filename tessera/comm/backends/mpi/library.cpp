#include "tessera/comm/backends/mpi/library.h"

#include <cstdlib>
#include <filesystem>

#include <dlfcn.h>

#include "tessera/comm/backends/extremum.h"
#include "tessera/comm/call.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFile = "libtessera_mpi.so";
constexpr const char* kWayOut = "install Open MPI (libopenmpi-dev) and build tessera again, or set comm.backend = auto";

// Beside the file that holds this function, or in the lib folder beside that one's folder (programs that hold our objects themselves). Empty where it is in
// neither.
fs::path find_library() {
  Dl_info self{};
  if (::dladdr(reinterpret_cast<const void*>(&mpi_library_missing), &self) == 0 || self.dli_fname == nullptr) return {};
  std::error_code error;
  const auto folder = fs::weakly_canonical(self.dli_fname, error).parent_path();
  for (const auto& candidate : {folder / kFile, folder.parent_path() / "lib" / kFile}) {
    if (fs::exists(candidate, error)) return candidate;
  }
  return {};
}

MpiLibrary& load() {
  const auto missing = mpi_library_missing();
  require(missing.empty(), "comm.backend = mpi: ", missing);
  // Open MPI loads components that look for its symbols among the global ones.
  void* library = ::dlopen(find_library().c_str(), RTLD_NOW | RTLD_GLOBAL);
  const char* cause = library ? nullptr : ::dlerror();
  require(library != nullptr, "comm.backend = mpi: ", kFile, " cannot be loaded: ", cause ? cause : "unknown", "; ", kWayOut);
  auto* entry = reinterpret_cast<MpiLibrary* (*)()>(::dlsym(library, kMpiEntry));
  require(entry != nullptr, "comm.backend = mpi: ", kFile, " is of another build; ", kWayOut);
  return *entry();
}

}  // namespace

std::string mpi_library_missing() {
  return find_library().empty() ? detail::concat("this build has no ", kFile, " beside its library; ", kWayOut) : std::string();
}

MpiLibrary& mpi_library() {
  static MpiLibrary& library = load();
  return library;
}

// Without a launcher of MPI each process would be a world of its own.
std::string mpi_missing(const Environment& environment) {
  auto missing = mpi_library_missing();
  if (!missing.empty() || environment.size == 1) return missing;
  for (const auto* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"}) {
    if (std::getenv(name)) return {};
  }
  return detail::concat("these ", environment.size, " processes were not started by MPI, so it cannot connect them; start them with mpirun -n ",
                        environment.size, " (or srun --mpi=pmix) and without --nproc, or set comm.backend = auto");
}

std::unique_ptr<EngineFactory> make_mpi_factory(const EngineOptions& options) { return mpi_library().make_factory(options); }

// What is summed in fp32 is a copy; so is what would be scattered in place, and what a minimum or maximum is made of.
int64_t mpi_scratch_bytes(const Call& call) {
  if (call.inputs.empty()) return 0;
  if (is_extremum(call)) return ordered_bytes(call);
  if (call.inputs[0].element_size() != 2) {
    return call.op == Operation::ReduceScatter && call.outputs[0].is_alias_of(call.inputs[0]) ? static_cast<int64_t>(call.outputs[0].nbytes()) : 0;
  }
  if (call.op == Operation::AllReduce || call.op == Operation::Reduce) return 2 * static_cast<int64_t>(call.inputs[0].nbytes());
  if (call.op == Operation::ReduceScatter) return 2 * static_cast<int64_t>(call.inputs[0].nbytes() + call.outputs[0].nbytes());
  return 0;
}

}  // namespace tessera::comm
