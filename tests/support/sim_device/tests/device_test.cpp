#include <c10/core/CachingDeviceAllocator.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include "tessera/memory/history.h"
#include "tessera/memory/host_link.h"
#include "tessera/memory/memory.h"
#include "tests/support/sim_device/tests/support.h"

namespace tessera::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using enum Report::Kind;

TEST_F(SimDevice, StandsWhereCudaWould) {
  const at::Tensor x = at::arange(6, at::TensorOptions(first)).view({2, 3});
  EXPECT_TRUE(at::hasCUDA() && x.is_cuda());
  EXPECT_EQ(at::getAccelerator(), at::kCUDA);
  EXPECT_TRUE(at::equal(x.t().contiguous().cpu(), at::arange(6).view({2, 3}).t()));
  EXPECT_THROW(x + at::ones({2, 3}), c10::Error);  // on the host
  EXPECT_THROW(x + at::ones({2, 3}, at::TensorOptions(second)), c10::Error);
  EXPECT_TRUE(at::equal((x + x.to(second).to(first)).cpu(), at::arange(0, 12, 2).view({2, 3})));
  EXPECT_THROW(at::empty({1}, at::TensorOptions(at::Device(sim_type(), 4))), c10::Error);  // there are four
}

TEST_F(SimDevice, DrawsTheCpusRandomNumbers) {
  at::manual_seed(3);
  const at::Tensor there = at::randn({5}, at::TensorOptions(first));
  at::manual_seed(3);
  EXPECT_TRUE(at::equal(there.cpu(), at::randn({5})));
}

/// Losses of some steps, and the weights after them.
std::vector<at::Tensor> train(at::Device device, bool attention) {
  at::manual_seed(7);
  torch::nn::Embedding embedding(50, 32);
  torch::nn::Linear in(32, 64), out(64, 50);
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({64}));
  std::vector<at::Tensor> parameters;
  for (const auto& module : std::vector<std::shared_ptr<torch::nn::Module>>{embedding.ptr(), in.ptr(), norm.ptr(), out.ptr()}) {
    module->to(device);
    for (const auto& parameter : module->parameters()) parameters.push_back(parameter);
  }
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-2));
  std::vector<at::Tensor> seen;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = at::randint(50, {4, 8}, at::kLong).to(device), y = at::randint(50, {32}, at::kLong).to(device);
    optimizer.zero_grad();
    at::Tensor h = out(norm(at::relu(in(embedding(x)))));
    if (attention) {
      const at::Tensor q = h.view({4, 8, 2, 25}).transpose(1, 2);
      h = at::scaled_dot_product_attention(q, q, q, {}, 0, /*is_causal=*/true).transpose(1, 2).reshape({4, 8, 50});
    }
    const at::Tensor loss = at::cross_entropy_loss(h.view({32, 50}), y);
    loss.backward();
    optimizer.step();
    seen.push_back(loss.detach().cpu());
  }
  for (const auto& parameter : parameters) seen.push_back(parameter.detach().cpu());
  return seen;
}

TEST_F(SimDevice, TrainsToTheCpusBits) {
  for (const bool attention : {false, true}) {
    const auto want = train(at::kCPU, attention);
    for (const at::Device device : {first, second}) {
      const auto got = train(device, attention);
      for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << device << ", tensor " << i;
    }
  }
  EXPECT_EQ(bytes_in_use(0), 0);
}

TEST_F(SimDevice, CountsTheBytesThatTheCpuCounts) {
  const auto peak_on = [](at::Device device) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    const at::Tensor x = at::ones({100, 7}, at::TensorOptions(device)), y = (x + x).softmax(1);
    return std::pair(tracker.current(), tracker.peak());
  };
  EXPECT_EQ(peak_on(first), peak_on(at::kCPU));
}

TEST_F(SimDevice, FindsAMissingWait) {
  for (const bool waits : {false, true}) {
    const auto stream = side();
    const at::Tensor x = at::zeros({1024}, at::TensorOptions(first)), from = pinned(1024);
    c10::Event ready(sim_type()), done(sim_type());
    ready.record(own());
    ready.block(stream);
    {
      const c10::StreamGuard guard(stream);
      x.copy_(from, /*non_blocking=*/true);
      done.record(stream);
    }
    if (waits) done.block(own());
    x + 1;
    const auto found = reports();
    ASSERT_EQ(found.size(), waits ? 0 : 1);
    if (!waits) EXPECT_EQ(found[0].second, "aten::add.Tensor") << found[0].text;
    at::accelerator::synchronizeDevice(0);
  }
}

