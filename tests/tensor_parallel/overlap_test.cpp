#include "tessera/tensor_parallel/overlap.h"

#include <chrono>

#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/layout/slice.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/operators.h"
#include "tessera/nn/sharing.h"
#include "tessera/nn/weight_gradients.h"
#include "tessera/tensor_parallel/overlap_ring.h"
#include "tests/late_sends.h"
#include "tests/refusal.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using tensor_parallel::GatherRing;
using tensor_parallel::SumRing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace testing_support;

constexpr double kOverlapParity = 1e-5;  // of a tensor's largest entry
constexpr TensorParallelOptions kOverlap{.overlap = true};

at::Tensor numbers(at::IntArrayRef sizes, int64_t seed = 1) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, generator);
}

at::Tensor part_of(const at::Tensor& whole, int ranks, int rank) {
  const auto [first, size] = chunk(whole.size(1), ranks, rank);
  return whole.narrow(1, first, size).contiguous();
}

double worst(const at::Tensor& got, const at::Tensor& want) {
  if (got.numel() == 0) return 0;
  return ((got - want).abs().max() / want.abs().max()).item<double>();
}

class Rings : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Overlap, Rings, ::testing::Values(1, 2, 3, 5, 8));

TEST_P(Rings, VisitEveryPartOnceAndBeginOrEndWithTheOwn) {
  const int n = GetParam();
  for (const int64_t positions : {16, 11, 3, 0}) {
    run_ranks(n, [&](World& world) {
      const int rank = world.rank();
      const at::Tensor whole = numbers({2, positions, 3});
      std::vector<int64_t> gathered, summed, expected;
      for (int step = 0; step < n; ++step) expected.push_back(chunk(positions, n, (rank - step + n) % n).first);

      for (GatherRing ring(world.group(), part_of(whole, n, rank), positions); !ring.done(); ring.advance()) {
        gathered.push_back(ring.begin());
        EXPECT_TRUE(at::equal(ring.part(), whole.narrow(1, ring.begin(), ring.part().size(1))));
      }
      EXPECT_EQ(gathered, expected);

      SumRing ring(world.group(), {2, positions, 3}, whole.options());
      while (!ring.done()) {
        summed.push_back(ring.begin());
        ring.term().copy_(whole.narrow(1, ring.begin(), ring.term().size(1)) * (rank + 1));
        ring.pass_on();
      }
      std::rotate(expected.begin(), expected.begin() + 1, expected.end());
      EXPECT_EQ(summed, expected);
      EXPECT_LT(worst(ring.take(), part_of(whole, n, rank) * (n * (n + 1) / 2)), 1e-6);
    });
  }
}

/// Gradients of a net whose layers overlap, and its loss, against one device; with sizes that are cut unevenly, and parts that are empty.
struct Case {
  int64_t batch, length;
  bool keep_gathered;
};

ParallelPlan plan_of(bool sequence, bool keep_gathered) {
  ParallelPlan plan = token_net_plan(sequence);
  for (auto& [pattern, style] : plan) {
    if (auto* prepare = std::get_if<PrepareInput>(&style)) prepare->keep_gathered = keep_gathered;
  }
  return plan;
}

TEST(Ring, MemoryThatIsStillOnItsWayIsNotWrittenOver) {
  run_ranks(5,
            [](World& world) {
              const at::Tensor whole = numbers({2, 15, 3});
              for (GatherRing ring(world.group(), part_of(whole, 5, world.rank()), 15); !ring.done(); ring.advance()) {
                EXPECT_TRUE(at::equal(ring.part(), whole.narrow(1, ring.begin(), 3))) << "rank " << world.rank() << " at " << ring.begin();
              }
              SumRing ring(world.group(), {2, 15, 3}, whole.options());
              while (!ring.done()) {
                ring.term().copy_(whole.narrow(1, ring.begin(), 3) * (world.rank() + 1));
                ring.pass_on();
              }
              EXPECT_LT(worst(ring.take(), part_of(whole, 5, world.rank()) * 15), 1e-6) << "rank " << world.rank();
            },
            {.decorators = {late_sends_of_rank_0()}});
}

