#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

#include "tessera/core/error.h"

/// Fuzz targets: one parser each, fed with any bytes. Built twice: as libFuzzer programs under the sanitizers (`make fuzz`), and into one test binary that
/// replays the corpora and mutates them by itself.
namespace tessera::fuzz {

/// A parser broke its promise: it refused without saying where, or took what it should not have.
class Violation : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Throws Violation made of `parts` unless `condition` holds.
template <class... Parts>
void expect(bool condition, Parts&&... parts) {
  if (!condition) [[unlikely]]
    throw Violation(detail::concat(std::forward<Parts>(parts)...));
}

/// Runs `parse`, which may return, or refuse: by a ConfigError whose text holds `place` (a file, a knob). Any other exception passes, and is a finding.
/// Returns whether it was not refused.
template <class Parse>
bool accepts(std::string_view place, Parse&& parse) {
  try {
    parse();
    return true;
  } catch (const ConfigError& refusal) {
    expect(std::string_view(refusal.what()).find(place) != std::string_view::npos, "the refusal does not name ", place, ": ", refusal.what());
    return false;
  }
}

/// Writes `bytes` to the file `name` in a folder of this process, which is removed at its end, and returns the file's path.
std::filesystem::path scratch_file(const std::string& name, std::string_view bytes);

using Target = void (*)(std::string_view input);

/// All targets of this program, by name.
std::map<std::string, Target>& targets();

}  // namespace tessera::fuzz

/// TESSERA_FUZZ_TARGET(name) { ... }: the body of a target; `input` is what it is fed with.
#define TESSERA_FUZZ_TARGET(name)                                                                                      \
  static void name##_target(std::string_view input);                                                                   \
  [[maybe_unused]] static const bool name##_is_listed = tessera::fuzz::targets().emplace(#name, name##_target).second; \
  static void name##_target([[maybe_unused]] std::string_view input)
