// Activations away from the device: the same bits, and bytes where the clock of modules puts them.

#include "tessera/offload/activations.h"

#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tessera/memory/history.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/dry_sizes.h"
#include "tessera/recompute/recompute.h"
#include "tests/recompute/net.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using namespace tessera::testing_support;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

int64_t on_host(const MemoryTracker& memory) { return memory.host_by_category()[static_cast<size_t>(MemoryCategory::Activations)]; }

ActivationOffloadOptions everything(int64_t prefetch = 1, OffloadPlace place = OffloadPlace::Host) {
  return {.where = {{"layers.*", place}}, .min_bytes = 1, .prefetch = prefetch, .dir = std::filesystem::temp_directory_path()};
}

TEST(OffloadActivations, IsBitForBitHoweverFarAheadTheyAreFetched) {
  Net net(5);
  const Result plain = run(net);
  for (const auto place : {OffloadPlace::Host, OffloadPlace::Disk}) {
    for (const int64_t prefetch : {0, 1, 2, 9}) {
      SCOPED_TRACE(prefetch);
      const auto moved = offload_activations(net, test_device(), everything(prefetch, place));
      expect_same_bits(run(net), plain);
      expect_same_bits(run(net), plain);
    }
  }
  expect_same_bits(run(net), plain);
}

TEST(OffloadActivations, LiesOutsideOfRecompute) {
  Net net(5);
  const Result plain = run(net);
  for (const RecomputeOptions& options : {RecomputeOptions{}, {.every = 2}, {.segment = 2}, {.mode = RecomputeMode::Selective, .keep = {"aten::addmm"}}}) {
    MemoryTracker memory;
    const TrackMemory track(memory);
    const auto again = recompute(net, options);
    const auto moved = offload_activations(net, test_device(), everything());
    expect_same_bits(run(net), plain);
    EXPECT_GT(memory.host_peak_by_category()[static_cast<size_t>(MemoryCategory::Activations)], 0);
    EXPECT_EQ(on_host(memory), 0);
  }
  // Inside of a module that is computed again nothing is kept, and so nothing moved.
  MemoryTracker memory;
  const TrackMemory track(memory);
  const auto moved = offload_activations(net, test_device(), everything());
  const auto again = recompute(net);
  expect_same_bits(run(net), plain);
  EXPECT_EQ(memory.host_peak_by_category()[static_cast<size_t>(MemoryCategory::Activations)], 0);
}

/// What is on the host when forward is done, and when the backward of each layer is about to begin, the last first.
std::vector<int64_t> away_in_backward(int64_t prefetch) {
  Net net(5);
  const auto moved = offload_activations(net, test_device(), everything(prefetch));
  std::vector<int64_t> away;
  MemoryTracker memory;
  const TrackMemory track(memory);
  at::Tensor x = input().requires_grad_();
  for (auto& layer : net->layers) {
    x = layer(x);
    x.register_hook([&](const at::Tensor& gradient) {
      away.push_back(on_host(memory));
      return gradient;
    });
  }
  away.push_back(on_host(memory));
  x.sum().backward();
  EXPECT_EQ(on_host(memory), 0);
  const int64_t layer = away.front() / 5;
  for (auto& bytes : away) bytes = bytes * 10 / layer;
  return away;
}

TEST(OffloadActivations, AreFetchedByTheClockOfModules) {
  EXPECT_THAT(away_in_backward(0), ElementsAre(50, 50, 40, 30, 20, 10));
  EXPECT_THAT(away_in_backward(1), ElementsAre(50, 50, 30, 20, 10, 0));
  EXPECT_THAT(away_in_backward(2), ElementsAre(50, 50, 20, 10, 0, 0));
}

TEST(OffloadActivations, PassesThatAreAliveTogetherAreToldApart) {
  Net net(3);
  const auto losses = [&] {
    std::vector<at::Tensor> losses;
    nn::SampleScope sample({.seed = 5, .step = 2});
    for (int64_t rows = 1; rows <= 3; ++rows) losses.push_back(net(input(rows)).pow(2).sum());
    return losses;
  };
  const auto gradients = [&](const std::vector<size_t>& order) {
    net->zero_grad();
    const auto all = losses();
    for (const size_t i : order) all[i].backward();
    std::vector<at::Tensor> found;
    for (const auto& p : net->parameters()) found.push_back(p.grad().clone());
    return found;
  };
  for (const std::vector<size_t>& order : {std::vector<size_t>{0, 1, 2}, {2, 0, 1}}) {
    const auto plain = gradients(order);
    const auto moved = offload_activations(net, test_device(), everything());
    const auto found = gradients(order);
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(found[i], plain[i])) << i;
  }
}

TEST(OffloadActivations, AGraphThatIsKeptAsksAgain) {
  for (const auto place : {OffloadPlace::Host, OffloadPlace::Disk}) {
    Net net(3);
    const auto moved = offload_activations(net, test_device(), everything(1, place));
    nn::SampleScope sample({.seed = 5, .step = 2});
    at::Tensor x = input().requires_grad_();
    const at::Tensor loss = net(x).pow(2).sum();
    loss.backward({}, /*retain_graph=*/true);
    const at::Tensor once = x.grad().clone();
    loss.backward();
    EXPECT_TRUE(at::equal(x.grad(), once * 2));
  }
}

