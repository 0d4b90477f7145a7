#include <string>

#include <ATen/core/grad_mode.h>
#include <torch/custom_class.h>

#include "tessera/comm/call_site.h"
#include "tessera/context_parallel/context.h"
#include "tessera/core/autograd_function.h"
#include "tessera/core/once_differentiable.h"
#include "tessera/nn/tiled_attention.h"

namespace tessera::context {

namespace {

struct KeptMethod : torch::CustomClassHolder {
  KeptMethod(std::shared_ptr<const Method> method, std::string_view site) : method(std::move(method)), site(site) {}
  std::shared_ptr<const Method> method;
  std::string site;
};

struct Attended : AutogradFunction<Attended> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const c10::intrusive_ptr<KeptMethod>& kept) {
    const Method::Result result = kept->method->forward(q, k, v);
    // Apart from its graph: where a recomputation is broken off while this is saved, the output would hold the function that holds it.
    context->save_for_backward({q, k, v, result.output.detach(), result.kept});
    context->saved_data["method"] = c10::IValue::make_capsule(kept);
    return result.output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto kept = c10::static_intrusive_pointer_cast<KeptMethod>(context->saved_data["method"].toCapsule());
    const auto saved = context->get_saved_variables();
    const auto gradients = [&] {
      const comm::CallSite site(kept->site);
      const at::NoGradGuard no_grad;
      return kept->method->backward(grads[0], saved[0], saved[1], saved[2], {.output = saved[3], .kept = saved[4]});
    }();
    return once_differentiable("attention over mesh.cp", nn::kAttentionTwice, grads, {gradients.q, gradients.k, gradients.v, at::Tensor()});
  }
};

}  // namespace

at::Tensor attend(std::shared_ptr<const Method> method, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return Attended::apply(q, k, v, c10::make_intrusive<KeptMethod>(std::move(method), comm::CallSite::current()));
}

}  // namespace tessera::context
