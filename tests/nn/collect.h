#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/layout/slice.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/parameter.h"

namespace tessera::testing_support {

/// Takes copies of the slices that ranks, as threads, hold of logical tensors, and puts the tensors together. What it takes is on no rank's memory account.
class SliceCollector {
 public:
  void add(const std::string& name, const at::Tensor& local, const Slice& slice) {
    const std::lock_guard lock(mutex_);
    MemoryTracker aside;
    const TrackMemory not_counted(aside);
    auto& held = held_[name];
    held.slices.push_back(slice);
    held.slices.back().name = name;
    held.tensors.push_back(local.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  }

  void add_values(const std::vector<nn::NamedParameter>& shards) {
    for (const auto& shard : shards) add(shard.name, shard.tensor, nn::slice_of(shard.tensor));
  }

  void add_gradients(const std::vector<nn::NamedParameter>& shards) {
    for (const auto& shard : shards) {
      if (shard.tensor.grad().defined()) add(shard.name, shard.tensor.grad(), nn::slice_of(shard.tensor));
    }
  }

  /// Throws where the slices of a tensor do not make it up.
  std::map<std::string, at::Tensor> whole() const {
    std::map<std::string, at::Tensor> tensors;
    for (const auto& [name, held] : held_) {
      at::Tensor tensor = at::empty(held.slices.front().shape, held.tensors.front().options());
      copy_slices(held.slices, held.tensors, Slice::whole(name, held.slices.front().shape), tensor);
      tensors.emplace(name, std::move(tensor));
    }
    return tensors;
  }

 private:
  struct Held {
    std::vector<Slice> slices;
    std::vector<at::Tensor> tensors;
  };
  std::mutex mutex_;
  std::map<std::string, Held> held_;
};

}  // namespace tessera::testing_support
