#ifdef TESSERA_WITH_SENTENCEPIECE

#include <algorithm>
#include <random>
#include <unordered_map>

#include <sentencepiece_trainer.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/system_reason.h"
#include "tessera/core/text_file.h"
#include "tessera/data/sample.h"
#include "tessera/data/tokenizer.h"
#include "tessera/data/utf8.h"

namespace tessera::data {
namespace {

/// The sample as SentencePiece's sentences: lines without their newline, long ones in pieces cut at spaces, malformed bytes left out (they are spelled in
/// bytes).
class Lines : public sentencepiece::SentenceIterator {
 public:
  explicit Lines(std::vector<std::string> stretches) : stretches_(std::move(stretches)) { Next(); }

  bool done() const override { return done_; }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

  void Next() override {
    do {
      done_ = !read_line();
    } while (!done_ && line_.empty());
  }

 private:
  static constexpr size_t longest = 4000;  // SentencePiece skips sentences above 4192 bytes

  bool read_line() {
    while (stretch_ < stretches_.size() && at_ >= stretches_[stretch_].size()) {
      ++stretch_;
      at_ = 0;
    }
    if (stretch_ == stretches_.size()) return false;
    const std::string& text = stretches_[stretch_];
    size_t end = std::min(text.find('\n', at_), text.size());
    size_t next = end + 1;
    if (end - at_ > longest) {
      const size_t space = text.rfind(' ', at_ + longest);
      end = next = space != std::string::npos && space > at_ ? space : at_ + longest;
    }
    line_.clear();
    for (size_t i = at_; i < end;) {
      const size_t length = utf8_length(std::string_view(text).substr(i, end - i));
      line_.append(text, i, length);
      i += std::max<size_t>(length, 1);
    }
    at_ = next;
    return true;
  }

  std::vector<std::string> stretches_;
  size_t stretch_ = 0, at_ = 0;
  std::string line_;
  bool done_ = false;
};

std::string explain(const std::string& message, int64_t vocab_size) {
  const std::string knob = detail::concat("tokenizer: vocab-size = ", vocab_size, ": ");
  const std::string after = message.substr(std::min(message.size(), message.find("] ") == std::string::npos ? 0 : message.find("] ") + 2));
  if (message.find("too high") != std::string::npos)
    return knob + "the sample is too small for so many pieces (" + after + "); give more text or a smaller vocabulary";
  if (message.find("smaller than") != std::string::npos || message.find("required_chars") != std::string::npos) {
    return knob + "it must hold 3 special ids, 256 bytes and the sample's characters (" + after + "); give a larger vocabulary";
  }
  return knob + "SentencePiece refused: " + message;
}

}  // namespace

std::filesystem::path train_tokenizer(const std::vector<std::filesystem::path>& files, int64_t vocab_size, const std::filesystem::path& out,
                                      const TokenizerTraining& options) {
  require(!files.empty(), "tokenizer: no file to train on; give at least one text");
  require(options.type == "bpe" || options.type == "unigram", "tokenizer: type = ", options.type, ": must be bpe or unigram");
  require(vocab_size > 3 + 256, "tokenizer: vocab-size = ", vocab_size,
          ": it must hold 3 special ids, 256 bytes and some pieces; give 300 or more, or use `byte`");
  std::filesystem::path path = out;
  if (path.extension() != ".model") path += ".model";
  const std::filesystem::path place = output_place(path, "tokenizer");

  Lines lines(sample_text(files, options.sample_bytes));
  require(!lines.done(), "tokenizer: ", files.front().string(), files.size() > 1 ? " and the other files hold" : " holds", " no text to train on");
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(
      std::unordered_map<std::string, std::string>{
          {"model_type", options.type},
          {"vocab_size", std::to_string(vocab_size)},
          {"character_coverage", std::to_string(options.character_coverage)},
          {"num_threads", std::to_string(std::max(1, options.threads))},
          // Nothing is normalized, added or collapsed, and what has no piece is spelled in bytes: any text comes back as it was.
          {"byte_fallback", "true"},
          {"normalization_rule_name", "identity"},
          {"add_dummy_prefix", "false"},
          {"remove_extra_whitespaces", "false"},
          {"allow_whitespace_only_pieces", "true"},
          {"unk_id", "0"},
          {"bos_id", "1"},
          {"eos_id", "2"},
          {"pad_id", "-1"},
          {"minloglevel", "2"},
      },
      &lines, &model);
  require(status.ok(), explain(status.ToString(), vocab_size));

  // Nobody else's name: whoever trains another tokenizer to the same one writes beside this, and what is called .partial may be somebody's.
  const std::filesystem::path partial = detail::concat(place.string(), ".", ::getpid(), ".", std::random_device()(), ".partial");
  const int reason = try_to_replace(place, partial, model);
  if (reason == 0) return path;
  fail_to_write(path.string() + ": cannot be written", reason, "choose another output");
}

}  // namespace tessera::data

#endif
