// The classic toy of data parallelism, on an unmodified torch::nn::Module and libtorch's own optimizer:
//   toy_ddp                                                     one process
//   torchrun --no-python --nproc_per_node 2 path/to/toy_ddp     two
// Every rank draws its own random data; gradients are averaged. The last line shows that the replicas stayed equal.
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
#include "tessera/core/hash.h"
#include "tessera/data_parallel/distributed_data_parallel.h"

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

/// One number per rank that is equal where all parameters are, to the bit.
int64_t checksum(const torch::nn::Module& model) {
  tessera::Hasher hasher;
  for (const at::Tensor& parameter : model.parameters()) {
    const at::Tensor values = parameter.detach().contiguous();
    hasher.update(values.const_data_ptr(), values.nbytes());
  }
  return static_cast<int64_t>(hasher.value());
}

void train() {
  auto world = tessera::comm::World::from_environment();
  torch::manual_seed(0);  // the same initial weights everywhere
  ToyModel model;
  torch::manual_seed(1 + world.rank());  // data of its own

  tessera::DistributedDataParallel ddp(*model, world.group(), {.average = true});
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.001);
  for (int step = 1; step <= 10; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = torch::nn::functional::mse_loss(model(at::randn({20, 10})), at::randn({20, 5}));
    loss.backward();
    optimizer.step();
    if (world.rank() == 0) std::printf("step %2d  loss %.6f\n", step, loss.item<double>());
  }

  const at::Tensor mine = at::tensor({checksum(*model)}, at::kLong);
  const at::Tensor all = at::empty({world.size()}, at::kLong);
  tessera::comm::all_gather(world.group(), all, mine);
  if (world.rank() == 0) {
    const bool equal = (all == mine).all().item<bool>();
    std::printf("%d %s, checksum %016llx: %s\n", world.size(), world.size() == 1 ? "replica" : "replicas",
                static_cast<unsigned long long>(mine.item<int64_t>()), equal ? "equal" : "NOT equal");
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
