#include "tessera/nn/weight_gradients.h"

#include <algorithm>
#include <map>
#include <optional>
#include <ranges>

#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include "tessera/core/ambient.h"
#include "tessera/core/autograd_function.h"
#include "tessera/core/once_differentiable.h"
#include "tessera/kernels/grouped_linear.h"
#include "tessera/kernels/products.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/backward_pass.h"
#include "tessera/nn/gradient_dispatcher.h"

// The layer's own node of the graph is told nothing of its weight: its backward hands on the input's gradient, and notes what the weight's is made of. Nothing
// else of the graph is kept for it, and saved tensors are unpacked once, in backward, as recomputation wants it.

namespace tessera::nn {
namespace {

const Ambient<std::shared_ptr<WeightGradients>> leaving;
const Ambient<std::optional<int>> source_at_hand;

/// To whom a layer leaves them, and of which parameters.
struct Destination : torch::CustomClassHolder {
  std::shared_ptr<WeightGradients> later;
  at::Tensor weight, bias;
  std::optional<Fp8Products> fp8;
};

/// How such a layer multiplies, and what backward makes of it.
at::Tensor multiply(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const std::optional<Fp8Products>& fp8) {
  if (!fp8) return kernels::linear(x, weight, bias);
  return kernels::fp8_linear(x, weight, bias.defined() ? std::optional(bias) : std::nullopt, fp8->out_dtype, fp8->scaling);
}

at::Tensor input_gradient(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& x, const std::optional<Fp8Products>& fp8) {
  if (!fp8) return kernels::linear_input_gradient(dy, weight, x.sizes());
  return kernels::fp8_linear_input_gradient(dy, weight, x, fp8->out_dtype, fp8->scaling);
}

/// Of fp32 operands it may be added up where it is to end up.
kernels::GradientPlace place_for(const at::Tensor& weight, const at::Tensor& dy) {
  const bool fits = !at::GradMode::is_enabled() && weight.scalar_type() == at::kFloat && dy.scalar_type() == at::kFloat;
  return fits && GradientDispatcher::adds_in_place(weight) ? GradientDispatcher::take_place(weight) : kernels::GradientPlace();
}

at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, at::ScalarType dtype, const std::optional<Fp8Products>& fp8) {
  if (!fp8) return kernels::linear_weight_gradient(dy, x, place_for(weight, dy));
  return kernels::fp8_linear_weight_gradient(dy, x, dtype, fp8->out_dtype, fp8->scaling);
}

/// Autograd adds a bias to fp8 products by an operator of its own.
at::Tensor bias_gradient(const at::Tensor& dy, const std::optional<Fp8Products>& fp8) {
  return fp8 ? at::sum_to(dy, at::IntArrayRef{dy.size(-1)}) : kernels::linear_bias_gradient(dy);
}

struct LinearWithWeightsLater : AutogradFunction<LinearWithWeightsLater> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const c10::intrusive_ptr<Destination>& destination) {
    context->save_for_backward({x, weight});
    context->saved_data["destination"] = c10::IValue::make_capsule(destination);
    return multiply(x, weight, bias.value_or(at::Tensor()), destination->fp8);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor x = saved[0].detach();  // without its history, which would stay with it
    const auto destination = c10::static_intrusive_pointer_cast<Destination>(context->saved_data["destination"].toCapsule());
    const auto& fp8 = destination->fp8;
    const WeightGradients::Kept dy = destination->later->keep(grads[0]);
    if (accumulates_into(destination->weight)) {
      const auto compute = [x, dy, fp8, weight = destination->weight, dtype = saved[1].scalar_type()] { return weight_gradient(*dy, x, weight, dtype, fp8); };
      destination->later->leave(destination->weight, compute);
    }
    if (destination->bias.defined() && accumulates_into(destination->bias)) {
      destination->later->leave(destination->bias, [dy, fp8] { return bias_gradient(*dy, fp8); });
    }
    // What is differentiated once more depends on the weight as it would had nothing been left.
    const at::Tensor weight = at::GradMode::is_enabled() ? destination->weight.to(saved[1].scalar_type()) : saved[1];
    return {input_gradient(grads[0], weight, x, fp8), {}, {}, {}};
  }
};

