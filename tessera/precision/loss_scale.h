#pragma once

#include <cstdint>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/config/config.h"
#include "tessera/nn/parameter.h"

namespace tessera::precision {

/// Loss scaling (Mixed Precision Training, arXiv:1710.03740), so that gradients that fp16 would round to zero keep their bits. In five steps:
///   1 scale     the loss is multiplied by value() before backward
///   2 unscale   unscale() divides the gradients, once they are summed over micro-batches and ranks
///   3 check     their norm is finite, or one of them is not; it is a sum over ranks, so every rank sees the same and no message is needed
///   4 skip      where it is not: neither optimizer nor schedule moves
///   5 adapt     after_backward(): a dynamic scale halves on each skip, and doubles after growth_steps finite steps in a row (at most to 2^24)
///
/// Without scaling (`none`) the value is 1 and what follows gradients that are not finite is to stop. One object per rank; equal on all, given equal calls.
class LossScale {
 public:
  enum class Decision {
    Update,  ///< the optimizer may step
    Skip,    ///< it must not: the next step goes on with the scale as it is now
    Stop,    ///< the run must end: max_skips steps in a row were skipped, or there is no scale to lower
  };

  LossScale() = default;  ///< none
  explicit LossScale(const PrecisionConfig& config);

  bool enabled() const { return mode_ != Mode::None; }
  double value() const { return value_; }
  int64_t skipped() const { return skipped_; }            ///< steps in the whole run
  int64_t skipped_in_a_row() const { return in_a_row_; }  ///< just before now
  int64_t lost_in_a_row() const { return lost_; }         ///< of those the last, whose loss was not finite either

  /// Divides every gradient by value(), in place; gradients of fp16 become fp32, in which no bit is lost. One pass over the gradients; none without scaling.
  void unscale(const std::vector<nn::NamedParameter>& parameters) const;

  /// Takes up whether the step's gradients were finite, and where they were not, whether its loss was `lost`, too; on all ranks the same.
  Decision after_backward(bool finite, bool lost = false);

  /// What a checkpoint keeps, and back, bit for bit. A checkpoint that was made with another precision.loss_scale (or null, with none) leaves this one's start,
  /// and takes over the count of skipped steps alone: the schedule depends on it. Throws ConfigError naming `source` where it is damaged.
  nlohmann::json state() const;
  void restore(const nlohmann::json& saved, const std::string& source);

 private:
  enum class Mode { None, Static, Dynamic };

  Mode mode_ = Mode::None;
  double value_ = 1;
  int64_t growth_steps_ = 0, max_skips_ = 0;
  int64_t finite_in_a_row_ = 0;  ///< since the scale last changed
  int64_t skipped_ = 0, in_a_row_ = 0, lost_ = 0;
};

}  // namespace tessera::precision