class Overlapped : public ::testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Overlap, Overlapped, ::testing::Combine(::testing::Values(1, 2, 3, 5, 8), ::testing::Bool()));

TEST_P(Overlapped, NetEqualsOneDevice) {
  const auto [ranks, sequence] = GetParam();
  for (const Case& sizes : {Case{3, 11, false}, Case{1, 16, true}, Case{2, 3, false}, Case{2, 150, sequence}}) {
    const Sample batch = sample(sizes.batch, sizes.length, 29);
    TokenNet one = on_meta([] { return TokenNet(); });
    materialize(one, 7, testing_support::test_device());
    const double loss = forward_backward(one, batch).item<double>();
    Tensors gradients;
    for (const auto& parameter : nn::unique_parameters(*one)) gradients[parameter.name] = parameter.tensor.grad();
    run_ranks(ranks, [&](World& world) {
      TokenNet net = on_meta([] { return TokenNet(); });
      const auto tensor = parallelize_module(net, world.group(), plan_of(sequence, sizes.keep_gathered), kOverlap);
      materialize(net, 7, testing_support::test_device());
      for (int pass = 0; pass < 2; ++pass) {
        net->zero_grad();
        EXPECT_NEAR(forward_backward(net, batch).item<double>(), loss, 5e-6 * loss);
        nn::sum_terms(tensor->group(), nn::unique_parameters(*net));
        EXPECT_LT(difference_from(*net, gradients), kOverlapParity) << sizes.length << " positions";
      }
    });
  }
}

/// Its casts are those of whole operators, so layers do not overlap under it: the bits of a run without.
TEST(Overlap, UnderAutocastIsLeftOut) {
  for (const bool sequence : {false, true}) {
    run_ranks(2, [&](World& world) {
      const auto gradients = [&](const TensorParallelOptions& options) {
        TokenNet net = on_meta([] { return TokenNet(); });
        const auto tensor = parallelize_module(net, world.group(), plan_of(sequence, false), options);
        materialize(net, 7, testing_support::test_device());
        const auto type = testing_support::test_device().type();
        const at::ScalarType usual = at::autocast::get_autocast_dtype(type);
        at::autocast::set_autocast_enabled(type, true);
        at::autocast::set_autocast_dtype(type, at::kBFloat16);
        const auto off = c10::make_scope_exit([&] {
          at::autocast::clear_cache();
          at::autocast::set_autocast_dtype(type, usual);
          at::autocast::set_autocast_enabled(type, false);
        });
        std::vector<at::Tensor> all{forward_backward(net, sample(2, 80, 29))};
        for (const auto& parameter : nn::unique_parameters(*net)) all.push_back(parameter.tensor.grad());
        return all;
      };
      const auto with = gradients(kOverlap), without = gradients({});
      for (size_t i = 0; i < with.size(); ++i) EXPECT_TRUE(at::equal(with[i], without[i])) << i;
    });
  }
}

/// One column-wise layer with a bias and one without, and a row-wise one, on raw tensors.
struct Layers {
  explicit Layers(World& world, at::ScalarType dtype, int64_t positions)
      : context{.group = world.group(), .sequence = positions},
        first(nn::LinearOptions(6, 4)),
        second(nn::LinearOptions(6, 5).bias(false)),
        row(nn::LinearOptions(4, 6).bias(false)) {
    for (auto* linear : {first.get(), second.get(), row.get()}) {
      const at::NoGradGuard no_grad;
      linear->weight.copy_(numbers(linear->weight.sizes(), 5 + world.rank()));
      linear->to(dtype);
    }
  }
  tensor_parallel::Context context;
  nn::Linear first, second, row;
};

double rounding(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-14 : dtype == at::kFloat ? 1e-6 : 1e-2; }

