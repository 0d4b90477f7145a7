#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

std::string format_bytes(int64_t bytes);      ///< "0 B", "640 KiB", "1.49 GiB": powers of 1024, three digits
std::string format_count(double count);       ///< "999", "1.24 K", "35.1 M", "405 B": powers of 1000, three digits
std::string format_duration(double seconds);  ///< "85 us", "1.20 s", "3 m 05 s", "2 h 04 m"

/// The shortest decimal text that reads back as exactly this number ("0.1", "1e-05", "3.0"); always with a point or an exponent, so that TOML
/// and JSON readers take it for a float. "nan", "inf", "-inf" otherwise.
std::string format_float(double value);

/// A text as one line that a terminal only shows: blanks for the ends of lines, and other control characters, which it would obey, as "\x1b".
std::string one_line(std::string_view text);

}  // namespace tessera
