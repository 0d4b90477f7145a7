#include "tessera/nn/sync_batch_norm.h"

#include <algorithm>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rsqrt.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/autograd_function.h"
#include "tessera/core/error.h"
#include "tessera/core/once_differentiable.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/parameter.h"

// The variance of the whole batch as E[x^2] - mean^2 would cancel where the mean is large beside the spread. So each rank brings its mean and its squares
// around that, and those are joined around the common mean (Chan, Golub, LeVeque 1979): one all-gather of 2C + 1 numbers, which also brings the counts, so that
// ranks may have samples of any number, none included. All ranks sum in rank order, and have the same bits. Backward through the statistics needs two sums over
// the whole batch: one all-reduce of 2C.

namespace tessera::nn {

namespace {

/// Of all samples and positions of all ranks, in the type of the arithmetic.
struct Statistics {
  at::Tensor mean;      ///< [C]
  at::Tensor variance;  ///< [C], of the population
  at::Tensor count;     ///< [1]
};

/// Each rank's mean and summed squares around it meet, and are joined around the common mean: no difference of large sums. `rows` [n, C].
Statistics statistics_of(const comm::Group& group, const at::Tensor& rows) {
  const comm::CallSite site("sync_batch_norm");
  const c10::NoGradGuard no_grad;
  const int64_t n = rows.size(0), channels = rows.size(1);
  const at::Tensor mean = rows.sum(0) / static_cast<double>(std::max<int64_t>(n, 1));
  const at::Tensor squares = (rows - mean).square().sum(0);
  const at::Tensor mine = at::cat({mean, squares, at::full({1}, static_cast<double>(n), mean.options())}).unsqueeze(0);
  const at::Tensor all = at::empty({group.size(), 2 * channels + 1}, mine.options());
  comm::all_gather(group, all, mine);
  const at::Tensor means = all.narrow(1, 0, channels), counts = all.narrow(1, 2 * channels, 1);
  const at::Tensor count = counts.sum(0), some = count.clamp_min(1), common = (means * counts).sum(0) / some;
  const at::Tensor spread = all.narrow(1, channels, channels).sum(0) + ((means - common).square() * counts).sum(0);
  return {common, spread / some, count};
}

/// By the samples of this rank alone, and by operators, which have second derivatives.
at::Tensor normalized_alone(const at::Tensor& rows, double eps) {
  const at::Tensor centered = rows - rows.mean(0);
  return centered * at::rsqrt(centered.square().mean(0) + eps);
}

struct GroupHolder : torch::CustomClassHolder {
  explicit GroupHolder(comm::Group held) : group(std::move(held)) {}
  comm::Group group;
};

/// x^ = (x - mean) / std, with the gradient through the statistics of all ranks: dx = (dy - mean(dy) - x^ mean(dy x^)) / std, means over the whole batch.
struct NormalizeFunction : AutogradFunction<NormalizeFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& rows, const at::Tensor& mean, const at::Tensor& rstd,
                            const at::Tensor& count, const c10::intrusive_ptr<GroupHolder>& holder) {
    const at::Tensor normalized = (rows - mean) * rstd;
    context->save_for_backward({normalized, rstd, count});
    context->saved_data["group"] = c10::IValue::make_capsule(holder);
    return normalized;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const comm::CallSite site("sync_batch_norm");
    const auto saved = context->get_saved_variables();
    const at::Tensor &normalized = saved[0], &rstd = saved[1], &count = saved[2], &dy = grads[0];
    const auto holder = c10::static_intrusive_pointer_cast<GroupHolder>(context->saved_data["group"].toCapsule());
    const at::Tensor sums = at::cat({dy.sum(0), (dy * normalized).sum(0)});
    comm::all_reduce(holder->group, sums);
    const auto means = (sums / count.clamp_min(1)).chunk(2);
    const at::Tensor d_rows = (dy - means[0] - normalized * means[1]) * rstd;
    return once_differentiable("SyncBatchNorm", "torch::nn::BatchNorm has one, by the samples of one rank; in eval mode this module has, too", grads,
                               {d_rows, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()});
  }
};

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const BatchNormOptions& given) : options(given) {
  const int64_t channels = options.num_features();
  require(channels > 0, "SyncBatchNorm: num_features = ", channels, " must be positive");
  if (options.affine()) {
    weight = register_parameter("weight", at::empty({channels}));
    bias = register_parameter("bias", at::empty({channels}));
    set_init(weight, InitRule::ones());
    set_init(bias, InitRule::zeros());
  }
  if (options.track_running_stats()) {
    running_mean = register_buffer("running_mean", at::empty({channels}));
    running_var = register_buffer("running_var", at::empty({channels}));
    num_batches_tracked = register_buffer("num_batches_tracked", at::empty({}, at::kLong));
  }
  reset_parameters();
}

void SyncBatchNormImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  if (weight.defined()) weight.fill_(1);
  if (bias.defined()) bias.zero_();
  reset_buffers();
}

bool SyncBatchNormImpl::reset_buffers() {
  if (!running_mean.defined()) return true;
  running_mean.zero_();
  running_var.fill_(1);
  num_batches_tracked.zero_();
  return true;
}

/// The running variance is the unbiased one, as torch keeps it. A batch that is empty on all ranks says nothing.
void SyncBatchNormImpl::track(const at::Tensor& mean, const at::Tensor& variance, const at::Tensor& count) {
  const at::NoGradGuard no_grad;
  num_batches_tracked.add_(1);
  const at::Tensor part = options.momentum() ? at::full({}, *options.momentum(), mean.options()) : num_batches_tracked.to(mean.scalar_type()).reciprocal();
  const at::Tensor weight_of_batch = part * (count > 0).to(part.scalar_type());
  running_mean.add_((mean - running_mean) * weight_of_batch);
  running_var.add_((variance * (count / (count - 1).clamp_min(1)) - running_var) * weight_of_batch);
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& x) {
  if (bypassed(*this)) return call(*this, x);
  require(x.dim() >= 2 && x.size(1) == options.num_features(), "SyncBatchNorm '", path(), "': x ", x.sizes(), " must be [samples, ", options.num_features(),
          ", ...]");
  const at::ScalarType wide = wide_type(x);
  const at::Tensor by_channel = cast(x, wide).movedim(1, -1), rows = by_channel.reshape({-1, x.size(1)});
  at::Tensor normalized;
  if (is_training()) {
    const auto [mean, variance, count] = statistics_of(group_, rows);
    // As torch::nn::BatchNorm; a device would have to be waited for.
    require(!count.is_cpu() || count.item<double>() != 1, "SyncBatchNorm '", path(),
            "': one value per channel on all ranks together has no variance; give it more samples, or set eval()");
    if (at::GradMode::is_enabled()) group_.in_backward().by_graphs = true;
    if (options.track_running_stats()) track(mean, variance, count);
    normalized = NormalizeFunction::apply(rows, mean, at::rsqrt(variance + options.eps()), count, c10::make_intrusive<GroupHolder>(group_));
  } else if (!options.track_running_stats()) {
    // As torch.nn.SyncBatchNorm: ranks need not evaluate together.
    require(rows.size(0) != 1, "SyncBatchNorm '", path(),
            "': in eval mode one value per channel on this rank has no variance; give it more samples, or let it track running statistics");
    normalized = normalized_alone(rows, options.eps());
  } else {
    normalized = (rows - cast(running_mean, wide)) * at::rsqrt(cast(running_var, wide) + options.eps());
  }
  if (weight.defined()) normalized = normalized * cast(in_use(weight), wide) + cast(in_use(bias), wide);
  return cast(normalized.view(by_channel.sizes()).movedim(-1, 1), x.scalar_type());
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::nn::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps() << ", group=" << group_.name() << ")";
}

int64_t synchronize_batch_norms(torch::nn::Module& root, const comm::Group& group) {
  int64_t count = 0;
  root.apply([&](torch::nn::Module& module) {
    if (auto* norm = dynamic_cast<SyncBatchNormImpl*>(&module)) {
      norm->synchronize(group);
      ++count;
    }
  });
  return count;
}

}  // namespace tessera::nn
