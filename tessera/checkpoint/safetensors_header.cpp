#include "tessera/checkpoint/safetensors_header.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "tessera/core/error.h"

// Headers come from anywhere. A JSON tree of hostile text can take many times its memory, and a size computed from what it says can overflow: so the text is
// read as events against the one grammar there is, each number is bounded where it is read, and the ranges must cover the file without a hole or an overlap,
// which leaves a reader nothing to point outside of it.

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kMetadata = "__metadata__";

/// The grammar of a header, event by event:
///   { "__metadata__": {string: string, ...}, name: {"dtype": string, "shape": [n, ...], "data_offsets": [begin, end]}, ... }
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  struct Raw {
    std::optional<std::string> dtype;
    std::optional<std::vector<uint64_t>> shape, offsets;
  };

  std::map<std::string, Raw> tensors;
  std::map<std::string, std::string> metadata;
  std::string problem;         ///< of the format; empty: none
  size_t syntax_error_at = 0;  ///< of the JSON, counted from 1; 0: none

  bool start_object(size_t) override {
    switch (where_) {
      case Where::Start:
        where_ = Where::Header;
        return true;
      case Where::Header:
        if (name_ == kMetadata) {
          where_ = Where::Metadata;
        } else {
          where_ = Where::Tensor;
        }
        return true;
      default:
        return refuse("an object where none can be");
    }
  }

  bool key(string_t& text) override {
    switch (where_) {
      case Where::Header:
        name_ = text;
        if (name_ == kMetadata) return std::exchange(has_metadata_, true) ? refuse("two __metadata__") : true;
        return tensors.try_emplace(name_).second || refuse("two tensors named '" + name_ + "'");
      case Where::Metadata:
        field_ = text;
        return true;
      default:
        field_ = text;
        if (field_ == "dtype" || field_ == "shape" || field_ == "data_offsets") return true;
        return refuse("tensor '" + name_ + "' has an unknown field '" + field_ + "'");
    }
  }

  bool end_object() override {
    if (where_ == Where::Tensor) {
      const Raw& raw = tensors.at(name_);
      if (!raw.dtype || !raw.shape || !raw.offsets) return refuse("tensor '" + name_ + "' lacks dtype, shape or data_offsets");
    }
    where_ = where_ == Where::Header ? Where::End : Where::Header;
    return true;
  }

  bool start_array(size_t) override {
    auto* const list = where_ == Where::Tensor ? list_of(field_) : nullptr;
    if (list == nullptr) return refuse("a list where none can be");
    if (list->has_value()) return refuse("tensor '" + name_ + "' has two fields '" + field_ + "'");
    list->emplace();
    where_ = Where::List;
    return true;
  }

  bool end_array() override {
    where_ = Where::Tensor;
    if (field_ == "data_offsets" && list_of(field_)->value().size() != 2) return refuse("data_offsets of tensor '" + name_ + "' are not two numbers");
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (where_ != Where::List) return refuse("a number where none can be");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return refuse("a number beyond 63 bits in tensor '" + name_ + "'");
    list_of(field_)->value().push_back(value);
    return true;
  }

  bool string(string_t& text) override {
    if (where_ == Where::Metadata) {
      metadata[field_] = text;
      return true;
    }
    if (where_ != Where::Tensor || field_ != "dtype") return refuse("a string where none can be");
    if (tensors.at(name_).dtype) return refuse("tensor '" + name_ + "' has two fields 'dtype'");
    tensors.at(name_).dtype = text;
    return true;
  }

  bool null() override { return refuse("a null"); }
  bool boolean(bool) override { return refuse("a boolean"); }
  bool number_integer(number_integer_t) override { return refuse("a negative number in tensor '" + name_ + "'"); }
  bool number_float(number_float_t, const string_t&) override { return refuse("a number with a fraction in tensor '" + name_ + "'"); }
  bool binary(binary_t&) override { return refuse("binary data"); }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    syntax_error_at = std::max<size_t>(position, 1);
    return false;
  }

 private:
  enum class Where { Start, Header, Metadata, Tensor, List, End };

  std::optional<std::vector<uint64_t>>* list_of(const std::string& field) {
    Raw& raw = tensors.at(name_);
    if (field == "shape") return &raw.shape;
    return field == "data_offsets" ? &raw.offsets : nullptr;
  }

  bool refuse(std::string why) {
    problem = std::move(why);
    return false;
  }

  Where where_ = Where::Start;
  bool has_metadata_ = false;
  std::string name_, field_;
};

