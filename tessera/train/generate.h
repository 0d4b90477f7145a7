#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "tessera/models/sampling.h"
#include "tessera/train/forward_engine.h"

namespace tessera {

/// A text to be continued.
struct TextRequest {
  std::vector<int64_t> prompt;  ///< at least one token
  SampleOptions sample{};
};

struct GenerateOptions {
  int64_t max_new_tokens = 100;          ///< of each text
  std::optional<int64_t> end_of_text{};  ///< stops behind it
  /// Hears of each token of text `text` as soon as this rank knows it; false stops the text behind it. Must answer alike on all ranks.
  std::function<bool(size_t text, int64_t token)> on_token{};
  int in_flight = 0;  ///< texts that are on their way through the stages at once, each with keys and values of its own; 0: as many as the pipeline has ranks
};

/// How many of a text's `length` tokens, the newest, are read where it fills a context of `capacity`: as many as leave room for the tokens still `wanted`, of
/// which all but the last are read in turn, and at least half of the context.
int64_t newest_tokens(int64_t length, int64_t capacity, int64_t wanted);

/// Refuses a model that cannot continue a text. Throws ConfigError.
void check_generates(const ModelConfig& model);

/// Continues each prompt; returns the new tokens of each, the same on all ranks and for any way to cut the model: a text depends on its prompt and options
/// alone, and not on those beside it. Dropout is off. Of a prompt that fills the context, and of a text that grows beyond it, the newest_tokens are read
/// (again), and what is older is forgotten.
///
/// Each stage keeps the keys and values of its layers and heads, and, where sequences are cut (mesh.cp), of the columns of the prompt that it read; the rank of
/// the last stage and column draws, and tells the others. Texts follow each other through the
/// stages without a pause: with as many in flight as there are ranks, none idles; one alone passes from rank to rank.
///
/// Collective over the ranks of the engine, with the same arguments on each.
///   traffic   of each token that is read, the stream from stage to stage, and what its layers send; of each that is made, 8 bytes to every other rank of the
///             pipeline, and (t-1)/t V numbers of the compute dtype where layers are cut over t ranks (logits of the last position alone are gathered)
///             Where sequences are cut over n ranks: of the prompt what their attention sends; then of each token and layer KvCache's, of each token 8 bytes
///   memory    KvCache's for each text in flight
std::vector<std::vector<int64_t>> generate(ForwardEngine& engine, const std::vector<TextRequest>& texts, const GenerateOptions& options);

/// One text.
std::vector<int64_t> generate(ForwardEngine& engine, const std::vector<int64_t>& prompt, int64_t max_new_tokens, const SampleOptions& sample);

}  // namespace tessera
