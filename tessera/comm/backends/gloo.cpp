#include <net/if.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "tessera/comm/backends/engine.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using Tensors = std::vector<at::Tensor>;

// Gloo knows a few dtypes; what it only moves it may take for another type of the same width.
at::Tensor as_carried(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kBool:
    case at::kInt:
    case at::kLong:
      return tensor;
    default:
      break;
  }
  switch (tensor.element_size()) {
    case 1:
      return tensor.view(at::kByte);
    case 2:
      return tensor.view(at::kHalf);
    case 4:
      return tensor.view(at::kInt);
    case 8:
      return tensor.view(at::kLong);
    default:
      return at::view_as_real(tensor);
  }
}

Tensors as_carried(const Tensors& tensors) {
  Tensors carried;
  carried.reserve(tensors.size());
  for (const auto& tensor : tensors) carried.push_back(as_carried(tensor));
  return carried;
}

std::vector<Tensors> as_carried(const std::vector<Tensors>& lists) {
  std::vector<Tensors> carried;
  for (const auto& list : lists) carried.push_back(as_carried(list));
  return carried;
}

class GlooBackend : public c10d::ProcessGroupGloo {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
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

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto carried = as_carried(tensors);
    return ProcessGroupGloo::broadcast(carried, options);
  }

  // These two insist on shapes; ours need the right number of elements, in order.
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto flat_output = as_carried(output.view(-1)), flat_input = as_carried(input.view(-1));
    return ProcessGroupGloo::_allgather_base(flat_output, flat_input, options);
  }

  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto flat_output = output.view(-1), flat_input = input.view(-1);
    return ProcessGroupGloo::_reduce_scatter_base(flat_output, flat_input, options);
  }

  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto carried_outputs = as_carried(outputs);
    auto carried_inputs = as_carried(inputs);
    return ProcessGroupGloo::gather(carried_outputs, carried_inputs, options);
  }

  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto carried_outputs = as_carried(outputs);
    auto carried_inputs = as_carried(inputs);
    return ProcessGroupGloo::scatter(carried_outputs, carried_inputs, options);
  }

  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                     const c10d::AllToAllOptions& options) override {
    auto carried_output = as_carried(output), carried_input = as_carried(input);
    return ProcessGroupGloo::alltoall_base(carried_output, carried_input, output_splits, input_splits, options);
  }

  // send and recv of c10d hand raw bytes to Gloo: any dtype passes as it is.
};

// An interface's name, or else a host name or address.
std::shared_ptr<gloo::transport::Device> make_device(const std::string& interface) {
  if (if_nametoindex(interface.c_str()) != 0) return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  return c10d::ProcessGroupGloo::createDeviceForHostname(interface);
}

class GlooEngine : public Engine {
 public:
  explicit GlooEngine(const std::string& interface) {
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

  c10::intrusive_ptr<c10d::Backend> connect(const GroupInfo& group, const c10::intrusive_ptr<c10d::Store>& store) override {
    auto options = c10d::ProcessGroupGloo::Options::create(group.timeout);
    options->devices = devices_;
    return c10::make_intrusive<GlooBackend>(store, group.rank, group.size, std::move(options));
  }

 private:
  std::vector<std::shared_ptr<gloo::transport::Device>> devices_;
};

}  // namespace

// Gathers into a flat buffer, scatters out of one, and scatters a reduced copy of the whole input.
int64_t gloo_scratch_bytes(const Call& call) {
  const auto bytes = [](const Tensors& tensors) {
    int64_t sum = 0;
    for (const auto& tensor : tensors) sum += static_cast<int64_t>(tensor.nbytes());
    return sum;
  };
  if (call.op == "all_gather" || call.op == "gather") return bytes(call.outputs);      // none but at the root of a gather,
  if (call.op == "reduce_scatter" || call.op == "scatter") return bytes(call.inputs);  // or of a scatter
  return 0;
}

std::unique_ptr<Engine> make_gloo_engine(const EngineOptions& options) { return std::make_unique<GlooEngine>(options.interface); }

}  // namespace tessera::comm
