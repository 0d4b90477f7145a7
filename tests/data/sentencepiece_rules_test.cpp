#include "tessera/data/sentencepiece_rules.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::data {
namespace {

using testing::HasSubstr;

std::string field(int number, const std::string& bytes) {
  std::string out(1, static_cast<char>(number << 3 | 2));
  for (size_t size = bytes.size();; size >>= 7) {
    out += static_cast<char>((size & 0x7f) | (size > 0x7f ? 0x80 : 0));
    if (size <= 0x7f) return out + bytes;
  }
}

std::string rules(const std::vector<uint32_t>& trie, const std::string& texts) {
  const auto bytes = static_cast<uint32_t>(trie.size() * sizeof(uint32_t));
  std::string out(sizeof bytes + bytes, '\0');
  std::memcpy(out.data(), &bytes, sizeof bytes);
  std::memcpy(out.data() + sizeof bytes, trie.data(), bytes);
  return out + texts;
}

/// A model whose normalizer (field 3) or denormalizer (5) has these rules.
std::string model(const std::string& compiled, int spec = 3) { return field(1, "piece") + field(spec, field(1, "name") + field(2, compiled)); }

constexpr uint32_t value_of(uint32_t value) { return value | uint32_t{1} << 31; }
constexpr uint32_t node_with_value(uint32_t offset) { return offset << 10 | 256; }

TEST(SentencePieceRules, LeadNowhereElse) {
  std::vector<uint32_t> trie(512);
  trie[0] = node_with_value(256);
  trie[256] = value_of(2);
  const std::string texts("a\0b\0", 4);
  EXPECT_EQ(problem_of_rules(""), "");
  EXPECT_EQ(problem_of_rules(field(1, "piece")), "");
  EXPECT_EQ(problem_of_rules(model("")), "");
  EXPECT_EQ(problem_of_rules(model(rules(trie, texts))), "");

  EXPECT_FALSE(has_rules("") || has_rules(field(1, "piece")) || has_rules(model("")));
  for (const int spec : {3, 5}) EXPECT_TRUE(has_rules(model(rules(trie, texts), spec))) << spec;

  for (const int spec : {3, 5}) EXPECT_THAT(problem_of_rules(model("abc", spec)), HasSubstr("cut short")) << spec;
  EXPECT_THAT(problem_of_rules(model(rules(trie, ""))), HasSubstr("a trie of 2048 bytes in 2048"));
  EXPECT_THAT(problem_of_rules(model(rules({0, 0}, texts))), HasSubstr("a trie of 8 bytes"));
  EXPECT_THAT(problem_of_rules(model(rules(trie, "a"))), HasSubstr("the last text has no end"));
  trie[256] = value_of(4);
  EXPECT_THAT(problem_of_rules(model(rules(trie, texts))), HasSubstr("unit 256 of the trie leads outside of the texts"));
  trie[256] = value_of(2);
  trie[0] = value_of(512 << 10);
  EXPECT_THAT(problem_of_rules(model(rules(trie, texts))), HasSubstr("leads outside of its 512"));
  trie[0] = 256 << 10;
  trie[256] = node_with_value(512);
  EXPECT_THAT(problem_of_rules(model(rules(trie, texts))), HasSubstr("leads outside of its 512"));
}

TEST(SentencePieceRules, AreLookedForInWholeFieldsOnly) {
  const std::string whole = model(rules(std::vector<uint32_t>(256), std::string(1, '\0')));
  EXPECT_EQ(problem_of_rules(whole), "");
  for (size_t keep = 8; keep < whole.size(); keep += 97) EXPECT_THAT(problem_of_rules(whole.substr(0, keep)), HasSubstr("cut short")) << keep;
  EXPECT_THAT(problem_of_rules("\x0b"), HasSubstr("at byte 0, a field that is cut short"));  // a group
  EXPECT_THAT(problem_of_rules(field(1, "piece") + "\x0b"), HasSubstr("at byte 7, "));
}

}  // namespace
}  // namespace tessera::data