TEST(Overlap, ColumnProductsAreThoseOfTheWhole) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const int64_t positions : {7, 200}) {  // gathered and multiplied together, or sample by sample
      run_ranks(3, [&](World& world) {
        Layers layers(world, dtype, positions);
        const at::Tensor whole = numbers({2, positions, 6}).to(dtype), part = part_of(whole, 3, world.rank()).requires_grad_();
        const auto [gathered, products] =
            tensor_parallel::multiply_columns(layers.context, part, TensorLayout::Sequence, {layers.first.get(), layers.second.get()});
        EXPECT_TRUE(at::equal(gathered, whole));
        const double bound = rounding(dtype);
        EXPECT_LE(worst(products[0], layers.first->forward(whole)), bound) << dtype;
        EXPECT_LE(worst(products[1], layers.second->forward(whole)), bound) << dtype;

        // Backward, also through what else uses the whole; and through that alone.
        const at::Tensor twice = whole.detach().requires_grad_();
        const auto loss = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& x) { return a.square().sum() + b.sum() + (x * x).sum(); };
        loss(products[0], products[1], gathered).backward();
        loss(layers.first->forward(twice), layers.second->forward(twice), twice).backward();
        at::Tensor sum = twice.grad().to(at::kFloat);
        comm::all_reduce(world.group(), sum);
        EXPECT_LE(worst(part.grad(), part_of(sum, 3, world.rank())), 2 * std::max(bound, 1e-6));
      });
    }
  }
}

TEST(Overlap, RowProductsAreTheSumOfTheTerms) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const TensorLayout to : {TensorLayout::Sequence, TensorLayout::Replicated}) {
      run_ranks(3, [&](World& world) {
        Layers layers(world, dtype, 7);
        const bool sequence = to == TensorLayout::Sequence;
        const auto own = [&](const at::Tensor& whole) { return sequence ? part_of(whole, 3, world.rank()) : whole; };
        const at::Tensor x = numbers({2, 7, 4}, 3 + world.rank()).to(dtype).requires_grad_(), weight = layers.row->weight, dy = numbers({2, 7, 6}).to(dtype);
        at::Tensor sum = layers.row->forward(x).detach().to(at::kDouble);
        comm::all_reduce(world.group(), sum);
        const at::Tensor y = tensor_parallel::multiply_rows(layers.context, x, *layers.row, to);
        EXPECT_LE(worst(y, own(sum)), 2 * rounding(dtype)) << dtype;
        y.backward(own(dy));
        const at::Tensor dx = x.grad(), d_weight = weight.grad();
        weight.mutable_grad() = x.mutable_grad() = at::Tensor();
        layers.row->forward(x).backward(dy);
        EXPECT_LE(worst(dx, x.grad()), rounding(dtype)) << dtype;
        EXPECT_LE(worst(d_weight, weight.grad()), rounding(dtype)) << dtype;
      });
    }
  }
}

