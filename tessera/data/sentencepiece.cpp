#ifdef TESSERA_WITH_SENTENCEPIECE

#include "tessera/data/sentencepiece.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <filesystem>
#include <unordered_map>

#include <sentencepiece_processor.h>

#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/text_file.h"
#include "tessera/data/sentencepiece_rules.h"
#include "tessera/data/utf8.h"

// Words repeat, and the library encodes each anew. Remembering them is right only where a word's ids do not depend on its neighbors: if no piece of the model
// holds these two bytes side by side, no piece can reach across, and both sides are encoded by themselves. What a model does beside that (spaces in front or
// taken away) is found by probes and not read from its settings, which mean different things in different versions; only whether it has rules that make other
// characters of some is read, for no probe holds all that they may change. One that alters its text is given it in large parts.

namespace tessera::data {
namespace {

using sentencepiece::SentencePieceProcessor;

constexpr std::string_view space_mark = "\u2581";  // how SentencePiece writes a space inside a piece

std::string replace_all(std::string text, std::string_view from, std::string_view to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) text.replace(at, from.size(), to);
  return text;
}

/// Facts of a model, found by asking it rather than by reading its settings.
struct Model {
  std::string file, knob;  // for messages
  SentencePieceProcessor processor;
  std::vector<std::string> text;      // of each id
  std::vector<uint32_t> token_bytes;  // text[id].size()
  std::vector<uint32_t> first_token_bytes;
  std::array<int32_t, 256> byte_ids;
  bool has_bytes = true;                          // any byte can be spelled
  bool plain = false;                             // every character stays what it is; only a space in front of the text may be added
  bool space_prefix = false;                      // ... and it is
  bool cut_at_newline = false;                    // text may be cut before a run of newlines
  bool cut_at_words = false;                      // text may be cut between two bytes that stand side by side in no piece
  std::bitset<256 * 256> joined;                  // such pairs of bytes: joined[256 * first + second]
  size_t anchor_ids = 0, newline_anchor_ids = 0;  // of the texts that stand in for what comes before a word; see encode_valid

  std::vector<int32_t> ids(std::string_view part) const {
    std::vector<int> out;
    const auto status = processor.Encode(part, &out);
    require(status.ok(), knob, " = ", file, ": SentencePiece cannot encode the text with it: ", status.ToString());
    return {out.begin(), out.end()};
  }

  std::string join(std::span<const int32_t> ids) const {
    std::string out;
    for (int32_t id : ids) out += text[id];
    return out;
  }

  /// `rules`: has_rules.
  void read_pieces(bool rules) {
    byte_ids.fill(-1);
    const int n = processor.GetPieceSize();
    for (int id = 0; id < n; ++id) {
      std::string piece;
      if (processor.IsByte(id)) {  // "<0x41>"
        piece = std::string(1, static_cast<char>(std::stoi(processor.IdToPiece(id).substr(3, 2), nullptr, 16)));
        byte_ids[static_cast<unsigned char>(piece[0])] = id;
      } else if (processor.IsUnknown(id)) {
        piece = " \u2047 ";  // what SentencePiece decodes it to
      } else if (!processor.IsControl(id)) {
        piece = replace_all(processor.IdToPiece(id), space_mark, " ");
        for (size_t i = 1; i < piece.size(); ++i) joined.set(pair(piece[i - 1], piece[i]));
      }
      token_bytes.push_back(processor.IsUnknown(id) ? 1 : static_cast<uint32_t>(piece.size()));
      text.push_back(std::move(piece));
    }
    has_bytes = std::ranges::all_of(byte_ids, [](int32_t id) { return id >= 0; });

    const std::vector<int32_t> newline = ids("\n");
    bool before_newline = false, behind_newline = false;  // pieces that reach into a run of newlines, or out of it
    for (int c = 0; c < 256; ++c) {
      before_newline |= c != '\n' && joined[pair(static_cast<char>(c), '\n')];
      behind_newline |= c != '\n' && joined[pair('\n', static_cast<char>(c))];
      // Of a model that takes a newline for a space, and one at the end away, those that reach into a space.
      before_newline |= newline.empty() && c != ' ' && joined[pair(static_cast<char>(c), ' ')];
    }
    anchor_ids = newline.size();
    newline_anchor_ids = ids("a").size();
    const bool newline_known = !newline.empty() && !processor.IsUnknown(newline.back()) && text[newline.back()] == "\n";
    const std::string probe = "\n a  b\t c \n";
    const std::string back = join(ids(probe));
    const bool kept = newline_known && !rules;
    space_prefix = kept && newline.size() == 2 && back == " " + probe && !before_newline && !behind_newline;
    plain = kept && (space_prefix || (newline.size() == 1 && back == probe));
    cut_at_words = plain && !before_newline && !behind_newline;
    // Behind a space, too: a model that takes away spaces at the end of what it is given would take those of each line.
    const auto comes_apart = [&](const std::string& line, const std::string& next) {
      std::vector<int32_t> halves = ids(line);
      const std::vector<int32_t> second = ids("\n" + next);
      halves.insert(halves.end(), second.begin() + (space_prefix ? 1 : 0), second.end());
      return halves == ids(line + "\n" + next);
    };
    // Without bytes, unknown pieces side by side become one unknown id: lines of words that are looked up whole may end and begin with them.
    const auto unknown_comes_apart = [&] {
      const std::string unknown = unknown_character();
      return !unknown.empty() && comes_apart(unknown, unknown);
    };
    cut_at_newline = cut_at_words || (!before_newline && (newline_known || newline.empty()) && comes_apart("a", "b") && comes_apart("a ", "b") &&
                                      (has_bytes || unknown_comes_apart()));
  }

