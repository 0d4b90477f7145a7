#include "tessera/lora/lora.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/kernels/dropout.h"
#include "tessera/lora/plain_linear.h"
#include "tessera/nn/adapter_names.h"
#include "tessera/nn/along.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/shared_casts.h"
#include "tessera/nn/sharing.h"
#include "tessera/nn/weight_gradients.h"
#include "tessera/nn/weights_in_use.h"

// A and B are parameters of the layer itself, so that everything that walks a model (precision, sharding, optimizers, checkpoints) meets them under their names
// and needs no word of this. The interceptor lies innermost: inside of what turns layouts, where x and y are this rank's. Cut by columns, every rank computes
// x A^T whole and its part of B; cut by rows, A's part gives a term of the row-wise sum that is made anyhow.

namespace tessera::lora {
namespace {

class LowRankTerm : public nn::Interceptor, public nn::DrawsMasks {
 public:
  LowRankTerm(at::Tensor a, at::Tensor b, const Options& options, Alive alive)
      : a_(std::move(a)), b_(std::move(b)), scale_(options.alpha / static_cast<double>(options.rank)), dropout_(options.dropout), alive_(std::move(alive)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    const at::Tensor x = inputs[0].toTensor();
    nn::Values outputs = next(std::move(inputs));
    const at::Tensor y = outputs[0].toTensor();
    outputs[0] = at::add(y, times(times(dropped(module, nn::cast(x, y.scalar_type())), a_), b_), scale_);
    return outputs;
  }

 private:
  static at::Tensor times(const at::Tensor& x, const at::Tensor& weight) {
    return nn::linear_with_weights_later(x, nn::cast_weight(nn::in_use(weight), x.scalar_type()), weight, {}, {});
  }

  /// Elements are dropped by their places in the whole model's tensor, as nn::Dropout does it.
  at::Tensor dropped(const nn::Module& module, const at::Tensor& x) const {
    if (!module.is_training() || dropout_ == 0) return x;
    require(x.dim() >= 2, "lora.dropout of '", module.path(), "': an input of shape ", x.sizes(), " has no sample and feature dimensions");
    const Slice& held = nn::slice_of(a_);  // [rank, I]: of all rows some columns, or, sharded, of some rows the same
    const int64_t first = held.boxes.empty() ? 0 : held.boxes.front().offset[1];
    return nn::drop_by_place(x, dropout_, module.path() + ".lora", "@" + std::to_string(replica()), {.offset = first, .total = held.shape.at(1)});
  }

