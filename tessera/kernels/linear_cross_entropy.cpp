#include "tessera/kernels/linear_cross_entropy.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sub.h>
#include <torch/library.h>

#include "tessera/core/ambient.h"
#include "tessera/core/autograd_function.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/half.h"
#include "tessera/kernels/operator.h"
#include "tessera/kernels/products.h"
#include "tessera/kernels/reference.h"
#include "tessera/kernels/routines.h"
#include "tessera/kernels/widen.h"
#include "tessera/memory/memory.h"
#include "tessera/memory/on_host.h"

// Logits of all tokens would be the largest tensor of a training step, and autograd would keep them, and make a second one for their gradient. The gradient of
// a sum is known before backward up to a factor, so each chunk's logits are turned into it in place, multiplied on, and forgotten. The factor that is expected
// is folded in. What is kept are the gradients of the two inputs; they are given away in backward, not lent, so that autograd need not copy them.

namespace tessera::kernels {

namespace {

constexpr int64_t kSmallestChunk = 128;

using Parts = std::optional<c10::intrusive_ptr<VocabularyParts>>;
using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::ScalarType, int64_t, double, bool,
                                                               bool, at::ScalarType, const std::optional<at::Tensor>&, bool, double, double, const Parts&);

/// Sum over chunks of d_logits^T hidden, in `handed_on`. fp32 products (`compute`) add into the result themselves; others are rounded to their dtype, so
/// their sum needs fp32.
class WeightGradient {
 public:
  /// `place`: where the sum is to lie, if anywhere; `adds`: to what lies there.
  WeightGradient(const at::Tensor& weight, at::ScalarType compute, bool single_chunk, at::ScalarType handed_on, const std::optional<at::Tensor>& place,
                 bool adds)
      : handed_on_(handed_on),
        product_(compute == at::kFloat ? at::Tensor() : at::empty(weight.sizes(), weight.options().dtype(compute))),
        sum_(place                                                                   ? *place
             : product_.defined() && single_chunk && compute == weight.scalar_type() ? product_
                                                                                     : at::empty(weight.sizes(), weight.options().dtype(at::kFloat))),
        first_(!adds) {}

  void add(const at::Tensor& d_logits, const at::Tensor& hidden) {
    if (!product_.defined()) {
      at::Tensor sum = sum_;
      at::addmm_out(sum, sum_, d_logits.t(), hidden, /*beta=*/first_ ? 0 : 1);
    } else {
      at::mm_out(product_, d_logits.t(), hidden);
      if (!product_.is_same(sum_)) routines_for(sum_).pointwise.accumulate(sum_, product_, first_);
    }
    first_ = false;
  }

  at::Tensor finish() {
    if (first_) sum_.zero_();
    product_ = at::Tensor();
    return sum_.to(handed_on_);
  }

