#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/common.h"
#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/log.h"
#include "tessera/data/corpus.h"
#include "tessera/data/tokenizer.h"

namespace tessera::cli {

namespace {

struct TokenizeFlags {
  bool train = false, bos = false;
  std::optional<int64_t> vocab_size;
  std::string output, tokenizer, documents = "none";
  std::vector<std::string> files;
  data::TokenizerTraining training;
};

std::vector<std::filesystem::path> paths(const std::vector<std::string>& names) { return {names.begin(), names.end()}; }

/// Before any text is read. What is written must not take the place of what it is made from.
std::string output_of(const TokenizeFlags& flags, const std::string& output) {
  const std::string named = std::filesystem::path(flags.output).filename().string();
  require(named != "." && named != ".." && !flags.output.ends_with('/'), "--output = ", flags.output, ": is a folder; name a file in it");
  std::vector<std::string> inputs = flags.files;
  if (!flags.tokenizer.empty()) inputs.push_back(flags.tokenizer);
  check_output_file("--output", output, inputs);
  return output;
}

void train_tokenizer(const TokenizeFlags& flags) {
  require(flags.vocab_size.has_value(), "--vocab-size is not given: how many ids the tokenizer has, for example 4096");
  require(flags.tokenizer.empty(), "--tokenizer and --train exclude each other: --train makes a new one");
  require(flags.training.sample_bytes >= 0, "--sample-bytes = ", flags.training.sample_bytes, ": it must be at least 1, or 0 for all of the text");
  std::filesystem::path output = flags.output.empty() ? "tokenizer.model" : flags.output;
  if (output.extension() != ".model") output += ".model";
  const auto model = data::train_tokenizer(paths(flags.files), *flags.vocab_size, output_of(flags, output.string()), flags.training);
  std::printf("%s: %lld ids\n", model.c_str(), static_cast<long long>(*flags.vocab_size));
}

void pack(const TokenizeFlags& flags) {
  require(!flags.tokenizer.empty(), "--tokenizer is not given: byte or a .model packs FILES; --train makes a new tokenizer from them");
  const auto tokenizer = data::Tokenizer::load(flags.tokenizer, "--tokenizer");
  Config defaults;
  resolve(defaults);
  const auto documents = data::documents_named(flags.documents, "--documents");
  if (flags.bos) data::require_bos(*tokenizer, "--bos");
  const auto corpus = flags.output.empty()
                          ? data::Corpus::open_or_build(paths(flags.files), *tokenizer, defaults.data.cache_dir, 0, "FILES", documents, flags.bos)
                          : data::Corpus::build(paths(flags.files), *tokenizer, output_of(flags, flags.output), 0, "FILES", documents, flags.bos);
  std::printf("%s: %lld tokens of %s of text, %.3f bytes a token\n", corpus->path().c_str(), static_cast<long long>(corpus->tokens()),
              format_bytes(corpus->text_bytes()).c_str(), static_cast<double>(corpus->text_bytes()) / static_cast<double>(corpus->tokens()));
  if (const auto remark = data::unknown_remark(data::unknown_among_first(*corpus, *tokenizer), "the tokens"); !remark.empty()) log().warn("{}", remark);
}

}  // namespace

void add_tokenize(Command app, int& exit_code) {
  auto flags = std::make_shared<TokenizeFlags>();
  auto command = app.add_command("tokenize", "Train a SentencePiece tokenizer, or pack text with one");
  command.add_flag("--train", flags->train, "Train a tokenizer on FILES");
  auto size = command.add_option("--vocab-size", flags->vocab_size, "Ids of the tokenizer to train");
  auto type = command.add_option("--type", flags->training.type, "SentencePiece model type: bpe or unigram").shows_default();
  auto sample = command.add_option("--sample-bytes", flags->training.sample_bytes, "Text to train on, spread evenly over FILES; 0 = all of it").shows_default();
  command.add_option("--tokenizer", flags->tokenizer, "Pack FILES with this one: byte, or a .model");
  auto documents =
      command.add_option("--documents", flags->documents, "Cut FILES into documents, as data.documents: none, files, paragraphs or lines").shows_default();
  auto bos = command.add_flag("--bos", flags->bos, "Begin each of them with the tokenizer's beginning-of-text id, as data.bos");
  command.add_option("-o,--output", flags->output, "The .model, or the packed .bin, to write");
  command.add_option("files", flags->files, "Text: plain, .gz or .dz").required();
  command.when_chosen([flags, size, type, sample, documents, bos, &exit_code] {
    for (const Option& of_training : {size, type, sample}) {
      if (!flags->train && of_training.given()) log().warn("{}: has no effect without --train", of_training.name());
    }
    for (const Option& of_packing : {documents, bos}) {
      if (flags->train && of_packing.given()) log().warn("{}: has no effect with --train; it is for packing text with the tokenizer", of_packing.name());
    }
    flags->train ? train_tokenizer(*flags) : pack(*flags);
    exit_code = 0;
  });
}

}  // namespace tessera::cli
