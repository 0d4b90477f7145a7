// A dry run has to allocate what a real run allocates, to the byte: every operator of a training step is run on the CPU and on meta under a tracker each.

#include "tessera/memory/memory.h"

#include "tessera/kernels/attention.h"
#include "tessera/kernels/bias_activation.h"
#include "tessera/kernels/dropout.h"
#include "tessera/kernels/fp8.h"
#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/kernels/products.h"
#include "tessera/kernels/rms_norm.h"
#include "tessera/kernels/rope.h"
#include "tessera/kernels/swiglu.h"
#include "tests/kernels/support.h"
#include "tests/on_the_cpu.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;
using Tensors = std::vector<at::Tensor>;

struct Bytes {
  int64_t peak, after;  ///< beyond the inputs
  std::vector<std::vector<int64_t>> shapes, strides;
  bool operator==(const Bytes&) const = default;
};

void PrintTo(const Bytes& bytes, std::ostream* out) {
  *out << "peak " << bytes.peak << ", after " << bytes.after << ", strides";
  for (const auto& s : bytes.strides) *out << " " << c10::IntArrayRef(s);
}

/// What `step` allocates on `device`, beyond its inputs, and the layout of what it returns.
Bytes measure(const std::function<Tensors(const Tensors&)>& step, const Tensors& inputs, c10::Device device) {
  // Some of libtorch's kernels make scratch without naming a device (attention in bf16, on CPUs with matrix units).
  std::optional<testing_support::OnTheCpu> cpu;
  if (device.is_cpu()) cpu.emplace();
  Tensors local;
  for (const auto& input : inputs) {
    at::Tensor copy = at::empty_strided(input.sizes(), input.strides(), input.options().device(device));
    if (!device.is_meta()) copy.copy_(input.detach());
    local.push_back(copy.requires_grad_(input.requires_grad()));
  }
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  Bytes bytes{};
  {
    const Tensors results = step(local);
    bytes.peak = tracker.peak();
    bytes.after = tracker.current();
    for (const auto& result : results) {
      bytes.shapes.push_back(result.sizes().vec());
      bytes.strides.push_back(result.strides().vec());
    }
  }
  return bytes;
}

struct Case {
  std::string name;
  std::function<Tensors(const Tensors&)> step;
  std::function<Tensors(at::ScalarType)> inputs;
};

/// Value and gradients, as a training step takes them.
std::function<Tensors(const Tensors&)> trained(Operator f) {
  return [f](const Tensors& in) {
    Tensors results{f(in)};
    results[0].backward(at::ones_like(results[0]));
    for (const auto& tensor : in) {
      if (tensor.requires_grad() && tensor.grad().defined()) results.push_back(tensor.grad());
    }
    return results;
  };
}

