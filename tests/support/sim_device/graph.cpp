#include "tests/support/sim_device/graph.h"

#include <array>
#include <atomic>
#include <cstring>
#include <memory>

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#define TESSERA_SIM_GRAPHS
#endif

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "tests/support/sim_device/device.h"
#include "tests/support/sim_device/memory.h"

namespace tessera::sim {

namespace {

std::array<std::atomic<Capture*>, kMaxDevices> under_way{};
std::atomic<int64_t> next_pool{1};

}  // namespace

Capture::Capture(int device) : device_(device), pool_(next_pool++) {
  each_block(device, [this](const Block& block) {
    const auto* const bytes = static_cast<const char*>(host_of(reinterpret_cast<const void*>(block.begin)));
    before_.push_back({.address = reinterpret_cast<void*>(block.begin), .bytes = {bytes, bytes + block.bytes}});
  });
  Capture* none = nullptr;
  TORCH_CHECK(under_way[static_cast<size_t>(device)].compare_exchange_strong(none, this), "simulated device: device ", device, " captures already");
}

Capture::~Capture() {
  Capture* self = this;
  under_way[static_cast<size_t>(device_)].compare_exchange_strong(self, nullptr);
}

Capture* Capture::of(int device) { return under_way[static_cast<size_t>(device)].load(); }

void Capture::refuse(int device, const char* what) {
  TORCH_CHECK(!of(device), "simulated device: ", what, ": operation not permitted when stream is capturing");
}

void Capture::add(std::function<void(int)> call) {
  const std::lock_guard lock(mutex_);
  calls_.push_back(std::move(call));
}

void Capture::end() {
  under_way[static_cast<size_t>(device_)] = nullptr;
  for (const Saved& saved : before_) std::memcpy(host_of(saved.address), saved.bytes.data(), saved.bytes.size());
  before_.clear();
  spoil(device_, pool_);
}

void Capture::replay(int stream) const {
  for (const auto& call : calls_) call(stream);
}

#ifdef TESSERA_SIM_GRAPHS

namespace {

class SimGraph final : public at::GraphImplInterface {
 public:
  explicit SimGraph(const at::GraphImplArgs& /*args*/) {}
  void capture_begin(at::MempoolId_t, at::GraphCaptureMode) override {
    const c10::Stream stream = now();
    TORCH_CHECK(stream.id() != 0, "simulated device: a graph is captured on another stream than the default one");
    capture_ = std::make_unique<Capture>(stream.device_index());
  }
  void capture_end() override { capture_->end(); }
  void instantiate() override {}
  void replay() override {
    Capture::refuse(now().device_index(), "a replay");
    capture_->replay(stream_number(now()));
  }
  void reset() override { capture_.reset(); }
  at::MempoolId_t pool() const override { return {static_cast<at::CaptureId_t>(capture_ ? capture_->pool() : 0), 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  static c10::Stream now() {
    const c10::impl::VirtualGuardImpl guard(sim_type());
    return guard.getStream(guard.getDevice());
  }
  std::unique_ptr<Capture> capture_;
};

}  // namespace

void register_graphs() {
  at::GraphImplRegistry()->Register(c10::DeviceTypeName(sim_type(), /*lower_case=*/false),
                                    [](const at::GraphImplArgs& args) -> std::unique_ptr<at::GraphImplInterface> { return std::make_unique<SimGraph>(args); });
}

#else

void register_graphs() {}

#endif

}  // namespace tessera::sim
