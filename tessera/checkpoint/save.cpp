#include <map>
#include <utility>

#include <fmt/format.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/deal.h"
#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

nlohmann::json to_json(const SlicedTensor& held) {
  nlohmann::json boxes = nlohmann::json::array();
  for (const auto& box : held.slice.boxes) boxes.push_back({box.offset, box.size});
  return {held.slice.name, dtype_name(held.tensor.scalar_type()), held.slice.shape, std::move(boxes)};
}

HeldSlice held_from(const nlohmann::json& json) {
  HeldSlice held{{json.at(0), json.at(2), {}, {}}, json.at(1), 0};
  for (const auto& box : json.at(3)) held.slice.boxes.push_back({box.at(0), box.at(1)});
  held.bytes = held.slice.numel() * static_cast<int64_t>(c10::elementSize(dtype_from_name(held.dtype)));
  return held;
}

/// Makes the empty folder on rank 0, and tells every rank what every rank holds.
std::vector<std::vector<HeldSlice>> prepare(const fs::path& temporary, const std::vector<SlicedTensor>& tensors, const comm::Group& group) {
  const auto answers = together(group, [&] {
    if (group.rank() == 0) {
      fs::create_directories(temporary.parent_path());
      fs::remove_all(temporary);
      fs::create_directory(temporary);
    }
    nlohmann::json mine = nlohmann::json::array();
    for (const auto& held : tensors) {
      invariant(held.tensor.sizes() == at::IntArrayRef(held.slice.local_shape()), "'", held.slice.name, "' has shape ", held.tensor.sizes(), ", its slice ",
                at::IntArrayRef(held.slice.local_shape()));
      mine.push_back(to_json(held));
    }
    return mine;
  });
  std::vector<std::vector<HeldSlice>> held;
  for (const auto& answer : answers) {
    held.emplace_back();
    for (const auto& json : answer) held.back().push_back(held_from(json));
  }
  return held;
}

/// Writes this rank's file. What it returns goes into the manifest: the file's size and the hash of each slice, in the order of `indices`.
nlohmann::json write_rank(const fs::path& file, const std::vector<SlicedTensor>& tensors, const std::vector<size_t>& indices) {
  std::vector<TensorSpec> specs;
  for (const size_t i : indices) specs.push_back({tensors[i].slice.name, tensors[i].tensor.scalar_type(), tensors[i].tensor.sizes().vec()});
  SafetensorsWriter writer(file, std::move(specs));
  nlohmann::json hashes = nlohmann::json::array();
  for (const size_t i : indices) {
    const auto host = tensors[i].tensor.detach().to(at::kCPU).contiguous();
    hashes.push_back(hash_hex(host.const_data_ptr(), host.nbytes()));
    writer.write(host);
  }
  return {{"bytes", writer.finish()}, {"hashes", std::move(hashes)}};
}

std::string rank_file(int rank, int size) { return fmt::format("rank-{:05}-of-{:05}.safetensors", rank, size); }

Manifest make_manifest(const CheckpointState& state, const std::vector<std::vector<HeldSlice>>& held, const std::vector<std::vector<size_t>>& dealt,
                       const std::vector<nlohmann::json>& written) {
  Manifest manifest;
  manifest.step = state.step;
  manifest.optimizer = state.optimizer;
  manifest.progress = state.progress;
  manifest.agreement = state.agreement;
  const int size = static_cast<int>(held.size());
  for (int rank = 0; rank < size; ++rank) {
    const std::string file = rank_file(rank, size);
    manifest.files[file] = written[rank].at("bytes").get<uint64_t>();
    for (const auto& slice : held[rank]) manifest.tensors[slice.slice.name] = {slice.dtype, slice.slice.shape, {}};
  }
  for (int rank = 0; rank < size; ++rank) {
    for (size_t n = 0; n < dealt[rank].size(); ++n) {
      const Slice& slice = held[rank][dealt[rank][n]].slice;
      manifest.tensors[slice.name].slices.push_back({rank_file(rank, size), slice.name, slice.boxes, written[rank].at("hashes").at(n).get<std::string>()});
    }
  }
  return manifest;
}

/// On rank 0: the manifest, then the one rename that makes the checkpoint exist.
void commit(const fs::path& temporary, const fs::path& folder, const Manifest& manifest) {
  for (const auto& [name, bytes] : manifest.files) {
    std::error_code missing;
    const auto size = fs::file_size(temporary / name, missing);
    if (missing || size != bytes) {
      throw Error(detail::concat((temporary / name).string(),
                                 ": written by another rank, but rank 0 does not see it whole; checkpoint.dir must be a folder that all ranks share"));
    }
  }
  write_file(temporary / "manifest.json", to_json(manifest));
  sync_directory(temporary);
  rename_or_exchange(temporary, folder);
  sync_directory(folder.parent_path());
  std::error_code ignored;  // the checkpoint exists; an older one of this step, now under the temporary name, is prune()'s if it cannot go now
  fs::remove_all(temporary, ignored);
}

}  // namespace

fs::path save(const fs::path& dir, const CheckpointState& state, const comm::Group& group) {
  const fs::path folder = fs::absolute(dir) / folder_name(state.step);
  const fs::path temporary = folder.parent_path() / temporary_name(state.step);
  try {
    const auto held = prepare(temporary, state.tensors, group);
    const auto dealt = deal(held);
    const auto written = together(group, [&] { return write_rank(temporary / rank_file(group.rank(), group.size()), state.tensors, dealt[group.rank()]); });
    together(group, [&] {
      if (group.rank() == 0) commit(temporary, folder, make_manifest(state, held, dealt, written));
      return nlohmann::json();
    });
  } catch (...) {
    std::error_code ignored;  // what stays is never read, and the next save or prune() removes it
    if (group.rank() == 0) fs::remove_all(temporary, ignored);
    throw;
  }
  return folder;
}

}  // namespace tessera::checkpoint
