#include <gtest/gtest.h>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"
#include "tessera/nn/sharing.h"
#include "tests/test_device.h"

/// What tensor parallelism sends, against the formulas of docs/tensor-parallel.md.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using namespace testing_support;

constexpr int64_t kTrafficBatch = 2, kTrafficLength = 24, kTrafficDim = 12, kTrafficLayers = 2;

/// Elements that a rank sends in one forward and backward pass, by call site.
std::map<std::string, int64_t> sent(int ranks, bool sequence, const kernels::CrossEntropyOptions& loss = {}, TensorParallelOptions options = {}) {
  options.watch_terms = false;  // ranks compare numbers of their parts in the first call
  std::map<std::string, int64_t> elements;
  std::mutex mutex;
  run_ranks(ranks, [&](World& world) {
    const auto records = std::make_shared<comm::Recorder>();
    const comm::Group group({.name = "tp", .rank = world.rank(), .size = ranks, .timeout = std::chrono::seconds(60)},
                            comm::make_record_engine(records, {.name = "tp", .rank = world.rank(), .size = ranks}, world.group().engine()));
    TokenNet net = on_meta([] { return TokenNet(TokenNetSizes{.dim = kTrafficDim, .hidden = 16, .vocabulary = 32}); });
    const auto tensor = parallelize_module(net, group, token_net_plan(sequence), options);
    materialize(net, 7, testing_support::test_device());
    net->head->set_loss(loss);
    forward_backward(net, sample(kTrafficBatch, kTrafficLength, 32));
    const auto passes = records->records();
    nn::sum_terms(tensor->group(), nn::unique_parameters(*net));
    if (world.rank() != 0) return;
    const std::lock_guard lock(mutex);
    for (const auto& record : passes) elements[record.site.substr(0, record.site.find('.'))] += record.sent_bytes / 4;
    for (size_t i = passes.size(); i < records->records().size(); ++i) elements["step"] += records->records()[i].sent_bytes / 4;
  });
  return elements;
}

class Traffic : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(TensorParallel, Traffic, ::testing::Values(2, 3, 4, 8));

TEST_P(Traffic, OfALayerIsTwoAllReducesEachWay) {
  const int t = GetParam();
  const int64_t stream = kTrafficBatch * kTrafficLength * kTrafficDim, tokens = kTrafficBatch * kTrafficLength;
  const auto all_reduce = [&](int64_t elements) { return 2 * (t - 1) * elements / t; };
  const auto elements = sent(t, false);
  for (int layer = 0; layer < kTrafficLayers; ++layer)
    EXPECT_EQ(elements.at("gated" + std::to_string(layer)), 2 * all_reduce(stream));  // one forward, one backward
  EXPECT_EQ(elements.at("embed"), all_reduce(stream));
  EXPECT_EQ(elements.at("head"), all_reduce(stream) + 3 * all_reduce(tokens));
  EXPECT_EQ(elements.size(), kTrafficLayers + 2u);
  EXPECT_EQ(sent(t, false, {}, {.overlap = true}), elements) << "in pieces, it is as much";
  EXPECT_EQ(sent(t, false, {.label_smoothing = 0.1, .z_loss = 1e-4}), elements) << "what the target expects of the logits travels as one number";
}

TEST_P(Traffic, OfALayerWithSequencesIsFiveGathersAndScatters) {
  const int t = GetParam();
  const int64_t stream = kTrafficBatch * kTrafficLength * kTrafficDim, tokens = kTrafficBatch * kTrafficLength;
  const auto part = [&](int64_t elements) { return (t - 1) * elements / t; };
  const auto elements = sent(t, true);
  // Forward a gather and a scatter, backward the same, and once more the gather for the weights' gradients.
  for (int layer = 0; layer < kTrafficLayers; ++layer) EXPECT_EQ(elements.at("gated" + std::to_string(layer)), 5 * part(stream));
  EXPECT_EQ(elements.at("embed"), 2 * part(stream));  // a scatter, and in backward a gather
  EXPECT_EQ(elements.at("head"), 2 * part(stream) + 3 * 2 * part(tokens));
  // Once a step: weights and biases of three norms, biases of the row-wise layers.
  EXPECT_EQ(elements.at("step"), 2 * part((3 * 2 + kTrafficLayers) * kTrafficDim));
  EXPECT_EQ(elements.size(), kTrafficLayers + 3u);
  EXPECT_EQ(sent(t, true, {}, {.overlap = true}), elements) << "part by part, it is as much";
}

}  // namespace
}  // namespace tessera
