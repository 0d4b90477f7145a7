#pragma once

#include <string>
#include <vector>

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

struct MuonOptions {
  double momentum = 0.95;
  int steps = 5;                            ///< of Newton-Schulz
  int64_t round_bytes = int64_t{16} << 20;  ///< of a rank's matrices that meet together
};

/// Muon (Keller Jordan, 2024) for matrices of hidden layers, scaled as in Muon is Scalable for LLM Training (arXiv:2502.16982), so that AdamW's learning rate
/// and weight decay serve; torch.optim.Muon with adjust_lr_fn = "match_rms_adamw" computes the same, with its Newton-Schulz in bf16 where this is in fp32.
///   m = mu m + (1 - mu) g;  d = mu m + (1 - mu) g;  p -= lr * weight_decay * p;  p -= lr * 0.2 sqrt(max(r, c)) * orthogonal(d)     of a matrix [r, c]
/// A parameter that is several matrices (WholeModel::stacks: experts, heads) has each of them made orthogonal by itself, and scaled by its own shape.
///
/// Where parameters are parts, matrices are dealt over the ranks: a reduce_scatter brings the parts of each to one rank, which makes it orthogonal, and an
/// all_gather brings the results to all. So no product is made twice among them (replicas of them all make it), and parts of any form do. What is frozen
/// (WholeModel::frozen) is left out, until the model's parameter requires a gradient when a step begins.
///   state    momentum_buffer: the parameter's slice, in its dtype
///   memory   4 bytes an element; while it steps 4 more, and where ranks meet a round of matrices: round_bytes, or one matrix, for each rank
///   traffic  where ranks meet, of n that hold all of a model's matrices together: 8 (n - 1) / n bytes sent for each element of all of them
///   work     steps * (4 r^2 c + 2 r^3) FLOPs of a matrix with r <= c, by one of those ranks
class Muon : public Optimizer {
 public:
  /// Throws ConfigError for a parameter that is no matrix, and for a stack whose rows are no multiple of its matrices.
  explicit Muon(std::vector<ParameterGroup> groups, MuonOptions options = {}, WholeModel model = {});

  std::string kind() const override { return "muon"; }
  std::vector<StateTensor> state() const override { return named_state("momentum_buffer", momentum_buffer_); }
  bool needs_begin() const override { return true; }
  void meet_nobody() override;

 private:
  /// Rows `first` .. `first + rows` of a parameter, which one rank makes orthogonal.
  struct Matrix {
    std::string parameter;
    int64_t first = 0, rows = 0, columns = 0;
    int64_t numel() const { return rows * columns; }
  };
  /// What ranks exchange at once: of each rank `length` numbers, where its matrices begin at their offsets.
  struct Placed {
    Matrix matrix;
    int64_t rank = 0, offset = 0;
  };
  struct Round {
    int64_t length = 0;
    std::vector<Placed> matrices;
  };

  std::vector<Round> deal_rounds() const;
  bool has_direction(const std::string& parameter) const;
  /// Deals anew once a parameter that was frozen is not.
  void take_in_unfrozen();
  /// Copies this rank's part of a matrix: out of its direction into `whole` [rows, columns], or back.
  void exchange(const Matrix& matrix, const at::Tensor& whole, bool out) const;
  int64_t matrices_in(const std::string& parameter) const;
  void prepare(const std::vector<Batch>& batches) override;
  void update(const Batch& batch) override;
  bool by_rows() const override { return true; }
  void hold(size_t index) override;

  MuonOptions options_;
  WholeModel model_;
  std::vector<nn::NamedParameter> frozen_;  ///< of model_.frozen, those that are so still
  std::vector<Round> rounds_;
  std::vector<at::Tensor> momentum_buffer_;
  std::vector<at::Tensor> direction_;         ///< between begin and apply, of each of parameters_: fp32, its slice
  std::map<std::string, size_t> index_of_{};  ///< of parameters_
};

/// The matrix [r, c] with its singular values brought near 1 (about 0.5 to 1.5) by `steps` of the quintic Newton-Schulz iteration, fp32.
at::Tensor orthogonal(const at::Tensor& matrix, int steps);

}  // namespace tessera::optim
