#include "tessera/comm/backends/by_device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera::comm {
namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

class ByDeviceBackend : public c10d::Backend {
 public:
  ByDeviceBackend(const GroupInfo& group, c10::intrusive_ptr<c10d::Backend> general, c10::DeviceType device, c10::intrusive_ptr<c10d::Backend> special)
      : Backend(group.rank, group.size), general_(std::move(general)), special_(std::move(special)), device_(device) {}

  const std::string getBackendName() const override { return general_->getBackendName() + "+" + special_->getBackendName(); }

  void setTimeout(std::chrono::milliseconds timeout) override {
    general_->setTimeout(timeout);
    special_->setTimeout(timeout);
  }

  void abort() override {
    general_->abort();
    special_->abort();
  }

  void shutdown() override {
    general_->shutdown();
    special_->shutdown();
  }

  bool supportsTensorAlloc(c10::DeviceIndex device) override { return general_->supportsTensorAlloc(device); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override { return general_->allocateTensor(size, std::move(options)); }

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override { return of(tensors[0]).allreduce(tensors, options); }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override { return of(tensors[0]).reduce(tensors, options); }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override { return of(tensors[0]).broadcast(tensors, options); }
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return of(input)._allgather_base(output, input, options);
  }
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return of(input)._reduce_scatter_base(output, input, options);
  }
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                     const c10d::AllToAllOptions& options) override {
    return of(input).alltoall_base(output, input, output_splits, input_splits, options);
  }
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return of(inputs[0]).gather(outputs, inputs, options);
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return of(outputs[0]).scatter(outputs, inputs, options);
  }
  Work send(Tensors& tensors, int destination, int tag) override { return of(tensors[0]).send(tensors, destination, tag); }
  Work recv(Tensors& tensors, int source, int tag) override { return of(tensors[0]).recv(tensors, source, tag); }
  Work barrier(const c10d::BarrierOptions& options) override { return general_->barrier(options); }

 private:
  c10d::Backend& of(const at::Tensor& tensor) const { return tensor.device().type() == device_ ? *special_ : *general_; }

  c10::intrusive_ptr<c10d::Backend> general_, special_;
  c10::DeviceType device_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_by_device_backend(const GroupInfo& group, c10::intrusive_ptr<c10d::Backend> general, c10::DeviceType device,
                                                         c10::intrusive_ptr<c10d::Backend> special) {
  return c10::make_intrusive<ByDeviceBackend>(group, std::move(general), device, std::move(special));
}

}  // namespace tessera::comm