TEST(OffloadActivations, AStorageMovesOnceHoweverManyViewsOfItAreSaved) {
  struct TwiceImpl : nn::Module {
    TwiceImpl() { nn::assign_paths(*this, "twice"); }
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor y = x + 1;  // 12 floats
      return (y.t().matmul(y)).sum() + y.narrow(0, 1, 2).sin().sum() + (y * y).sum();
    }
  };
  struct Holder : nn::ModuleHolder<TwiceImpl> {
    using nn::ModuleHolder<TwiceImpl>::ModuleHolder;
  };
  Holder net;
  const auto pass = [&] {
    at::Tensor x = input().narrow(1, 0, 4).contiguous().requires_grad_();
    MemoryTracker memory;
    const TrackMemory track(memory);
    const at::Tensor loss = net(x);
    const int64_t away = on_host(memory);
    loss.backward();
    return std::pair(away, x.grad());
  };
  const auto [none, plain] = pass();
  EXPECT_EQ(none, 0);
  const auto moved = offload_activations(*net.ptr(), test_device(), {.where = {{""}}, .min_bytes = 1});
  const auto [away, gradient] = pass();
  EXPECT_EQ(away, 12 * 4) << "y, whole, transposed, and two of its rows";
  EXPECT_TRUE(at::equal(gradient, plain));
}

TEST(OffloadActivations, AChangeInPlaceIsRefusedAsWithoutThem) {
  struct WritesImpl : nn::Module {
    WritesImpl() { nn::assign_paths(*this, "writes"); }
    at::Tensor forward(const at::Tensor& x) {
      at::Tensor y = x * 2;
      const at::Tensor before = (y * y).sum();
      y.detach().add_(1);
      return before;
    }
  };
  struct Holder : nn::ModuleHolder<WritesImpl> {
    using nn::ModuleHolder<WritesImpl>::ModuleHolder;
  };
  Holder net;
  const auto moved = offload_activations(*net.ptr(), test_device(), {.where = {{""}}, .min_bytes = 1});
  EXPECT_THAT(refusal([&] { net(input().requires_grad_()).backward(); }), HasSubstr("changed in place after it was saved"));
}

TEST(OffloadActivations, StaysWithinItsBudgetAndAboveItsThreshold) {
  Net net(5);
  const Result plain = run(net);
  const auto most = [&](ActivationOffloadOptions options) {
    MemoryTracker memory;
    const TrackMemory track(memory);
    const auto moved = offload_activations(net, test_device(), options);
    expect_same_bits(run(net), plain);
    EXPECT_EQ(on_host(memory), 0);
    memory.reset_peak();
    expect_same_bits(run(net), plain);  // in which there is as much room as in the first
    return memory.host_peak_by_category()[static_cast<size_t>(MemoryCategory::Activations)];
  };
  constexpr int64_t one = 3 * 8 * 4;
  auto options = everything();
  options.min_bytes = one;  // all but what dropout keeps
  const int64_t all = most(options);
  EXPECT_EQ(all % (5 * one), 0);
  options.budget_bytes = 7 * one + 1;
  EXPECT_EQ(most(options), 7 * one);
  options.budget_bytes = 0, options.min_bytes = one + 1;
  EXPECT_EQ(most(options), 0);
  options.min_bytes = one, options.fraction = 0.4;
  EXPECT_EQ(most(options), all / 5 * 2) << "the first two layers";
  options.fraction = 1, options.where = {{"layers.1"}, {"layers.3.w2"}};
  EXPECT_GT(most(options), all / 5);
}

/// A dry run of the least or the most that a run may have there bounds what it takes on either side of the threshold.
TEST(OffloadActivations, AnExceptionStaysWhateverIsSaidAroundIt) {
  Net net(5);
  const Result plain = run(net);
  const auto away = [&](const std::vector<OffloadedModules>& where, double fraction = 1) {
    auto options = everything();
    options.where = where, options.fraction = fraction;
    const auto moved = offload_activations(net, test_device(), options);
    expect_same_bits(run(net), plain);
    MemoryTracker memory;
    const TrackMemory track(memory);
    const at::Tensor y = net(input().requires_grad_());
    return on_host(memory);
  };
  const auto host = OffloadPlace::Host;
  const int64_t all = away({{"layers.*", host}}), layer = all / 5;
  EXPECT_EQ(away({{"layers.*", host}, {"layers.1", std::nullopt}}), 4 * layer);
  EXPECT_EQ(away({{"layers.1", std::nullopt}, {"layers.*", host}}), 4 * layer) << "in any order";
  EXPECT_EQ(away({{"layers.*", host}, {"layers.1", std::nullopt}}, 0.5), 2 * layer) << "of those that move";
  const int64_t less = away({{"layers.*", host}, {"layers.*.w2", std::nullopt}});
  EXPECT_LT(less, all);
  EXPECT_GT(less, 0) << "the rest of each layer moves";
  EXPECT_EQ(away({{"layers.*", host}, {"layers.1", std::nullopt}, {"layers.1.w2", host}}), 4 * layer + away({{"layers.1.w2", host}})) << "inside of it, too";
}

