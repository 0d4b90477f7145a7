#include "tessera/train/observers/event_record.h"

#include <array>
#include <bit>
#include <cstring>

namespace tessera {
namespace {

constexpr std::array<uint32_t, 256> crc_table = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78 : 0);
    table[i] = crc;
  }
  return table;
}();

/// Checksums of data that holds checksums are weak, so TFRecord rotates them and adds a constant.
uint32_t masked(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return std::rotr(crc, 15) + 0xa282ead8;
}

static_assert(std::endian::native == std::endian::little, "event files are little-endian");

template <class T>
std::string raw(T value) {
  std::string out(sizeof value, '\0');
  std::memcpy(out.data(), &value, sizeof value);
  return out;
}

std::string varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out += static_cast<char>(value);
}

// Wire types of protobuf's encoding.
enum class Wire : uint64_t { Varint = 0, Fixed64 = 1, Bytes = 2, Fixed32 = 5 };

std::string key(uint64_t field, Wire wire) { return varint(field << 3 | static_cast<uint64_t>(wire)); }
std::string bytes_field(uint64_t field, std::string_view bytes) { return key(field, Wire::Bytes) + varint(bytes.size()) + std::string(bytes); }
std::string varint_field(uint64_t field, uint64_t value) { return key(field, Wire::Varint) + varint(value); }
std::string double_field(uint64_t field, double value) { return key(field, Wire::Fixed64) + raw(value); }
std::string float_field(uint64_t field, float value) { return key(field, Wire::Fixed32) + raw(value); }

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (char c : bytes) crc = crc >> 8 ^ crc_table[(crc ^ static_cast<unsigned char>(c)) & 0xff];
  return ~crc;
}

std::string event_record(std::string_view data) {
  const std::string length = raw(static_cast<uint64_t>(data.size()));
  return length + raw(masked(length)) + std::string(data) + raw(masked(data));
}

std::string file_version_event(double wall_time) { return double_field(1, wall_time) + bytes_field(3, "brain.Event:2"); }

std::string restart_event(double wall_time, int64_t step) {
  constexpr uint64_t start = 1;
  return double_field(1, wall_time) + varint_field(2, static_cast<uint64_t>(step)) + bytes_field(7, varint_field(1, start));
}

std::string scalars_event(double wall_time, int64_t step, std::span<const std::pair<std::string, double>> scalars) {
  std::string summary;
  for (const auto& [tag, value] : scalars) summary += bytes_field(1, bytes_field(1, tag) + float_field(2, static_cast<float>(value)));
  return double_field(1, wall_time) + varint_field(2, static_cast<uint64_t>(step)) + bytes_field(5, summary);
}

}  // namespace tessera
