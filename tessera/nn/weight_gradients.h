#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/kernels/fp8.h"

namespace tessera::nn {

/// Gradients of weights that backward passes have left for later. A backward pass makes two things of each layer's output gradient: what the layer before waits
/// for, and the gradient of the weight, for which nobody waits. Split in two, the second part fills the bubbles of a pipeline (zero bubble, arXiv:2401.10241,
/// where they are B and W).
///
///   const auto later = std::make_shared<WeightGradients>();
///   { const LeaveWeightGradients scope(later); loss = ...; loss.backward(); }   // nn::Linear and what wraps it leave theirs
///   later->compute();                                                           // the same bits as if they had not
///
/// Autograd may take a gradient over for another leaf without a copy, and the next backward pass then adds to it in place: where one comes before compute(),
/// call own() when the first is over.
///
/// A pass that is there for other gradients (torch::autograd::grad) leaves nothing, and may be differentiated once more.
///
/// Memory: of each layer its input and its output's gradient, from backward until compute; what own() copies besides, while another holds it. One micro-batch,
/// one thread.
class WeightGradients {
 public:
  enum class When { Later, AtOnce };  ///< at once: in the midst of backward, as nobody had left them, but each delivered by itself

  explicit WeightGradients(When when = When::Later) : when_(when) {}
  ~WeightGradients();  ///< what was not computed is promised no more
  WeightGradients(const WeightGradients&) = delete;
  WeightGradients& operator=(const WeightGradients&) = delete;

  /// Keeps `gradient` for later, and promises it to the dispatcher of `parameter` (GradientDispatcher::expect). It is delivered as one of `source`
  /// (GradientSource).
  void leave(const at::Tensor& parameter, std::function<at::Tensor()> gradient, std::optional<int> source = std::nullopt);

  /// An output's gradient that one or several of those that are left are made of: what the last of them holds is let go with it.
  using Kept = std::shared_ptr<const at::Tensor>;
  Kept keep(const at::Tensor& gradient);

  /// Copies of what is kept whatever lies in memory that somebody else holds, too. The pass has ended, and its caller has let go of what it began with.
  void own();

  /// Computes what was left, in that order, and delivers it (GradientDispatcher::deliver): listeners and synchronizers see each as it comes. So do hooks
  /// that a program has put on the weight itself (Tensor::register_hook).
  void compute();

  bool empty() const { return left_.empty(); }

 private:
  struct Left {
    at::Tensor parameter;
    std::function<at::Tensor()> gradient;
    std::optional<int> source;
  };
  When when_;
  std::vector<Left> left_;
  std::vector<std::weak_ptr<at::Tensor>> kept_;
};

/// Where a layer computes micro-batches of several ranks one after the other: whose is at hand. While alive, stacked weights that this thread multiplies by
/// leave their gradients as ones of `source`; when these are delivered, it says so to whoever listens to the dispatcher.
class GradientSource {
 public:
  explicit GradientSource(std::optional<int> source);
  ~GradientSource();
  GradientSource(const GradientSource&) = delete;
  GradientSource& operator=(const GradientSource&) = delete;

  /// Of the innermost scope of this thread; nothing outside.
  static std::optional<int> current();

 private:
  std::optional<int> outer_;
};

/// While alive, layers that this thread calls leave their weights' gradients to `later`, where that is not null. Scopes nest.
class LeaveWeightGradients {
 public:
  explicit LeaveWeightGradients(std::shared_ptr<WeightGradients> later);
  ~LeaveWeightGradients();
  LeaveWeightGradients(const LeaveWeightGradients&) = delete;
  LeaveWeightGradients& operator=(const LeaveWeightGradients&) = delete;

  /// Of the innermost scope of this thread; null outside.
  static const std::shared_ptr<WeightGradients>& current();

 private:
  std::shared_ptr<WeightGradients> outer_;
};

using kernels::Fp8Products;

/// kernels::linear(x, weight, bias), or with `fp8` kernels::fp8_linear, where `weight` is what is multiplied of the parameter `of_weight`, itself or cast, and
/// so `bias` (may be undefined) of `of_bias`. Leaves the gradients of both to LeaveWeightGradients::current(), where there is one and both are leaves.
at::Tensor linear_with_weights_later(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& of_weight, const at::Tensor& bias,
                                     const at::Tensor& of_bias, const std::optional<Fp8Products>& fp8 = {});

/// kernels::grouped_linear(x, weight, sizes, fp8), where `weight` [E, O, I] is what is multiplied of the stacked parameter `of_weight` [E * O, I], itself or
/// cast. Leaves its gradient as linear_with_weights_later does.
at::Tensor grouped_with_weights_later(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& of_weight, const std::vector<int64_t>& sizes,
                                      const std::optional<Fp8Products>& fp8 = {});

/// Whether a layer leaves the gradients of `parameters` (some may be undefined) to LeaveWeightGradients::current(): there is one, gradients are recorded, x
/// waits for one of its own, and all of them are leaves that want one.
bool leaves_weight_gradients(const at::Tensor& x, at::ArrayRef<at::Tensor> parameters);

}  // namespace tessera::nn
