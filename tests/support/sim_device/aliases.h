#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace tessera::sim {

/// CPU tensors over the memory of device tensors, for one operator: tensors that share a storage there share one here.
class Aliases {
 public:
  at::Tensor operator()(const at::Tensor& tensor);

  /// After the operator: device tensors follow where it resized a storage or changed a tensor's shape.
  void carry_back(c10::Device device);

  /// What the operator returned, on the device: the argument itself, a view of one, or new memory (`fresh`).
  at::Tensor wrap(const at::Tensor& result, c10::Device device, bool& fresh);

 private:
  struct Shared {
    c10::Storage device, host;
    void* address;  ///< of the host's when it was made
  };
  c10::Storage storage_of(const at::Tensor& tensor);
  std::vector<Shared> storages_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // on the device, on the host
};

}  // namespace tessera::sim
