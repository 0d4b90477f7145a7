#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/nn/module.h>

namespace tessera {

/// A module whose output for one sample depends on the other samples of the micro-batch, so that accumulation or data parallelism is not one big batch to it.
struct BatchCoupledModule {
  std::string path;  ///< in the root module
  std::string type;  ///< for example "BatchNorm2d"
};

/// BatchNorm modules of `root` that normalise by the statistics of the batch: in training mode, or without running statistics. SyncBatchNorm is among them
/// where its group does not cover the `ranks`, or `accumulation` makes a step of several batches; and libtorch's embeddings with scale_grad_by_freq, which
/// divide gradients by counts of the batch.
std::vector<BatchCoupledModule> find_batch_coupled(const torch::nn::Module& root, int ranks = 1, int64_t accumulation = 1);

/// One line that names them by path and says what it means and what can be done, for `ranks` data-parallel ranks and `accumulation` micro-batches per rank and
/// step. Empty where nothing is coupled, or there is one rank and one micro-batch.
std::string batch_coupling_report(const torch::nn::Module& root, int ranks, int64_t accumulation);

}  // namespace tessera