/// The same of stacked weights, of which groups of rows meet one each.
struct GroupedDestination : torch::CustomClassHolder {
  std::shared_ptr<WeightGradients> later;
  at::Tensor weight;
  std::vector<int64_t> sizes;
  std::optional<Fp8Products> fp8;
  std::optional<int> source;  ///< whose rows these are
};

struct GroupedWithWeightsLater : AutogradFunction<GroupedWithWeightsLater> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const c10::intrusive_ptr<GroupedDestination>& destination) {
    context->save_for_backward({x, weight});
    context->saved_data["destination"] = c10::IValue::make_capsule(destination);
    return kernels::grouped_linear(x, weight, destination->sizes, destination->fp8);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor x = saved[0].detach(), dy = grads[0].detach().contiguous();
    const auto destination = c10::static_intrusive_pointer_cast<GroupedDestination>(context->saved_data["destination"].toCapsule());
    if (const at::Tensor& parameter = destination->weight; accumulates_into(parameter)) {
      const auto compute = [x, dy = destination->later->keep(dy), destination, dtype = saved[1].scalar_type()] {
        return kernels::grouped_weight_gradient(*dy, x, destination->sizes, destination->fp8, dtype).flatten(0, 1);
      };
      destination->later->leave(parameter, compute, destination->source);
    }
    return once_differentiable(
        "grouped_linear", "multiply each group by itself, with nn::project", grads,
        {kernels::grouped_input_gradient(dy, saved[1], destination->sizes, destination->fp8, x.scalar_type()), at::Tensor(), at::Tensor()});
  }
};

/// What at::linear and its backward compute, with the weight's gradient added up in place.
struct LinearAddedInPlace : AutogradFunction<LinearAddedInPlace> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    context->save_for_backward({x, weight});
    context->saved_data["bias"] = bias.has_value();
    return kernels::linear(x, weight, bias.value_or(at::Tensor()));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &dy = grads[0];
    at::Tensor dx, d_weight, d_bias;
    if (context->needs_input_grad(0)) dx = kernels::linear_input_gradient(dy, weight, x.sizes());
    if (context->needs_input_grad(1)) {
      const kernels::GradientPlace place = accumulates_into(weight) ? place_for(weight, dy) : kernels::GradientPlace();
      d_weight = kernels::linear_weight_gradient(dy, x, place);
    }
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(2)) d_bias = kernels::linear_bias_gradient(dy);
    return {dx, d_weight, d_bias};
  }
};

bool is_added_in_place(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& of_weight) {
  return at::GradMode::is_enabled() && weight.is_same(of_weight) && x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat &&
         GradientDispatcher::adds_in_place(of_weight);
}

bool can_be_left(const at::Tensor& parameter) { return parameter.is_leaf() && parameter.requires_grad(); }

}  // namespace

/// The step is given up.
WeightGradients::~WeightGradients() {
  for (const Left& left : left_) {
    if (auto* const dispatcher = GradientDispatcher::find(left.parameter)) dispatcher->expect(-1);
  }
}

void WeightGradients::leave(const at::Tensor& parameter, std::function<at::Tensor()> gradient, std::optional<int> source) {
  GradientDispatcher::of(parameter).expect();
  left_.push_back({parameter, std::move(gradient), source});
  if (when_ == When::AtOnce) compute();
}

WeightGradients::Kept WeightGradients::keep(const at::Tensor& gradient) {
  auto kept = std::make_shared<at::Tensor>(gradient.detach());  // without its history, which would stay with it
  kept_.push_back(kept);
  return kept;
}

// Who takes a gradient over is seen when the pass has ended: until then autograd itself holds some.
void WeightGradients::own() {
  const at::NoGradGuard no_grad;
  std::map<const c10::StorageImpl*, std::vector<std::shared_ptr<at::Tensor>>> by_memory;
  for (const auto& one : kept_) {
    if (auto kept = one.lock()) by_memory[kept->storage().unsafeGetStorageImpl()].push_back(std::move(kept));
  }
  for (const auto& handles : std::views::values(by_memory)) {
    if (handles.front()->storage().use_count() == handles.size()) continue;
    for (const auto& kept : handles) *kept = kept->clone();
  }
}