at::Tensor leaf(at::IntArrayRef shape, at::ScalarType dtype) { return random(shape, dtype).requires_grad_(true); }
at::Tensor heads(int64_t batch, int64_t tokens, int64_t heads, int64_t dim, at::ScalarType dtype) {
  return random({batch, tokens, heads, dim}, dtype).transpose(1, 2).detach().requires_grad_(true);
}
at::Tensor tokens(at::IntArrayRef shape, int64_t vocabulary) { return at::arange(c10::multiply_integers(shape), at::kLong).remainder(vocabulary).view(shape); }

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](std::string name, std::function<Tensors(const Tensors&)> step, std::function<Tensors(at::ScalarType)> inputs) {
    all.push_back({std::move(name), std::move(step), std::move(inputs)});
  };
  const auto attention = [&](const std::string& name, int64_t b, int64_t s, int64_t h, int64_t k, int64_t d, bool causal) {
    add("attention_" + name, trained([causal](const Tensors& in) { return flash_attention(in[0], in[1], in[2], causal); }),
        [=](at::ScalarType t) { return Tensors{heads(b, s, h, d, t), heads(b, s, k, d, t), heads(b, s, k, d, t)}; });
  };
  // Sequence lengths on both sides of the operator's tile sizes.
  attention("tiny", 1, 1, 1, 1, 8, true);
  attention("short", 2, 31, 4, 4, 16, true);
  attention("grouped", 2, 200, 6, 2, 64, true);
  attention("full", 1, 193, 4, 4, 32, false);
  attention("long", 1, 800, 4, 4, 64, true);
  attention("odd", 2, 333, 3, 3, 20, true);
  add("attention_contiguous_gradient", trained([](const Tensors& in) { return flash_attention(in[0], in[1], in[2], true).transpose(1, 2).flatten(2).mul(2); }),
      [](at::ScalarType t) { return Tensors{heads(2, 40, 4, 16, t), heads(2, 40, 2, 16, t), heads(2, 40, 2, 16, t)}; });
  add("embedding", trained([](const Tensors& in) { return at::embedding(in[0], in[1]); }),
      [](at::ScalarType t) { return Tensors{leaf({97, 24}, t), tokens({2, 33}, 97)}; });
  add("linear", trained([](const Tensors& in) { return at::linear(in[0], in[1]); }),
      [](at::ScalarType t) { return Tensors{leaf({2, 40, 64}, t), leaf({96, 64}, t)}; });
  add("linear_bias", trained([](const Tensors& in) { return at::linear(in[0], in[1], in[2]); }),
      [](at::ScalarType t) { return Tensors{leaf({2, 40, 64}, t), leaf({96, 64}, t), leaf({96}, t)}; });
  add("linear_odd", trained([](const Tensors& in) { return at::linear(in[0], in[1], in[2]); }),
      [](at::ScalarType t) { return Tensors{leaf({7, 33}, t), leaf({19, 33}, t), leaf({19}, t)}; });
  add("linear_large", trained([](const Tensors& in) { return at::linear(in[0], in[1]); }),
      [](at::ScalarType t) { return Tensors{leaf({512, 384}, t), leaf({1024, 384}, t)}; });
  add("linear_cast", trained([](const Tensors& in) { return at::linear(in[0], in[1].to(at::kBFloat16)); }),
      [](at::ScalarType t) { return Tensors{leaf({64, 48}, at::kBFloat16), leaf({32, 48}, t)}; });
  for (const auto scaling : {Fp8Scaling::Tensor, Fp8Scaling::Row}) {
    for (const auto out : {at::kFloat, at::kBFloat16}) {
      for (const auto left : {at::kFloat8_e5m2, at::kFloat8_e4m3fn}) {  // which libtorch may multiply in different ways
        add(
            std::string(left == at::kFloat8_e5m2 ? "fp8_" : "fp8_alike_") + (scaling == Fp8Scaling::Row ? "rows_to_" : "to_") + c10::toString(out),
            [=](const Tensors& in) { return Tensors{fp8_product(in[0], left, in[1], at::kFloat8_e4m3fn, out, scaling)}; },
            [](at::ScalarType t) { return Tensors{leaf({40, 64}, t).detach(), leaf({96, 64}, t).detach()}; });
      }
    }
  }
  for (const bool bias : {false, true}) {
    add(bias ? "product_bias" : "product", trained([bias](const Tensors& in) { return kernels::linear(in[0], in[1], bias ? in[2] : at::Tensor()); }),
        [](at::ScalarType t) { return Tensors{leaf({2, 40, 64}, t), leaf({96, 64}, t), leaf({96}, t)}; });
  }
  add("matmul", trained([](const Tensors& in) { return at::matmul(in[0], in[1]); }),
      [](at::ScalarType t) { return Tensors{leaf({3, 20, 16}, t), leaf({3, 16, 24}, t)}; });
  add("layer_norm", trained([](const Tensors& in) { return at::layer_norm(in[0], {40}, in[1], in[2], 1e-5); }),
      [](at::ScalarType t) { return Tensors{leaf({2, 70, 40}, t), leaf({40}, t), leaf({40}, t)}; });
  add("layer_norm_mixed", trained([](const Tensors& in) { return at::layer_norm(in[0], {40}, in[1], in[2], 1e-5); }),
      [](at::ScalarType) { return Tensors{leaf({2, 70, 40}, at::kBFloat16), leaf({40}, at::kFloat), leaf({40}, at::kFloat)}; });
  add("gelu", trained([](const Tensors& in) { return at::gelu(in[0], "tanh"); }), [](at::ScalarType t) { return Tensors{leaf({20, 33}, t)}; });
  add("activate", trained([](const Tensors& in) { return activate(in[0], Activation::Gelu); }), [](at::ScalarType t) { return Tensors{leaf({20, 33}, t)}; });
  add("relu", trained([](const Tensors& in) { return at::relu(in[0]); }), [](at::ScalarType t) { return Tensors{leaf({20, 33}, t)}; });
  add("silu", trained([](const Tensors& in) { return at::silu(in[0]); }), [](at::ScalarType t) { return Tensors{leaf({20, 33}, t)}; });
  add("softmax", trained([](const Tensors& in) { return at::softmax(in[0], -1); }), [](at::ScalarType t) { return Tensors{leaf({20, 33}, t)}; });
  add("residual", trained([](const Tensors& in) { return in[0] + in[1]; }),
      [](at::ScalarType t) { return Tensors{leaf({20, 33}, at::kFloat), leaf({20, 33}, t)}; });
  add("positions", trained([](const Tensors& in) { return in[0] + at::embedding(in[1], in[2]); }),
      [](at::ScalarType t) { return Tensors{leaf({2, 9, 16}, t), leaf({12, 16}, t), tokens({9}, 9)}; });
  add("cross_entropy_loss", trained([](const Tensors& in) { return at::cross_entropy_loss(in[0], in[1], {}, at::Reduction::Sum); }),
      [](at::ScalarType t) { return Tensors{leaf({20, 33}, t), tokens({20}, 33)}; });
  add("where", trained([](const Tensors& in) { return at::where(in[1] > 0, in[0], 0.0); }),
      [](at::ScalarType t) { return Tensors{leaf({20, 33}, t), random({20, 33}, t)}; });

  add("dropout_of_libtorch", trained([](const Tensors& in) { return at::dropout(in[0], 0.5, true); }),
      [](at::ScalarType t) { return Tensors{leaf({20, 33}, t)}; });
  add(
      "adamw",
      [](const Tensors& in) {
        at::_fused_adamw_({in[0]}, {in[1]}, {in[2]}, {in[3]}, {}, {in[4]}, 1e-3, 0.9, 0.999, 0.01, 1e-8, /*amsgrad=*/false, /*maximize=*/false);
        return Tensors{};
      },
      [](at::ScalarType t) { return Tensors{random({20, 33}, t), random({20, 33}, t), random({20, 33}, t), random({20, 33}, t).square(), at::ones({})}; });
  add(
      "unscale",
      [](const Tensors& in) {
        at::_amp_foreach_non_finite_check_and_unscale_({in[0]}, const_cast<at::Tensor&>(in[1]), in[2]);
        return Tensors{};
      },
      [](at::ScalarType) { return Tensors{random({20, 33}), at::zeros({1}), at::ones({1})}; });
  add("foreach_norm", [](const Tensors& in) { return at::_foreach_norm(in); }, [](at::ScalarType t) { return Tensors{random({20, 33}, t), random({7}, t)}; });
  add("stack", [](const Tensors& in) { return Tensors{at::stack(in)}; }, [](at::ScalarType t) { return Tensors{random({}, t), random({}, t)}; });
  add("norm", [](const Tensors& in) { return Tensors{at::linalg_vector_norm(in[0])}; }, [](at::ScalarType t) { return Tensors{random({20, 33}, t)}; });

  add("rms_norm", trained([](const Tensors& in) { return rms_norm(in[0], in[1], 1e-5); }),
      [](at::ScalarType t) { return Tensors{leaf({2, 70, 40}, t), leaf({40}, t)}; });
  add("rms_norm_cast", trained([](const Tensors& in) { return rms_norm(in[0], in[1], 1e-5, at::kBFloat16); }),
      [](at::ScalarType t) { return Tensors{leaf({2, 70, 40}, at::kFloat), leaf({40}, t)}; });
  add("swiglu", trained([](const Tensors& in) { return swiglu(in[0], in[1]); }),
      [](at::ScalarType t) { return Tensors{leaf({20, 33}, t), leaf({20, 33}, t)}; });
  add("rope", trained([](const Tensors& in) { return rope(in[0], in[1], in[2]); }),
      [](at::ScalarType t) { return Tensors{leaf({2, 9, 3, 8}, t), random({9, 4}), random({9, 4})}; });
  add("dropout", trained([](const Tensors& in) { return dropout(in[0], 0.5, 1, in[1]); }),
      [](at::ScalarType t) { return Tensors{leaf({20, 33}, t), tokens({20}, 20)}; });
  add("cross_entropy_sum", trained([](const Tensors& in) { return cross_entropy_sum(in[0], in[1]); }),
      [](at::ScalarType t) { return Tensors{leaf({20, 33}, t), tokens({20}, 33)}; });
  for (const int64_t chunk : {1, 16, 64}) {
    add("linear_cross_entropy_" + std::to_string(chunk), trained([chunk](const Tensors& in) {
          return linear_cross_entropy(in[0], in[1], in[2], {.chunk_tokens = chunk, .expected_gradient = 0.5, .loss = {0.1, 0.1}});
        }),
        [](at::ScalarType t) { return Tensors{leaf({50, 24}, t), leaf({97, 24}, t), tokens({50}, 97)}; });
  }
  add("linear_cross_entropy_cast",
      trained([](const Tensors& in) { return linear_cross_entropy(in[0], in[1], in[2], {.chunk_tokens = 16, .compute_dtype = at::kBFloat16}); }),
      [](at::ScalarType t) { return Tensors{leaf({50, 24}, t), leaf({97, 24}, at::kFloat), tokens({50}, 97)}; });
  return all;
}

