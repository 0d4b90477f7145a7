#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "tessera/comm/group.h"
#include "tessera/kernels/quantized_linear.h"

/// Linear layers whose frozen weight is kept in 8 or 4 bits (kernels/quantized_linear.h). The weight is no parameter any more: nothing updates or saves it,
/// it is sharded here (Sharding) and by no wrapper, and it is made again from where it came from.
namespace tessera::quantize {

/// The ranks that share out, by rows, what each of them would hold of a weight, as fully_shard() does with parameters: over the same ranks, which then compute
/// every layer alike and equally often. A weight is gathered for its product and again for its gradient (sharded_matrix.h has the traffic).
struct Sharding {
  comm::Group group{};
  bool reshard_after_forward = true;  ///< false: what a forward has gathered stays until its backward
  bool prefetch = true;               ///< the next weight is on its way while one is used (sharded_weights.h)
  std::string whole{};                ///< layers that every rank keeps whole, by a pattern of paths
};

struct Options {
  std::vector<std::string> modules;  ///< linear layers, by patterns of paths
  kernels::QuantizeForm form;
  Sharding sharding{};
};

/// Gives `whole`, fp32 on the CPU in the shape of the logical weight that `weight` is, or is a part of, its values.
using Fill = std::function<void(const at::Tensor& weight, const at::Tensor& whole)>;

struct Report {
  std::vector<std::string> weights;  ///< names
  int64_t elements = 0, bytes = 0;   ///< that are held here
};

/// Keeps the weight of every nn::Linear under `root` that one of the patterns names in fewer bits, on `device`: what is held here of it, which may be cut
/// already, but not sharded, and of that this rank's share. Weights are without memory before (on meta), or, without `fill`, hold their values and are whole.
/// On device meta nothing is read. Biases stay. Memory for the while: one whole weight at a time, 12 bytes an element. Throws ConfigError for a weight that is
/// to be trained, and, unless `part_of_model`, for a pattern that names no nn::Linear, with the nearest path.
Report quantize_weights(torch::nn::Module& root, const Options& options, at::Device device, const Fill& fill = {}, bool part_of_model = false);

/// The names of the weights that would be, of a whole model. Throws ConfigError as above.
std::vector<std::string> weights_named(torch::nn::Module& root, const std::vector<std::string>& modules);

}  // namespace tessera::quantize
