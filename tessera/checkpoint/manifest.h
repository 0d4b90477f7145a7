#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/run_identity.h"
#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

namespace tessera::checkpoint {

/// One stored slice of a logical tensor: the tensor `key` of the file `file`, shaped like the slice's local tensor.
struct StoredSlice {
  std::string file;        ///< relative to the checkpoint's folder
  std::string key;         ///< tensor name within the file
  std::vector<Box> boxes;  ///< which part of the logical tensor
  std::string hash;        ///< xxh64 of the stored bytes
};

struct StoredTensor {
  std::string dtype;  ///< safetensors' name: F32, BF16, ...
  std::vector<int64_t> shape;
  std::vector<StoredSlice> slices;  ///< together they cover the tensor
};

/// All that a checkpoint holds besides the bytes of its tensors. As JSON it is manifest.json, written last, with its own hash.
struct Manifest {
  static constexpr int kVersion = 1;

  int64_t step = 0;
  std::map<std::string, StoredTensor> tensors;  ///< by logical name
  std::map<std::string, uint64_t> files;        ///< size in bytes of each file
  nlohmann::json optimizer;                     ///< {"kind", "kinds", "update_counts"}
  nlohmann::json progress;                      ///< what the loop needs to go on: RNG seed, data cursor, bucket layout, ...
  nlohmann::json agreement;                     ///< fields that a resuming run must share, see agreement.h
  RunIdentity run;                              ///< who wrote it

  /// The slices of a tensor as layout knows them, in the order of StoredTensor::slices.
  std::vector<Slice> slices(const std::string& name) const;
};

std::string to_json(const Manifest& manifest);

/// Throws ConfigError naming `file` where the text is no manifest, its hash is wrong, or anything in it does not add up (boxes outside the shape, unknown
/// dtypes, paths that leave the folder).
Manifest parse_manifest(const std::string& text, const std::filesystem::path& file);

/// Reads and checks `folder`/manifest.json.
Manifest read_manifest(const std::filesystem::path& folder);

/// What `read` gives of a checkpoint that its caller needs, and has no other for: to what it throws of one that is damaged or incomplete the way out is added.
template <class Read>
auto read_or_name_another(Read&& read) -> decltype(read()) {
  try {
    return read();
  } catch (const ConfigError& problem) {
    throw ConfigError(detail::concat(problem.what(), "; name another checkpoint, or copy this one anew"));
  }
}

}  // namespace tessera::checkpoint
