#pragma once

#include <array>
#include <vector>

#include "tessera/kernels/adam8bit.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {

/// AdamW whose averages are kept in 8 bits, with a scale for each block of 256 elements (Dettmers et al., arXiv:2110.02861; kernels/adam8bit.h). Blocks are of
/// the flattened logical tensor, so the bits of the state are the same in any layout; ranks that share a block meet over its scale.
///
/// Tensors of fewer than 4,096 elements, and embeddings, whose rows have gradients of very different size, keep averages in fp32 and are AdamW's.
///   state    exp_avg, exp_avg_sq: uint8, the parameter's slice; exp_avg_scale, exp_avg_sq_scale: fp32 [blocks], those that this rank's elements lie in
///   memory   2 + 8/256 bytes an element (AdamW: 8); while it steps, 8/256 bytes an element of the whole model
///   traffic  22 bytes an element and step; where parameters are parts, an all-reduce of 8/256 bytes an element of the whole
/// Parameters are fp32 (ConfigError otherwise).
class Adam8bit : public Optimizer {
 public:
  /// Elements that a tensor has at least whose state is in 8 bits.
  static constexpr int64_t kLeastElements = 4096;
  /// Whether the state of a parameter of so many elements, whole, is in 8 bits.
  static bool quantizes(const std::string& name, int64_t elements, const WholeModel& model) {
    return elements >= kLeastElements && !model.looked_up.contains(name);
  }

  explicit Adam8bit(std::vector<ParameterGroup> groups, AdamWOptions options = {}, WholeModel model = {});

  std::string kind() const override { return "adam8bit"; }
  std::vector<StateTensor> state() const override;
  bool needs_begin() const override { return true; }
  void meet_nobody() override { model_.ranks = {}; }

 private:
  /// Of one parameter that is kept in 8 bits.
  struct Quantized {
    kernels::Adam8bitState state;
    std::vector<kernels::QuantizedRun> runs;
    Slice scales;  ///< of [blocks]: those that are held
  };

  bool is_quantized(size_t index) const { return quantized_[index].scales.shape.size() == 1; }
  kernels::Adam8bitStep step_of(const Batch& batch, int64_t update) const;
  void prepare(const std::vector<Batch>& batches) override;
  void update(const Batch& batch) override;
  bool by_rows() const override { return true; }
  bool writes_memory() const override { return true; }
  void hold(size_t index) override;

  AdamWOptions options_;
  WholeModel model_;
  Places places_;                                 ///< of blocks
  std::vector<Quantized> quantized_;              ///< of each of parameters_
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_;  ///< of those that are kept in fp32
  std::vector<std::array<at::Tensor, 2>> fresh_;  ///< between begin and apply, of each of parameters_: the new scales of both averages
};

}  // namespace tessera::optim
