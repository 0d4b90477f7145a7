#include "tessera/kernels/reference.h"

#include <ATen/ATen.h>

#include "tessera/core/autograd_function.h"
#include "tessera/core/once_differentiable.h"
#include "tessera/core/rng.h"
#include "tessera/kernels/consecutive.h"
#include "tessera/kernels/loss_terms.h"
#include "tessera/kernels/widen.h"

namespace tessera::kernels::reference {

namespace {
/// Arithmetic type: at least fp32.
at::Tensor wide(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat); }
}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, std::optional<at::ScalarType> out_dtype) {
  const at::Tensor input = wide(x);
  const at::Tensor rstd = at::rsqrt(input.square().mean(-1, /*keepdim=*/true) + eps);
  return (input * rstd * wide(weight)).to(out_dtype.value_or(x.scalar_type()));
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) { return (at::silu(wide(gate)) * wide(up)).to(gate.scalar_type()); }

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up) { return (at::gelu(wide(gate), "tanh") * wide(up)).to(gate.scalar_type()); }

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps, std::optional<at::ScalarType> out_dtype) {
  const at::Tensor input = wide(x);
  const at::Tensor centered = input - input.mean(-1, /*keepdim=*/true);
  const at::Tensor rstd = at::rsqrt(centered.square().mean(-1, /*keepdim=*/true) + eps);
  return (centered * rstd * wide(weight) + wide(bias)).to(out_dtype.value_or(x.scalar_type()));
}

at::Tensor bias_activation(const at::Tensor& x, const at::Tensor& bias, Activation activation) {
  const at::Tensor sum = wide(x) + wide(bias);
  return (activation == Activation::Silu ? at::silu(sum) : at::gelu(sum, "tanh")).to(x.scalar_type());
}

void add_embedding_gradient_(const at::Tensor& sum, const at::Tensor& rows, const at::Tensor& ids, int64_t padding_row) {
  const at::Tensor counted = padding_row < 0 ? rows : rows.masked_fill(ids.eq(padding_row).unsqueeze(1), 0);
  if (sum.scalar_type() != at::kBFloat16 && sum.scalar_type() != at::kHalf) {
    at::Tensor(sum).index_add_(0, ids, counted.to(sum.scalar_type()));
  } else {
    sum.copy_(wide(sum).index_add_(0, ids, wide(counted)));
  }
}

at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto halves = wide(x).chunk(2, -1);
  const at::Tensor c = cos.unsqueeze(-2), s = sin.unsqueeze(-2);
  return at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, -1).to(x.scalar_type());
}

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& labels, const CrossEntropyOptions& options) {
  const at::Tensor x = wide(logits);
  const at::Tensor loss = at::cross_entropy_loss(x, labels, /*weight=*/{}, at::Reduction::Sum, kIgnoredLabel, options.label_smoothing);
  if (options.z_loss == 0) return loss;
  return loss + options.z_loss * at::logsumexp(x, -1).square().masked_fill(labels == kIgnoredLabel, 0).sum();
}

namespace {

/// What each row's target expects of these columns, which are some of `parts.total`: [T, V].
at::Tensor expected_share(const at::Tensor& x, const at::Tensor& labels, const VocabularyParts& parts, const CrossEntropyOptions& options) {
  const LossTerms terms = loss_terms(options, parts.total);
  const at::Tensor columns = consecutive(parts.first, x.size(1), labels.device());
  return (labels.unsqueeze(1) == columns).to(x.scalar_type()) * terms.label + terms.each;
}

/// The logits, whose gradient has no derivative.
struct DerivedOnce : AutogradFunction<DerivedOnce> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& logits) { return logits.alias(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/, const torch::autograd::variable_list& grads) {
    return once_differentiable("the loss over a vocabulary that is cut", "keep the head whole (leave it out of the plan) where it is differentiated twice",
                               grads, {grads[0].clone()});
  }
};

/// Ranks meet in numbers, not in a graph: what others hold of a row is a constant, whose value the loss has, and whose gradient here is that of
/// sum(exp(x - lse)) (1 + 2 z lse) - sum(expected x).
at::Tensor cross_entropy_of_parts(const at::Tensor& logits, const at::Tensor& labels, const CrossEntropyOptions& options, VocabularyParts& parts) {
  const at::Tensor x = wide(DerivedOnce::apply(logits)), constant = x.detach(), expected = expected_share(constant, labels, parts, options);
  const at::Tensor most = std::get<0>(constant.max(-1)), sum = (constant - most.unsqueeze(1)).exp().sum(-1), target = (expected * constant).sum(-1);
  parts.meet(most, sum, target);
  const at::Tensor lse = sum.log() + most, ignored = labels == kIgnoredLabel;
  const at::Tensor value = lse - target + options.z_loss * lse.square();
  const at::Tensor slope = (x - lse.unsqueeze(1)).exp().sum(-1) * (1 + 2 * options.z_loss * lse) - (expected * x).sum(-1);
  // The value alone, to the last bit: every rank's slope is another, and would round it otherwise.
  return (value + (slope - slope.detach())).masked_fill(ignored, 0).sum();
}

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels, std::optional<at::ScalarType> compute_dtype,
                                const CrossEntropyOptions& options, VocabularyParts* parts) {
  const at::ScalarType compute = compute_dtype.value_or(hidden.scalar_type());
  const at::Tensor logits = at::mm(hidden.to(compute), widen(weight, compute).t());
  return parts == nullptr ? reference::cross_entropy_sum(logits, labels, options) : cross_entropy_of_parts(logits, labels, options, *parts);
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, std::optional<double> scale) {
  const int64_t groups = q.size(1) / k.size(1);
  const at::Tensor keys = wide(k).repeat_interleave(groups, 1), values = wide(v).repeat_interleave(groups, 1);
  const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  at::Tensor scores = at::matmul(wide(q), keys.transpose(-2, -1)) * factor;
  if (causal) {
    const at::Tensor future = at::ones({q.size(2), k.size(2)}, q.options().dtype(at::kBool)).triu(1);
    scores = scores.masked_fill(future, -std::numeric_limits<double>::infinity());
  }
  // Laid out as [B, S, H, D], like the fused operator's result.
  return at::matmul(at::softmax(scores, -1), values).to(q.scalar_type()).transpose(1, 2).contiguous().transpose(1, 2);
}

at::Tensor dropout(const at::Tensor& x, double p, uint64_t key, const at::Tensor& rows, FeatureBlock features) {
  const int64_t dim = x.dim() == 0 ? 1 : x.size(-1);
  const int64_t total = features.total == 0 ? dim : features.total;
  at::Tensor keep = at::empty({rows.numel(), dim}, rows.options().dtype(at::kFloat));
  if (!x.is_meta()) {
    // One element after the other, so that the fused kernel is held against the definition.
    const CounterRng rng = CounterRng::from_key(key);
    at::Tensor host = keep.device().is_cpu() ? keep : keep.cpu();
    const at::Tensor row_index = rows.cpu();
    for (int64_t r = 0; r < rows.numel(); ++r) {
      const int64_t first = row_index.const_data_ptr<int64_t>()[r] * total + features.offset;
      for (int64_t i = 0; i < dim; ++i)
        host.mutable_data_ptr<float>()[r * dim + i] = rng.uniform(static_cast<uint64_t>(first + i)) >= static_cast<float>(p) ? 1.0f : 0.0f;
    }
    keep = host.to(keep.device());
  }
  return (wide(x) * keep.view(x.sizes()) * (1.0 / (1.0 - p))).to(x.scalar_type());
}

}  // namespace tessera::kernels::reference
