#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/core/rng.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/bucket_layout.h"
#include "tests/refusal.h"
#include "tests/test_device.h"

/// A small model of plain libtorch, its data, and comparisons: what every data-parallel technique is tested with.
namespace tessera::testing_support {

/// Fills the parameters of `module`, but for those on meta, with the same values everywhere, without torch's process-wide generator.
inline void fill_parameters(torch::nn::Module& module, uint64_t seed = 1) {
  const at::NoGradGuard no_grad;
  for (auto& item : module.named_parameters()) {
    if (item.value().is_meta()) continue;
    item.value().copy_(floats_by(item.value().sizes(), [&](float* out, int64_t n) { CounterRng(seed, item.key()).fill_uniform(out, 0, n, -0.5f, 0.5f); }));
  }
}

/// A learned scale without dimensions, which under fully_shard one rank has and the others have nothing of.
struct ScaledLayer : torch::nn::Module {
  ScaledLayer() {
    register_module("layer", layer);
    scale = register_parameter("scale", at::full({}, 0.5));
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return layer(x) * scale.exp(); }
  torch::nn::Linear layer{5, 3};
  at::Tensor scale;
};

/// Registered in another order than it is used: `first` gives the last gradient.
struct Net : torch::nn::Module {
  Net() {
    last = register_module("last", torch::nn::Linear(7, 3));
    first = register_module("first", torch::nn::Linear(5, 7));
    middle = register_module("middle", torch::nn::Linear(7, 7));
    scale = register_parameter("scale", at::ones({7}));
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return last(at::tanh(middle(at::tanh(first(x))) * scale)); }

  torch::nn::Linear first{nullptr}, middle{nullptr}, last{nullptr};
  at::Tensor scale;
};

struct Batch {
  at::Tensor x, y;
};

inline at::Tensor random_tensor(at::IntArrayRef sizes, const std::string& name) {
  return floats_by(sizes, [&](float* out, int64_t n) { CounterRng(3, name).fill_uniform(out, 0, n, -1.0f, 1.0f); });
}

inline Batch whole_batch(int64_t samples, int64_t step = 0) {
  return {random_tensor({samples, 5}, "x" + std::to_string(step)), random_tensor({samples, 3}, "y" + std::to_string(step))};
}

/// Rank `rank`'s part of `batch`, by the rule that deals everything.
inline Batch part_of(const Batch& batch, int ranks, int rank) {
  const auto [begin, size] = chunk(batch.x.size(0), ranks, rank);
  return {batch.x.narrow(0, begin, size), batch.y.narrow(0, begin, size)};
}

/// Summed over samples, normalized by the number of all of them.
inline at::Tensor loss_of(const at::Tensor& output, const at::Tensor& y, int64_t samples) { return (output - y).square().sum() / static_cast<double>(samples); }

inline std::vector<at::Tensor> gradients_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : module.parameters()) gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  return gradients;
}

/// Largest difference of any tensor, relative to that tensor's largest entry.
inline double largest_difference(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(actual[i].defined(), expected[i].defined()) << "tensor " << i;
    if (!expected[i].defined() || expected[i].numel() == 0) continue;
    const double scale = std::max(expected[i].abs().max().item<double>(), 1e-30);
    largest = std::max(largest, (actual[i].to(at::kCPU, at::kDouble) - expected[i].to(at::kCPU, at::kDouble)).abs().max().item<double>() / scale);
  }
  return largest;
}

inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined() || (a[i].defined() && !at::equal(a[i].cpu(), b[i].cpu()))) return false;
  }
  return true;
}

inline void sgd(torch::nn::Module& module, double lr) {
  const at::NoGradGuard no_grad;
  for (at::Tensor parameter : module.parameters()) {
    if (parameter.grad().defined()) parameter.sub_(parameter.grad(), lr);
  }
}

/// The text of the ConfigError that `action` throws; fails the test where it throws none.

constexpr double parity = 1e-5;  ///< of each tensor's largest entry
constexpr int64_t samples = 13;
constexpr BucketSizes small_buckets{.bucket_bytes = 150, .first_bucket_bytes = 16};

inline void backward(Net& net, const Batch& batch) { loss_of(net.forward(batch.x), batch.y, samples).backward(); }

/// Gradients of `steps` steps of one process on the whole batch.
inline std::vector<std::vector<at::Tensor>> one_process(int steps) {
  Net net;
  std::vector<std::vector<at::Tensor>> gradients;
  for (int step = 0; step < steps; ++step) {
    net.zero_grad();
    backward(net, whole_batch(samples, step));
    gradients.push_back(gradients_of(net));
    sgd(net, 0.05);
  }
  return gradients;
}

}  // namespace tessera::testing_support
