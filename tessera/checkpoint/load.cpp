#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/fullest.h"
#include "tessera/checkpoint/narrowing.h"
#include "tessera/checkpoint/problems.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/stored_slices.h"
#include "tessera/checkpoint/unread.h"
#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/expanded.h"
#include "tessera/nn/kept_memory.h"
#include "tessera/nn/parameter.h"

// All that does not fit is found from the manifest and told at once, before a byte of the model is written: half a model loaded, or one complaint a try, would
// be worse than either. Then each target takes the intersections of its slice with the stored ones, whatever the layout that wrote them. Hashes cover whole
// stored slices: with verify, one of which a rank needs a corner is read whole, once.

namespace tessera::checkpoint {
namespace {

/// Patterns of LoadOptions::partial, and which of them have matched anything.
class PartialPatterns {
 public:
  explicit PartialPatterns(const std::vector<std::string>& patterns) {
    for (const auto& pattern : patterns) used_.emplace(pattern, false);
  }

  bool allow(const std::string& stored) {
    bool allowed = false;
    for (auto& [pattern, used] : used_) {
      if (!nn::matches(pattern, parameter_of(stored))) continue;
      allowed = used = true;
    }
    return allowed;
  }

  void refuse_unused(Problems& problems) const {
    for (const auto& [pattern, used] : used_) {
      if (!used) problems.add("checkpoint.partial = ", pattern, " matches no tensor");
    }
  }