 private:
  at::ScalarType handed_on_;
  at::Tensor product_, sum_;
  bool first_;
};

/// Losses of rows of which others hold columns as well, and, with `gradient`, logits <- their gradient * scale.
void meet_parts(VocabularyParts& parts, const CrossEntropyRoutines& routines, const at::Tensor& logits, const at::Tensor& losses, const at::Tensor& labels,
                double scale, const LossTerms& terms, bool gradient) {
  const at::Tensor most = at::empty_like(losses), sum = at::empty_like(losses), target = at::empty_like(losses);
  routines.part(most, sum, target, logits, labels, parts.first, terms);
  parts.meet(most, sum, target);
  const at::Tensor lse = sum.log_().add_(most);
  at::Tensor loss = losses;
  at::sub_out(loss, lse, target);
  if (terms.z != 0) loss.addcmul_(lse, lse, terms.z);
  loss.masked_fill_(labels < 0, 0);
  if (gradient) routines.part_gradient(logits, labels, parts.first, lse, scale, terms);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels, at::ScalarType compute,
                                                       int64_t chunk_tokens, double expected_gradient, bool needs_hidden, bool needs_weight,
                                                       at::ScalarType handed_on, const std::optional<at::Tensor>& place, bool adds, double label_smoothing,
                                                       double z_loss, const Parts& parts) {
  const int64_t tokens = hidden.size(0), dim = hidden.size(1), vocabulary = weight.size(0);
  // Parts meet once a chunk: what a part that has a column less could do in fewer chunks must not count.
  const int64_t columns = parts ? (*parts)->largest : vocabulary;
  const int64_t chunk = linear_cross_entropy_chunk(tokens, columns, compute, chunk_tokens, place ? kLogitsBytesInPlace : kLogitsBytes);
  const auto& routines = routines_for(hidden);
  const int64_t entries = parts ? (*parts)->total : vocabulary;
  const LossTerms terms = loss_terms({label_smoothing, z_loss}, entries);
  routines.cross_entropy.check_labels(labels, entries);

  const auto floats = hidden.options().dtype(at::kFloat);
  const at::Tensor total = at::empty({}, floats), losses = at::empty({tokens}, floats);
  const at::Tensor lse = needs_hidden || needs_weight ? at::Tensor() : at::empty({chunk}, floats);
  // Operands are of `compute`; products, and the logits between them, of `product`.
  const at::ScalarType product = is_widened(compute, hidden.device()) ? at::kFloat : compute;
  const at::Tensor x = hidden.to(compute).to(product).contiguous(), w = weight.to(compute).to(product).contiguous();
  at::Tensor d_hidden, d_hidden_chunk;
  if (needs_hidden) {
    d_hidden = at::empty(hidden.sizes(), hidden.options());
    if (product != hidden.scalar_type()) d_hidden_chunk = at::empty({chunk, dim}, x.options());
  }
  std::optional<WeightGradient> d_weight;
  if (needs_weight) d_weight.emplace(weight, product, chunk >= tokens, handed_on, place, adds);
  const at::Tensor logits_buffer = [&] {
    const MemoryScope outputs(MemoryCategory::Outputs);
    return at::empty({chunk, vocabulary}, x.options());
  }();

  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t size = std::min(chunk, tokens - begin);
    const at::Tensor x_chunk = x.narrow(0, begin, size), label_chunk = labels.narrow(0, begin, size), loss_chunk = losses.narrow(0, begin, size);
    at::Tensor logits = logits_buffer.narrow(0, 0, size);
    at::mm_out(logits, x_chunk, w.t());
    if (parts) {
      meet_parts(**parts, routines.cross_entropy, logits, loss_chunk, label_chunk, expected_gradient, terms, needs_hidden || needs_weight);
    } else if (needs_hidden || needs_weight) {
      routines.cross_entropy.in_place(logits, loss_chunk, label_chunk, expected_gradient, terms);
    } else {
      routines.cross_entropy.forward(loss_chunk, lse.narrow(0, 0, size), logits, label_chunk, terms);
    }
    if (needs_hidden) {
      const at::Tensor target = d_hidden.narrow(0, begin, size);
      at::Tensor gradient = d_hidden_chunk.defined() ? d_hidden_chunk.narrow(0, 0, size) : target;
      at::mm_out(gradient, logits, w);
      if (d_hidden_chunk.defined()) target.copy_(gradient);
    }
    if (needs_weight) d_weight->add(logits, x_chunk);
  }
  routines.cross_entropy.sum(total, losses);
  const at::Tensor weight_gradient = needs_weight ? d_weight->finish() : at::Tensor();
  return {total, d_hidden, place ? at::Tensor() : weight_gradient};
}

/// Whether the loss's gradient is the number that was folded in. A device would have to be waited for, so there the answer is no, and costs one pass over the
/// gradients.
bool is_planned(const at::Tensor& grad, double planned) {
  if (!is_on_host(grad)) return false;
  if (grad.is_meta()) return true;  // a dry run goes as planned
  return grad.scalar_type() == at::kFloat && *grad.const_data_ptr<float>() == static_cast<float>(planned);
}

