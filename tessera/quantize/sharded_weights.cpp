#include "tessera/quantize/sharded_weights.h"

#include "tessera/nn/backward_pass.h"

// A pass uses a model's weights in one order, back uses them in the other, and what is computed again goes ahead for a while within the way back. So the two
// uses before tell where it goes from here, whatever recomputation and schedules make of it, and nobody has to say what a pass is.

namespace tessera::quantize {

size_t ShardedWeights::add(ShardedMatrix matrix) {
  matrices_.push_back(std::move(matrix));
  return matrices_.size() - 1;
}

ShardedMatrix::Gathered ShardedWeights::start(size_t index) {
  ++statistics_.gathers;
  return matrices_.at(index).gather();
}

/// Outside of a backward pass what does not lie further on in the model is of another pass, which may never come.
std::optional<size_t> ShardedWeights::next() const {
  if (!ahead_) return std::nullopt;
  const auto found = after_.find({before_, *now_});
  if (found == after_.end() || found->second.in_backward != now_->in_backward) return std::nullopt;
  if (!now_->in_backward && found->second.index <= now_->index) return std::nullopt;
  return found->second.index;
}

std::shared_ptr<const kernels::QuantizedMatrix> ShardedWeights::gather(size_t index) {
  const Use use{index, nn::backward_pass() != -1};
  if (now_) after_.insert_or_assign({before_, *now_}, use);
  before_ = std::exchange(now_, use);
  std::optional<OnItsWay> on_its_way = std::exchange(on_its_way_, std::nullopt);
  if (on_its_way) on_its_way->gathered.arrived.wait();  // its memory is free then, whoever it is
  const bool foretold = on_its_way && on_its_way->index == index;
  statistics_.foretold += foretold ? 1 : 0;
  ShardedMatrix::Gathered gathered = foretold ? std::move(on_its_way->gathered) : start(index);
  on_its_way.reset();
  gathered.arrived.wait();
  if (const auto following = next()) on_its_way_ = {*following, start(*following)};
  return gathered.matrix;
}

}  // namespace tessera::quantize
