#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/data_parallel/communication_hook.h"

namespace tessera {

struct PowerSgdOptions {
  int64_t rank = 4;            ///< r: of the approximation of each matrix
  int64_t start = 10;          ///< steps before compression begins; gradients cross whole until then
  double min_compression = 2;  ///< a matrix is compressed where it then takes fewer than 1 / min_compression of its elements
  uint64_t seed = 0;           ///< of the first Q
  int64_t steps_done = 0;      ///< of the run, before the first step of this object: what a resumed run counts into `start`
};

/// PowerSGD (arXiv:1905.13727): a gradient matrix M [n, m] (dimension 0 by the rest) crosses as P Q of rank r, found by one step of power iteration that starts
/// from the Q of the step before. With M_w = gradient + error of rank w, and M their sum:
///
///   P [r, n] <- sum of Q M_w^T;  P <- orthonormal rows;  Q [r, m] <- sum of P M_w;  gradient <- P^T Q;  error of w <- M_w - P^T Q / ranks
///
/// Error feedback: what a step leaves out is added to the next gradient, so the sum over steps of what is applied follows the sum of the true gradients. Small
/// tensors (of one dimension, or where r (n + m) min_compression >= n m) cross whole, in one all-reduce with the P of their bucket. The first Q is a
/// pure function of (seed, parameter name, index), equal on all ranks and in any bucket layout; a row of Q that became zero (no rank had a
/// gradient) is replaced by its first value, or it would stay zero for ever. All ranks end with the same bits, since they compute from the same sums.
///
///   traffic per step   r (n + m) elements of each compressed matrix (4 bytes in fp32), in two all-reduces a bucket: P with the small tensors, then Q
///   memory             carried, under MemoryCategory::Comm: the error, one gradient of the compressed matrices per rank, and 2 r m elements a matrix;
///                      in a step: P, Q and the small tensors once more, and for the while of a product the largest matrix
///   arithmetic         6 r n m FLOPs a matrix, and 4 r^2 n to make P orthonormal
///
/// What ranks that compute one model together (tensor parallelism) hold alike crosses whole, too: they must stay one, and errors that are fed back would part
/// them, a last bit first.
///
/// A gradient that is not finite on one rank comes out so on all, and what that matrix owes and its Q stay as they were: who skips the step goes on. What is
/// owed is in the unit of the gradients; behind a loss scale that changes it would be in another's, so use the one or the other.
///
/// The error after a step depends on the rank, and is part of a checkpoint (`state`). Works for fp32 and fp64 gradients; prepare throws ConfigError for others.
class PowerSgd final : public CommunicationHook {
 public:
  /// Throws ConfigError for a rank below 1, or a start or min_compression below 0.
  explicit PowerSgd(PowerSgdOptions options = {});

  void prepare(const std::vector<nn::NamedParameter>& parameters, const std::vector<at::ScalarType>& dtypes, const comm::Group& group) override;
  void set_average(bool average) override { average_ = average; }
  bool is_linear() const override { return true; }  ///< in fp16, of which nothing is compressed
  void complete_step() override;
  std::unique_ptr<BucketReduction> start(GradientBucket& bucket, GradientChannel& channel) override;

  /// "powersgd.error.<parameter>" in the parameter's shape (Sum, or Mean where gradients are averaged), and "powersgd.q.<parameter>" [r, m] (Equal).
  std::vector<HookTensor> state() const override;

  /// What is carried for one compressed matrix [n, m] as it lies in memory.
  struct Matrix {
    int64_t n = 0, m = 0, r = 0;
    at::Tensor error = {};    ///< [n * m]
    at::Tensor q = {};        ///< [r, m]
    at::Tensor first_q = {};  ///< [r, m]
    at::Tensor shaped = {};   ///< `error` in the parameter's shape
    Slice slice = {};         ///< of the parameter
  };

 private:
  PowerSgdOptions options_;
  bool average_ = false;
  int64_t steps_done_ = 0;                  ///< of the run
  std::vector<std::string> names_;          ///< of compressed parameters, in the order of registration
  std::map<std::string, Matrix> matrices_;  ///< by parameter
};

/// Makes the rows of `p` [r, n], contiguous, orthonormal from the first to the last (Gram-Schmidt, each row twice, which holds the product of any two rows
/// below 1e-6 in fp32). Rows that depend on those before come out as any direction orthogonal to them, or as zero. On the CPU the bits
/// depend on the values alone, not on the number of threads.
void orthonormalize_rows(const at::Tensor& p);

}  // namespace tessera
