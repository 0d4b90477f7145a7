#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::checkpoint {

class OutputFile;

/// Name, dtype and shape of one tensor of a safetensors file.
struct TensorSpec {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
};

/// Where a tensor's bytes lie, counted from the start of the file.
struct TensorEntry {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  uint64_t offset = 0, bytes = 0;
};

/// A safetensors file, mapped for reading: opening costs the header, a tensor costs the pages that are touched.
/// Nothing in the file is trusted: the header's length (at most 100 MB, as the format's own library has it) and every name, dtype, shape and range are checked
/// before use; ranges must cover the file without gap or overlap. Throws ConfigError naming the file and the offset. A file that is cut while it is mapped is
/// beyond that check.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const;
  const std::map<std::string, TensorEntry>& entries() const;
  const std::map<std::string, std::string>& metadata() const;
  uint64_t file_bytes() const;

  /// Throws ConfigError naming file and tensor where there is none.
  const TensorEntry& entry(const std::string& name) const;

  /// The tensor's bytes in the mapping; valid while this file or a tensor of it lives.
  std::span<const std::byte> bytes(const std::string& name) const;

  /// A CPU tensor over the mapping, which it keeps alive. No copy; read-only: writing to it is a fault. Bytes that are not aligned to the dtype are copied.
  at::Tensor tensor(const std::string& name) const;

 private:
  struct Mapped;
  std::shared_ptr<const Mapped> mapped_;
};

/// Writes a safetensors file tensor by tensor, so that no more than one needs to be in memory. The name appears only when the file is whole: bytes go to
/// `<path>.partial`, which finish() syncs and renames; a writer destroyed before that removes it. Throws Error naming the file and the system's reason.
class SafetensorsWriter {
 public:
  /// All tensors, in the order in which they will be written.
  SafetensorsWriter(std::filesystem::path path, std::vector<TensorSpec> tensors, const std::map<std::string, std::string>& metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// The next tensor; any device and strides. Throws InternalError where dtype or shape are not those announced.
  void write(const at::Tensor& tensor);

  /// The same in portions: the next bytes of the tensors' elements, which follow each other without gap. Not to be mixed with write().
  void write_bytes(std::span<const std::byte> bytes);

  /// After the last tensor: sync, rename. Returns the size of the file in bytes.
  uint64_t finish();

 private:
  void discard();

  std::filesystem::path path_;
  std::vector<TensorSpec> tensors_;
  std::unique_ptr<OutputFile> file_;
  size_t next_ = 0;
  uint64_t written_ = 0, whole_ = 0;  ///< bytes of the file so far, and in the end
};

/// Bytes of a tensor of this dtype and shape; nothing where a size is negative or the product leaves 64 bits.
std::optional<uint64_t> tensor_bytes(at::ScalarType dtype, const std::vector<int64_t>& shape);

/// The format's dtype names ("F32", "BF16", ...) both ways. Throw ConfigError on one the other side lacks.
std::string dtype_name(at::ScalarType dtype);
at::ScalarType dtype_from_name(const std::string& name);

}  // namespace tessera::checkpoint
