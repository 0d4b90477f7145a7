#pragma once

#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "tessera/comm/world.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera::comm {

struct Call;

/// Makes one kind of c10d backend for the groups of one rank, and owns what they share (a network device).
class Engine {
 public:
  virtual ~Engine() = default;
  /// Connects the group's members, who find each other in `store` under keys that only they use. Blocks until all have come.
  virtual c10::intrusive_ptr<c10d::Backend> connect(const GroupInfo& group, const c10::intrusive_ptr<c10d::Store>& store) = 0;
};

/// What an engine may know when it is made.
struct EngineOptions {
  std::string backend = "auto";  ///< comm.backend
  std::string interface{};       ///< comm.interface, as in WorldOptions
  Environment environment{};
};

/// Names that comm.backend takes in this build; "auto" is the first.
std::vector<std::string> engine_names();

/// Throws ConfigError, naming the knob, for a backend that this build does not have.
void check_engine_name(const std::string& backend);

/// Bytes of tensors that the engine makes for itself on the caller's thread during `call`, and keeps until the work is done: what a dry run has to
/// allocate to stay true. Throws ConfigError as above.
int64_t scratch_bytes(const std::string& backend, const Call& call);

/// Throws ConfigError as above, CommError where the interface cannot be bound to.
std::unique_ptr<Engine> make_engine(const EngineOptions& options);

// The engines. Each lives in a file or folder of its own; engine.cpp holds the table.

/// Gloo, from torch's own library: TCP, CPU tensors. Data that is moved and not summed may have any dtype. Sums of bf16 and fp16 are made in that dtype.
/// `abort` closes the connections, which ends what waits on them here and at the peers.
std::unique_ptr<Engine> make_gloo_engine(const EngineOptions& options);
int64_t gloo_scratch_bytes(const Call& call);

}  // namespace tessera::comm