/// What goes through them would count as a constant in a second derivative.
TEST(Overlap, ASecondDerivativeIsRefusedByName) {
  for (const TensorLayout side : {TensorLayout::Sequence, TensorLayout::Replicated}) {
    run_ranks(2, [&](World& world) {
      Layers layers(world, at::kDouble, 7);
      const bool sequence = side == TensorLayout::Sequence;
      const at::Tensor whole = numbers({2, 7, 6}).to(at::kDouble), x = (sequence ? part_of(whole, 2, world.rank()) : whole.clone()).requires_grad_();
      const at::Tensor z = numbers({2, 7, 4}, 3 + world.rank()).to(at::kDouble).requires_grad_();
      const auto second = [&](const at::Tensor& y, const at::Tensor& of) {
        const at::Tensor slope = torch::autograd::grad({y.square().sum()}, {of}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
        slope.square().sum().backward();
      };
      const auto refused = ::testing::ThrowsMessage<ConfigError>(HasSubstr("tensor.overlap: its gradient was differentiated once more"));
      EXPECT_THAT([&] { second(tensor_parallel::multiply_columns(layers.context, x, side, {layers.first.get()}).products[0], x); }, refused);
      EXPECT_THAT([&] { second(tensor_parallel::multiply_rows(layers.context, z, *layers.row, side), z); }, refused);
    });
  }
}

/// What backward makes with weights' gradients in it, and what it makes, and makes later, where they are left: the same bits, and the products of inputs alone.
TEST(Overlap, GradientsOfWeightsAreLeftForLater) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool sequence : {true, false}) {
      for (const bool kept : {false, true}) {
        run_ranks(5, [&](World& world) {
          Layers layers(world, at::kFloat, 7);
          const std::vector<nn::LinearImpl*> columns{layers.first.get(), layers.second.get()};
          for (auto* linear : {layers.first.get(), layers.second.get(), layers.row.get()}) linear->set_compute_dtype(dtype);
          const TensorLayout side = sequence ? TensorLayout::Sequence : TensorLayout::Replicated;
          const at::Tensor whole = numbers({2, 7, 6}).to(dtype), wide = numbers({2, 7, 4}, 3 + world.rank()).to(dtype);
          struct Made {
            std::vector<at::Tensor> gradients;
            double in_backward, behind;
          };
          const auto flops_of = [](const auto& body) {
            const auto counter = std::make_shared<nn::FlopCounter>();
            const nn::OperatorScope counted(counter);
            body();
            return counter->flops();
          };
          const auto made = [&](const std::shared_ptr<nn::WeightGradients>& later) {
            const at::Tensor x = (sequence ? part_of(whole, 5, world.rank()) : whole.clone()).requires_grad_(), z = wide.clone().requires_grad_();
            for (auto* linear : {layers.first.get(), layers.second.get(), layers.row.get()}) linear->zero_grad();
            at::Tensor loss;
            {
              const nn::LeaveWeightGradients scope(later);
              const auto result = tensor_parallel::multiply_columns(layers.context, x, side, columns, kept);
              loss = result.products[0].square().sum() + result.products[1].sum() + result.whole.sum() +
                     tensor_parallel::multiply_rows(layers.context, z, *layers.row, side).square().sum();
            }
            const double in_backward = flops_of([&] { loss.backward(); });
            if (later) EXPECT_FALSE(layers.row->weight.grad().defined() || layers.first->weight.grad().defined() || layers.first->bias.grad().defined());
            const double behind = flops_of([&] {
              if (later) later->compute();
            });
            return Made{{x.grad(), z.grad(), layers.first->weight.grad(), layers.first->bias.grad(), layers.second->weight.grad(), layers.row->weight.grad()},
                        in_backward,
                        behind};
          };
          const Made at_once = made(nullptr), later = made(std::make_shared<nn::WeightGradients>());
          for (size_t i = 0; i < at_once.gradients.size(); ++i) EXPECT_TRUE(at::equal(later.gradients[i], at_once.gradients[i])) << i << " " << dtype;
          EXPECT_EQ(later.in_backward + later.behind, at_once.in_backward);
          const double products = 2.0 * 2 * 7 * (6 * (4 + 5) + 4 * 6);
          EXPECT_EQ(later.behind, products);
          EXPECT_EQ(later.in_backward, products);
        });
      }
    }
  }
}

TEST(Overlap, BackwardNeverHoldsTheWholeInput) {
  constexpr int64_t n = 8, positions = 64, width = 256, part = positions / n * width * 4;
  run_ranks(n, [](World& world) {
    MemoryTracker memory;
    const TrackMemory tracked(memory);
    tensor_parallel::Context context{.group = world.group(), .sequence = positions};
    nn::Linear linear(nn::LinearOptions(width, 4).bias(false));
    const at::Tensor x = at::ones({1, positions / n, width}).requires_grad_();
    auto made = tensor_parallel::multiply_columns(context, x, TensorLayout::Sequence, {linear.get()});
    const at::Tensor loss = made.products[0].sum();
    made = {};
    const int64_t before = memory.current(), weight = linear->weight.numel() * 4;
    memory.reset_peak();
    loss.backward();
    EXPECT_LE(memory.peak() - before, 6 * part + weight + 4096);  // two parts on the one ring, three on the other, and the result
    EXPECT_LE(memory.at_peak(MemoryCategory::Comm), 5 * part);
    EXPECT_EQ(memory.current() - before, part + weight) << "gradients stay, and nothing else";
  });
}

