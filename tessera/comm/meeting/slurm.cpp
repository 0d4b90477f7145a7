#include "tessera/comm/meeting/slurm.h"

#include <algorithm>
#include <regex>

#include "tessera/core/error.h"

// Slurm writes "node[01-03,7]" for four names, and brackets multiply: a few characters can stand for more names than there is memory. Each expansion is
// measured before it is made.

namespace tessera::comm {
namespace {

constexpr size_t kMostNodes = 1 << 18;
constexpr size_t kLongestName = 255;  // of a host
constexpr size_t kMostBrackets = 16;  // in one name

[[noreturn]] void refuse(const std::string& variable, const std::string& list, const std::string& rule) {
  throw ConfigError(detail::concat(variable, " = \"", list, "\" ", rule));
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : text) {
    depth += (c == '[') - (c == ']');
    if (c == separator && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

// "01-03" or "7": the numbers with their width.
void expand_range(const std::string& range, std::vector<std::string>& out) {
  static const std::regex pattern("([0-9]{1,9})(?:-([0-9]{1,9}))?");
  std::smatch match;
  if (!std::regex_match(range, match, pattern)) throw std::invalid_argument(range);
  const auto first = match[1].str(), last = match[2].matched ? match[2].str() : first;
  const int64_t low = std::stoll(first), high = std::stoll(last);
  if (high < low || static_cast<size_t>(high - low) >= kMostNodes - std::min(kMostNodes, out.size())) throw std::invalid_argument(range);
  for (int64_t number = low; number <= high; ++number) {
    auto digits = std::to_string(number);
    if (digits.size() < first.size()) digits.insert(0, first.size() - digits.size(), '0');
    out.push_back(std::move(digits));
  }
}

// One entry of the list, all of whose brackets multiply.
std::vector<std::string> expand_name(const std::string& name) {
  const auto open = name.find('[');
  const auto plain = name.substr(0, open);
  if (name.empty() || plain.size() > kLongestName || plain.find_first_of(" ]()") != std::string::npos) throw std::invalid_argument(name);
  if (open == std::string::npos) return {name};
  const auto close = name.find(']', open);
  if (close == std::string::npos) throw std::invalid_argument(name);
  std::vector<std::string> numbers;
  for (const auto& range : split(name.substr(open + 1, close - open - 1), ',')) expand_range(range, numbers);
  const auto rest = name.substr(close + 1);
  const auto tails = rest.empty() ? std::vector<std::string>{""} : expand_name(rest);
  // The product of all brackets grows with every one of them.
  if (numbers.size() * tails.size() > kMostNodes || open + tails.back().size() > kLongestName) throw std::invalid_argument(name);
  std::vector<std::string> names;
  for (const auto& number : numbers) {
    for (const auto& tail : tails) names.push_back(plain + number + tail);
  }
  return names;
}

}  // namespace

std::vector<std::string> expand_nodes(const std::string& list, const std::string& variable) {
  std::vector<std::string> names;
  for (const auto& entry : split(list, ',')) {
    try {
      if (static_cast<size_t>(std::ranges::count(entry, '[')) > kMostBrackets) throw std::invalid_argument(entry);
      for (auto& name : expand_name(entry)) names.push_back(std::move(name));
      if (names.size() > kMostNodes) refuse(variable, list, detail::concat("is of more than ", kMostNodes, " nodes"));
    } catch (const std::invalid_argument& part) {
      refuse(variable, list, detail::concat("is not a list of nodes such as node[01-03,7],gpu2: \"", part.what(), "\" is none"));
    }
  }
  return names;
}

std::vector<int> expand_counts(const std::string& list, const std::string& variable) {
  static const std::regex pattern("([1-9][0-9]{0,6})(?:\\(x([1-9][0-9]{0,6})\\))?");
  std::vector<int> counts;
  for (const auto& entry : split(list, ',')) {
    std::smatch match;
    if (!std::regex_match(entry, match, pattern))
      refuse(variable, list, detail::concat("is not a list of tasks per node such as 2(x3),1: \"", entry, "\" is none"));
    const size_t nodes = match[2].matched ? std::stoul(match[2].str()) : 1;
    if (nodes > kMostNodes - counts.size()) refuse(variable, list, detail::concat("is of more than ", kMostNodes, " nodes"));
    counts.insert(counts.end(), nodes, std::stoi(match[1].str()));
  }
  return counts;
}

}  // namespace tessera::comm