TEST_F(SimDevice, TakesTwoHalvesOfATensorForTwo) {
  const auto stream = side();
  const at::Tensor x = at::zeros({1000}, at::TensorOptions(first));
  at::accelerator::synchronizeDevice(0);
  {
    const c10::StreamGuard guard(stream);
    x.narrow(0, 0, 500).add_(1);
  }
  x.narrow(0, 500, 500).add_(1);
  EXPECT_THAT(kinds(), ElementsAre());
  x.narrow(0, 499, 2).add_(1);
  EXPECT_THAT(kinds(), ElementsAre(Race));
  at::accelerator::synchronizeDevice(0);
}

enum class Release { AtOnce, Recorded, AfterAWait, BeforeAWait };

std::vector<Report::Kind> freed_in_use(c10::Stream stream, c10::Stream own, at::Device device, Release how) {
  at::Tensor x = at::ones({1 << 18}, at::TensorOptions(device));
  const at::Tensor sum = at::zeros_like(x);
  at::accelerator::synchronizeDevice(0);
  c10::Event done(sim_type());
  {
    const c10::StreamGuard guard(stream);
    sum.add_(x);
    done.record(stream);
  }
  if (how == Release::Recorded) x.record_stream(stream);
  if (how == Release::AfterAWait) done.block(own);
  x = at::Tensor();
  if (how == Release::BeforeAWait) done.block(own);  // before anybody gets the memory
  at::zeros({10}, at::TensorOptions(device));
  std::vector<Report::Kind> kinds;
  for (const auto& report : HappensBefore::get().take_reports()) kinds.push_back(report.kind);
  at::accelerator::synchronizeDevice(0);
  return kinds;
}

TEST_F(SimDevice, FindsMemoryThatIsFreedWhileAnotherStreamUsesIt) {
  EXPECT_THAT(freed_in_use(side(), own(), first, Release::AtOnce), ElementsAre(FreedInUse));
  for (const auto how : {Release::Recorded, Release::AfterAWait, Release::BeforeAWait}) EXPECT_THAT(freed_in_use(side(), own(), first, how), ElementsAre());
}

TEST_F(SimDevice, FindsWhatIsWrittenBehindTheEndOfATensor) {
  {
    const at::Tensor x = at::zeros({3}, at::TensorOptions(first).dtype(at::kByte));
    static_cast<char*>(host_of(x.mutable_data_ptr()))[4] = 1;
  }
  EXPECT_THAT(HappensBefore::get().take_reports(),
              ElementsAre(::testing::AllOf(::testing::Field(&Report::kind, Overrun), ::testing::Field(&Report::text, HasSubstr("behind the end of 3 bytes")))));
}

TEST_F(SimDevice, FindsAHostThatTouchesDeviceMemory) {
  const at::Tensor x = at::ones({10}, at::TensorOptions(first));
  EXPECT_EQ(x.data_ptr<float>()[3], 1);  // reported, and goes on
  const auto found = reports();
  ASSERT_EQ(found.size(), 1);
  EXPECT_EQ(found[0].kind, HostAccess);
  EXPECT_THAT(found[0].text, HasSubstr("the host reads device memory on the host (a tensor of 40 bytes on device 0)"));
  close_opened_pages();
  x.data_ptr<float>()[3] = 2;
  EXPECT_THAT(kinds(), ElementsAre(HostAccess));
}

TEST_F(SimDevice, FindsAHostThatTouchesPinnedMemoryOfACopy) {
  const at::Tensor x = at::ones({10}, at::TensorOptions(first)), host = pinned(10);
  host.copy_(x, /*non_blocking=*/true);
  EXPECT_EQ(host.data_ptr<float>()[0], 1);  // too early
  EXPECT_THAT(kinds(), ElementsAre(HostRace));
  at::accelerator::synchronizeDevice(0);

  x.copy_(host, /*non_blocking=*/true);
  EXPECT_EQ(host.data_ptr<float>()[0], 1);  // the copy only reads
  EXPECT_THAT(kinds(), ElementsAre());
  host.data_ptr<float>()[0] = 2;
  EXPECT_THAT(kinds(), ElementsAre(HostRace));
  at::accelerator::synchronizeDevice(0);

  host.copy_(x, /*non_blocking=*/true);
  at::accelerator::synchronizeDevice(0);
  host.data_ptr<float>()[0] = 2;
  EXPECT_THAT(kinds(), ElementsAre());
}

TEST_F(SimDevice, CountsHostSynchronisationsByOperator) {
  const at::Tensor x = at::ones({10}, at::TensorOptions(first));
  x.sum().item<float>();
  x.cpu();
  x.nonzero();
  pinned(10).copy_(x, /*non_blocking=*/true);
  at::accelerator::synchronizeDevice(0);
  EXPECT_THAT(HappensBefore::get().take_host_syncs(), ElementsAre(std::pair("aten::_local_scalar_dense", 1), std::pair("aten::copy_ to the host", 1),
                                                                  std::pair("aten::nonzero", 1), std::pair("synchronize", 1)));
}