TEST(Overlap, OfABiasAWeightOrAnInputAloneTheOthersAreLeftOut) {
  run_ranks(2, [](World& world) {
    for (const TensorLayout from : {TensorLayout::Sequence, TensorLayout::Replicated}) {
      for (int wanted = 0; wanted < 4; ++wanted) {
        Layers layers(world, at::kFloat, 5);
        const at::Tensor whole = numbers({2, 5, 6});
        const at::Tensor x = (from == TensorLayout::Sequence ? part_of(whole, 2, world.rank()) : whole.clone()).requires_grad_(wanted == 1);
        layers.first->weight.requires_grad_(wanted == 2);
        layers.first->bias.requires_grad_(wanted == 3);
        const auto made = tensor_parallel::multiply_columns(layers.context, x, from, {layers.first.get()});
        EXPECT_EQ(made.products[0].requires_grad(), wanted != 0);
        if (wanted == 0) continue;
        made.products[0].sum().backward();
        EXPECT_EQ(x.grad().defined(), wanted == 1);
        EXPECT_EQ(layers.first->weight.grad().defined(), wanted == 2);
        EXPECT_EQ(layers.first->bias.grad().defined(), wanted == 3);
        if (wanted == 2) EXPECT_LT(worst(layers.first->weight.grad(), whole.sum({0, 1}).expand({4, 6})), 1e-5);
        if (wanted == 3) EXPECT_TRUE(at::equal(layers.first->bias.grad(), at::full({4}, 10.0)));
      }
    }
  });
}

/// How many exchanges had begun when each product was computed.
struct Moments : nn::OperatorHooks {
  explicit Moments(std::shared_ptr<comm::Recorder> records) : records(std::move(records)) {}
  void call(nn::OperatorCall& operation) override {
    if (operation.name() == "aten::mm" || operation.name() == "aten::addmm") begun.push_back(records->records().size());
    operation.run();
  }
  std::shared_ptr<comm::Recorder> records;
  std::vector<size_t> begun;
};

TEST(Overlap, WhatAProductHidesIsOnItsWayWhenItBegins) {
  run_ranks(3, [](World& world) {
    Layers layers(world, at::kFloat, 9);
    const auto records = std::make_shared<comm::Recorder>();
    layers.context.group = comm::Group({.name = "tp", .rank = world.rank(), .size = 3, .timeout = std::chrono::seconds(60)},
                                       comm::make_record_engine(records, {.name = "tp", .rank = world.rank(), .size = 3}, world.group().engine()));
    const auto moments = std::make_shared<Moments>(records);
    const auto begun = [&] { return std::exchange(moments->begun, {}); };
    const nn::OperatorScope scope(moments);
    const at::Tensor x = numbers({1, 3, 6}).requires_grad_(), inner = numbers({1, 9, 4}).requires_grad_();

    // A send and a receive each time, but for the last.
    const auto columns = tensor_parallel::multiply_columns(layers.context, x, TensorLayout::Sequence, {layers.first.get(), layers.second.get()});
    EXPECT_THAT(begun(), ElementsAre(2, 2, 4, 4, 4, 4));
    records->clear();
    const at::Tensor row = tensor_parallel::multiply_rows(layers.context, inner, *layers.row, TensorLayout::Sequence);
    EXPECT_THAT(begun(), ElementsAre(0, 2, 4));
    records->clear();
    row.sum().backward();  // for the input and for the weight
    EXPECT_THAT(begun(), ElementsAre(2, 2, 4, 4, 4, 4));
    records->clear();
    (columns.products[0].sum() + columns.products[1].sum()).backward();  // two layers' terms, then their weights', while sums and inputs go round
    EXPECT_THAT(begun(), ElementsAre(2, 2, 4, 4, 6, 6, 8, 8, 8, 8, 8, 8));
    records->clear();

    const at::Tensor whole = tensor_parallel::multiply_rows(layers.context, inner, *layers.row, TensorLayout::Replicated);
    EXPECT_THAT(begun(), ElementsAre(0, 1, 2, 3));
    EXPECT_EQ(records->records().size(), 4u);
  });
}