void WeightGradients::compute() {
  const at::NoGradGuard no_grad;
  kept_.clear();
  const MemoryScope scope(MemoryCategory::Gradients);
  WeightGradients at_hand;  // where one fails the step is given up, and with this what it and those behind it have promised
  at_hand.left_ = std::exchange(left_, {});
  std::ranges::reverse(at_hand.left_);
  while (!at_hand.left_.empty()) {
    const GradientSource source(at_hand.left_.back().source);
    const at::Tensor gradient = at_hand.left_.back().gradient(), parameter = at_hand.left_.back().parameter;
    at_hand.left_.pop_back();  // what it was made of goes at once
    GradientDispatcher::of(parameter).deliver(gradient);
  }
}

LeaveWeightGradients::LeaveWeightGradients(std::shared_ptr<WeightGradients> later) : outer_(std::exchange(*leaving, std::move(later))) {}

LeaveWeightGradients::~LeaveWeightGradients() { *leaving = std::move(outer_); }

const std::shared_ptr<WeightGradients>& LeaveWeightGradients::current() { return *leaving; }

GradientSource::GradientSource(std::optional<int> source) : outer_(std::exchange(*source_at_hand, source)) {}

GradientSource::~GradientSource() { *source_at_hand = outer_; }

std::optional<int> GradientSource::current() { return *source_at_hand; }

bool leaves_weight_gradients(const at::Tensor& x, at::ArrayRef<at::Tensor> parameters) {
  return *leaving && at::GradMode::is_enabled() && x.requires_grad() &&
         std::ranges::all_of(parameters, [](const at::Tensor& parameter) { return !parameter.defined() || can_be_left(parameter); });
}

at::Tensor linear_with_weights_later(const at::Tensor& given, const at::Tensor& given_weight, const at::Tensor& of_weight, const at::Tensor& given_bias,
                                     const at::Tensor& of_bias, const std::optional<Fp8Products>& fp8) {
  // What at::linear casts is what backward multiplies by, whether autocast is on there or not.
  const auto type = given.device().type();
  const bool casts = !fp8 && at::autocast::is_autocast_available(type) && at::autocast::is_autocast_enabled(type);
  const auto cast = [&](const at::Tensor& tensor) { return casts ? at::autocast::cached_cast(at::autocast::get_autocast_dtype(type), tensor, type) : tensor; };
  const at::Tensor x = cast(given), weight = cast(given_weight), bias = cast(given_bias);
  if (!leaves_weight_gradients(x, {of_weight, bias.defined() ? of_bias : at::Tensor()})) {
    if (fp8 || !is_added_in_place(x, weight, of_weight)) return multiply(x, weight, bias, fp8);
    return LinearAddedInPlace::apply(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
  }
  const auto destination = c10::make_intrusive<Destination>();
  destination->later = *leaving;
  destination->fp8 = fp8;
  destination->weight = of_weight;
  if (bias.defined()) destination->bias = of_bias;
  return LinearWithWeightsLater::apply(x, weight.detach(), bias.defined() ? std::optional(bias.detach()) : std::nullopt, destination);
}

at::Tensor grouped_with_weights_later(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& of_weight, const std::vector<int64_t>& sizes,
                                      const std::optional<Fp8Products>& fp8) {
  if (!leaves_weight_gradients(x, {of_weight})) return kernels::grouped_linear(x, weight, sizes, fp8);
  const auto destination = c10::make_intrusive<GroupedDestination>();
  destination->later = *leaving;
  destination->weight = of_weight;
  destination->sizes = sizes;
  destination->fp8 = fp8;
  destination->source = *source_at_hand;
  return GroupedWithWeightsLater::apply(x, weight.detach(), destination);
}

}  // namespace tessera::nn
