#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/saved_tensors.h"
#include "tessera/tensor_parallel/overlap.h"
#include "tessera/tensor_parallel/regather.h"

// Layers that take one input (q, k and v; gate and up) find it gathered by the module around them; were it whole before the first product begins, nothing could
// hide the gathering. So the products of all of them are computed in front, as the parts come, and each layer takes its own when it is called with that very
// tensor. One that nobody takes shows that a layer's input is not what it was said to be, and is refused by name.

namespace tessera::tensor_parallel {

at::Tensor Overlap::take(const nn::Module& layer, const at::Tensor& x) {
  for (Prepared* one = prepared; one != nullptr; one = one->outer) {
    if (!one->whole.is_same(x)) continue;
    const auto found = one->products.find(&layer);
    if (found == one->products.end()) return {};
    require(
        nn::version_of(x) == one->version, "PrepareInput: '", layer.path(),
        "' is given what was written in place after it was gathered, and its product was made before (tensor.overlap); write out of place, or take the layer "
        "out of PrepareInput's layers");
    return std::move(one->products.extract(found).mapped());
  }
  return {};
}

namespace {

class PrepareProducts : public nn::Interceptor {
 public:
  PrepareProducts(std::shared_ptr<Context> context, const PrepareInput& style, std::vector<nn::LinearImpl*> layers, std::shared_ptr<nn::Interceptor> plain)
      : context_(std::move(context)), style_(style), layers_(std::move(layers)), plain_(std::move(plain)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    const auto argument = static_cast<size_t>(style_.argument);
    if (argument >= inputs.size() || !inputs[argument].isTensor() || !overlaps(inputs[argument].toTensor())) {
      return plain_->call(module, std::move(inputs), next);
    }
    const at::Tensor given = inputs[argument].toTensor();
    for (nn::LinearImpl* const layer : layers_) nn::announce_use(*layer);
    auto [whole, products] = multiply_columns(*context_, given, style_.from, layers_, style_.keep_gathered);
    Scope scope(*context_->overlap, whole);
    for (size_t i = 0; i < layers_.size(); ++i) scope.prepared.products[layers_[i]] = std::move(products[i]);
    products.clear();
    inputs[argument] = std::move(whole);
    nn::Values outputs = run(given, std::move(inputs), next);
    const auto& left = scope.prepared.products;
    require(left.empty(), "PrepareInput of '", module.path(), "': its layers say that '", left.empty() ? std::string() : left.begin()->first->path(),
            "' takes what is prepared, and in this call it was given something else, or not called; take it out of PrepareInput's layers");
    return outputs;
  }

 private:
  /// Prepared products can be taken while it lives.
  struct Scope {
    Scope(Overlap& overlap, const at::Tensor& whole)
        : overlap(overlap), prepared{.whole = whole, .version = nn::version_of(whole), .products = {}, .outer = overlap.prepared} {
      overlap.prepared = &prepared;
    }
    ~Scope() { overlap.prepared = prepared.outer; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    Overlap& overlap;
    Overlap::Prepared prepared;
  };

  bool overlaps(const at::Tensor& x) const {
    return std::ranges::all_of(layers_, [&](const nn::LinearImpl* layer) {
      const auto known = context_->overlap->features.find(layer);
      return known != context_->overlap->features.end() && can_overlap(*layer, x, style_.from, known->second);
    });
  }

  /// What else of the module keeps the whole keeps the part, as without overlap.
  nn::Values run(const at::Tensor& given, nn::Values inputs, const nn::Next& next) const {
    const at::Tensor& whole = inputs[static_cast<size_t>(style_.argument)].toTensor();
    if (style_.from != TensorLayout::Sequence || style_.keep_gathered || !at::GradMode::is_enabled() || nn::saved_tensors_are_computed_again()) {
      return next(std::move(inputs));
    }
    const nn::SavedTensorScope scope(regather(context_, given, whole));
    return next(std::move(inputs));
  }

  std::shared_ptr<Context> context_;
  PrepareInput style_;
  std::vector<nn::LinearImpl*> layers_;
  std::shared_ptr<nn::Interceptor> plain_;
};

}  // namespace

std::shared_ptr<nn::Interceptor> prepare_products(std::shared_ptr<Context> context, const PrepareInput& style, std::vector<nn::LinearImpl*> layers,
                                                  std::shared_ptr<nn::Interceptor> plain) {
  return std::make_shared<PrepareProducts>(std::move(context), style, std::move(layers), std::move(plain));
}

}  // namespace tessera::tensor_parallel
