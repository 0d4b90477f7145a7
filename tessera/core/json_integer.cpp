#include "tessera/core/json_integer.h"

#include <limits>
#include <optional>

#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/core/json_text.h"

namespace tessera {
namespace {

std::optional<int64_t> integer_in(const nlohmann::json& value) {
  constexpr uint64_t most = std::numeric_limits<int64_t>::max();
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > most)) return std::nullopt;
  return value.get<int64_t>();
}

}  // namespace

int64_t to_integer(const nlohmann::json& value) {
  const auto integer = integer_in(value);
  require(integer.has_value(), json_text(value), " is not an integer of 64 bits");
  return *integer;
}

int64_t to_integer(const nlohmann::json& value, const std::string& what, int64_t low, int64_t high) {
  const auto integer = integer_in(value);
  require(integer && *integer >= low && *integer <= high, what, " = ", json_text(value), ": expected a whole number from ", low, " to ", high);
  return *integer;
}

std::vector<int64_t> to_integers(const nlohmann::json& list) {
  require(list.is_array(), json_text(list), " is not a list of integers");
  std::vector<int64_t> values;
  for (const auto& value : list) values.push_back(to_integer(value));
  return values;
}

}  // namespace tessera