TEST(Overlap, WhatItCannotServeIsComputedWithout) {
  nn::Linear linear(nn::LinearOptions(6, 4));
  const auto serves = [&](const at::Tensor& x, int64_t features = 4) { return tensor_parallel::can_overlap(*linear, x, TensorLayout::Sequence, features); };
  EXPECT_TRUE(serves(at::zeros({1, 2, 6})));
  EXPECT_FALSE(serves(at::zeros({2, 6})));
  EXPECT_FALSE(serves(at::zeros({1, 2, 6}, at::kBFloat16)));
  EXPECT_FALSE(serves(at::zeros({1, 2, 6}), 8));  // elsewhere, or not gathered yet
  linear->set_fp8(kernels::Fp8Scaling::Row);
  EXPECT_FALSE(serves(at::zeros({1, 2, 6})));
}

TEST(Overlap, LayersThatDoNotTakeWhatIsPreparedAreRefused) {
  run_ranks(2, [](World& world) {
    const auto refusal = [&](const PrepareInput& prepare) -> std::string {
      TokenNet net = on_meta([] { return TokenNet(); });
      ParallelPlan plan = token_net_plan(true);
      for (auto& [pattern, style] : plan) {
        if (std::holds_alternative<PrepareInput>(style)) style = prepare;
      }
      try {
        const auto tensor = parallelize_module(net, world.group(), plan, kOverlap);
        materialize(net, 7, testing_support::test_device());
        forward_backward(net, sample(2, 7, 29));
      } catch (const ConfigError& error) {
        return error.what();
      }
      return "";
    };
    using enum TensorLayout;
    EXPECT_EQ(refusal({.from = Sequence, .to = Copied, .layers = {"w3"}}), "");  // the other takes the whole, and keeps its part
    EXPECT_THAT(refusal({.from = Sequence, .to = Copied, .layers = {"w4"}}), HasSubstr("nearest path is"));
    EXPECT_THAT(refusal({.from = Sequence, .to = Replicated, .layers = {"w1"}}), HasSubstr("its layers take what is copied, and to = replicated"));

    struct IdleImpl : nn::Module {
      IdleImpl() : used(4, 6), idle(4, 6) {
        register_module("used", used);
        register_module("idle", idle);
      }
      at::Tensor forward(const at::Tensor& x) { return used(x); }
      nn::Linear used, idle;
    };
    struct Outer : torch::nn::Module {
      Outer() : inner(std::make_shared<IdleImpl>()) { register_module("inner", inner); }
      std::shared_ptr<IdleImpl> inner;
    };
    const auto outer = std::make_shared<Outer>();
    const auto tensor = parallelize_module(
        *outer, world.group(),
        {{"inner", PrepareInput{.from = Replicated, .to = Copied, .layers = {"used", "idle"}}}, {"inner.*", ColumnParallel{.input = Copied}}},
        {.overlap = true, .replicas = ReplicaStart::Broadcast});
    try {
      nn::call(*outer->inner, numbers({1, 3, 4}));
      ADD_FAILURE() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("'inner.idle' takes what is prepared, and in this call"));
    }
  });
}

/// What a module writes into the gathered input before a layer takes it is no part of what is gathered again for backward, nor of a product that was made in
/// front.
TEST(Overlap, AGatheredInputThatIsWrittenInPlaceIsKept) {
  const auto make = [] {
    TokenNet net = on_meta([] { return TokenNet(); });
    for (Gated& gated : net->gated) gated->writes = true;
    return net;
  };
  const Sample batch = sample(2, 7, 29);
  TokenNet one = make();
  materialize(one, 7, testing_support::test_device());
  forward_backward(one, batch);
  Tensors gradients;
  for (const auto& parameter : nn::unique_parameters(*one)) gradients[parameter.name] = parameter.tensor.grad();
  for (const bool overlap : {false, true}) {
    run_ranks(2, [&](World& world) {
      TokenNet net = make();
      const auto tensor = parallelize_module(net, world.group(), token_net_plan(true), overlap ? kOverlap : TensorParallelOptions{});
      materialize(net, 7, testing_support::test_device());
      if (overlap) {
        EXPECT_THAT(testing_support::refusal([&] { forward_backward(net, batch); }), HasSubstr("is given what was written in place after it was gathered"));
        return;
      }
      forward_backward(net, batch);
      nn::sum_terms(tensor->group(), nn::unique_parameters(*net));
      EXPECT_LT(difference_from(*net, gradients), 1e-5);
    });
  }
}

}  // namespace
}  // namespace tessera
