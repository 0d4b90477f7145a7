#include "bench/kernels/support.h"
#include "tessera/kernels/cross_entropy.h"
#include "tessera/kernels/linear_cross_entropy.h"

// Arguments: dtype (0 fp32, 1 bf16), tokens, features, vocabulary, chunk (0: default).
namespace tessera::bench {
namespace {

struct Problem {
  explicit Problem(const benchmark::State& state)
      : compute(dtype_of(state.range(0))),
        hidden((at::randn({state.range(1), state.range(2)})).to(compute).requires_grad_(true)),
        weight((at::randn({state.range(3), state.range(2)}) * 0.02).requires_grad_(true)),
        labels(at::randint(state.range(3), {state.range(1)}, at::kLong)) {}

  void forget() {
    hidden.mutable_grad() = at::Tensor();
    weight.mutable_grad() = at::Tensor();
  }
  at::ScalarType compute;
  at::Tensor hidden, weight, labels;
};

/// Logits, log-softmax and loss as PyTorch composes them under autocast: product in the compute dtype, softmax in fp32.
void eager(benchmark::State& state) {
  Problem p(state);
  for (auto _ : state) {
    const at::Tensor logits = at::mm(p.hidden, p.weight.to(p.compute).t()).to(at::kFloat);
    at::cross_entropy_loss(logits, p.labels, {}, at::Reduction::Mean).backward();
    p.forget();
  }
}

/// Our own unfused head: all logits, one pass each way.
void unfused(benchmark::State& state) {
  Problem p(state);
  for (auto _ : state) {
    kernels::cross_entropy_sum(at::mm(p.hidden, p.weight.to(p.compute).t()), p.labels).backward(at::full({}, 1.0 / state.range(1)));
    p.forget();
  }
}

void fused(benchmark::State& state) {
  Problem p(state);
  const double scale = 1.0 / static_cast<double>(state.range(1));
  for (auto _ : state) {
    kernels::linear_cross_entropy(p.hidden, p.weight, p.labels, {.chunk_tokens = state.range(4), .compute_dtype = p.compute, .expected_gradient = scale})
        .backward(at::full({}, scale));
    p.forget();
  }
}

/// The bound: the three products alone, into buffers that exist already.
void products(benchmark::State& state) {
  const Problem p(state);
  const at::NoGradGuard no_grad;
  at::Tensor weight = p.weight.to(p.compute), logits = at::zeros({state.range(1), state.range(3)}, weight.options()), dx = at::zeros_like(p.hidden),
             dw = at::zeros_like(weight);
  for (auto _ : state) {
    at::mm_out(logits, p.hidden, weight.t());
    at::mm_out(dx, logits, weight);
    at::mm_out(dw, logits.t(), p.hidden);
  }
}

void shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"bf16", "T", "D", "V", "chunk"})->Unit(benchmark::kMillisecond)->UseRealTime();
  for (const int64_t bf16 : {0, 1}) {
    b->Args({bf16, 2048, 384, 32000, 0});
    b->Args({bf16, 2048, 1024, 4096, 0});
  }
}
void chunks(benchmark::internal::Benchmark* b) {
  shapes(b);
  for (const int64_t bf16 : {0, 1}) {
    for (const int64_t chunk : {128, 256, 512, 1024, 2048}) b->Args({bf16, 2048, 384, 32000, chunk});
  }
}

BENCHMARK(products)->Apply(shapes);
BENCHMARK(eager)->Apply(shapes);
BENCHMARK(unfused)->Apply(shapes);
BENCHMARK(fused)->Apply(chunks);

}  // namespace
}  // namespace tessera::bench