/// Operators of models that are not ours, whose temporaries on the CPU a dry run does not follow to the byte; what stays allocated has to agree all the same.
std::vector<Case> approximate_cases() {
  std::vector<Case> all;
  all.push_back({"mse_loss", trained([](const Tensors& in) { return at::mse_loss(in[0], in[1]); }),
                 [](at::ScalarType t) { return Tensors{leaf({20, 33}, t), random({20, 33}, t)}; }});
  all.push_back({"batch_norm", trained([](const Tensors& in) { return at::batch_norm(in[0], in[1], in[2], {}, {}, true, 0.1, 1e-5, false); }),
                 [](at::ScalarType t) { return Tensors{leaf({20, 33}, t), leaf({33}, t), leaf({33}, t)}; }});
  all.push_back({"multinomial", [](const Tensors& in) { return Tensors{at::multinomial(in[0].abs(), 2)}; },
                 [](at::ScalarType t) { return Tensors{random({4, 33}, t)}; }});
  all.push_back(
      {"extremes", [](const Tensors& in) { return Tensors{in[0].max(), in[0].min()}; }, [](at::ScalarType t) { return Tensors{random({4, 33}, t)}; }});
  return all;
}

TEST(Memory, WhatStaysAgreesWhereTemporariesDoNot) {
  for (const Case& c : approximate_cases()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const Tensors inputs = c.inputs(dtype);
      Bytes meta = measure(c.step, inputs, at::kMeta), cpu = measure(c.step, inputs, at::kCPU);
      meta.peak = cpu.peak = 0;
      EXPECT_EQ(meta, cpu) << c.name;
    }
  }
}

