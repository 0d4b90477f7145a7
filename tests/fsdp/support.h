#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/sgd.h>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/module.h"
#include "tessera/nn/operators.h"
#include "tessera/nn/parameter.h"
#include "tests/nn/net.h"

/// Models that are sharded, and how their slices compare to one process.
namespace tessera::testing_support {

/// h + w2(tanh(w1 h)) * scale * gain: odd sizes, a parameter smaller than most groups, a scalar, a frozen one.
struct BlockImpl : nn::Module {
  BlockImpl() : w1(7, 11), w2(nn::LinearOptions(11, 7).bias(false)) {
    register_module("w1", w1);
    register_module("w2", w2);
    scale = register_parameter("scale", at::ones({7}));
    gain = register_parameter("gain", at::ones({}));
    shift = register_parameter("shift", at::ones({3, 1}), /*requires_grad=*/false);
    nn::set_init(scale, nn::InitRule::uniform(0.5, 1));
    nn::set_init(gain, nn::InitRule::uniform(0.5, 1));
    nn::set_init(shift, nn::InitRule::uniform(-1, 1));
  }
  at::Tensor forward(const at::Tensor& h) { return h + w2(at::tanh(w1(h) + shift.sum())) * scale * gain; }

  nn::Linear w1, w2;
  at::Tensor scale, gain, shift;
};
TESSERA_MODULE(Block);

/// x weight: shares the first layer's weight.
struct TiedOutImpl : nn::Module {
  explicit TiedOutImpl(const at::Tensor& tied) { weight = register_parameter("weight", tied); }
  at::Tensor forward(const at::Tensor& h) { return at::matmul(h, weight); }
  at::Tensor weight;
};
TESSERA_MODULE(TiedOut);

/// first -> blocks, the last of them twice -> norm -> tied out -> last.
struct DeepNetImpl : nn::Module {
  DeepNetImpl() : first(5, 7), norm(nn::LinearOptions(7, 7).bias(false)), out(first->weight), last(5, 3) {
    register_module("first", first);
    for (int i = 0; i < 3; ++i) register_module("block" + std::to_string(i), blocks.emplace_back());
    register_module("norm", norm);
    register_module("out", out);
    register_module("last", last);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = first(x);
    for (Block& block : blocks) {
      if (skipped != &block) h = block(h);
    }
    h = blocks.back()(h);
    return last(out(norm(h)));
  }

  nn::Linear first, norm;
  std::vector<Block> blocks;
  TiedOut out;
  nn::Linear last;
  const Block* skipped = nullptr;
};
TESSERA_MODULE(DeepNet);

template <class Model>
void backward_of(Model& model, const Batch& batch, double weight = 1) {
  (loss_of(model(batch.x), batch.y, samples) * weight).backward();
}

using Gradients = std::map<std::string, at::Tensor>;

inline constexpr auto kBoth = {ShardTrigger::Calls, ShardTrigger::Operators};

inline torch::optim::SGD momentum(const torch::nn::Module& module) {
  return torch::optim::SGD(module.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
}

inline Gradients named_gradients(const torch::nn::Module& module) {
  Gradients gradients;
  for (const auto& parameter : nn::unique_parameters(module))
    gradients[parameter.name] = parameter.tensor.grad().defined() ? parameter.tensor.grad().clone() : at::Tensor();
  return gradients;
}

inline Gradients named_values(const torch::nn::Module& module) {
  Gradients values;
  for (const auto& parameter : nn::unique_parameters(module)) values[parameter.name] = parameter.tensor.detach().clone();
  return values;
}

/// Largest difference of the slices' gradients (or, with `values`, of the slices) from those of one process, relative to the largest entry of each whole
/// tensor.
inline double slice_difference(const torch::nn::Module& module, const Gradients& whole, bool values = false) {
  double largest = 0;
  for (const auto& parameter : nn::unique_parameters(module)) {
    const at::Tensor& expected = whole.at(parameter.name);
    const at::Tensor actual = values ? parameter.tensor.detach() : parameter.tensor.grad();
    EXPECT_EQ(actual.defined(), expected.defined()) << parameter.name;
    if (!actual.defined() || !expected.defined()) continue;
    const Slice& slice = nn::slice_of(parameter.tensor);
    EXPECT_EQ(actual.sizes(), at::IntArrayRef(slice.local_shape())) << parameter.name;
    if (slice.numel() == 0) continue;
    const double scale = std::max(expected.abs().max().item<double>(), 1e-30);
    largest = std::max(largest, (actual.cpu() - take(expected, slice).cpu()).abs().max().item<double>() / scale);
  }
  return largest;
}

/// Wide enough that padding and scalars do not count.
struct WideNetImpl : nn::Module {
  WideNetImpl() {
    for (int i = 0; i < 6; ++i) register_module("layer" + std::to_string(i), layers.emplace_back(64, 1024));
  }
  at::Tensor forward(at::Tensor x) {
    for (nn::Linear& layer : layers) x = at::tanh(layer(x)).view({16, 64}).mean(0, /*keepdim=*/true);
    return x;
  }
  std::vector<nn::Linear> layers;
};
TESSERA_MODULE(WideNet);

/// Counts copies of as many elements as what is watched.
class CopyCount final : public nn::OperatorHooks {
 public:
  explicit CopyCount(int64_t numel) : numel_(numel) {}
  void call(nn::OperatorCall& operation) override {
    if (operation.name() == "aten::copy_" && operation.arguments()[0].toTensor().numel() == numel_) ++copies;
    operation.run();
  }
  int copies = 0;

 private:
  int64_t numel_;
};

/// Layers, rows that are looked up, and parameters that one rank holds whole: `positions` and `scale`, behind the first layer or before it.
struct Patches : torch::nn::Module {
  explicit Patches(bool first) {
    const auto add = [this] {
      positions = register_parameter("positions", at::empty({1, 5, 4}));
      scale = register_parameter("scale", at::empty({1, 4}));
    };
    if (first) add();
    register_module("patch", patch);
    if (!first) add();
    register_module("inner", inner);
    bias = register_parameter("bias", at::empty({8}));
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = at::gelu(inner(patch(x) + positions)).mean(1) * scale;
    return h + bias.index_select(0, at::arange(x.size(0))).unsqueeze(1);
  }
  torch::nn::Linear patch{3, 4}, inner{4, 4};
  at::Tensor positions, scale, bias;
};

/// A gate for each channel, of a unit of its own: what libtorch makes like a parameter before it looks at the parameter.
struct Gate : torch::nn::Module {
  using Use = std::function<at::Tensor(const at::Tensor& h, const at::Tensor& x, const at::Tensor& g)>;
  Gate(int64_t size, Use use) : in(size, size), use(std::move(use)) {
    register_module("in", in);
    g = register_parameter("g", at::empty({size}));
    fill_parameters(*this);
    const at::NoGradGuard no_grad;
    g.abs_().add_(0.5);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor before = begin ? begin(x, x, g) : x;
    return use(at::tanh(in(before)), x, g);
  }

  torch::nn::Linear in;
  at::Tensor g;
  Use begin = {};  ///< before the first layer
  Use use;
};

}  // namespace tessera::testing_support
