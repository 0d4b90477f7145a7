#include "tests/fuzz/mutator.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <limits>
#include <string_view>

namespace tessera::fuzz {
namespace {

/// Sizes at which arithmetic goes wrong.
constexpr std::array<uint64_t, 18> kExtremes{0,
                                             1,
                                             2,
                                             0x7f,
                                             0x80,
                                             0xff,
                                             0x7fff,
                                             0x8000,
                                             0xffff,
                                             0x7fffffff,
                                             0x80000000,
                                             0xffffffff,
                                             0x100000000,
                                             0x3fffffffffffffff,
                                             0x4000000000000000,
                                             0x7fffffffffffffff,
                                             0x8000000000000000,
                                             0xffffffffffffffff};

constexpr std::array<std::string_view, 16> kNumbers{
    "0",          "1",           "-1",         "255", "65536", "2147483647", "2147483648",          "4294967296",
    "4294967297", "-2147483649", "1000000000", "0.5", "1e308", "1e999",      "9223372036854775807", "18446744073709551616"};

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

}  // namespace

Mutator::Mutator(std::vector<std::string> inputs, uint64_t seed, size_t most_bytes) : inputs_(std::move(inputs)), random_(seed), most_bytes_(most_bytes) {
  if (inputs_.empty()) inputs_.emplace_back();
  for (const auto& input : inputs_) most_bytes_ = std::max(most_bytes_, input.size());
}

// Not std::uniform_int_distribution: its results differ between standard libraries.
size_t Mutator::below(size_t limit) { return limit == 0 ? 0 : static_cast<size_t>(random_() % limit); }

std::string Mutator::next() {
  std::string input = inputs_[below(inputs_.size())];
  for (size_t left = 1 + below(8); left > 0; --left) mutate(input);
  if (input.size() > most_bytes_) input.resize(most_bytes_);
  return input;
}

void Mutator::mutate(std::string& input) {
  const size_t at = below(input.size()), length = below(std::min<size_t>(input.size() - std::min(at, input.size()), 64)) + 1;
  switch (below(10)) {
    case 0:
      if (!input.empty()) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
      break;
    case 1:
      if (!input.empty()) input[at] = static_cast<char>(below(256));
      break;
    case 2:
      input.insert(at, 1, static_cast<char>(below(256)));
      break;
    case 3:
      input.erase(at, length);
      break;
    case 4:
      input.resize(at);
      break;
    case 5: {
      const std::string part = input.substr(at, length);
      for (size_t times = 1 + below(4); times > 0; --times) input.insert(at, part);
      break;
    }
    case 6:
      return overwrite_integer(input);
    case 7:
    case 8:
      return replace_digits(input);
    default:
      return insert_from(input, inputs_[below(inputs_.size())]);
  }
}

void Mutator::overwrite_integer(std::string& input) {
  const size_t width = size_t{1} << below(4);
  if (input.size() < width) return;
  // Numbers of binary formats are mostly aligned.
  size_t at = below(input.size() - width + 1);
  if (below(4) != 0) at = at / width * width;
  const uint64_t value = kExtremes[below(kExtremes.size())] + (below(4) == 0 ? below(17) - 8 : 0);
  for (size_t i = 0; i < width; ++i) input[at + i] = static_cast<char>(value >> (8 * i));
}

void Mutator::replace_digits(std::string& input) {
  const size_t from = below(input.size());
  const auto begin = std::find_if(input.begin() + static_cast<int64_t>(from), input.end(), is_digit);
  if (begin == input.end()) return;
  const auto end = std::find_if_not(begin, input.end(), is_digit);
  input.replace(begin, end, kNumbers[below(kNumbers.size())]);
}

void Mutator::insert_from(std::string& input, const std::string& other) {
  if (other.empty()) return;
  const size_t from = below(other.size()), length = 1 + below(std::min<size_t>(other.size() - from, 256));
  const size_t at = below(input.size() + 1);
  if (below(2) == 0) {
    input.insert(at, other, from, length);
  } else {
    input.replace(at, length, other, from, length);
  }
}

}  // namespace tessera::fuzz
