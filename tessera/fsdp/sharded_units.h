#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/hash.h"
#include "tessera/fsdp/flat_parameters.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/fsdp/unit_plan.h"
#include "tessera/fsdp/use_order.h"
#include "tessera/nn/backward_pass.h"
#include "tessera/nn/gradient_synchronizer.h"

namespace tessera {

/// Of a unit's parameters while they are whole, without padding.
int64_t gathered_bytes(const UnitPlan::Unit& unit, const FullyShardOptions& options);

/// Where a parameter lies.
struct UnitPlace {
  size_t unit, flat, index;
};

/// The memory and the traffic of all units of a module: prefetch, acquire, release, reduce. Knows nothing of what makes them due. Whoever calls it does so in
/// the same order on every rank; with find_unused_parameters, that goes for the first gather of a pass and for reductions alone.
class ShardedUnits {
 public:
  /// Sums are divided by `ranks_of_mean`.
  ShardedUnits(const UnitPlan& plan, const comm::Group& group, const FullyShardOptions& options, int ranks_of_mean);

  size_t size() const { return units_.size(); }
  const std::string& name(size_t unit) const { return units_[unit].name; }
  Offload place(size_t unit) const { return units_[unit].place; }
  std::vector<FlatParameters>& flats(size_t unit) { return units_[unit].flats; }
  const std::vector<FlatParameters>& flats(size_t unit) const { return units_[unit].flats; }
  int64_t gathered_bytes(size_t unit) const;
  bool trained(size_t unit) const;
  void follow_requires_grad(bool too);  ///< what was trained before stays so
  /// Gives every parameter its whole value, in memory of its own, unit by unit. Collective; nothing else may be called afterwards.
  void unshard();

  /// Takes in what the program has put in the place of parameters (FlatParameters::take_in), and shows them as before. What was gathered is gone then.
  void take_in(size_t unit);
  int64_t times_taken_in() const { return times_taken_in_; }  ///< slices may lie in other storages since the last time
  bool are_cut() const { return group_.size() > 1; }          ///< slices are less than the whole
  bool are_together() const { return together_; }             ///< all are gathered at once, and stay until backward has left them

  void show_whole(size_t unit);
  void show_slices(size_t unit);

  /// The unit's parameters may be used from here on, until release. Gathers and waits where that has not been done ahead of time. Throws ConfigError for what
  /// FlatParameters::check_given and take_in refuse; the unit is not held then, and shown as before.
  void acquire(size_t unit);
  /// Before a use, or a reduction, that the pass before did not foretell: the ranks tell each other which unit it is of. ConfigError where it is not one on all
  /// of them: their gathers would meet, and each would have a part of another unit's weights. What every rank has foretold alike needs no telling. Collective,
  /// 128 bytes a rank; a rank that does so alone meets the others in another collective, which its engine, or comm.check, refuses.
  void agree_on(size_t unit) const;
  /// Starts gathers of what `order` says comes next, within the limits, and reads of what comes behind that and lies on disk.
  void prefetch(const UseOrder& order);
  bool held(size_t unit) const { return units_[unit].memory == Memory::Ready; }
  /// Whether prefetch would have it gathered by now, were it not in use.
  bool is_due(const UseOrder& order, size_t unit) const;
  /// The unit is used no more by the action at hand, and one that comes will find it gathered, as if that had been done ahead of time.
  void keep(size_t unit);
  void release(size_t unit);
  /// The same where it may be used again in this forward; ranks that take different paths keep what they have gathered.
  void release_for_now(size_t unit);
  /// Also those that were gathered ahead of time and never used; but for those that are kept, where they may be.
  void release_all(bool but_kept = false);
  /// Waits for gathers on their way: from here on slices may be written.
  void settle();
  bool any_held() const;
  /// Slices are not needed in memory for now, where they lie on disk.
  void let_go();

  /// Starts the reduction of what was taken up for the unit; waits for the one before, so gradients of at most two units are whole at a time.
  /// The `last` of a step also sums over the replicas.
  void reduce(size_t unit, bool last);
  /// Waits for what is under way and drops sums that no parameter has got.
  void clear_sums();
  /// Waits for the reduction under way, and for what of the one before goes to the host: no gradient is whole then.
  void drain();
  /// Waits for everything; afterwards local gradients are those of the step.
  void finish_reductions();

  /// A number for the gathers and reductions since it was asked last, and for where each came among all that wrappers have made over the group: another one on
  /// a rank where a program came to units, or to wrappers, in another order, so that collectives of two have met.
  uint64_t take_made();

  SynchronizationStatistics& statistics() { return statistics_; }
  const SynchronizationStatistics& statistics() const { return statistics_; }

 private:
  enum class Memory { None, Arriving, Kept, Ready };
  struct Unit {
    std::string name;
    std::vector<FlatParameters> flats;
    Offload place = Offload::None;
    Memory memory = Memory::None;
    bool whole = false;  ///< its parameters have their whole shapes
  };

  std::vector<std::pair<int64_t, std::string>> told_by_all(int64_t number, std::string_view name) const;
  bool moves_nothing() const;
  void refuse_another_order() const;
  std::vector<size_t> ahead(const UseOrder& order, std::optional<size_t> leaving, int64_t units) const;
  void start_gather(size_t unit);
  void note(size_t unit, bool reduces);
  void finish_gather(Unit& unit);
  void finish_reduction();
  void finish_return();
  void count(int64_t bytes);

  comm::Group group_, replicas_;
  PrefetchLimits limits_;
  bool reads_ = false;  ///< some units lie on disk
  double scale_;
  nn::Turn turn_;  ///< among wrappers, on every rank the same
  bool together_;  ///< all units are gathered at once, in one order: ranks may use different ones
  std::vector<Unit> units_;
  int64_t times_taken_in_ = 0;
  std::optional<size_t> reducing_;
  std::optional<size_t> returning_;  ///< its reduced slices are on their way to the host
  bool reducing_last_ = false;
  SynchronizationStatistics statistics_;
  Hasher made_;
};

}  // namespace tessera
