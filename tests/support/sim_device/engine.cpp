#include "tests/support/sim_device/engine.h"

#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/comm/backends/carried.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/comm/engine.h"
#include "tests/support/sim_device/aliases.h"
#include "tests/support/sim_device/device.h"
#include "tests/support/sim_device/graph.h"
#include "tests/support/sim_device/memory.h"
#include "tests/support/sim_device/operators.h"

namespace tessera::sim {

namespace {

using comm::Call;
using WorkInFlight = comm::Work;

/// Done when the CPU's work is. wait() makes the current stream wait, and the host too, for the bytes have to be there; but of that the detector learns
/// nothing.
class SimWork final : public c10d::Work {
 public:
  SimWork(WorkInFlight inner, int device, int stream, Aliases held, std::shared_ptr<WorkInFlight> again)
      : inner_(std::move(inner)), device_(device), end_(HappensBefore::get().record(stream)), held_(std::move(held)), again_(std::move(again)) {}
  ~SimWork() override {
    try {
      if (!inner_->isCompleted()) inner_->wait();  // the bytes are in use, though nobody waits for the result
    } catch (...) {
    }
    // NCCL's work is kept with its memory until it is over, also when it was dropped. That is a fault to report, but where a failure dropped it.
    if (std::uncaught_exceptions() > 0) HappensBefore::get().block(stream_number(current_stream(device_)), end_);
  }
  /// Who asks for the first time is told that it goes on: whatever is asked about is waited for in both ways.
  bool isCompleted() override { return asked_.exchange(true) && inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  void synchronize() override {
    Capture* const capture = Capture::of(device_);
    TORCH_CHECK((capture != nullptr) == (again_ != nullptr), "simulated device: a wait for a collective across the edge of a capture");
    HappensBefore::get().block(stream_number(current_stream(device_)), end_);
    if (capture) capture->add([again = again_](int) { finish(*again); });
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    bool ok = false;
    try {
      ok = inner_->wait(timeout);
    } catch (...) {
      synchronize();  // a collective that has failed is over
      throw;
    }
    synchronize();
    held_ = {};
    return ok;
  }
  void abort() override { inner_->abort(); }

  /// Of a replay.
  static void finish(WorkInFlight& work) {
    if (const WorkInFlight done = std::exchange(work, {})) done->wait();
  }

 private:
  WorkInFlight inner_;
  int device_;
  Clock end_;
  std::atomic<bool> asked_ = false;
  Aliases held_;                         ///< until it is waited for, as NCCL's holds them
  std::shared_ptr<WorkInFlight> again_;  ///< of the replay under way, where it was captured
};

class SimEngine final : public comm::Engine {
 public:
  SimEngine(std::shared_ptr<comm::Engine> bytes, c10::Device device)
      : bytes_(std::move(bytes)), stream_(c10::impl::VirtualGuardImpl(sim_type()).getNewStream(device)) {}

  std::string name() const override { return "simulated"; }
  WorkInFlight start(const Call& given) override {
    const Call call = comm::carried_by_nccl(given);
    for (const auto* list : {&call.inputs, &call.outputs}) {
      for (const auto& tensor : *list) {
        TORCH_CHECK(tensor.device() == stream_.device(), "a group of ", stream_.device(), " was given a tensor on ", tensor.device());
        TORCH_CHECK(comm::is_carried(tensor.scalar_type()), "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
      }
    }
    auto& order = HappensBefore::get();
    const int stream = stream_number(stream_of(call));
    const char* const name = intern("collective " + std::string(comm::to_string(call.op)));
    order.block(stream, order.record(stream_number(current_stream(stream_.device_index()))));
    const uint64_t sequence = order.launch(stream);
    for (const auto& tensor : call.inputs) record_access(tensor, stream, sequence, false, name);
    for (const auto& tensor : call.outputs) record_access(tensor, stream, sequence, true, name);
    Call on_host = call;
    Aliases aliases;
    for (auto* list : {&on_host.inputs, &on_host.outputs}) {
      for (auto& tensor : *list) tensor = aliases(tensor);
    }
    std::shared_ptr<WorkInFlight> again;
    if (Capture* const capture = Capture::of(stream_.device_index())) {
      again = std::make_shared<WorkInFlight>();
      Uses uses;
      for (const auto& tensor : call.inputs) uses.add(tensor, false, name);
      for (const auto& tensor : call.outputs) uses.add(tensor, true, name);
      capture->add([bytes = bytes_, on_host, again, uses](int replayed) {
        SimWork::finish(*again);
        uses.tell(replayed);
        *again = bytes->start(on_host);
      });
    }
    WorkInFlight inner;
    try {
      inner = bytes_->start(on_host);
    } catch (...) {  // an engine that was aborted: nothing is under way
      order.block(stream_number(current_stream(stream_.device_index())), order.record(stream));
      throw;
    }
    return c10::make_intrusive<SimWork>(std::move(inner), stream_.device_index(), stream, std::move(aliases), std::move(again));
  }
  void set_timeout(std::chrono::milliseconds timeout) override { bytes_->set_timeout(timeout); }
  void abort() override { bytes_->abort(); }
  void shutdown() override { bytes_->shutdown(); }

 private:
  /// Messages have one for each peer and direction, so that a wait says nothing of another message than those before it on the same way.
  c10::Stream stream_of(const Call& call) {
    if (call.op != comm::Operation::Send && call.op != comm::Operation::Recv) return stream_;
    const std::lock_guard lock(mutex_);  // they may come from two threads
    const std::pair way(call.op, call.peer);
    const auto found = ways_.find(way);
    if (found != ways_.end()) return found->second;
    return ways_.emplace(way, c10::impl::VirtualGuardImpl(sim_type()).getNewStream(stream_.device())).first->second;
  }

  std::shared_ptr<comm::Engine> bytes_;
  c10::Stream stream_;  ///< of collectives
  std::mutex mutex_;
  std::map<std::pair<comm::Operation, int>, c10::Stream> ways_;
};

class SimFactory final : public comm::EngineFactory {
 public:
  explicit SimFactory(comm::EngineOptions options) : bytes_(comm::make_factory(with_shm(std::move(options)))) {}
  std::shared_ptr<comm::Engine> connect(const comm::GroupInfo& group, const c10::intrusive_ptr<c10d::Store>& store) override {
    return std::make_shared<SimEngine>(bytes_->connect(group, store), c10::impl::VirtualGuardImpl(sim_type()).getDevice());
  }

 private:
  static comm::EngineOptions with_shm(comm::EngineOptions options) {
    options.backend = "shm";
    return options;
  }
  std::unique_ptr<comm::EngineFactory> bytes_;
};

}  // namespace

void register_engine() {
  comm::register_device_engine(
      sim_type(), [](const comm::EngineOptions& options) -> std::unique_ptr<comm::EngineFactory> { return std::make_unique<SimFactory>(options); });
}

}  // namespace tessera::sim
