#include <net/if.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "tessera/comm/backends/c10d_engine.h"
#include "tessera/comm/backends/carried.h"
#include "tessera/comm/backends/extremum.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/comm/backends/work_queue.h"
#include "tessera/core/error.h"

// What is added to torch's Gloo: it moves types that it cannot add up under the name of others of their width, takes its tensors flat where it would compare
// shapes of no meaning, sends what nobody waits for any more, and an abort ends this rank's waits too and not the peers' alone.

namespace tessera::comm {
namespace {

class GlooBackend : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  // Closing the connections would do for the peers, but leave this rank's own workers waiting for their timeout.
  void abort() override {
    for (const auto& context : contexts_) {
      for (int rank = 0; rank < getSize(); ++rank) {
        const auto& pair = context->getPair(rank);
        if (pair) reinterpret_cast<gloo::transport::tcp::Pair*>(pair.get())->signalExceptionExternal("aborted by this rank");
      }
    }
  }
};

/// A send, which Gloo begins once the peer asks for it, and forgets if its work has gone by then. One that is dropped goes to a thread that waits in its
/// caller's place.
class SentWork : public c10d::Work {
 public:
  SentWork(comm::Work inner, std::weak_ptr<WorkQueue> dropped) : inner_(std::move(inner)), dropped_(std::move(dropped)) {}
  ~SentWork() override {
    const auto dropped = waited_ ? nullptr : dropped_.lock();
    if (!dropped) return;
    try {
      dropped->run([inner = inner_] { inner->wait(std::chrono::years(30)); }, /*async=*/true);
    } catch (...) {  // no thread to be had: it is not sent
    }
  }

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  bool wait(std::chrono::milliseconds timeout) override {
    waited_ = true;
    return inner_->wait(timeout);
  }

 private:
  comm::Work inner_;
  std::weak_ptr<WorkQueue> dropped_;
  bool waited_ = false;
};

class GlooEngine : public C10dEngine {
 public:
  using C10dEngine::C10dEngine;
  ~GlooEngine() override {
    if (!dropped_sends_->idle()) abort();  // what its peer has not asked for by now, nobody will
  }

  Work start(const Call& call) override {
    if (call.op == Operation::Send) return c10::make_intrusive<SentWork>(C10dEngine::start(call), dropped_sends_);
    const bool by_shape = call.op == Operation::AllGather || call.op == Operation::ReduceScatter;  // Gloo's insist on shapes; ours need the right number
    const bool moves = !call.reduction && !call.is_message();  // messages are handed to Gloo as raw bytes: any dtype passes as it is
    if (!by_shape && !moves) return C10dEngine::start(call);
    auto carried = call;
    for (auto* tensors : {&carried.inputs, &carried.outputs}) {
      for (auto& tensor : *tensors) {
        if (by_shape) tensor = tensor.view(-1);
        if (moves) tensor = as_carried(tensor);
      }
    }
    return C10dEngine::start(carried);
  }

 private:
  const std::shared_ptr<WorkQueue> dropped_sends_ = std::make_shared<WorkQueue>();
};

// An interface's name, or else a host name or address.
std::shared_ptr<gloo::transport::Device> make_device(const std::string& interface) {
  if (if_nametoindex(interface.c_str()) != 0) return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  return c10d::ProcessGroupGloo::createDeviceForHostname(interface);
}

class GlooFactory : public EngineFactory {
 public:
  explicit GlooFactory(const std::string& interface) {
    try {
      if (interface.empty()) {
        devices_ = c10d::ProcessGroupGloo::Options::create_default()->devices;
      } else {
        devices_ = {make_device(interface)};
      }
    } catch (const std::exception& error) {
      throw CommError(detail::concat("comm.interface = ", interface.empty() ? "(default)" : interface, ": Gloo cannot bind to it: ", error.what()));
    }
  }

  std::shared_ptr<Engine> connect(const GroupInfo& group, const c10::intrusive_ptr<c10d::Store>& store) override {
    auto options = c10d::ProcessGroupGloo::Options::create(group.timeout);
    options->devices = devices_;
    return std::make_shared<GlooEngine>(c10::make_intrusive<GlooBackend>(store, group.rank, group.size, std::move(options)));
  }

 private:
  std::vector<std::shared_ptr<gloo::transport::Device>> devices_;
};

}  // namespace

// Gathers into a flat buffer, scatters out of one, and scatters a reduced copy of the whole input.
int64_t gloo_scratch_bytes(const Call& call) {
  const auto bytes = [](const std::vector<at::Tensor>& tensors) {
    int64_t sum = 0;
    for (const auto& tensor : tensors) sum += static_cast<int64_t>(tensor.nbytes());
    return sum;
  };
  if (is_extremum(call)) return ordered_bytes(call) + (call.op == Operation::ReduceScatter ? ordered_bytes(call.inputs[0]) : 0);
  if (call.op == Operation::AllGather || call.op == Operation::Gather) return bytes(call.outputs);      // none but at the root of a gather,
  if (call.op == Operation::ReduceScatter || call.op == Operation::Scatter) return bytes(call.inputs);  // or of a scatter
  return 0;
}

std::unique_ptr<EngineFactory> make_gloo_factory(const EngineOptions& options) { return std::make_unique<GlooFactory>(options.interface); }

}  // namespace tessera::comm
