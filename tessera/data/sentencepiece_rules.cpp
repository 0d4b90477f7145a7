#include "tessera/data/sentencepiece_rules.h"

#include <cstdint>
#include <cstring>

#include "tessera/core/error.h"

// SentencePiece's parser checks the message around these rules, and nobody checks the rules. The few fields on the way to them are read by hand, so that no
// protobuf library is needed. Every unit that can be reached is checked by checking all of them, in one pass, without walking the trie: a search only ever goes
// from a unit to one of its 256 children.

namespace tessera::data {
namespace {

/// Fields of a protobuf message, one after the other.
class Fields {
 public:
  explicit Fields(std::string_view message) : rest_(message) {}

  bool next() {
    if (rest_.empty() || broken_) return false;
    start_ = rest_.data();
    const uint64_t key = varint();
    number_ = key >> 3;
    bytes_ = {};
    switch (key & 7) {
      case 0:
        varint();
        break;
      case 1:
        take(8);
        break;
      case 2:
        bytes_ = take(varint());
        break;
      case 5:
        take(4);
        break;
      default:  // groups, which SentencePiece does not write
        broken_ = true;
    }
    return !broken_;
  }

  uint64_t number() const { return number_; }
  std::string_view bytes() const { return bytes_; }  ///< of a string or a message
  bool broken() const { return broken_; }
  const char* start() const { return start_; }  ///< of the field that next() read last

 private:
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    broken_ = true;
    return 0;
  }

  std::string_view take(uint64_t bytes) {
    if (bytes > rest_.size()) broken_ = true;
    const auto taken = rest_.substr(0, broken_ ? 0 : bytes);
    rest_.remove_prefix(taken.size());
    return taken;
  }

  std::string_view rest_, bytes_;
  const char* start_ = rest_.data();
  uint64_t number_ = 0;
  bool broken_ = false;
};

/// A unit of the double-array trie (darts-clone): a node that leads to others, or the value at the end of a key.
struct Unit {
  uint32_t bits;
  bool is_value() const { return bits >> 31; }
  uint32_t value() const { return bits & 0x7fffffff; }
  bool has_value() const { return bits >> 8 & 1; }
  uint32_t offset() const { return (bits >> 10) << ((bits & 512) >> 6); }
};

/// Rules are the trie's size in bytes, the trie, and the texts that its values are offsets into, each ended by a zero.
std::string problem_of_trie(std::string_view rules) {
  uint32_t trie_bytes = 0;
  if (rules.empty()) return {};
  if (rules.size() <= sizeof trie_bytes) return "their header is cut short";
  std::memcpy(&trie_bytes, rules.data(), sizeof trie_bytes);
  rules.remove_prefix(sizeof trie_bytes);
  constexpr size_t children = 256;  // a node's children lie in one block of that many units
  const size_t count = trie_bytes / sizeof(Unit);
  if (trie_bytes >= rules.size() || count < children) return detail::concat("a trie of ", trie_bytes, " bytes in ", rules.size());
  const std::string_view texts = rules.substr(trie_bytes);
  if (texts.back() != 0) return "the last text has no end";
  const auto unit = [&](size_t index) {
    Unit read{};
    std::memcpy(&read, rules.data() + index * sizeof read, sizeof read);
    return read;
  };
  for (size_t index = 0; index < count; ++index) {
    const Unit node = unit(index);
    if (node.is_value() && index > 0) continue;  // at the root a search goes on whatever its unit says
    const size_t first = index ^ node.offset();
    if ((first | (children - 1)) >= count) return detail::concat("unit ", index, " of the trie leads outside of its ", count);
    if (node.has_value() && unit(first).value() >= texts.size()) return detail::concat("unit ", first, " of the trie leads outside of the texts");
  }
  return {};
}

/// Shows `look` all compiled rules of a model, one after the other, until it finds a problem in them; returns that problem, or one of the fields on the way.
template <class Look>
std::string walk_rules(std::string_view model, Look&& look) {
  const auto at = [&](const Fields& fields) { return detail::concat("at byte ", fields.start() - model.data(), ", "); };
  constexpr uint64_t normalizer = 3, denormalizer = 5, compiled = 2;  // fields of ModelProto and of NormalizerSpec
  Fields specs(model);
  while (specs.next()) {
    if (specs.number() != normalizer && specs.number() != denormalizer) continue;
    Fields spec(specs.bytes());
    while (spec.next()) {
      if (spec.number() != compiled) continue;
      if (const std::string problem = look(spec.bytes()); !problem.empty()) return at(spec) + "normalization rules: " + problem;
    }
    if (spec.broken()) return at(spec) + "a normalizer that is cut short";
  }
  return specs.broken() ? at(specs) + "a field that is cut short" : "";
}

}  // namespace

std::string problem_of_rules(std::string_view model) { return walk_rules(model, problem_of_trie); }

bool has_rules(std::string_view model) {
  bool found = false;
  walk_rules(model, [&](std::string_view compiled) {
    found = found || !compiled.empty();
    return std::string();
  });
  return found;
}

}  // namespace tessera::data
