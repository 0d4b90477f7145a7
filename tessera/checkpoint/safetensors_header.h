#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/safetensors.h"

namespace tessera::checkpoint {

/// What the JSON at the head of a safetensors file says.
struct SafetensorsHeader {
  std::map<std::string, TensorEntry> entries;
  std::map<std::string, std::string> metadata;
};

/// Parses and checks a header. `header_offset` is where `text` starts in the file, `file_bytes` the file's size; entries' offsets count from the start of the
/// file. Memory is of the order of the text's size whatever it holds: it is read as a stream of events, and the first that the format does not allow ends it
/// with a ConfigError naming `file` and the offset.
SafetensorsHeader parse_safetensors_header(std::string_view text, uint64_t header_offset, uint64_t file_bytes, const std::filesystem::path& file);

/// The header of a file with these tensors one after the other: its length in 8 bytes, JSON, spaces up to a multiple of 8.
std::string make_safetensors_header(const std::vector<TensorSpec>& tensors, const std::map<std::string, std::string>& metadata);

}  // namespace tessera::checkpoint
