#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/quantize/sharded_matrix.h"

namespace tessera::quantize {

/// The matrices of a model whose rows are dealt over ranks, in the order of the model. While one is used, the one that came next last time is on its way:
/// within a forward or within a backward pass, and not from one to the next, so that nothing is left on its way when there is none. Where another one is asked
/// for, that costs traffic, and a forward that ends early keeps what was on its way until the next use. Memory: two matrices at a time. Ranks ask in one order,
/// and so foretell the same.
class ShardedWeights {
 public:
  /// `ahead`: whether the next one is gathered ahead of its use.
  explicit ShardedWeights(bool ahead) : ahead_(ahead) {}

  size_t add(ShardedMatrix matrix);
  const ShardedMatrix& at(size_t index) const { return matrices_.at(index); }

  /// Whole, in memory that ends with what is given. Collective. Throws CommError.
  std::shared_ptr<const kernels::QuantizedMatrix> gather(size_t index);

  struct Statistics {
    int64_t gathers = 0;
    int64_t foretold = 0;  ///< of these, on their way when they were asked for
  };
  const Statistics& statistics() const noexcept { return statistics_; }

 private:
  struct Use {
    size_t index;
    bool in_backward;
    auto operator<=>(const Use&) const = default;
  };
  struct OnItsWay {
    size_t index;
    ShardedMatrix::Gathered gathered;
  };

  std::optional<size_t> next() const;
  ShardedMatrix::Gathered start(size_t index);

  bool ahead_;
  std::vector<ShardedMatrix> matrices_;
  std::optional<Use> before_, now_;
  std::map<std::pair<std::optional<Use>, Use>, Use> after_;  ///< two uses, for backward goes where forward came from: the one behind them last time
  std::optional<OnItsWay> on_its_way_;
  Statistics statistics_;
};

}  // namespace tessera::quantize