  /// One of those for private use that no piece spells; none: all are known, or made into others.
  std::string unknown_character() const {
    for (int c = 0xe000; c < 0xf900; ++c) {
      const std::string character{static_cast<char>(0xe0 | c >> 12), static_cast<char>(0x80 | (c >> 6 & 0x3f)), static_cast<char>(0x80 | (c & 0x3f))};
      if (std::ranges::any_of(ids(character), [&](int32_t id) { return processor.IsUnknown(id); })) return character;
    }
    return {};
  }

  /// Of models that change their text, too: what they put in front is not in it either.
  void count_first_bytes() {
    const std::vector<int32_t> letter = ids("a");
    const auto begins_with_space = [&](int32_t id) { return !processor.IsUnknown(id) && text[id].starts_with(' '); };
    const bool space_in_front = !letter.empty() && begins_with_space(letter.front());
    first_token_bytes = token_bytes;
    for (int32_t id = 0; space_in_front && id < static_cast<int32_t>(text.size()); ++id) first_token_bytes[id] -= begins_with_space(id) ? 1 : 0;
  }

  static size_t pair(char first, char second) { return 256 * static_cast<unsigned char>(first) + static_cast<unsigned char>(second); }

  bool cut(std::string_view all, size_t at) const {
    const char before = all[at - 1], here = all[at];
    if (!cut_at_words) return cut_at_newline && here == '\n' && before != '\n';
    if (joined[pair(before, here)]) return false;
    // Without bytes to spell them in, unknown characters side by side become one unknown id: only known neighbors are safe.
    if (!has_bytes) return here == ' ' || here == '\n' || before == '\n';
    return (here & 0xc0) != 0x80;  // not inside a character
  }
};

/// Encodes word by word (a word is what lies between two cuts) where the model allows it, remembering the ids of words met before: text repeats its words, and
/// SentencePiece does not remember them.
class SentencePieceEncoder : public Encoder {
 public:
  explicit SentencePieceEncoder(const Model& model) : model_(model) {}

  void append(std::string_view part, bool first, std::vector<int32_t>& ids, int64_t offset) override {
    for (size_t begin = 0; begin < part.size();) {
      size_t end = begin + 1;
      while (end < part.size() && !model_.cut(part, end)) ++end;
      const std::string_view word = part.substr(begin, end - begin);
      const bool first_word = first && begin == 0;
      if (first_word || !model_.plain || word.size() > longest_remembered) {
        encode(word, first_word, ids, offset + static_cast<int64_t>(begin));
      } else {
        remember(word, ids, offset + static_cast<int64_t>(begin));
      }
      begin = end;
    }
  }

 private:
  static constexpr size_t longest_remembered = 48, most_remembered = 1 << 18;

  void remember(std::string_view word, std::vector<int32_t>& ids, int64_t offset) {
    const auto found = words_.find(word);
    if (found != words_.end()) {
      ids.insert(ids.end(), pool_.begin() + found->second.begin, pool_.begin() + found->second.begin + found->second.size);
      return;
    }
    const size_t before = ids.size();
    encode(word, false, ids, offset);
    if (words_.size() < most_remembered) {
      words_.emplace(std::string(word), Run{static_cast<uint32_t>(pool_.size()), static_cast<uint32_t>(ids.size() - before)});
      pool_.insert(pool_.end(), ids.begin() + before, ids.end());
    }
  }

  /// SentencePiece replaces malformed bytes, and takes the character U+2581 for a space: a plain model that can spells them in bytes instead.
  void encode(std::string_view word, bool first, std::vector<int32_t>& ids, int64_t offset) {
    const bool keep_mark = model_.plain && model_.has_bytes;
    size_t done = 0;
    while (done < word.size()) {
      size_t stop = done, stop_bytes = 0;  // the next bytes that SentencePiece must not see
      while (stop < word.size() && stop_bytes == 0) {
        const size_t length = utf8_length(word.substr(stop));
        if (length == 0) {
          require(keep_mark, "not valid UTF-8 at byte ", offset + static_cast<int64_t>(stop),
                  model_.has_bytes ? ", and this tokenizer changes its text before it spells any of it in bytes; clean the text, or use one without rules"
                                   : ", and this tokenizer has no bytes to spell it in; clean the text, or use a tokenizer with byte fallback");
          stop_bytes = 1;
        } else if (keep_mark && word.substr(stop, length) == space_mark) {
          stop_bytes = length;
        } else {
          stop += length;
        }
      }
      if (stop > done) encode_valid(word.substr(done, stop - done), first && done == 0, ids);
      for (size_t i = stop; i < stop + stop_bytes; ++i) ids.push_back(model_.byte_ids[static_cast<unsigned char>(word[i])]);
      done = stop + stop_bytes;
    }
  }

