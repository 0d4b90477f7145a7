#pragma once

#include <functional>
#include <map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/pipeline/schedules/schedule.h"

namespace tessera::pipeline {

/// The weights of one stage in a step of an asynchronous schedule: the newest, which its updates change, and of the older ones those that an action still to
/// come computes with (weight stashing: PipeDream, Narayanan et al., SOSP 2019). How often each is used, the schedule says.
///
/// A version is a memory of its own: an update leaves that of an older version as it is and goes on in a copy, and an action runs while its parameters have
/// the memory of its version. So a backward, what is recomputed in it included, sees the very weights of its forward, and its gradients are those of the
/// parameters themselves.
///
///   memory    of the stage's parameters once for each version but the newest, as parameters: `weight_versions` of schedules::measure() in all
///   traffic   a copy of the parameters an update that leaves an older version
///
/// One rank, one thread.
class WeightVersions {
 public:
  /// `parameters`: what updates change in place, each with memory that nothing else names; tied ones once. They are version 0. Of `actions`, a rank's in a
  /// whole step, those of `stage` count.
  WeightVersions(std::vector<at::Tensor> parameters, const schedules::RankActions& actions, int stage);

  /// Runs an action with the weights of `version`, and lets these go behind the last that uses them. Throws InternalError for one that is not there.
  void with(int version, const std::function<void()>& action);

  /// Makes the next version of the newest: `update` changes the parameters.
  void update(const std::function<void()>& update);

  int newest() const { return newest_; }
  /// How many there are.
  int held() const { return 1 + static_cast<int>(older_.size()); }

 private:
  /// What a version's parameters have: memory and the counter of writes to it, by which autograd knows a tensor that was changed behind its back.
  using Values = std::vector<at::Tensor>;
  Values current() const;
  void put(const Values& values) const;

  std::vector<at::Tensor> parameters_;
  std::map<int, int> uses_;  ///< of each version: by actions to come
  std::map<int, Values> older_;
  int newest_ = 0;
};

}  // namespace tessera::pipeline
