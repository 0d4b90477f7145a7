#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"
#include "tessera/fsdp/sharded_units.h"
#include "tessera/fsdp/use_order.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/parameter.h"

namespace tessera {

/// Where a parameter lies.
struct UnitPlace {
  size_t unit, flat, index;
};

/// A step over sharded units: when parameters are whole and when slices, where gradients go, when a unit is reduced. A trigger tells it which unit is used, and
/// which one backward has left.
///
///   pass   a micro-batch's forward and backward; ends when the backward pass does, which libtorch's engine tells
class ShardedStep {
 public:
  ShardedStep(ShardedUnits& units, const comm::Group& group, const FullyShardOptions& options);
  ShardedStep(const ShardedStep&) = delete;
  ShardedStep& operator=(const ShardedStep&) = delete;

  void begin();
  void begin_micro_batch(bool last);
  void finish();

  bool running() const { return running_; }
  bool in_backward() const { return in_backward_; }
  int64_t pass() const { return pass_; }  ///< changes with every pass

  /// Whether a unit's reduction may start as soon as all its gradients are there, for a trigger that is not told when backward leaves a unit.
  void retire_when_complete() { retire_when_complete_ = true; }

  /// Called at the end of each backward pass, to retire what is left in the trigger's own order.
  void before_backward_ends(std::function<void()> last_call) { last_call_ = std::move(last_call); }

  /// The unit is needed now. Counts as a use in `order`, which prefetch follows: in forward each time, in backward where it has to be gathered (what is held
  /// may be met again on some ranks and not on others).
  void use(size_t unit, UseOrder& order);
  /// Backward is in the graph of this pass. From the first call on, until the pass ends.
  void begin_backward();
  bool retired(size_t unit) const { return retired_[unit]; }
  /// Backward needs the unit no more: frees it, and reduces its gradients where this pass does.
  void retire(size_t unit);

  UseOrder& order() { return order_; }
  const UseOrder& order() const { return order_; }

 private:
  FlatParameters& flat_of(const UnitPlace& place) { return units_.flats(place.unit)[place.flat]; }
  void listen();
  void offer_places();
  void accumulated(size_t parameter);
  void end_backward();
  void end_pass();
  void reduce(size_t unit, bool last);
  std::vector<bool> used_parameters() const;

  ShardedUnits& units_;
  comm::Group group_, replicas_;
  bool reduce_each_, find_unused_;
  bool retire_when_complete_ = false;
  std::function<void()> last_call_;
  std::vector<UnitPlace> places_;               ///< of parameters_
  std::vector<nn::NamedParameter> parameters_;  ///< those that are trained
  UsedParameters used_;

  bool running_ = false, last_ = true, in_backward_ = false;
  int64_t pass_ = 0;
  UseOrder order_;
  std::vector<bool> retired_;                              ///< per unit, in this backward
  std::vector<bool> final_;                                ///< per unit: reduced for the last time in this step
  std::vector<size_t> awaited_;                            ///< per unit: gradients that have not come in this backward
  std::shared_ptr<int> alive_ = std::make_shared<int>(0);  ///< what callbacks of the engine hold weakly
  Attachment hooks_;
};

}  // namespace tessera
