#include "bench/kernels/support.h"
#include "tessera/kernels/bias_activation.h"
#include "tessera/kernels/dropout.h"
#include "tessera/kernels/embedding_gradient.h"
#include "tessera/kernels/layer_norm.h"
#include "tessera/kernels/reference.h"
#include "tessera/kernels/rms_norm.h"
#include "tessera/kernels/rope.h"
#include "tessera/kernels/swiglu.h"

// Kernels whose cost is their bytes, forward and backward. Arguments: dtype (0 fp32, 1 bf16), rows, features.
namespace tessera::bench {
namespace {

constexpr double kEps = 1e-5;

/// One forward and backward pass of f per iteration; `passes` counts how often one tensor of the problem's size is read or written at least.
template <class F>
void measure(benchmark::State& state, double passes, const std::vector<at::Tensor>& leaves, F&& f) {
  const at::Tensor grad = at::ones_like(f());
  for (auto _ : state) {
    f().backward(grad);
    for (const auto& leaf : leaves) leaf.mutable_grad() = at::Tensor();
  }
  report_bytes(state, passes * static_cast<double>(grad.numel() * grad.element_size()));
}

at::Tensor problem(const benchmark::State& state) { return random({state.range(1), state.range(2)}, dtype_of(state.range(0)), true); }

void rms_norm_fused(benchmark::State& state) {
  const at::Tensor x = problem(state), weight = random({state.range(2)}, at::kFloat, true);
  measure(state, 5, {x, weight}, [&] { return kernels::rms_norm(x, weight, kEps); });
}
void rms_norm_eager(benchmark::State& state) {
  const at::Tensor x = problem(state), weight = random({state.range(2)}, at::kFloat, true);
  measure(state, 5, {x, weight}, [&] { return kernels::reference::rms_norm(x, weight, kEps); });
}
void swiglu_fused(benchmark::State& state) {
  const at::Tensor gate = problem(state), up = problem(state);
  measure(state, 8, {gate, up}, [&] { return kernels::swiglu(gate, up); });
}
void swiglu_eager(benchmark::State& state) {
  const at::Tensor gate = problem(state), up = problem(state);
  measure(state, 8, {gate, up}, [&] { return at::silu(gate) * up; });
}

void geglu_fused(benchmark::State& state) {
  const at::Tensor gate = problem(state), up = problem(state);
  measure(state, 8, {gate, up}, [&] { return kernels::geglu(gate, up); });
}
void geglu_eager(benchmark::State& state) {
  const at::Tensor gate = problem(state), up = problem(state);
  measure(state, 8, {gate, up}, [&] { return at::gelu(gate, "tanh") * up; });
}

at::Tensor feature(const benchmark::State& state) { return random({state.range(2)}, at::kFloat, true); }

void layer_norm_fused(benchmark::State& state) {
  const at::Tensor x = problem(state), weight = feature(state), bias = feature(state);
  measure(state, 5, {x, weight, bias}, [&] { return kernels::layer_norm(x, weight, bias, kEps); });
}
/// PyTorch's own fused operator; of 16 bits in fp32, as nn::LayerNorm and autocast take it.
void layer_norm_eager(benchmark::State& state) {
  const at::Tensor x = problem(state), weight = feature(state), bias = feature(state);
  measure(state, 5, {x, weight, bias}, [&] { return at::layer_norm(x.to(at::kFloat), {state.range(2)}, weight, bias, kEps).to(x.scalar_type()); });
}
/// The stream and its norm are both used, as in a block: reads 2 and writes 2, then reads 3 and writes 1.
void add_rms_norm_fused(benchmark::State& state) {
  const at::Tensor x = problem(state), added = problem(state), weight = feature(state);
  measure(state, 11, {x, added, weight}, [&] {
    const auto [sum, out] = kernels::add_rms_norm(x, added, weight, kEps);
    return sum + out;
  });
}
void add_rms_norm_eager(benchmark::State& state) {
  const at::Tensor x = problem(state), added = problem(state), weight = feature(state);
  measure(state, 11, {x, added, weight}, [&] {
    const at::Tensor sum = x + added;
    return sum + kernels::reference::rms_norm(sum, weight, kEps);
  });
}
void bias_gelu_fused(benchmark::State& state) {
  const at::Tensor x = problem(state), bias = feature(state);
  measure(state, 5, {x, bias}, [&] { return kernels::bias_activation(x, bias, kernels::Activation::Gelu); });
}
void bias_gelu_eager(benchmark::State& state) {
  const at::Tensor x = problem(state), bias = random({state.range(2)}, dtype_of(state.range(0)), true);
  measure(state, 5, {x, bias}, [&] { return at::gelu(x + bias, "tanh"); });
}

/// As in an embedding's backward: into a sum that is there, of 32,000 rows.
template <class Add>
void embedding_gradient(benchmark::State& state, const Add& add) {
  const at::Tensor rows = random({state.range(1), state.range(2)}, dtype_of(state.range(0))), ids = at::randint(32000, {state.range(1)}, at::kLong);
  const at::Tensor sum = at::zeros({32000, state.range(2)});
  for (auto _ : state) add(sum, rows, ids);
  report_bytes(state, static_cast<double>(rows.nbytes()) + 8.0 * static_cast<double>(rows.numel()));
}
void embedding_gradient_fused(benchmark::State& state) {
  embedding_gradient(state, [](const at::Tensor& sum, const at::Tensor& rows, const at::Tensor& ids) { kernels::add_embedding_gradient_(sum, rows, ids, -1); });
}
void embedding_gradient_eager(benchmark::State& state) {
  embedding_gradient(state, [](const at::Tensor& sum, const at::Tensor& rows, const at::Tensor& ids) { sum.index_add_(0, ids, rows.to(at::kFloat)); });
}

struct RopeProblem {
  explicit RopeProblem(const benchmark::State& state) : x(random({state.range(1) / 256, 256, state.range(2) / 64, 64}, dtype_of(state.range(0)), true)) {}
  at::Tensor x, cos = at::rand({256, 32}), sin = at::rand({256, 32});
};
void rope_fused(benchmark::State& state) {
  const RopeProblem p(state);
  measure(state, 4, {p.x}, [&] { return kernels::rope(p.x, p.cos, p.sin); });
}
void rope_eager(benchmark::State& state) {
  const RopeProblem p(state);
  measure(state, 4, {p.x}, [&] { return kernels::reference::rope(p.x, p.cos, p.sin); });
}

void dropout_fused(benchmark::State& state) {
  const at::Tensor x = problem(state), rows = at::arange(state.range(1), at::kLong);
  measure(state, 4, {x}, [&] { return kernels::dropout(x, 0.1, 1, rows); });
}
void dropout_eager(benchmark::State& state) {
  const at::Tensor x = problem(state);
  measure(state, 4, {x}, [&] { return at::dropout(x, 0.1, true); });
}

void shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"bf16", "rows", "features"})->Unit(benchmark::kMicrosecond)->UseRealTime();
  for (const int64_t bf16 : {0, 1}) b->Args({bf16, 2048, 384})->Args({bf16, 8192, 1024});
}

BENCHMARK(rms_norm_eager)->Apply(shapes);
BENCHMARK(rms_norm_fused)->Apply(shapes);
BENCHMARK(swiglu_eager)->Apply(shapes);
BENCHMARK(swiglu_fused)->Apply(shapes);
BENCHMARK(rope_eager)->Apply(shapes);
BENCHMARK(rope_fused)->Apply(shapes);
BENCHMARK(geglu_eager)->Apply(shapes);
BENCHMARK(geglu_fused)->Apply(shapes);
BENCHMARK(layer_norm_eager)->Apply(shapes);
BENCHMARK(layer_norm_fused)->Apply(shapes);
BENCHMARK(add_rms_norm_eager)->Apply(shapes);
BENCHMARK(add_rms_norm_fused)->Apply(shapes);
BENCHMARK(bias_gelu_eager)->Apply(shapes);
BENCHMARK(bias_gelu_fused)->Apply(shapes);
BENCHMARK(embedding_gradient_eager)->Apply(shapes);
BENCHMARK(embedding_gradient_fused)->Apply(shapes);
BENCHMARK(dropout_eager)->Apply(shapes);
BENCHMARK(dropout_fused)->Apply(shapes);

}  // namespace
}  // namespace tessera::bench