/// What does not differ from call to call of one loss.
struct Settings {
  at::ScalarType compute;
  int64_t chunk_tokens;
  double expected_gradient;
  double label_smoothing, z_loss;
  at::ScalarType handed_on;  ///< in which the weight's gradient is
  Parts parts;
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> call(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels, const Settings& settings,
                                                    bool needs_hidden, bool needs_weight, const GradientPlace& place) {
  static const auto op = find_operator<Forward>("tessera::linear_cross_entropy");
  const at::AutoDispatchBelowADInplaceOrView below;
  auto result =
      op.call(hidden, weight, labels, settings.compute, settings.chunk_tokens, settings.expected_gradient, needs_hidden, needs_weight, settings.handed_on,
              place.defined() ? std::optional(place.memory) : std::nullopt, place.holds_sum, settings.label_smoothing, settings.z_loss, settings.parts);
  if (place.defined()) std::get<2>(result) = place.memory.alias();  // a handle that autograd finds to be the only one
  return result;
}

using Place = std::function<GradientPlace()>;

GradientPlace place_of(const at::Tensor& weight, const Place& ask) {
  GradientPlace place = ask ? ask() : GradientPlace();
  if (!place.defined()) return place;
  const at::Tensor& memory = place.memory;
  require(memory.sizes() == weight.sizes() && memory.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat && memory.is_contiguous() &&
              !memory.requires_grad(),
          "linear_cross_entropy: weight_gradient must be contiguous fp32 ", weight.sizes(), " for a weight that is fp32 and wants a gradient");
  return place;
}

at::Tensor scaled(at::Tensor gradient, const at::Tensor& grad, double planned, bool in_sum = false) {
  if (!gradient.defined() || is_planned(grad, planned)) return gradient;
  if (in_sum) {
    throw Error(detail::concat("linear_cross_entropy: backward brought another gradient than expected_gradient = ", planned,
                               ", and the weight's has been added to others already"));
  }
  return gradient.mul_(grad.div(planned));
}

/// Holds the gradients between the two passes and gives them away, so that autograd can keep them as they are instead of copying.
struct LinearCrossEntropyFunction : AutogradFunction<LinearCrossEntropyFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                            const Settings& settings, bool needs_hidden, bool needs_weight, const GradientPlace& place) {
    auto [loss, d_hidden, d_weight] = call(hidden, weight, labels, settings, needs_hidden, needs_weight, place);
    auto& data = context->saved_data;
    data["expected"] = settings.expected_gradient;
    data["in_sum"] = place.holds_sum;
    if (d_hidden.defined()) data["hidden"] = std::move(d_hidden);
    if (d_weight.defined()) data["weight"] = std::move(d_weight);
    return loss;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    auto& data = context->saved_data;
    const auto expected = data.find("expected");
    require(expected != data.end(), "linear_cross_entropy: its gradients were given away by an earlier backward pass; run the forward pass again");
    const double planned = expected->second.toDouble();
    data.erase(expected);
    const bool in_sum = data.at("in_sum").toBool();
    const auto take = [&](const char* name, bool is_in_sum) {
      const auto found = data.find(name);
      if (found == data.end()) return at::Tensor();
      at::Tensor gradient = std::move(found->second).toTensor();
      data.erase(found);
      return scaled(std::move(gradient), grads[0], planned, is_in_sum);
    };
    const at::Tensor none;
    at::Tensor d_hidden = take("hidden", false), d_weight = take("weight", in_sum);
    return first_derivative("linear_cross_entropy", grads, {std::move(d_hidden), std::move(d_weight), none, none, none, none, none});
  }
};

/// Makes them in the backward pass.
struct GradientsInBackward : AutogradFunction<GradientsInBackward> {
  struct Later : torch::CustomClassHolder {
    Later(Settings settings, Place place) : settings(std::move(settings)), place(std::move(place)) {}
    Settings settings;
    Place place;
  };

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                            const Settings& settings, const Place& place) {
    context->save_for_backward({hidden, weight, labels});
    context->saved_data["later"] = c10::IValue::make_capsule(c10::make_intrusive<Later>(settings, place));
    return std::get<0>(call(hidden, weight, labels, settings, false, false, {}));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto later = c10::static_intrusive_pointer_cast<Later>(context->saved_data["later"].toCapsule());
    const bool needs_hidden = context->needs_input_grad(0), needs_weight = context->needs_input_grad(1);
    const GradientPlace place = needs_weight ? place_of(saved[1], later->place) : GradientPlace();
    auto [loss, d_hidden, d_weight] = call(saved[0], saved[1], saved[2], later->settings, needs_hidden, needs_weight, place);
    const at::Tensor none;
    const double planned = later->settings.expected_gradient;
    return first_derivative(
        "linear_cross_entropy", grads,
        {scaled(std::move(d_hidden), grads[0], planned), scaled(std::move(d_weight), grads[0], planned, place.holds_sum), none, none, none});
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.class_<VocabularyParts>("VocabularyParts");
  m.def(
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, ScalarType compute_dtype, int chunk_tokens, float expected_gradient, bool "
      "needs_hidden, bool needs_weight, ScalarType handed_on, Tensor(a!)? weight_gradient, bool adds, float label_smoothing, float z_loss, "
      "__torch__.torch.classes.tessera.VocabularyParts? "
      "parts) -> (Tensor loss, Tensor d_hidden, "
      "Tensor d_weight)");
}
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) { m.impl("linear_cross_entropy", forward); }

