#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/core/events.h"
#include "tessera/memory/memory.h"

namespace tessera::plan {

/// Whether it goes from one rank to one other.
bool is_message(const CollectiveEvent& call);

/// "dp_shard+tp" -> its axes; "pp.tied", a further group of the same ranks, has those of "pp".
std::vector<std::string> axes_in(const std::string& group);

/// One kind of collective of a step, with all that are alike added up.
struct CollectiveSum {
  std::string op;
  std::string axis;  ///< the group's name: mesh axes joined by '+'
  std::string dtype;
  int64_t count = 0;
  int64_t bytes = 0;       ///< of the whole tensors: reduced, gathered, dealt
  int64_t sent_bytes = 0;  ///< by this rank, at least
};

/// In the order of their first call.
std::vector<CollectiveSum> collectives_of(const Events& events);

/// Bytes alive on the device, and on the host beside it.
struct Alive {
  MemoryByCategory device{}, host{};
  bool operator==(const Alive&) const = default;
};

/// Adds up what events say, one after the other: FLOPs of matrix products, of the model's passes and beside them, and memory as MemoryTracker counts it.
class EventReader {
 public:
  /// `before`: what is alive when the events begin.
  explicit EventReader(const Alive& before = {});
  void read(const Event& event);
  void read(const Events& events);

  double flops() const { return flops_; }
  double recomputed_flops() const { return recomputed_flops_; }  ///< of those, what recompute ran again
  double flops_beside() const { return flops_beside_; }          ///< beside those (BesidePasses)
  const Alive& peak() const { return peak_; }                    ///< when most was alive, of either
  const Alive& alive() const { return now_; }

 private:
  double flops_ = 0, recomputed_flops_ = 0, flops_beside_ = 0;
  Alive peak_, now_;
  int64_t device_, host_, device_peak_, host_peak_;
};

/// A list of objects: `index`, `kind`, what the event says of itself, `reads` and `writes` (storages), and `after`: the events that it has to wait for
/// (dependencies).
nlohmann::json to_json(const Events& events);

}  // namespace tessera::plan
