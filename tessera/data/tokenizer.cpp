#include "tessera/data/tokenizer.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <system_error>
#include <thread>

#include "tessera/core/error.h"
#include "tessera/data/byte_tokenizer.h"
#include "tessera/data/sentencepiece.h"

// Text may be cut wherever the tokenizer says that no piece can cross: the parts then have the ids that they have in the whole. Threads take the next part when
// they are done with one, and results are put together in the order of the text, so neither their number nor their speed is seen in the ids.

namespace tessera::data {

std::unique_ptr<Tokenizer> Tokenizer::load(const std::string& name, const std::string& knob) {
  if (name == "byte") return std::make_unique<ByteTokenizer>();
  return load_sentencepiece(name, knob);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  encoder()->append(text, true, ids);
  return ids;
}

ParallelEncoder::ParallelEncoder(const Tokenizer& tokenizer, int threads) : tokenizer_(tokenizer) {
  if (threads <= 0) threads = std::max(1u, std::thread::hardware_concurrency());
  for (int i = 0; i < threads; ++i) encoders_.push_back(tokenizer.encoder());
}

void ParallelEncoder::append(std::string_view text, bool first, std::vector<int32_t>& ids, int64_t offset) {
  // Large enough that a thread's start costs nothing beside it, small enough that the last parts end together.
  constexpr size_t part_bytes = 256 << 10;
  std::vector<size_t> cuts = {0};
  while (cuts.back() < text.size()) {
    const size_t from = cuts.back() + part_bytes;
    cuts.push_back(from < text.size() ? tokenizer_.boundary(text, from) : text.size());
  }
  const size_t parts = cuts.size() - 1;
  if (parts <= 1 || encoders_.size() == 1) return encoders_[0]->append(text, first, ids, offset);

  std::vector<std::vector<int32_t>> results(parts);
  std::vector<std::exception_ptr> failures(parts);
  std::atomic<size_t> next = 0;
  auto work = [&](Encoder& encoder) {
    for (size_t i; (i = next++) < parts;) {
      try {
        encoder.append(text.substr(cuts[i], cuts[i + 1] - cuts[i]), first && i == 0, results[i], offset + static_cast<int64_t>(cuts[i]));
      } catch (...) {
        failures[i] = std::current_exception();
      }
    }
  };
  {
    std::vector<std::jthread> workers;
    try {
      for (size_t t = 1; t < std::min(parts, encoders_.size()); ++t) workers.emplace_back([&, t] { work(*encoders_[t]); });
    } catch (const std::system_error&) {  // no more threads are to be had: those there are take all parts
    }
    work(*encoders_[0]);
  }
  for (size_t i = 0; i < parts; ++i) {
    if (failures[i]) std::rethrow_exception(failures[i]);  // the first in the text, whichever thread met it
    ids.insert(ids.end(), results[i].begin(), results[i].end());
  }
}

std::string StreamDecoder::add(int32_t id) {
  constexpr std::string_view unfinished = "\ufffd";
  constexpr size_t longest_character = 4;  // bytes, each of which may be an id
  waiting_.push_back(id);
  const std::string text = text_of(waiting_);
  if (!text.ends_with(unfinished)) return settle(waiting_.size());
  return waiting_.size() < longest_character ? "" : settle(1);  // it begins no character: the others still may
}

std::string StreamDecoder::finish() { return settle(waiting_.size()); }

std::string StreamDecoder::settle(size_t count) {
  if (count == 0) return {};
  std::string text = text_of(std::span(waiting_).first(count));
  if (!text.empty()) before_.clear();  // else it is a mark, behind which a text need not begin
  const auto settled = waiting_.begin() + static_cast<int64_t>(count);
  before_.insert(before_.end(), waiting_.begin(), settled);
  waiting_.erase(waiting_.begin(), settled);
  return text;
}

std::string StreamDecoder::text_of(std::span<const int32_t> ids) const {
  if (before_.empty()) return tokenizer_->decode(ids);
  std::vector<int32_t> both = before_;
  both.insert(both.end(), ids.begin(), ids.end());
  const std::string text = tokenizer_->decode(both), known = tokenizer_->decode(before_);
  return text.starts_with(known) ? text.substr(known.size()) : tokenizer_->decode(ids);
}

void check_vocabulary(const Tokenizer& tokenizer, int64_t model_vocab_size) {
  require(tokenizer.vocab_size() <= model_vocab_size, "model.vocab_size = ", model_vocab_size, ": the tokenizer has ", tokenizer.vocab_size(),
          " ids, and each needs a row; set model.vocab_size to ", tokenizer.vocab_size(), " or more, or use a smaller tokenizer");
}

int32_t require_bos(const Tokenizer& tokenizer, const std::string& knob) {
  const auto bos = tokenizer.bos();
  require(bos.has_value(), knob, ": the tokenizer (", tokenizer.fingerprint(),
          ") has no beginning-of-text id to put in front of documents; do without (data.bos = false), or name a SentencePiece .model that has one");
  return *bos;
}

}  // namespace tessera::data
