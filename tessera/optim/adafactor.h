#pragma once

#include <set>
#include <string>

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

struct AdafactorOptions {
  double eps = 1e-8;          ///< eps^2 is the least squared gradient; eps the least mean of a matrix's rows
  double least_scale = 1e-3;  ///< a parameter's root mean square counts for at least this
  double momentum = 0;        ///< of an average of the updates; 0: none is kept
};

/// Adafactor (Shazeer and Stern, arXiv:1804.04235) as torch.optim.Adafactor has it: of a matrix's squared gradients only the mean of each row and of each
/// column is kept, whose product over the mean of all estimates them. Steps are relative: a parameter moves by a share of its own size.
///   a = 1 - k^-0.8 at the k-th update;  row = a row + (1 - a) mean_columns g^2;  col likewise;  v = row col / mean(row);  vectors: v = a v + (1 - a) g^2
///   u = g / sqrt(max(v, eps^2));  u /= max(1, rms(u));  p -= lr * weight_decay * p;  p -= min(lr, 1 / sqrt(k)) max(1e-3, rms(p)) u
/// Tensors of three and more dimensions are stacks of matrices, of their last two. With momentum u goes into an average first.
///
/// Sums of rows, columns and of whole tensors are of the logical tensor: in parts, ranks add them up, two all-reduces a step.
///   state    row_var [..., r, 1] and col_var [..., 1, c], fp32, whole on each rank that holds elements; variance of vectors, exp_avg with momentum: slices
///   memory   4 (r + c) bytes for a matrix of r c elements, 4 bytes an element with momentum; while it steps, 12 bytes an element of one matrix and 8 (r + c)
///            bytes of each
///   traffic  in parts, all-reduces of 8 (r + c) bytes and of 8 bytes a matrix
class Adafactor : public Optimizer {
 public:
  explicit Adafactor(std::vector<ParameterGroup> groups, AdafactorOptions options = {}, WholeModel model = {});

  std::string kind() const override { return "adafactor"; }
  std::vector<StateTensor> state() const override;
  bool needs_begin() const override { return true; }
  void meet_nobody() override { model_.ranks = {}; }

 private:
  bool is_factored(size_t index) const { return slice(index).shape.size() >= 2; }
  const Slice& slice(size_t index) const { return nn::slice_of(parameters_[index].tensor); }
  /// The sums over `dim` (-1: of rows, -2: of columns) that are kept here: all, or none where this rank has no elements.
  Slice held(size_t index, int dim) const;
  /// Of the update that comes: the share of the new in averages of squares.
  double share_of_new(size_t index) const;

  void prepare(const std::vector<Batch>& batches) override;
  void update(const Batch& batch) override;
  bool by_rows() const override { return true; }
  void hold(size_t index) override;

  void add_squares(size_t index, const at::Tensor& gradient, const at::Tensor& sums) const;
  void take_squares(size_t index, const at::Tensor& gradient, const at::Tensor& sums);
  /// u of one box, before it is scaled down: fp32, shaped like the box.
  at::Tensor direction(size_t index, size_t box, const at::Tensor& gradient) const;

  AdafactorOptions options_;
  WholeModel model_;
  Places sums_, scalars_;  ///< of row and column sums and the parameter's squares; of one number a parameter
  std::vector<at::Tensor> row_var_, col_var_, variance_, exp_avg_;
  at::Tensor size_, excess_;  ///< between prepare and update, fp64 [parameters of the model]: max(1e-3, rms(p)) and max(1, rms(u))
};

}  // namespace tessera::optim
