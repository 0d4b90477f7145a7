#include "tessera/nn/embedding.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>

#include "tessera/core/autograd_function.h"
#include "tessera/core/error.h"
#include "tessera/kernels/embedding_gradient.h"
#include "tessera/kernels/widen.h"
#include "tessera/memory/on_host.h"
#include "tessera/nn/backward_pass.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/parameter.h"

namespace tessera::nn {

namespace {

/// at::embedding in `dtype`, whose gradient is added up where it is to end up, if such a place is on offer when backward comes.
struct EmbeddingFunction : AutogradFunction<EmbeddingFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& weight, const at::Tensor& ids, int64_t padding_row,
                            at::ScalarType dtype) {
    context->save_for_backward({ids});
    context->saved_data["weight"] = weight;  // for its place and shape: what it holds may change
    context->saved_data["padding_row"] = padding_row;
    const at::AutoDispatchBelowADInplaceOrView below;
    return at::embedding(weight, ids, padding_row).to(dtype);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const at::Tensor ids = context->get_saved_variables()[0], weight = context->saved_data["weight"].toTensor();
    const int64_t padding_row = context->saved_data["padding_row"].toInt();
    // On an accelerator adding rows up at once has no fixed order.
    const bool in_order = is_on_host(weight);
    // A gradient that is asked for (autograd::grad), or one with a history of its own (create_graph), is not added up in a step's place.
    const bool adds_up = in_order && !at::GradMode::is_enabled() && accumulates_into(weight);
    auto [gradient, holds_sum] = adds_up ? GradientDispatcher::take_place(weight) : kernels::GradientPlace();
    if (!gradient.defined()) {
      const at::Tensor rows = grads[0].to(kernels::handed_on_in(weight, grads[0].scalar_type()));
      gradient = at::embedding_dense_backward(rows, ids, weight.size(0), padding_row, /*scale_grad_by_freq=*/false);
    } else {
      if (!holds_sum) gradient.zero_();
      kernels::add_embedding_gradient_(gradient, grads[0], ids, padding_row);
    }
    return {std::move(gradient), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor look_up(const at::Tensor& weight, const at::Tensor& ids, int64_t padding_row, at::ScalarType dtype) {
  if (!at::GradMode::is_enabled() || !weight.requires_grad() || !weight.is_leaf()) return at::embedding(weight, ids, padding_row).to(dtype);
  return EmbeddingFunction::apply(weight, ids, padding_row, dtype);
}

}  // namespace

EmbeddingImpl::EmbeddingImpl(EmbeddingOptions given) : options(std::move(given)) {
  const int64_t rows = options.num_embeddings();
  require(!options.max_norm() && !options.scale_grad_by_freq() && !options.sparse(),
          "Embedding: max_norm, scale_grad_by_freq and sparse are not supported: they depend on the whole batch of one rank; leave them off");
  if (options.padding_idx() && *options.padding_idx() < 0) options.padding_idx(*options.padding_idx() + rows);
  require(!options.padding_idx() || (*options.padding_idx() >= 0 && *options.padding_idx() < rows), "Embedding: padding_idx ",
          options.padding_idx().value_or(0), " is no row of ", rows);
  weight = register_parameter("weight", at::empty({rows, options.embedding_dim()}));
  InitRule rule = InitRule::normal(0, 1);
  rule.zero_row = options.padding_idx();
  set_init(weight, rule);
  reset_parameters();
}

void EmbeddingImpl::reset_parameters() {
  at::NoGradGuard no_grad;
  weight.normal_();
  if (options.padding_idx()) weight.select(0, *options.padding_idx()).zero_();
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& ids) {
  if (bypassed(*this)) return call(*this, ids);
  const at::Tensor used = in_use(weight);  // until then it may be a slice, of another type than what is gathered
  return look_up(used, ids, options.padding_idx().value_or(-1), compute_dtype() ? at::kFloat : used.scalar_type());
}

void EmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::nn::Embedding(num_embeddings=" << options.num_embeddings() << ", embedding_dim=" << options.embedding_dim() << ")";
}

}  // namespace tessera::nn
