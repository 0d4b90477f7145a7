#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// Turns text into ids, with what it remembers from earlier text to be fast (never to give other ids). One object, one thread.
class Encoder {
 public:
  virtual ~Encoder() = default;

  /// Appends the ids of `part`, which is a whole text or a part of one that was cut at Tokenizer::boundary; `first` says that it begins the text. `offset` is
  /// its place in the text or file, for messages. Throws as Tokenizer::encode does.
  virtual void append(std::string_view part, bool first, std::vector<int32_t>& ids, int64_t offset = 0) = 0;
};

/// Text to ids and back. Immutable after construction: any number of threads may use one object.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// `byte` (a byte is its value, vocabulary 256, nothing added) or the path of a SentencePiece `.model`.
  /// Throws ConfigError naming the `knob` that asked for it and the file where it is missing, empty or no SentencePiece model.
  static std::unique_ptr<Tokenizer> load(const std::string& name, const std::string& knob = "data.tokenizer");

  /// How many ids there are; every id is in [0, vocab_size).
  virtual int64_t vocab_size() const = 0;

  /// Ids of `text`; neither a beginning nor an end id is added. Throws ConfigError naming the byte offset where the model cannot represent the text
  /// (invalid UTF-8, and a model without byte pieces).
  std::vector<int32_t> encode(std::string_view text) const;

  /// Text of `ids`. For `byte` and for every model with byte pieces and an identity normalizer, decode(encode(text)) == text, for any bytes.
  /// Control ids (beginning and end of text) give nothing. Throws ConfigError on an id outside the vocabulary.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;

  /// The beginning-of-text and the end-of-text id, if the tokenizer has them.
  virtual std::optional<int32_t> bos() const = 0;
  virtual std::optional<int32_t> eos() const = 0;

  /// The id that stands for text which no other can spell, if the tokenizer has one; with bytes to spell it in, it is never used.
  virtual std::optional<int32_t> unknown() const { return std::nullopt; }

  /// The id of a piece of the vocabulary as it is written there ("<s>"); nothing where there is none, as of bytes.
  virtual std::optional<int32_t> id_of(std::string_view /*piece*/) const { return std::nullopt; }

  /// Hash of everything that determines the ids; corpora and checkpoints are compared by it. `byte` for the byte tokenizer.
  virtual const std::string& fingerprint() const = 0;

  /// Bytes of text that each id stands for, by id; 0 for control ids. What bits per byte is counted with.
  virtual std::span<const uint32_t> token_bytes() const = 0;

  /// The same for an id that a text begins with: without the space that some models put in front of a text, and that is not in it.
  virtual std::span<const uint32_t> first_token_bytes() const { return token_bytes(); }

  /// The first position in (from, text.size()) where the text may be cut with no effect on its ids; text.size() if there is none.
  virtual size_t boundary(std::string_view text, size_t from) const = 0;

  virtual std::unique_ptr<Encoder> encoder() const = 0;
};

/// Text of ids as they come: all that it gives, one after the other, is what Tokenizer::decode gives of all the ids behind `before`, the last one before them
/// (nothing: the text begins). Decoded alone, a piece that begins with a space would lose it, as the first of a text does with a model that puts one in front;
/// and the bytes of a character, each an id, would be as many U+FFFD with a model whose text SentencePiece decodes.
class StreamDecoder {
 public:
  /// `tokenizer` must outlive it.
  explicit StreamDecoder(const Tokenizer& tokenizer, std::optional<int32_t> before = std::nullopt) : tokenizer_(&tokenizer) {
    if (before) before_ = {*before};
  }

  /// The text that is settled with `id`; what may be a character's first bytes waits for those to come.
  std::string add(int32_t id);
  /// What still waits, at the end.
  std::string finish();

 private:
  std::string settle(size_t count);
  std::string text_of(std::span<const int32_t> ids) const;

  const Tokenizer* tokenizer_;
  std::vector<int32_t> before_{};  ///< the last that gave text, and what came behind it without any
  std::vector<int32_t> waiting_{};
};

/// An Encoder that deals long text over threads, in parts cut at Tokenizer::boundary: the same ids in the same order, bit for bit.
class ParallelEncoder : public Encoder {
 public:
  /// `tokenizer` must outlive it; threads 0 = one per core.
  explicit ParallelEncoder(const Tokenizer& tokenizer, int threads = 0);
  void append(std::string_view text, bool first, std::vector<int32_t>& ids, int64_t offset = 0) override;

 private:
  const Tokenizer& tokenizer_;
  std::vector<std::unique_ptr<Encoder>> encoders_;  // one per thread
};

/// Throws ConfigError unless every id of the tokenizer is below `model_vocab_size` (model.vocab_size may exceed the tokenizer's, never the reverse).
void check_vocabulary(const Tokenizer& tokenizer, int64_t model_vocab_size);

/// The beginning-of-text id, which `knob` ("data.bos = true") asks for. Throws ConfigError where the tokenizer has none.
int32_t require_bos(const Tokenizer& tokenizer, const std::string& knob);

/// What train_tokenizer takes beside files and vocabulary size.
struct TokenizerTraining {
  int64_t sample_bytes = 4 << 20;      ///< text read for training: evenly spaced stretches of whole lines of all files; 0 = everything
  double character_coverage = 0.9995;  ///< share of the sample's characters that get an id of their own; the rest is spelled in bytes
  std::string type = "bpe";            ///< SentencePiece's model type: bpe or unigram
  int threads = 2;                     ///< part of the arithmetic of `unigram`: fix it for reproducible models
};

/// Trains a SentencePiece model on `files` (plain, .gz, .dz) and writes it to `out` (".model" is added where missing) through a temporary file; returns its
/// path. Ids: 0 unknown, 1 beginning, 2 end of text, 3..258 the bytes, then pieces: any bytes encode without loss, whitespace included. Throws ConfigError
/// where a file is unreadable, the text is too small for `vocab_size`, or vocab_size does not hold bytes and characters.
std::filesystem::path train_tokenizer(const std::vector<std::filesystem::path>& files, int64_t vocab_size, const std::filesystem::path& out,
                                      const TokenizerTraining& options = {});

}  // namespace tessera::data