TEST_F(SimDevice, AWaitOfWhatTheHostKnowsIsNone) {
  const at::Tensor x = at::ones({10}, at::TensorOptions(first));
  c10::Event event(sim_type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(own());
  x.cpu();
  event.synchronize();
  EXPECT_TRUE(event.query());
  EXPECT_THAT(HappensBefore::get().take_host_syncs(), ElementsAre(std::pair("aten::copy_ to the host", 1)));
}

// A microsecond for each piece of work, unless somebody says otherwise; streams that wait for one another meet at the later time, the host at none.
TEST_F(SimDevice, EventsKnowTheirTimes) {
  const auto timed = [] { return c10::Event(sim_type(), c10::EventFlag::BACKEND_DEFAULT); };
  c10::Event begin = timed(), middle = timed(), end = timed(), there = timed();
  const c10::Stream other = side();
  at::Tensor x = at::ones({10}, at::TensorOptions(first));
  begin.record(own());
  x.add_(1);
  x.add_(1);
  middle.record(own());
  {
    const Takes slow(0.5);
    middle.block(other);
    const c10::StreamGuard guard(other);
    x.mul_(2);
    there.record(other);
  }
  at::ones({10}, at::TensorOptions(first));
  there.block(own());
  end.record(own());
  at::accelerator::synchronizeDevice(0);
  EXPECT_NEAR(begin.elapsedTime(middle), 2e-3, 1e-9);  // in milliseconds
  EXPECT_NEAR(middle.elapsedTime(end), 500, 1e-9);
  x.add_(1);
  c10::Event later = timed();
  later.record(own());
  later.synchronize();
  EXPECT_NEAR(end.elapsedTime(later), 1e-3, 1e-9);
}

TEST_F(SimDevice, EventsThatTheHostHasNotWaitedForHaveNoTimes) {
  c10::Event begin(sim_type(), c10::EventFlag::BACKEND_DEFAULT), end(sim_type(), c10::EventFlag::BACKEND_DEFAULT);
  const at::Tensor x = at::ones({10}, at::TensorOptions(first));
  begin.record(own());
  x.add_(1);
  end.record(own());
  begin.synchronize();
  EXPECT_THROW(begin.elapsedTime(end), c10::Error);
  end.synchronize();
  EXPECT_NO_THROW(begin.elapsedTime(end));
}

// As CUDA's caching allocator does: what is freed stays reserved until something else needs the room.
TEST_F(SimDevice, KeepsWhatItHasGivenUpToALimit) {
  constexpr int64_t kMiB = 1 << 20;
  const auto bytes = [](int64_t size) { return at::empty({size}, at::TensorOptions(first).dtype(at::kByte)); };
  c10::getDeviceAllocator(sim_type())->emptyCache();
  const int64_t before = reserved(0).current;
  bytes(4 * kMiB);
  EXPECT_EQ(reserved(0).current, before + 4 * kMiB);
  EXPECT_EQ(reserved_memory(first).current, before + 4 * kMiB);
  EXPECT_GE(reserved_memory(first).peak, before + 4 * kMiB);
  limit_device(first, before + 8 * kMiB);
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  EXPECT_NO_THROW(bytes(8 * kMiB)) << "of which 4 were kept for reuse";
  EXPECT_EQ(reserved(0).current, before + 8 * kMiB);
  const at::Tensor held = bytes(5 * kMiB);
  EXPECT_THROW(bytes(4 * kMiB), c10::OutOfMemoryError);
  ASSERT_TRUE(tracker.refusal().has_value());
  EXPECT_EQ(tracker.refusal()->requested, 4 * kMiB);
  EXPECT_EQ(total_of(tracker.refusal()->in_use), 5 * kMiB);
  lift_limits();
  EXPECT_NO_THROW(bytes(4 * kMiB));
}

TEST_F(SimDevice, HostLinkOrdersItsCopies) {
  const HostLink link(first);
  const at::Tensor x = at::ones({1000}, at::TensorOptions(first)), there = at::empty({1000}, at::TensorOptions(first));
  const at::Tensor host = link.empty(1000, at::kFloat);
  EXPECT_TRUE(host.is_pinned());
  CopyStream::Point out, in;
  {
    const CopyStream::Scope copying(link.out);
    host.copy_(x, true);
    out = link.out.point();
  }
  out.wait();
  host.mul_(2);
  {
    const CopyStream::Scope copying(link.in);
    there.copy_(host, true);
    in = link.in.point();
  }
  in.hold_device();
  EXPECT_TRUE(at::equal((there + x).cpu(), at::full({1000}, 3.0F)));
}

}  // namespace
}  // namespace tessera::sim
