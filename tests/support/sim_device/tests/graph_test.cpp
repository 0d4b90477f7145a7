// Graphs of the simulated device: what a capture takes down happens at each replay, on the same memory, and not before.

#include <optional>

#include <ATen/accelerator/Graph.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>

#include "tests/support/sim_device/tests/support.h"

namespace tessera::sim {
namespace {

using ::testing::HasSubstr;

class SimGraphs : public SimDevice {
 protected:
  void SetUp() override {
    SimDevice::SetUp();
    guard_.reset_stream(side());
    graph_.emplace();
  }
  void TearDown() override {
    graph_.reset();
    guard_.reset();
    SimDevice::TearDown();
  }

  at::TensorOptions options_ = at::TensorOptions(first);
  c10::OptionalStreamGuard guard_;
  std::optional<at::accelerator::Graph> graph_;

  void expect_refused(const std::function<void()>& what, const std::string& part) {
    at::accelerator::Graph graph;
    graph.capture_begin();
    try {
      what();
      ADD_FAILURE() << "took what belongs in no graph: " << part;
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
    graph.capture_end();
  }
};

TEST_F(SimGraphs, AReplayDoesItOnTheMemoryOfTheCapture) {
  const at::Tensor x = at::ones({3}, options_), sum = at::zeros({3}, options_);
  at::Tensor y;
  graph_->capture_begin();
  {
    const at::Tensor twice = x * 2;  // memory that is given back within, and used again
    y = twice + 1;
  }
  sum.add_(y * y);
  graph_->capture_end();
  EXPECT_EQ(sum.cpu().sum().item<float>(), 0) << "a capture has done something";
  EXPECT_TRUE(y.cpu().isnan().all().item<bool>()) << "a capture has made something";
  for (const float value : {1.0F, 4.0F}) {
    x.fill_(value);
    graph_->replay();
    EXPECT_EQ(y.cpu()[1].item<float>(), 2 * value + 1);
  }
  EXPECT_EQ(sum.cpu()[0].item<float>(), 9 + 81);
  EXPECT_TRUE(reports().empty());
}

TEST_F(SimGraphs, ItsMemoryIsNobodyElses) {
  graph_->capture_begin();
  const void* const address = at::ones({100}, options_).storage().data();
  graph_->capture_end();
  for (int i = 0; i < 3; ++i) EXPECT_NE(at::empty({100}, options_).storage().data(), address);
}

TEST_F(SimGraphs, NumbersOfTheHostAreThoseOfTheCapture) {
  const at::Tensor x = at::zeros({2}, options_);
  double factor = 3;
  graph_->capture_begin();
  x.add_(1, factor);
  graph_->capture_end();
  factor = 5;
  graph_->replay();
  EXPECT_EQ(x.cpu()[0].item<float>(), 3);
}

TEST_F(SimGraphs, RefusesWhatAHostTakesPartIn) {
  const at::Tensor x = at::ones({3}, options_);
  c10::Event before(sim_type());
  before.record(own());
  expect_refused([&] { static_cast<void>(x.sum().item<float>()); }, "_local_scalar_dense: operation not permitted");
  expect_refused([&] { static_cast<void>(x.cpu()); }, "operation not permitted");
  expect_refused([&] { x.copy_(at::ones({3}, at::kCPU)); }, "pinned memory");
  expect_refused([&] { own().synchronize(); }, "synchronize: operation not permitted");
  expect_refused([&] { before.block(own()); }, "across the edge");
  c10::Event within(sim_type());
  graph_->capture_begin();
  within.record(own());
  graph_->capture_end();
  EXPECT_THROW(within.synchronize(), c10::Error);
  EXPECT_THROW(within.block(own()), c10::Error);
}

TEST_F(SimGraphs, AReplayThatNobodyWaitsForIsFound) {
  const at::Tensor x = at::ones({64}, options_);
  graph_->capture_begin();
  x.mul_(2);
  graph_->capture_end();
  c10::Event ready(sim_type());
  ready.record(own());
  for (const bool waits : {true, false}) {
    const auto stream = side();
    if (waits) ready.block(stream);
    graph_->replay();
    c10::Event done(sim_type());
    done.record(own());
    if (waits) done.block(stream);
    {
      const c10::StreamGuard other(stream);
      x.add_(1);
    }
    EXPECT_EQ(reports().empty(), waits);
    at::accelerator::synchronizeDevice(0);
  }
}

}  // namespace
}  // namespace tessera::sim