  at::Tensor a_, b_;
  double scale_, dropout_;
  Alive alive_;
};

template <class AnyLinear>
at::Tensor add_parameter(AnyLinear& linear, std::string_view name, const std::vector<int64_t>& sizes, const nn::InitRule& rule, nn::Along along) {
  const at::Tensor parameter = linear.register_parameter(std::string(name), at::empty(sizes, linear.weight.options().requires_grad(false)));
  nn::set_init(parameter, rule);
  nn::set_along(parameter, along);
  return parameter;
}

/// A wrapper knows the parameters that it found: later ones it would neither sum nor update; and terms go innermost, before what turns layouts. Asked of
/// everyone alike, for one rank may hold all rows of a slice.
template <class AnyLinear>
void require_plain(const AnyLinear& linear, const std::string& path) {
  require(linear.weight.defined(), "LoRA of '", path, "': its weight is gone, into fewer bits; attach LoRA before quantize_weights");
  const auto* gradients = nn::GradientDispatcher::find(linear.weight);
  require(!(gradients && gradients->owner()) && !nn::keeps_memory(linear.weight), "LoRA of '", path,
          "': the model is wrapped already, by something that would not know the adapters; attach LoRA before what sums or shards gradients");
  const bool is_whole = linear.weight.sizes() == at::IntArrayRef({linear.options.out_features(), linear.options.in_features()});
  require(is_whole && std::ranges::none_of(nn::sharings_of(linear.weight), &nn::Sharing::is_term), "LoRA of '", path,
          "': its weight is cut, or gone, already, or ranks have terms of its gradient; attach LoRA before whatever cuts, shards or quantizes the model");
}

/// Those of a layer that has had terms before.
std::pair<at::Tensor, at::Tensor> known_matrices(const torch::nn::Module& linear, const std::string& path, const Options& options) {
  const auto own = linear.named_parameters(/*recurse=*/false);
  const at::Tensor a = own[std::string(nn::kLoraA)], b = own[std::string(nn::kLoraB)];
  require(!nn::has_user(a), "LoRA of '", path,
          "': it has adapters, and what attached them is alive; let go of that first (detach()), or name layers that have none");
  require(a.size(0) == options.rank, "LoRA of '", path, "': its matrices are of rank ", a.size(0), ", and options say ", options.rank,
          "; give the rank that they have");
  return {a, b};
}

/// A and B, registered beside the weight.
template <class AnyLinear>
std::pair<at::Tensor, at::Tensor> add_matrices(AnyLinear& linear, const Options& options) {
  const int64_t in = linear.options.in_features(), out = linear.options.out_features();
  const double bound = in > 0 ? 1 / std::sqrt(static_cast<double>(in)) : 0;
  const at::Tensor a = add_parameter(linear, nn::kLoraA, {options.rank, in}, nn::InitRule::uniform(-bound, bound), {.dim = 1, .of_weight = 1});
  const at::Tensor b = add_parameter(linear, nn::kLoraB, {out, options.rank}, nn::InitRule::zeros(), {.dim = 0, .of_weight = 0});
  return {a, b};
}

bool has_matrices(const torch::nn::Module& linear) { return linear.named_parameters(/*recurse=*/false).contains(std::string(nn::kLoraA)); }

template <class AnyLinear>
std::pair<at::Tensor, at::Tensor> matrices_of(AnyLinear& linear, const std::string& path, const Options& options) {
  require_plain(linear, path);
  return has_matrices(linear) ? known_matrices(linear, path, options) : add_matrices(linear, options);
}

Attachment adapt(nn::LinearImpl& linear, const Options& options, const Alive& alive) {
  const auto [a, b] = matrices_of(linear, linear.path(), options);
  nn::add_user(a, alive);
  linear.set_called(true);
  return nn::attach(linear, std::make_shared<LowRankTerm>(a, b, options, alive));
}

/// Of libtorch's own Linear: a child that drops lets train(), eval() and wrappers reach it.
PlainTerm adapt(torch::nn::LinearImpl& linear, const std::string& path, const Options& options, const Alive& alive) {
  const auto [a, b] = matrices_of(linear, path, options);
  PlainTerm term{.path = path, .weight = linear.weight, .a = a, .b = b, .scale = options.alpha / static_cast<double>(options.rank), .alive = alive};
  nn::add_user(a, alive);
  const std::string name = "lora_dropout";
  if (linear.named_children().contains(name)) linear.unregister_module(name);
  if (options.dropout > 0) term.dropout = linear.register_module(name, nn::Dropout(options.dropout));
  return term;
}

/// Its products are known by the weight, whichever module multiplies. One that only looks rows up does not.
void require_weight_of_its_own(const torch::nn::Module& root, const std::string& path, const torch::nn::LinearImpl& linear) {
  root.apply([&](const std::string& name, const torch::nn::Module& module) {
    if (&module == &linear || dynamic_cast<const torch::nn::EmbeddingImpl*>(&module) != nullptr) return;
    const bool shares = std::ranges::any_of(nn::weights_in_use(module), [&](const at::Tensor& weight) { return weight.is_alias_of(linear.weight); });
    require(!shares, "LoRA of '", path, "', libtorch's own Linear: '", name,
            "' has its weight, too, and their products cannot be told apart; build both as tessera::nn::Linear, or name neither");
  });
}

/// The linear layers that the pattern names; whatever else it matches is passed over, but for what would be taken for one.
struct Linears {
  std::vector<nn::LinearImpl*> ours;
  std::vector<std::pair<std::string, torch::nn::LinearImpl*>> libtorchs;
};

Linears linears_matching(torch::nn::Module& root, const std::string& pattern) {
  Linears linears;
  std::string other;
  for (const auto& [path, module] : nn::modules_matching(root, pattern)) {
    if (auto* linear = dynamic_cast<nn::LinearImpl*>(module.get())) {
      linears.ours.push_back(linear);
      continue;
    }
    if (auto* linear = dynamic_cast<torch::nn::LinearImpl*>(module.get())) {
      linears.libtorchs.emplace_back(path, linear);
      continue;
    }
    require(dynamic_cast<const nn::GroupedExpertsImpl*>(module.get()) == nullptr, "LoRA of '", path,
            "': experts are stacks of matrices, beside which nothing is learnt yet; name other linear layers, such as attention's (layers.*.attention.*)");
    other = path;
  }
  require(!linears.ours.empty() || !linears.libtorchs.empty(), "LoRA: '", pattern, "' names '", other,
          "' and no linear layer; name linear layers, such as layers.*.attention.*");
  return linears;
}

/// What adapters that were attached before were told to train stays so for as long as they are.
void freeze_all_but(torch::nn::Module& root, const std::vector<std::string>& trained, const Alive& alive) {
  const auto parameters = nn::unique_parameters(root);
  std::vector<bool> used(trained.size());
  for (const auto& parameter : parameters) {
    bool named = false;
    for (size_t i = 0; i < trained.size(); ++i) {
      if (!nn::matches(trained[i], parameter.name)) continue;
      used[i] = named = true;
    }
    const bool adapts = nn::is_adapter(parameter.name);
    if (named && !adapts) nn::add_user(parameter.tensor, alive);
    const bool learns = adapts || nn::has_user(parameter.tensor);
    if (parameter.tensor.is_floating_point() || parameter.tensor.is_complex()) parameter.tensor.set_requires_grad(learns);
  }
  std::vector<std::string> names;
  for (const auto& parameter : parameters) {
    if (!nn::is_adapter(parameter.name)) names.push_back(parameter.name);
  }
  for (size_t i = 0; i < trained.size(); ++i) {
    require(used[i], "lora.trained: '", trained[i], "' names no parameter; the nearest is '", used[i] ? "" : nearest(trained[i], names),
            "' ('*' is any text between two dots, '**' any number of parts)");
  }
}

}  // namespace

Attachment attach(torch::nn::Module& root, const Options& options) {
  require(options.rank >= 1, "LoRA: rank = ", options.rank, " must be at least 1");
  require(!options.modules.empty(), "LoRA: no modules are named; give patterns of the paths of linear layers");
  nn::assign_paths(root);
  std::set<const torch::nn::Module*> named;  // patterns may meet
  std::set<const torch::nn::Module*> made;   // what is new begins as it is drawn, and what was trained stays
  const auto draw = [&] {
    nn::assign_paths(root);
    for (const torch::nn::Module* linear : made) {
      for (const auto& item : linear->named_parameters(/*recurse=*/false)) {
        if (nn::is_adapter(item.key()) && !item.value().is_meta()) nn::draw(item.value(), options.seed);
      }
    }
  };
  const auto alive = std::make_shared<const char>();
  Attachment attached;
  std::vector<PlainTerm> terms;
  try {
    for (const std::string& pattern : options.modules) {
      const Linears linears = linears_matching(root, pattern);
      for (nn::LinearImpl* linear : linears.ours) {
        if (!named.insert(linear).second) continue;
        if (!has_matrices(*linear)) made.insert(linear);
        attached.add(adapt(*linear, options, alive));
      }
      for (const auto& [path, linear] : linears.libtorchs) {
        if (!named.insert(linear).second) continue;
        require_weight_of_its_own(root, path, *linear);
        if (!has_matrices(*linear)) made.insert(linear);
        terms.push_back(adapt(*linear, path, options, alive));
      }
    }
  } catch (...) {
    draw();  // the matrices stay, and a later call would take them for trained ones
    throw;
  }
  attached.add(attach_to_products(std::move(terms)));
  draw();
  freeze_all_but(root, options.trained, alive);
  return attached;
}

}  // namespace tessera::lora
