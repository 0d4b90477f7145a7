#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tessera/config/config.h"

/// Shared by the parser, the writer and the rules of the configuration.
namespace tessera::detail {

/// "a, b" -> {"a", "b"}
std::vector<std::string> split_choices(std::string_view choices);

/// A TOML basic string.
std::string quoted(std::string_view text);

bool is_utf8(const std::string& text);

/// Without blanks and tabs at its ends.
std::string trimmed(std::string text);

/// Sets a key as --set does: `text` is read as TOML, and where that fails, or the field is a string, as the bare string. Throws ConfigError naming `place`.
void set_from_text(Config& config, const std::string& section, const std::string& key, const std::string& text, const std::string& place);

/// The rules of optim.*, and of each of optim.groups. Throws ConfigError.
void validate_optim(const OptimConfig& optim, int64_t steps);

template <class T>
struct is_optional : std::false_type {};
template <class T>
struct is_optional<std::optional<T>> : std::true_type {};

/// The value of "section.key" as to_toml() writes it; nothing where it is not set.
std::optional<std::string> value_text(const Config& config, const std::string& key);

/// The rules of the formats that weights are kept and multiplied in, which a model has that is only read, too. Throws ConfigError.
void validate_formats(const PrecisionConfig& precision);
/// The rules of precision.*, alone and beside other sections. Throws ConfigError.
void validate_precision(const Config& config);

/// What schedules that update weights in the midst of a step ask of other sections. Throws ConfigError.
void validate_asynchronous(const Config& config, int stages);
/// Of a mixture, by lora.modules: the biases of routers rest with them.
bool all_routers_are_frozen(const Config& config);

/// Settings with which a step cannot be captured, under run.graph; `size_of` an axis of the mesh.
void validate_graph(const Config& config, const std::function<int(const std::string&)>& size_of);
/// A tied weight, of which two stages have a copy each, must be updated alike on both. Throws ConfigError.
void validate_tied_update(const Config& config, int stages);

/// A field's type in messages and documentation.
template <class T>
constexpr std::string_view type_name() {
  if constexpr (is_optional<T>::value) {
    return type_name<typename T::value_type>();
  } else if constexpr (std::is_same_v<T, bool>) {
    return "true or false";
  } else if constexpr (std::is_integral_v<T>) {
    return "an integer";
  } else if constexpr (std::is_floating_point_v<T>) {
    return "a number";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return "a string";
  } else if constexpr (std::is_same_v<T, Betas>) {
    return "a list of two numbers";
  } else if constexpr (std::is_same_v<T, ByPattern>) {
    return "a string, or a table of patterns and strings";
  } else if constexpr (std::is_same_v<T, std::vector<double>>) {
    return "a list of numbers";
  } else {
    static_assert(std::is_same_v<T, std::vector<std::string>>);
    return "a list of strings";
  }
}

}  // namespace tessera::detail