  void encode_valid(std::string_view text, bool first, std::vector<int32_t>& ids) {
    if (first || !model_.plain || !model_.space_prefix) {
      const std::vector<int32_t> all = model_.ids(text);
      ids.insert(ids.end(), all.begin(), all.end());
      return;
    }
    // The model puts a space in front of whatever it is given. Behind a character that no piece connects to this word, the word's own ids appear.
    const bool newlines = text.front() == '\n';
    line_.assign(newlines ? "a" : "\n").append(text);
    const std::vector<int32_t> all = model_.ids(line_);
    ids.insert(ids.end(), all.begin() + static_cast<int64_t>(newlines ? model_.newline_anchor_ids : model_.anchor_ids), all.end());
  }

  struct Run {
    uint32_t begin, size;
  };
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view word) const { return std::hash<std::string_view>{}(word); }
  };

  const Model& model_;
  std::unordered_map<std::string, Run, Hash, std::equal_to<>> words_;
  std::vector<int32_t> pool_;  // the ids of all remembered words
  std::string line_;
};

class SentencePieceTokenizer : public Tokenizer {
 public:
  SentencePieceTokenizer(const std::filesystem::path& file, const std::string& knob) {
    std::error_code error;
    const bool special = std::filesystem::exists(file, error) && !std::filesystem::is_regular_file(file, error);
    require(!special, knob, " = ", file.string(), ": is no regular file; give `byte` or a SentencePiece .model");
    require(std::filesystem::exists(file, error), knob, " = ", file.string(),
            ": no such file; give `byte` or a SentencePiece .model (tessera tokenize --train makes one)");
    const std::string bytes = read_text_file(knob + " = " + file.string(), file);
    model_.file = file.string();
    model_.knob = knob;
    const auto refuse = [&](const std::string& why) {
      throw ConfigError(detail::concat(knob, " = ", file.string(), ": is no SentencePiece model (", bytes.size(), " bytes", why,
                                       "); give `byte` or a .model that SentencePiece wrote"));
    };
    if (const std::string problem = problem_of_rules(bytes); !problem.empty()) refuse("; " + problem);
    try {
      if (bytes.empty() || !model_.processor.LoadFromSerializedProto(bytes).ok()) refuse("");
      model_.read_pieces(has_rules(bytes));
      model_.count_first_bytes();
    } catch (const ConfigError&) {
      throw;
    } catch (const std::exception& error) {  // the library's own, of pieces that no model can have
      refuse(detail::concat("; ", error.what()));
    }
    fingerprint_ = "sentencepiece-" + hash_hex(bytes.data(), bytes.size());
  }

  int64_t vocab_size() const override { return static_cast<int64_t>(model_.text.size()); }

  std::string decode(std::span<const int32_t> ids) const override {
    for (int32_t id : ids) require(id >= 0 && id < vocab_size(), "tokenizer: id ", id, " is outside its vocabulary of ", vocab_size());
    if (!model_.plain) return model_.processor.DecodeIds({ids.begin(), ids.end()});
    std::string text = model_.join(ids);  // not SentencePiece's: it replaces bytes that spell no character
    if (model_.space_prefix && text.starts_with(' ')) text.erase(0, 1);
    return text;
  }

  std::optional<int32_t> bos() const override { return id_if_any(model_.processor.bos_id()); }
  std::optional<int32_t> eos() const override { return id_if_any(model_.processor.eos_id()); }
  std::optional<int32_t> unknown() const override { return id_if_any(model_.processor.unk_id()); }
  std::optional<int32_t> id_of(std::string_view piece) const override {
    const int id = model_.processor.PieceToId(piece);  // of one that it does not know, that of the unknown
    return id_if_any(id >= 0 && model_.processor.IdToPiece(id) == piece ? id : -1);
  }

  const std::string& fingerprint() const override { return fingerprint_; }
  std::span<const uint32_t> token_bytes() const override { return model_.token_bytes; }
  std::span<const uint32_t> first_token_bytes() const override { return model_.first_token_bytes; }

  size_t boundary(std::string_view text, size_t from) const override {
    for (size_t at = from + 1; at < text.size(); ++at) {
      if (model_.cut(text, at)) return at;
    }
    return text.size();
  }

  std::unique_ptr<Encoder> encoder() const override { return std::make_unique<SentencePieceEncoder>(model_); }

 private:
  static std::optional<int32_t> id_if_any(int id) { return id < 0 ? std::nullopt : std::optional<int32_t>(id); }

  Model model_;
  std::string fingerprint_;
};

}  // namespace

std::unique_ptr<Tokenizer> load_sentencepiece(const std::filesystem::path& file, const std::string& knob) {
  return std::make_unique<SentencePieceTokenizer>(file, knob);
}

}  // namespace tessera::data

#endif
