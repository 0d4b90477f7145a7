// A module of somebody else, intercepted from outside, trained with tessera's DDP and optimizer. Uses only the installed package.
#include <cstdio>

#include <ATen/ATen.h>
#include <tessera/tessera.h>

struct FeedForwardImpl : tessera::nn::Module {
  FeedForwardImpl(int64_t dim, int64_t hidden) : w1(dim, hidden), w2(hidden, dim), w3(dim, hidden) {
    register_module("w1", w1);
    register_module("w2", w2);
    register_module("w3", w3);
  }
  at::Tensor forward(const at::Tensor& x) { return w2(at::silu(w1(x)) * w3(x)); }
  tessera::nn::Linear w1, w2, w3;
};
TESSERA_MODULE(FeedForward);

struct Count : tessera::nn::Interceptor {
  int calls = 0;
  tessera::nn::Values call(tessera::nn::Module&, tessera::nn::Values inputs, const tessera::nn::Next& next) override {
    ++calls;
    return next(std::move(inputs));
  }
};

int main() {
  auto model = tessera::on_meta([] { return FeedForward(16, 40); });
  tessera::nn::assign_paths(*model);
  tessera::materialize(model, /*seed=*/1);
  auto count = std::make_shared<Count>();
  auto attached = tessera::nn::attach(*model, "w*", count);

  auto world = tessera::comm::World::from_environment();
  tessera::DistributedDataParallel ddp(*model, world.group(), {.average = true});
  tessera::optim::AdamW optimizer(tessera::optim::decay_groups(tessera::nn::unique_parameters(*model), "matrices", 0.01));

  const at::Tensor x = at::randn({64, 16}), y = x.flip(1);
  double first = 0, last = 0;
  for (int step = 0; step < 50; ++step) {
    model->zero_grad();
    const at::Tensor loss = (model(x) - y).square().mean();
    loss.backward();
    optimizer.step(1e-2);
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  if (!(last < 0.5 * first) || count->calls != 150) {
    std::printf("loss went from %f to %f, %d calls seen\n", first, last, count->calls);
    return 1;
  }
  std::printf("loss fell from %f to %f\n", first, last);
  return 0;
}
