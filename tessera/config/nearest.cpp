#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "tessera/config/config.h"

namespace tessera {
namespace {

/// Insertions, deletions, substitutions and swaps of neighbors that turn `a` into `b` (optimal string alignment).
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  std::iota(above.begin(), above.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before = std::move(above);
    above = row;
  }
  return above[b.size()];
}

}  // namespace

std::string nearest(const std::string& word, const std::vector<std::string>& known) {
  const auto best =
      std::min_element(known.begin(), known.end(), [&](const std::string& a, const std::string& b) { return edit_distance(word, a) < edit_distance(word, b); });
  return best == known.end() ? std::string() : *best;
}

}  // namespace tessera
