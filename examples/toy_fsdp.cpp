// The toy of data parallelism with everything sharded (FSDP, ZeRO stage 3), on an unmodified torch::nn::Module and libtorch's own optimizer:
//   toy_fsdp                                                     one process
//   torchrun --no-python --nproc_per_node 2 path/to/toy_fsdp     two
// Every rank draws its own random data; gradients are averaged. The loop is that of one process. Between steps a rank holds its rows of each parameter, and so
// does its optimizer. The last lines show which, and that one whole model is what all ranks hold together.
#include <cstdio>
#include <exception>

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/fully_shard.h"

namespace {

struct ToyModelImpl : torch::nn::Module {
  ToyModelImpl() : net1(10, 10), net2(10, 5) {
    register_module("net1", net1);
    register_module("net2", net2);
  }
  at::Tensor forward(const at::Tensor& x) { return net2(at::relu(net1(x))); }

  torch::nn::Linear net1, net2;
};
TORCH_MODULE(ToyModel);

int64_t num_elements(const torch::nn::Module& model) {
  int64_t elements = 0;
  for (const at::Tensor& parameter : model.parameters()) elements += parameter.numel();
  return elements;
}

void train() {
  auto world = tessera::comm::World::from_environment();
  torch::manual_seed(0);  // the same initial weights everywhere
  ToyModel model;
  const int64_t whole = num_elements(*model);
  torch::manual_seed(1 + world.rank());  // data of its own

  auto sharded = tessera::fully_shard(*model.ptr(), world.group(), {.wrap = "net*", .average = true});
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.001);
  for (int step = 1; step <= 10; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = torch::nn::functional::mse_loss(model->forward(at::randn({20, 10})), at::randn({20, 5}));
    loss.backward();
    optimizer.step();
    if (world.rank() == 0) std::printf("step %2d  loss %.6f\n", step, loss.item<double>());
  }

  const at::Tensor mine = at::tensor({num_elements(*model)}, at::kLong);
  const at::Tensor all = at::empty({world.size()}, at::kLong);
  tessera::comm::all_gather(world.group(), all, mine);
  if (world.rank() == 0) {
    for (int rank = 0; rank < world.size(); ++rank) std::printf("rank %d holds %lld elements\n", rank, static_cast<long long>(all[rank].item<int64_t>()));
    std::printf("%d %s, %lld of %lld elements: %s\n", world.size(), world.size() == 1 ? "rank" : "ranks", static_cast<long long>(all.sum().item<int64_t>()),
                static_cast<long long>(whole), all.sum().item<int64_t>() == whole ? "one model" : "NOT one model");
  }
}

}  // namespace

int main() {
  try {
    train();
    return 0;
  } catch (const tessera::ConfigError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
