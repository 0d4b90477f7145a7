#pragma once

#include <string>
#include <string_view>

namespace tessera::data {

/// What is wrong, and at which byte, with the compiled normalization rules of a SentencePiece model (a serialized ModelProto); empty: nothing. SentencePiece
/// follows the offsets in them without looking where they lead: rules that are damaged would have it read anywhere. Linear in the model's size.
std::string problem_of_rules(std::string_view model);

/// Whether a model that has no such problem has any normalization rules: then characters may become others before it looks for pieces.
bool has_rules(std::string_view model);

}  // namespace tessera::data
