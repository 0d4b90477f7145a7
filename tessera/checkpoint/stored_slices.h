#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/layout/slice.h"

namespace tessera::checkpoint {

/// Copies `values` into a tensor of their shape, whatever its type and device. Throws ConfigError where that is expanded, one element in place of several, and
/// the values, those of `tensor`, differ where it is one.
void copy_once(const at::Tensor& values, const at::Tensor& target, const std::string& tensor);

/// The slices of a checkpoint as tensors over the mapped files. Files are mapped, and slices checked, when they are first asked for. `manifest` must outlive
/// it.
class StoredSlices {
 public:
  /// Refuses a copy that is infinite where its sources are not, or returns (narrowing.h).
  using Narrowed = std::function<void(const at::Tensor& target, const std::vector<at::Tensor>& sources, const std::string& place, const std::string& tensor)>;

  /// Without `narrowed` precision.params is what narrows.
  StoredSlices(std::filesystem::path folder, const Manifest& manifest, bool verify, Narrowed narrowed = {});

  /// Copies `slice` of a logical tensor that the manifest has, in the same shape, into `target`, converting the dtype. Only slices that overlap it are read.
  /// Throws ConfigError naming file, tensor and offset of what is damaged, and the tensor of which a finite value became infinite.
  void fill(at::Tensor target, const Slice& slice);

  /// Of the slices that were read, each counted once.
  uint64_t read_bytes() const { return read_bytes_; }

 private:
  at::Tensor read(const std::string& name, size_t index);

  std::filesystem::path folder_;
  const Manifest& manifest_;
  bool verify_;
  Narrowed narrowed_;
  std::map<std::string, SafetensorsFile> files_;
  std::set<std::pair<std::string, size_t>> checked_;
  uint64_t read_bytes_ = 0;
};

}  // namespace tessera::checkpoint