TEST(Memory, LinearCrossEntropyNeverHoldsAllLogits) {
  const int64_t T = 300, D = 24, V = 1000;
  // The header's formula. C: chunk, e: size of the compute dtype, `widened`: products of it are made in fp32.
  const auto documented = [&](int64_t C, int64_t hidden, int64_t weight, int64_t e, bool widened) {
    if (widened) return 4 * (C * V + T + 1 + T * D + V * D) + T * D * hidden + V * D * weight + (hidden == 4 ? 0 : 4 * C * D) + (weight == 4 ? 0 : 4 * V * D);
    int64_t bytes = C * V * e + 4 * (T + 1) + T * D * hidden + V * D * weight;
    if (e != hidden) bytes += T * D * e + C * D * e;
    if (e != weight) bytes += V * D * e;
    if (weight == 4 && e != 4) bytes += V * D * e;
    if (weight != 4 && (e == 4 || C < T)) bytes += V * D * 4;
    return bytes;
  };
  for (const at::ScalarType hidden : {at::kFloat, at::kBFloat16}) {
    for (const at::ScalarType weight : {at::kFloat, at::kBFloat16}) {
      for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
        for (const int64_t chunk : {1, 64, 300}) {
          const auto step = [&](const Tensors& in) {
            return Tensors{linear_cross_entropy(in[0], in[1], in[2], {.chunk_tokens = chunk, .compute_dtype = compute})};
          };
          const Tensors inputs{leaf({T, D}, hidden), leaf({V, D}, weight), tokens({T}, V)};
          for (const bool native : {true, false}) {
            const Bf16ProductsGuard products(native);
            const bool widened = !native && compute == at::kBFloat16;
            const int64_t expected = documented(chunk, c10::elementSize(hidden), c10::elementSize(weight), c10::elementSize(compute), widened);
            EXPECT_EQ(measure(step, inputs, at::kCPU).peak, expected) << hidden << " " << weight << " " << compute << " " << chunk << " " << widened;
            EXPECT_EQ(measure(step, inputs, at::kMeta).peak, expected) << hidden << " " << weight << " " << compute << " " << chunk << " " << widened;
          }
        }
      }
    }
  }
}

