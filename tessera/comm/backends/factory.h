#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

#include "tessera/comm/world.h"

namespace c10d {
class Store;
}

namespace tessera::comm {

struct Call;

/// Makes the engines of one kind for the groups of one rank, and owns what they share (a network device).
class EngineFactory {
 public:
  virtual ~EngineFactory() = default;
  /// Connects the group's members, who find each other in `store` under keys that only they use. Blocks until all have come.
  virtual std::shared_ptr<Engine> connect(const GroupInfo& group, const c10::intrusive_ptr<c10d::Store>& store) = 0;
};

/// What engines may know when they are made.
struct EngineOptions {
  std::string backend = "auto";  ///< comm.backend
  std::string interface{};       ///< comm.interface, as in WorldOptions
  Environment environment{};
  std::string host{};                  ///< what tells this rank's host from others; empty: host_identity(). Tests let threads play several hosts
  std::optional<at::Device> device{};  ///< as WorldOptions::device
};

/// Names that comm.backend takes in this build, on this machine; "auto" is the first.
std::vector<std::string> engine_names();

/// Whether `backend` is one of them.
bool has_engine(const std::string& backend);

/// Throws ConfigError, naming the knob and the way out, for a backend that is unknown, that this build or machine lacks something for, or that cannot connect
/// processes which were started as `environment` says.
void check_engine_name(const std::string& backend, const Environment& environment = {});

/// Bytes of tensors that the engine makes for itself on the caller's thread during `call`, and keeps until the work is done: what a dry run has to
/// allocate to stay true, also for an engine that this machine lacks. Throws ConfigError for an unknown one.
int64_t scratch_bytes(const std::string& backend, const Call& call);

/// Throws ConfigError as above, CommError where the interface cannot be bound to.
std::unique_ptr<EngineFactory> make_factory(const EngineOptions& options);

/// Lets "auto" hand tensors on devices of `type` to the engines of `make`, beside those of the host, in groups whose members have a device each: registered
/// when the program loads by whoever brings such a device. NCCL, where this build has it, needs no registration.
void register_device_engine(c10::DeviceType type, std::unique_ptr<EngineFactory> (*make)(const EngineOptions& options));

// The kinds. Each lives in a file or folder of its own; factory.cpp holds the table.

/// Gloo, from torch's own library: TCP, CPU tensors. Data that is moved and not summed may have any dtype. Sums of bf16 and fp16 are made in that dtype.
/// `abort` closes the connections, which ends what waits on them here and at the peers.
std::unique_ptr<EngineFactory> make_gloo_factory(const EngineOptions& options);
int64_t gloo_scratch_bytes(const Call& call);

/// Shared memory: ranks on one host, CPU tensors, no tensors of its own. Sums in rank order; of bf16 and fp16 in fp32, rounded once. fp8 is moved and not
/// reduced. The memory is a memfd, or a file in the folder TESSERA_SHM_DIR; nothing of it has a name once a group has formed.
std::unique_ptr<EngineFactory> make_shm_factory(const EngineOptions& options);

/// MPI, from libtessera_mpi (backends/mpi/library.h): CPU tensors, processes of mpirun. Sums of bf16 and fp16 are made in fp32, and rounded once.
std::unique_ptr<EngineFactory> make_mpi_factory(const EngineOptions& options);
int64_t mpi_scratch_bytes(const Call& call);
std::string mpi_missing(const Environment& environment);

#ifdef TESSERA_CUDA
/// NCCL, from torch's own library: CUDA tensors alone, each member on a device of its own. A stream of high priority per group; waiting for work makes the
/// caller's stream wait, never the host.
std::unique_ptr<EngineFactory> make_nccl_factory(const EngineOptions& options);
std::string nccl_missing(const Environment& environment);
#endif

/// The best there is for where the members live: shared memory where all are on one host, Gloo where each is alone on its own, and a two-level group of both
/// otherwise. Tensors of accelerators go to the engine of their device (NCCL for CUDA where this build has it) in groups whose members all compute on one, no
/// two on the same; in others they are staged through pinned memory, as those that gloo, shm and mpi are handed. Members learn each other's hosts and devices
/// through the store, once per world. `required`: a group that cannot meet on devices of this type is refused (comm.backend = `options.backend`, which is that
/// of the device), by ConfigError on every member.
std::unique_ptr<EngineFactory> make_auto_factory(const EngineOptions& options, std::optional<c10::DeviceType> required = {});

}  // namespace tessera::comm