TEST(OffloadActivations, SizesThatAreNotKnownMayLieOnEitherSideOfTheThreshold) {
  Net net(5);
  constexpr int64_t one = 3 * 8 * 4;
  struct Bytes {
    int64_t away, here, most_in_backward;
    bool operator==(const Bytes&) const = default;
  };
  const auto after_forward = [&](nn::DrySizes sizes, int64_t min_bytes) {
    auto options = everything(/*prefetch=*/9);
    options.min_bytes = min_bytes;
    const auto moved = offload_activations(net, test_device(), options);
    const at::Tensor x = input().requires_grad_();
    MemoryTracker memory;
    const TrackMemory track(memory);
    const nn::DrySizesScope scope(sizes);
    const at::Tensor y = net(x).sum();
    Bytes bytes{.away = on_host(memory), .here = memory.current(), .most_in_backward = 0};
    memory.reset_peak();
    y.backward();
    bytes.most_in_backward = memory.peak();
    net->zero_grad();
    x.mutable_grad().reset();
    EXPECT_EQ(memory.current(), static_cast<int64_t>(y.nbytes()));
    return bytes;
  };
  const Bytes small_go = after_forward(nn::DrySizes::Known, 1), large_go = after_forward(nn::DrySizes::Known, one);
  EXPECT_GT(small_go.away, large_go.away) << "what dropout keeps is smaller";
  EXPECT_EQ(after_forward(nn::DrySizes::Least, one + 1), small_go);
  const Bytes most = after_forward(nn::DrySizes::Most, one);
  EXPECT_EQ(most.away, large_go.away);
  EXPECT_EQ(most.here, large_go.here + large_go.away / one * (one - 1)) << "each as large as what stays may be";
  EXPECT_EQ(most.most_in_backward, large_go.most_in_backward) << "what is back lies there once";
}

TEST(OffloadActivations, LeavesEvaluationAlone) {
  Net net(2);
  const auto moved = offload_activations(net, test_device(), everything());
  MemoryTracker memory;
  const TrackMemory track(memory);
  {
    const at::NoGradGuard no_grad;
    net(input());
  }
  net->eval();
  net(input().requires_grad_());
  EXPECT_EQ(total_of(memory.host_peak_by_category()), 0);
}

TEST(OffloadActivations, RefusesWhatItCannotDo) {
  Net net(2);
  const auto refused = [&](ActivationOffloadOptions options) { return refusal([&] { (void)offload_activations(net, test_device(), options); }); };
  EXPECT_THAT(refused({.where = {{"layer.*"}}}), HasSubstr("layers"));
  EXPECT_THAT(refused({.where = {{"layers.1*"}, {"layers.*1", OffloadPlace::Disk}}}),
              HasSubstr("'layers.1' is named by two patterns, 'layers.1*' and 'layers.*1'"));
  EXPECT_THAT(refused({.where = {{"layers.1"}, {"layers.0", std::nullopt}}}), HasSubstr("'layers.0' = device: is no exception"));
  EXPECT_THAT(refused({.where = {{"layers.1"}, {"layers.*", std::nullopt}}}), HasSubstr("'layers.*' = device: is no exception"));
  EXPECT_THAT(refused({.where = {{"layers.*"}, {"layers.1", OffloadPlace::Host}}}), "not refused");
  EXPECT_THAT(refused({.fraction = 1.5}), HasSubstr("offload.fraction = 1.5"));
  EXPECT_THAT(refused({.prefetch = -1}), HasSubstr("offload.prefetch = -1"));
  EXPECT_THAT(refused(everything(1, OffloadPlace::Disk)), "not refused");
  auto nowhere = everything(1, OffloadPlace::Disk);
  nowhere.dir = "";
  EXPECT_THAT(refused(nowhere), HasSubstr("offload.dir"));
  nowhere.dir = "/proc/none";
  EXPECT_THAT(refused(nowhere), AllOf(HasSubstr("offload.dir = /proc/none"), HasSubstr("a folder that can be written")));
}

struct ImaginaryImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return at::imag(at::complex(x, 2 * x).conj()) * weight; }  // a view that negates what it shows
  at::Tensor weight = register_parameter("weight", at::full({8}, 0.5));
};
TESSERA_MODULE(Imaginary);

TEST(OffloadActivations, ViewsThatNegateComeBackAsTheyWere) {
  torch::nn::Module root("Root");
  Imaginary module;
  const auto layers = root.register_module("layers", std::make_shared<torch::nn::Module>());
  layers->register_module("0", module.ptr());
  nn::assign_paths(root);
  const auto gradient = [&] {
    module->zero_grad();
    module(at::arange(16, at::kFloat).view({2, 8})).pow(2).sum().backward();
    return module->weight.grad().clone();
  };
  const at::Tensor plain = gradient();
  const auto moved = offload_activations(root, test_device(), everything());
  EXPECT_TRUE(at::equal(gradient(), plain)) << plain;
}

}  // namespace
}  // namespace tessera