class EachOperator : public ::testing::TestWithParam<std::tuple<int, at::ScalarType>> {};

TEST_P(EachOperator, AllocatesOnMetaWhatItAllocatesOnTheCpu) {
  const Case c = cases()[std::get<0>(GetParam())];
  const Tensors inputs = c.inputs(std::get<1>(GetParam()));
  // oneDNN and the thread pool set themselves up at the first call.
  measure(c.step, inputs, at::kCPU);
  EXPECT_EQ(measure(c.step, inputs, at::kMeta), measure(c.step, inputs, at::kCPU)) << c.name;
}

/// On a CPU without bf16 products, and in its dry run.
TEST(Memory, WidenedProductsAllocateOnMetaWhatTheyAllocateOnTheCpu) {
  const Bf16ProductsGuard widened(/*native=*/false);
  int compared = 0;
  for (const Case& c : cases()) {
    if (!c.name.starts_with("attention_") && !c.name.starts_with("product") && !c.name.starts_with("linear_cross_entropy")) continue;
    const Tensors inputs = c.inputs(at::kBFloat16);
    measure(c.step, inputs, at::kCPU);
    EXPECT_EQ(measure(c.step, inputs, at::kMeta), measure(c.step, inputs, at::kCPU)) << c.name;
    ++compared;
  }
  EXPECT_GE(compared, 12);
}

INSTANTIATE_TEST_SUITE_P(Memory, EachOperator,
                         ::testing::Combine(::testing::Range(0, static_cast<int>(cases().size())), ::testing::Values(at::kFloat, at::kBFloat16)),
                         [](const auto& info) { return cases()[std::get<0>(info.param)].name + "_" + c10::toString(std::get<1>(info.param)); });

}  // namespace
}  // namespace tessera::kernels
