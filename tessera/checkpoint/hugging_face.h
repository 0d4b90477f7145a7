#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/config/config.h"

namespace tessera::checkpoint {

/// Which part of a Hugging Face tensor one of our logical tensors, or some rows of it, is: `theirs`.narrow(dim, offset, size), transposed where they store
/// [in, out]; of stacked experts theirs[index] first.
struct HuggingFaceTensor {
  std::string ours;            ///< logical name, "layers.0.attention.wq.weight"
  std::string theirs;          ///< "transformer.h.0.attn.c_attn.weight"
  std::vector<int64_t> shape;  ///< of ours, or of those rows
  bool transposed = false;
  int64_t dim = 0, offset = 0;  ///< of the part, in their layout; its size is ours'
  bool leading = false;         ///< theirs may go on behind the part (positions beyond max_seq_len)
  int64_t row = 0, rows = 0;    ///< of ours, of `rows` rows, this is `row` .. `row` + shape[0]; rows = 0: all of it
  int64_t index = -1;           ///< of theirs, along a dimension in front of the others; -1: there is none

  std::vector<int64_t> whole_shape() const;       ///< of ours
  Slice slice_of(const std::string& name) const;  ///< the rows, of a logical tensor called `name`
};

/// The table of the model's family for its shape, in the order in which Hugging Face lists its parameters; a tied head has no row. Nothing for families without
/// published files (mlp). `model` is resolved.
std::optional<std::vector<HuggingFaceTensor>> hugging_face_table(const ModelConfig& model);

/// Reads `config.model.from_hf`/config.json of a LLaMA or GPT-2 model (transformers 4 and 5). max_seq_len (default: the file's) and dropout (default: 0) are
/// taken from `config`; any other [model] key in `config.given` must agree with the file. Throws ConfigError by name: an unknown architecture, rope type or
/// activation, an attention bias, or a key that disagrees (with both values).
ModelConfig read_hugging_face_config(const Config& config);

/// The SentencePiece model of a folder, `dir`/tokenizer.model; nothing where there is none. No other vocabulary is read (tokenizer.json).
std::optional<std::filesystem::path> hugging_face_tokenizer(const std::filesystem::path& dir);

/// A vocabulary that a folder brings as JSON, by which text is not read here.
struct HuggingFaceVocabulary {
  std::filesystem::path file{};
  std::map<std::string, int64_t> ids{};  ///< of the pieces; empty where the file cannot be read
};

/// That of `dir`/tokenizer.json with its added_tokens, or, where there is none, of `dir`/vocab.json; nothing where there is neither.
std::optional<HuggingFaceVocabulary> hugging_face_vocabulary(const std::filesystem::path& dir);

struct HuggingFaceToken {
  std::optional<std::string> text{};  ///< nothing: that of the id which the tokenizer has for the purpose
  std::optional<int64_t> id{};        ///< its number, where the folder says it
};

/// What a folder's tokenizer puts around a text.
struct HuggingFaceFrame {
  bool bos = false;              ///< an id stands in front of it
  HuggingFaceToken bos_token{};  ///< that one
  bool eos = false;              ///< an id stands behind it
  HuggingFaceToken eos_token{};
  std::filesystem::path file{};        ///< says so
  std::vector<std::string> remarks{};  ///< to be said aloud: files or classes that contradict each other, and what cannot be told
};

/// The post_processor of `dir`/tokenizer.json, as transformers 5 goes by it; add_bos_token of `dir`/tokenizer_config.json with the bos_token that it names
/// comes first where 4 does (a LLaMA's tokenizer_class, or none), and a CodeLLaMA's class needs neither. Where the first file is not there, or does not tell,
/// add_bos_token says it, or else the class. Without the files: nothing. Throws ConfigError where the second is damaged.
HuggingFaceFrame hugging_face_frame(const std::filesystem::path& dir);

/// The ids behind which texts of a folder's model end: eos_token_id, a number or a list, of `dir`/generation_config.json and of `dir`/config.json. Of a
/// fine-tune some are other than its tokenizer's, and may lie beyond it. Throws ConfigError where a file is damaged.
std::set<int64_t> hugging_face_ends(const std::filesystem::path& dir);

/// What a folder adds to a tokenizer of `ids` ids, by id: those beyond of `dir`/added_tokens.json, and of added_tokens_decoder in `dir`/tokenizer_config.json.
/// Throws ConfigError where a file is damaged.
std::map<int64_t, std::string> hugging_face_added_tokens(const std::filesystem::path& dir, int64_t ids);

/// Tells one model's weights from another's, wherever the folder lies: a hash of names, types and shapes, and of each tensor's first 4 KiB and 32 pieces of 512
/// bytes that are spread over it. What differs in a few rows alone may pass. Throws ConfigError.
std::string hugging_face_fingerprint(const std::filesystem::path& dir);

/// Fills `targets` (slices named as our parameters) from `dir`/model.safetensors or its sharded index; fp32, fp16 and bf16 files are converted to the targets'
/// dtype. Only what the slices need is read. Throws ConfigError with the full list of missing, extra and mis-shaped tensors before anything is touched.
void load_hugging_face(const std::filesystem::path& dir, const ModelConfig& model, const std::vector<SlicedTensor>& targets);

}  // namespace tessera::checkpoint
