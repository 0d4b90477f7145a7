#include "tessera/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/core/error.h"

// Files are mapped and not read: a load that reshards needs some boxes of a file, and touches the pages of those. The price is that a tensor lies where the
// file has it, which need not suit its dtype; then it is copied.

namespace tessera::checkpoint {
namespace {

constexpr std::array<std::pair<std::string_view, at::ScalarType>, 15> kDtypes{{
    {"F64", at::kDouble},
    {"F32", at::kFloat},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"I8", at::kChar},
    {"U64", at::kUInt64},
    {"U32", at::kUInt32},
    {"U16", at::kUInt16},
    {"U8", at::kByte},
    {"BOOL", at::kBool},
}};

std::filesystem::path partial_path(const std::filesystem::path& path) { return path.string() + ".partial"; }

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  const auto found = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& row) { return row.second == dtype; });
  require(found != kDtypes.end(), "dtype ", c10::toString(dtype), " has no safetensors name");
  return std::string(found->first);
}

at::ScalarType dtype_from_name(const std::string& name) {
  const auto found = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& row) { return row.first == name; });
  require(found != kDtypes.end(), "dtype '", name, "' is not one that can be read");
  return found->second;
}

std::optional<uint64_t> tensor_bytes(at::ScalarType dtype, const std::vector<int64_t>& shape) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  // A zero anywhere makes the product zero, but must not hide sizes whose own product no tensor could have.
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return std::nullopt;
  }
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  return empty ? 0 : static_cast<uint64_t>(bytes);
}

struct SafetensorsFile::Mapped {
  explicit Mapped(const std::filesystem::path& path) : path(path), file(path) {
    constexpr uint64_t kMaxHeader = 100'000'000;
    const auto bytes = file.bytes();
    require(bytes.size() >= 8, path.string(), ": has ", bytes.size(), " bytes, a safetensors file has at least 8");
    uint64_t length = 0;
    for (int i = 0; i < 8; ++i) length |= static_cast<uint64_t>(bytes[i]) << (8 * i);
    require(length <= kMaxHeader, path.string(), ": is no safetensors file, or damaged at its beginning: offset 0 gives a header of ", length,
            " bytes, and at most ", kMaxHeader, " are read");
    require(length <= bytes.size() - 8, path.string(), ": offset 0 gives a header of ", length, " bytes, the file has ", bytes.size());
    header = parse_safetensors_header({reinterpret_cast<const char*>(bytes.data()) + 8, length}, 8, bytes.size(), path);
  }

  std::filesystem::path path;
  MappedFile file;
  SafetensorsHeader header;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : mapped_(std::make_shared<const Mapped>(path)) {}

const std::filesystem::path& SafetensorsFile::path() const { return mapped_->path; }
const std::map<std::string, TensorEntry>& SafetensorsFile::entries() const { return mapped_->header.entries; }
const std::map<std::string, std::string>& SafetensorsFile::metadata() const { return mapped_->header.metadata; }
uint64_t SafetensorsFile::file_bytes() const { return mapped_->file.bytes().size(); }

const TensorEntry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = entries().find(name);
  require(found != entries().end(), path().string(), ": holds no tensor '", name, "'");
  return found->second;
}

std::span<const std::byte> SafetensorsFile::bytes(const std::string& name) const {
  const TensorEntry& place = entry(name);
  return mapped_->file.bytes().subspan(place.offset, place.bytes);
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const TensorEntry& place = entry(name);
  const auto source = bytes(name);
  const auto options = at::device(at::kCPU).dtype(place.dtype);
  if (reinterpret_cast<uintptr_t>(source.data()) % c10::elementSize(place.dtype) != 0) {
    auto copy = at::empty(place.shape, options);
    std::memcpy(copy.mutable_data_ptr(), source.data(), source.size());
    return copy;
  }
  return at::from_blob(const_cast<std::byte*>(source.data()), place.shape, [keep = mapped_](void*) {}, options);
}

SafetensorsWriter::SafetensorsWriter(std::filesystem::path path, std::vector<TensorSpec> tensors, const std::map<std::string, std::string>& metadata)
    : path_(std::move(path)), tensors_(std::move(tensors)) {
  const std::string header = make_safetensors_header(tensors_, metadata);
  file_ = std::make_unique<OutputFile>(partial_path(path_));
  try {
    file_->write(std::as_bytes(std::span(header)));
  } catch (...) {  // the destructor of what was never made does not run
    discard();
    throw;
  }
  whole_ = written_ = header.size();
  for (const auto& spec : tensors_) whole_ += tensor_bytes(spec.dtype, spec.shape).value();
}

SafetensorsWriter::~SafetensorsWriter() { discard(); }

void SafetensorsWriter::discard() {
  if (!file_) return;
  file_.reset();
  std::error_code ignored;  // nothing more can be done for a half-written file
  std::filesystem::remove(partial_path(path_), ignored);
}

void SafetensorsWriter::write(const at::Tensor& tensor) {
  invariant(next_ < tensors_.size(), path_.string(), ": more tensors written than announced");
  const TensorSpec& spec = tensors_[next_++];
  invariant(tensor.scalar_type() == spec.dtype && tensor.sizes() == at::IntArrayRef(spec.shape), path_.string(), ": tensor '", spec.name, "' announced as ",
            c10::toString(spec.dtype), " ", at::IntArrayRef(spec.shape), ", written as ", c10::toString(tensor.scalar_type()), " ", tensor.sizes());
  const auto host = tensor.detach().to(at::kCPU).contiguous();
  write_bytes({static_cast<const std::byte*>(host.const_data_ptr()), host.nbytes()});
}

void SafetensorsWriter::write_bytes(std::span<const std::byte> bytes) {
  written_ += bytes.size();
  invariant(written_ <= whole_, path_.string(), ": more bytes written than announced");
  file_->write(bytes);
}

uint64_t SafetensorsWriter::finish() {
  invariant(written_ == whole_, path_.string(), ": ", written_, " bytes written, ", whole_, " announced");
  file_->sync_and_close();
  rename_to(partial_path(path_), path_);
  file_.reset();
  sync_directory(path_.parent_path().empty() ? "." : path_.parent_path());
  return written_;
}

}  // namespace tessera::checkpoint