/// Tensors must lie one after the other from the end of the header to the end of the file.
void check_ranges(const std::map<std::string, TensorEntry>& entries, uint64_t data_offset, uint64_t file_bytes, const std::filesystem::path& file) {
  std::vector<std::pair<const std::string*, const TensorEntry*>> in_order;
  for (const auto& [name, entry] : entries) in_order.emplace_back(&name, &entry);
  std::sort(in_order.begin(), in_order.end(),
            [](const auto& a, const auto& b) { return std::pair(a.second->offset, a.second->bytes) < std::pair(b.second->offset, b.second->bytes); });
  uint64_t end = data_offset;
  for (const auto& [name, entry] : in_order) {
    require(entry->offset >= end, file.string(), ": tensor '", *name, "' at offset ", entry->offset, " overlaps the one before it, which ends at ", end);
    require(entry->offset == end, file.string(), ": no tensor holds the bytes from offset ", end, " to ", entry->offset);
    end = entry->offset + entry->bytes;
  }
  require(end == file_bytes, file.string(), ": the last tensor ends at offset ", end, ", the file at ", file_bytes);
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, uint64_t header_offset, uint64_t file_bytes, const std::filesystem::path& file) {
  HeaderReader reader;
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  require(reader.problem.empty(), file.string(), ": safetensors header at offset ", header_offset, ": ", reader.problem);
  require(reader.syntax_error_at == 0, file.string(), ": safetensors header is not JSON, at offset ", header_offset + reader.syntax_error_at - 1);

  const uint64_t data_offset = header_offset + text.size();
  const uint64_t data_bytes = file_bytes - data_offset;
  SafetensorsHeader header;
  header.metadata = std::move(reader.metadata);
  for (auto& [name, raw] : reader.tensors) {
    TensorEntry entry;
    try {
      entry.dtype = dtype_from_name(*raw.dtype);
    } catch (const ConfigError& error) {
      throw ConfigError(detail::concat(file.string(), ": tensor '", name, "': ", error.what()));
    }
    entry.shape.assign(raw.shape->begin(), raw.shape->end());
    const uint64_t begin = raw.offsets->at(0), end = raw.offsets->at(1);
    require(begin <= end && end <= data_bytes, file.string(), ": tensor '", name, "' lies at offsets ", data_offset, " + [", begin, ", ", end,
            "), the file has ", file_bytes, " bytes");
    const auto bytes = tensor_bytes(entry.dtype, entry.shape);
    require(bytes == end - begin, file.string(), ": tensor '", name, "' at offset ", data_offset + begin, " has ", end - begin, " bytes, its dtype ",
            *raw.dtype, " and shape say otherwise");
    entry.offset = data_offset + begin;
    entry.bytes = end - begin;
    header.entries.emplace(name, std::move(entry));
  }
  check_ranges(header.entries, data_offset, file_bytes, file);
  return header;
}

std::string make_safetensors_header(const std::vector<TensorSpec>& tensors, const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  std::set<std::string_view> names{kMetadata};
  if (!metadata.empty()) json[std::string(kMetadata)] = metadata;
  uint64_t offset = 0;
  for (const auto& tensor : tensors) {
    invariant(names.insert(tensor.name).second, "a safetensors file with two tensors named '", tensor.name, "'");
    const uint64_t bytes = tensor_bytes(tensor.dtype, tensor.shape).value();
    nlohmann::ordered_json entry;
    entry["dtype"] = dtype_name(tensor.dtype);
    entry["shape"] = tensor.shape;
    entry["data_offsets"] = {offset, offset + bytes};
    json.push_back({tensor.name, std::move(entry)});
    offset += bytes;
  }
  std::string text = json.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string head(8, '\0');
  for (int i = 0; i < 8; ++i) head[i] = static_cast<char>(text.size() >> (8 * i));
  return head + text;
}

}  // namespace tessera::checkpoint
