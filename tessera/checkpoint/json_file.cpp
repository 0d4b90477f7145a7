#include "tessera/checkpoint/json_file.h"

#include <cstdint>

#include "tessera/checkpoint/files.h"
#include "tessera/core/error.h"
#include "tessera/core/json_reason.h"

namespace tessera::checkpoint {

nlohmann::json parse_json(const std::string& text, const std::filesystem::path& file) {
  constexpr int kMaxDepth = 64;  // comparing and printing recurse
  try {
    return nlohmann::json::parse(text, [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
      require(depth <= kMaxDepth, file.string(), ": JSON nested deeper than ", kMaxDepth);
      return true;
    });
  } catch (const nlohmann::json::parse_error& error) {
    throw ConfigError(detail::concat(file.string(), ": not JSON, at offset ", error.byte, " of ", text.size(), " bytes"));
  } catch (const nlohmann::json::exception& error) {  // a number beyond any double
    throw ConfigError(detail::concat(file.string(), ": ", json_reason(error)));
  }
}

nlohmann::json read_json(const std::filesystem::path& file) {
  constexpr uint64_t kMaxBytes = uint64_t{256} << 20;
  return parse_json(read_text_file(file, kMaxBytes), file);
}

}  // namespace tessera::checkpoint
