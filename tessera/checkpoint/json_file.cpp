#include "tessera/checkpoint/json_file.h"

#include <limits>

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

int64_t to_integer(const nlohmann::json& value) {
  const bool fits = value.is_number_integer() && !(value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()});
  require(fits, value.dump(), " is not an integer of 64 bits");
  return value.get<int64_t>();
}

std::vector<int64_t> to_integers(const nlohmann::json& list) {
  require(list.is_array(), list.dump(), " is not a list of integers");
  std::vector<int64_t> values;
  for (const auto& value : list) values.push_back(to_integer(value));
  return values;
}

}  // namespace tessera::checkpoint