namespace {
const Ambient<bool> whole_logits;
}
WholeLogitsGuard::WholeLogitsGuard() : former_(std::exchange(*whole_logits, true)) {}
WholeLogitsGuard::~WholeLogitsGuard() { *whole_logits = former_; }

int64_t linear_cross_entropy_chunk(int64_t tokens, int64_t vocabulary, at::ScalarType compute_dtype, int64_t chunk_tokens, int64_t logits_bytes) {
  const int64_t row_bytes = std::max<int64_t>(1, vocabulary) * static_cast<int64_t>(c10::elementSize(compute_dtype));
  if (chunk_tokens > 0) return std::max<int64_t>(1, std::min(tokens, chunk_tokens));
  if (*whole_logits) return std::max<int64_t>(1, tokens);
  const int64_t most = std::max(kSmallestChunk, logits_bytes / row_bytes);
  const int64_t chunks = std::max<int64_t>(1, (tokens + most - 1) / most);
  return std::max<int64_t>(1, (tokens + chunks - 1) / chunks);  // chunks of one size, so that the last is no leftover
}

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels, const LinearCrossEntropyOptions& options) {
  require(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1) && weight.size(0) > 0, "linear_cross_entropy: hidden ", hidden.sizes(),
          " must be [tokens, features] and weight ", weight.sizes(), " [vocabulary, features]");
  require(labels.dim() == 1 && labels.size(0) == hidden.size(0) && labels.scalar_type() == at::kLong, "linear_cross_entropy: labels ", labels.sizes(),
          " must be int64 [", hidden.size(0), "]");
  require(options.chunk_tokens >= 0, "linear_cross_entropy: chunk_tokens = ", options.chunk_tokens, " must be positive, or 0 for the default");
  require(options.expected_gradient != 0, "linear_cross_entropy: expected_gradient must not be 0");
  const at::ScalarType compute = options.compute_dtype.value_or(hidden.scalar_type());
  if (compute == at::kHalf && is_widened(compute, hidden.device())) {
    auto wide = options;
    wide.compute_dtype = at::kFloat;
    return linear_cross_entropy(rounded_to_half(hidden), rounded_to_half(weight), labels, wide);
  }
  if (hidden.scalar_type() == at::kHalf && compute != at::kHalf) {  // which loses nothing
    auto wide = options;
    wide.compute_dtype = compute;
    return linear_cross_entropy(hidden.to(at::kFloat), weight, labels, wide);
  }
  const bool stands_for_device = compute == at::kHalf && hidden.is_meta();
  if (stands_for_device && (hidden.scalar_type() == at::kHalf || weight.scalar_type() == at::kHalf)) {
    return linear_cross_entropy(hidden.to(at::kFloat), weight.to(at::kFloat), labels, options);
  }
  if (takes_reference(Kernel::linear_cross_entropy)) {
    return reference::linear_cross_entropy(hidden, weight, labels, compute, options.loss, options.parts.get());
  }
  require_supported("linear_cross_entropy: hidden", hidden);
  if (weight.scalar_type() != at::kHalf) require_supported("linear_cross_entropy: weight", weight);  // which is widened before it is multiplied
  require(is_supported(compute) || stands_for_device, "linear_cross_entropy: compute_dtype ", c10::toString(compute),
          " is not supported; use Float or BFloat16");
  const bool differentiate = at::GradMode::is_enabled(), needs_weight = differentiate && weight.requires_grad();
  const Settings settings{.compute = compute,
                          .chunk_tokens = options.chunk_tokens,
                          .expected_gradient = options.expected_gradient,
                          .label_smoothing = options.loss.label_smoothing,
                          .z_loss = options.loss.z_loss,
                          .handed_on = handed_on_in(weight, at::kFloat),
                          .parts = options.parts ? Parts(options.parts) : std::nullopt};
  if (options.in_backward && differentiate) return GradientsInBackward::apply(hidden, weight, labels.contiguous(), settings, options.weight_gradient);
  return LinearCrossEntropyFunction::apply(hidden, weight, labels.contiguous(), settings, differentiate && hidden.requires_grad(), needs_weight,
                                           needs_weight ? place_of(weight, options.weight_gradient) : GradientPlace());
}

}  // namespace tessera::kernels
