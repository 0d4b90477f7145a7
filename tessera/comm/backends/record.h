#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tessera/comm/world.h"
#include "tessera/core/events.h"

namespace tessera {
/// All fields by name; dtype as float32, bfloat16, ...
void to_json(nlohmann::json& json, const CollectiveEvent& call);
}  // namespace tessera

namespace tessera::comm {

struct Call;

/// What a call of this rank's says of itself.
CollectiveEvent event_of(const Call& call, const GroupInfo& group);

/// What a rank's recording groups write into. Thread-safe.
class Recorder {
 public:
  void add(CollectiveEvent call);  ///< gives it the next sequence number
  std::vector<CollectiveEvent> records() const;
  /// Forgets all records, and starts counting anew.
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<CollectiveEvent> records_;
};

/// Logs each call and hands it on to `inner`.
std::shared_ptr<Engine> make_record_engine(std::shared_ptr<Recorder> recorder, const GroupInfo& group, std::shared_ptr<Engine> inner);

/// Logs each call, unless `recorder` is null, and computes nothing: outputs keep their bits, and all is done at once, on meta and CPU tensors alike. While a
/// call lasts it holds as much memory as `scratch_bytes` says that a real world would; without it, none.
using ScratchBytes = std::function<int64_t(const Call& call, const GroupInfo& group)>;
std::shared_ptr<Engine> make_dry_engine(std::shared_ptr<Recorder> recorder, const GroupInfo& group, ScratchBytes scratch_bytes = {});

/// A decorator that records every group of a world.
Decorator recording(std::shared_ptr<Recorder> recorder);

}  // namespace tessera::comm
