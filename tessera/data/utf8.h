#pragma once

#include <cstddef>
#include <string_view>

namespace tessera::data {

/// Bytes of the UTF-8 character that `text` begins with; 0 where it begins with none (malformed, overlong, a surrogate, beyond U+10FFFF, or empty).
inline size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) -> unsigned { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0; };
  const auto continues = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
  if (text.empty()) return 0;
  const unsigned lead = byte(0), second = byte(1);
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead < 0xe0 && continues(1)) return 2;
  if (lead >= 0xe0 && lead < 0xf0 && continues(1) && continues(2)) {
    const bool overlong = lead == 0xe0 && second < 0xa0, surrogate = lead == 0xed && second >= 0xa0;
    return overlong || surrogate ? 0 : 3;
  }
  if (lead >= 0xf0 && lead < 0xf5 && continues(1) && continues(2) && continues(3)) {
    const bool overlong = lead == 0xf0 && second < 0x90, too_large = lead == 0xf4 && second >= 0x90;
    return overlong || too_large ? 0 : 4;
  }
  return 0;
}

}  // namespace tessera::data