 private:
  std::map<std::string, bool> used_;
};

/// What keeps a stored tensor from filling a target, or nothing.
std::string misfit(const SlicedTensor& target, const Manifest& manifest, const LoadOptions& options) {
  const auto& [tensor, slice] = target;
  const StoredTensor& stored = manifest.tensors.at(slice.name);
  if (stored.shape != slice.shape) {
    return detail::concat("shape of ", slice.name, ": ", at::IntArrayRef(stored.shape), " in the checkpoint, ", at::IntArrayRef(slice.shape), " in the model");
  }
  const std::string dtype = dtype_name(tensor.scalar_type());
  const bool converts = options.converts(slice.name) && at::isFloatingType(tensor.scalar_type()) && at::isFloatingType(dtype_from_name(stored.dtype));
  if (stored.dtype != dtype && !converts)
    return detail::concat("dtype of ", slice.name, ": ", stored.dtype, " in the checkpoint, ", dtype, " in the model, which LoadOptions::convert allows");
  try {
    reshard(manifest.slices(slice.name), slice);
    return {};
  } catch (const ConfigError& gap) {
    return gap.what();
  }
}

/// Refuses with everything that does not fit, before anything is touched. What `partial` allows not to fit is noted in the report.
LoadReport check_keys(const std::filesystem::path& folder, const Manifest& manifest, const std::vector<SlicedTensor>& targets, const LoadOptions& options) {
  Problems problems;
  LoadReport report;
  report.partial = options.partial;
  PartialPatterns partial(options.partial);
  std::set<std::string> own, wanted(options.expected.begin(), options.expected.end());
  for (const auto& target : targets) {
    const auto& [tensor, slice] = target;
    wanted.insert(slice.name);
    own.insert(slice.name);
    const auto stored = manifest.tensors.find(slice.name);
    if (stored == manifest.tensors.end()) continue;
    std::string problem = misfit(target, manifest, options);
    if (const auto source = fullest(manifest, slice.name, tensor.scalar_type()); problem.empty() && source != slice.name) {
      Slice of_master = slice;
      of_master.name = source;
      problem = misfit({tensor, std::move(of_master)}, manifest, options);
    }
    const bool allowed = partial.allow(slice.name);
    if (problem.empty()) {
      const std::string dtype = dtype_name(tensor.scalar_type());
      if (stored->second.dtype != dtype) report.converted.emplace(slice.name, detail::concat(stored->second.dtype, " -> ", dtype));
      continue;
    }
    if (allowed) {
      report.fresh.insert(slice.name);
    } else {
      problems.add(problem);
    }
  }
  for (const auto& name : wanted) {
    const bool allowed = partial.allow(name);  // a pattern may be of what other ranks hold
    if (manifest.tensors.contains(name)) continue;
    if (!allowed) {
      problems.add("missing ", name);
    } else if (own.contains(name)) {
      report.fresh.insert(name);
    }
  }
  for (const auto& [name, stored] : manifest.tensors) {
    if (may_stay_unread(options, name) || wanted.contains(name)) continue;
    if (partial.allow(name)) {
      report.unread.insert(name);
    } else {
      problems.add("extra ", name);
    }
  }
  partial.refuse_unused(problems);
  problems.refuse(folder.string(), ": the checkpoint is of another model, or not whole: ");
  return report;
}

/// A forward that recorded gradients, and that no backward has followed, shows sharded parameters whole, and may have left what it gathered for a backward:
/// both are of the values before.
void announce_writes(const std::vector<SlicedTensor>& targets) {
  for (const auto& [tensor, slice] : targets) {
    if (nn::keeps_memory(tensor)) {
      nn::announce_write(tensor);
      require(tensor.sizes() == at::IntArrayRef(slice.local_shape()), "checkpoint: '", slice.name, "' shows shape ", tensor.sizes(), " where this rank holds ",
              at::IntArrayRef(slice.local_shape()),
              " of it: a step that begin_step() opened is under way, and sharded parameters are whole until its finish(); load after that");
    }
    invariant(tensor.sizes() == at::IntArrayRef(slice.local_shape()), "'", slice.name, "' has shape ", tensor.sizes(), ", its slice ",
              at::IntArrayRef(slice.local_shape()));
    nn::note_loaded(tensor);
  }
}

}  // namespace

bool may_differ(const std::vector<std::string>& partial, std::string_view parameter) {
  return std::ranges::any_of(partial, [&](const auto& pattern) { return nn::matches(pattern, parameter); });
}

void check_partial(const std::vector<std::string>& patterns, const Manifest& manifest, const std::vector<std::string>& parameters) {
  for (const auto& pattern : patterns) {
    const auto matches = [&](std::string_view name) { return nn::matches(pattern, name); };
    const bool stored = std::ranges::any_of(manifest.tensors, [&](const auto& tensor) { return matches(parameter_of(tensor.first)); });
    require(stored || std::ranges::any_of(parameters, matches), "checkpoint.partial = ", pattern,
            ": matches no tensor of the checkpoint, and no parameter or buffer of the model; name some, or leave it out");
  }
}

void copy_once(const at::Tensor& values, const at::Tensor& target, const std::string& tensor) {
  const at::Tensor once = nn::written_once(values, target);
  require(once.numel() == values.numel() || at::equal(once.expand_as(values), values), "checkpoint: '", tensor,
          "' is expanded, one element in place of several, and the checkpoint's differ from each other; give the model's memory of its own (clone) before ",
          "loading");
  nn::written_once(target, target).copy_(once);
}

StoredSlices::StoredSlices(std::filesystem::path folder, const Manifest& manifest, bool verify, Narrowed narrowed)
    : folder_(std::move(folder)), manifest_(manifest), verify_(verify), narrowed_(std::move(narrowed)) {}

at::Tensor StoredSlices::read(const std::string& name, size_t index) {
  const StoredTensor& tensor = manifest_.tensors.at(name);
  const StoredSlice& slice = tensor.slices[index];
  return read_or_name_another([&] {
    auto file = files_.find(slice.file);
    if (file == files_.end()) file = files_.emplace(slice.file, SafetensorsFile(folder_ / slice.file)).first;
    if (checked_.emplace(name, index).second) {
      check_stored(file->second, name, tensor, slice, verify_);
      read_bytes_ += file->second.entry(slice.key).bytes;
    }
    return file->second.tensor(slice.key);
  });
}

void StoredSlices::fill(at::Tensor target, const Slice& slice) {
  if (nn::written_once(target, target).numel() < target.numel()) {
    const at::Tensor all = at::empty(target.sizes(), target.options());
    fill(all, slice);
    return copy_once(all, target, slice.name);
  }
  std::map<int, at::Tensor> sources;
  for (const auto& piece : reshard(manifest_.slices(slice.name), slice)) {
    auto source = sources.find(piece.source);
    if (source == sources.end()) source = sources.emplace(piece.source, read(slice.name, piece.source)).first;
    copy_piece(piece, source->second, target);
  }
  std::vector<at::Tensor> read;
  for (const auto& [index, source] : sources) read.push_back(source);
  (narrowed_ ? narrowed_ : refuse_beyond_params)(target, read, folder_.string(), std::string(parameter_of(slice.name)));
}

LoadReport load(const std::filesystem::path& folder, const Manifest& manifest, const std::vector<SlicedTensor>& targets, const LoadOptions& options) {
  LoadReport report = check_keys(folder, manifest, targets, options);
  const c10::NoGradGuard no_grad;
  announce_writes(targets);
  StoredSlices stored(folder, manifest, options.verify);
  std::set<const c10::TensorImpl*> filled;
  for (const auto& [tensor, slice] : targets) {
    const bool again = !filled.insert(tensor.unsafeGetTensorImpl()).second;  // also a weight that stays as it was
    if (report.fresh.contains(slice.name)) continue;
    if (again && state_of(slice.name) == "master") continue;  // a weight, that has by now what it takes of its master
    fill_fullest(stored, manifest, tensor, slice, tensor.scalar_type(), refuse_beyond_params, folder.string());
  }
  report.read_bytes = stored.read_bytes();
  return report;
}

}  // namespace tessera::checkpoint
