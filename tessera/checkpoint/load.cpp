#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <c10/core/GradMode.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/problems.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

/// Refuses with everything that does not fit, before anything is touched.
void check_keys(const std::filesystem::path& folder, const Manifest& manifest, const std::vector<SlicedTensor>& targets, const LoadOptions& options) {
  Problems problems;
  std::set<std::string> wanted(options.expected.begin(), options.expected.end());
  for (const auto& [tensor, slice] : targets) {
    wanted.insert(slice.name);
    invariant(tensor.sizes() == at::IntArrayRef(slice.local_shape()), "'", slice.name, "' has shape ", tensor.sizes(), ", its slice ",
              at::IntArrayRef(slice.local_shape()));
    const auto stored = manifest.tensors.find(slice.name);
    if (stored == manifest.tensors.end()) continue;
    if (stored->second.shape != slice.shape) {
      problems.add("shape of ", slice.name, ": ", at::IntArrayRef(stored->second.shape), " in the checkpoint, ", at::IntArrayRef(slice.shape), " in the model");
    } else if (stored->second.dtype != dtype_name(tensor.scalar_type())) {
      problems.add("dtype of ", slice.name, ": ", stored->second.dtype, " in the checkpoint, ", dtype_name(tensor.scalar_type()), " in the model");
    }
  }
  for (const auto& name : wanted) {
    if (!manifest.tensors.contains(name)) problems.add("missing ", name);
  }
  for (const auto& [name, stored] : manifest.tensors) {
    const bool ignored =
        std::any_of(options.ignore_prefixes.begin(), options.ignore_prefixes.end(), [&](const auto& prefix) { return name.starts_with(prefix); });
    if (!ignored && !wanted.contains(name)) problems.add("extra ", name);
  }
  problems.refuse(folder.string(), ": the checkpoint is of another model: ");
}

/// The files of a checkpoint, mapped at first use, and their slices, checked at first use.
class StoredSlices {
 public:
  StoredSlices(std::filesystem::path folder, const Manifest& manifest, bool verify) : folder_(std::move(folder)), manifest_(manifest), verify_(verify) {}

  at::Tensor read(const std::string& name, size_t index) {
    const StoredTensor& tensor = manifest_.tensors.at(name);
    const StoredSlice& slice = tensor.slices[index];
    auto file = files_.find(slice.file);
    if (file == files_.end()) file = files_.emplace(slice.file, SafetensorsFile(folder_ / slice.file)).first;
    if (checked_.emplace(name, index).second) check_stored(file->second, name, tensor, slice, verify_);
    return file->second.tensor(slice.key);
  }

 private:
  std::filesystem::path folder_;
  const Manifest& manifest_;
  bool verify_;
  std::map<std::string, SafetensorsFile> files_;
  std::set<std::pair<std::string, size_t>> checked_;
};

}  // namespace

void load(const std::filesystem::path& folder, const Manifest& manifest, const std::vector<SlicedTensor>& targets, const LoadOptions& options) {
  check_keys(folder, manifest, targets, options);
  const c10::NoGradGuard no_grad;
  StoredSlices stored(folder, manifest, options.verify);
  for (const auto& [tensor, slice] : targets) {
    at::Tensor target = tensor;
    std::map<int, at::Tensor> sources;
    for (const auto& piece : reshard(manifest.slices(slice.name), slice)) {
      auto source = sources.find(piece.source);
      if (source == sources.end()) source = sources.emplace(piece.source, stored.read(slice.name, piece.source)).first;
      copy_piece(piece, source->second, target);
    }
  }
}

}  // namespace tessera::checkpoint
