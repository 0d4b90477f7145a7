#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace tessera {

/// Integers of JSON, as others wrote it: nlohmann's own conversion cuts fractions off, and wraps.

/// An integer of 64 bits, or a list of them; anything else, a fraction or a number that does not fit too, is a ConfigError that shows it.
int64_t to_integer(const nlohmann::json& value);
std::vector<int64_t> to_integers(const nlohmann::json& list);

/// An integer between two others, or one of them; the ConfigError names `what` it is.
int64_t to_integer(const nlohmann::json& value, const std::string& what, int64_t low, int64_t high);

}  // namespace tessera
