#include "tessera/comm/meeting/disagreement.h"

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/comm/failure.h"
#include "tessera/core/error.h"
#include "tessera/core/json_text.h"

namespace tessera::comm {
namespace {

/// The values of one setting and who has them, in the order of the first rank that does.
std::vector<std::pair<std::string, std::vector<int>>> values_of(const std::string& key, const std::vector<Settings>& of_ranks) {
  std::vector<std::pair<std::string, std::vector<int>>> values;
  for (int rank = 0; const auto& settings : of_ranks) {
    const auto found = std::ranges::find(settings, key, &Settings::value_type::first);
    const std::string value = found == settings.end() ? "not given" : found->second;
    auto same = std::ranges::find(values, value, [](const auto& each) { return each.first; });
    if (same == values.end()) same = values.insert(values.end(), {value, {}});
    same->second.push_back(rank++);
  }
  return values;
}

/// "0.003 on ranks 0-2, 0.3 on rank 3"
std::string text_of(const std::vector<std::pair<std::string, std::vector<int>>>& values) {
  std::string text;
  for (const auto& [value, ranks] : values) text += (text.empty() ? "" : ", ") + value + " on " + comm::name_ranks(ranks);
  return text;
}

}  // namespace

std::optional<std::string> disagreement(const std::vector<Settings>& of_ranks) {
  std::vector<std::string> keys;
  for (const auto& settings : of_ranks) {
    for (const auto& [key, value] : settings) {
      if (std::ranges::find(keys, key) == keys.end()) keys.push_back(key);
    }
  }
  std::string first, others;
  for (const auto& key : keys) {
    const auto values = values_of(key, of_ranks);
    if (values.size() == 1) continue;
    if (first.empty()) {
      first = detail::concat(key, " = ", text_of(values), ": all ranks of a run need the same");
    } else {
      others += (others.empty() ? " (as of " : ", ") + key;
    }
  }
  if (first.empty()) return std::nullopt;
  return first + others + (others.empty() ? "" : ", which differ too)") + "; start each with the same recipe, flags and texts";
}

void compare_in_store(c10d::Store& store, int rank, int size, const Settings& mine, std::chrono::milliseconds timeout) {
  const std::string verdict = "told/verdict", alike = "alike";
  const auto key = [](int of) { return "told/" + std::to_string(of); };
  store.set(key(rank), json_text(nlohmann::json(mine)));
  if (store.add("told", 1) == size) {  // the last to come: all have said it
    std::vector<Settings> of_ranks;
    for (int of = 0; of < size; ++of) of_ranks.push_back(nlohmann::json::parse(store.get_to_str(key(of))).get<Settings>());
    store.set(verdict, disagreement(of_ranks).value_or(alike));
  }
  store.wait({verdict}, timeout);
  const std::string found = store.get_to_str(verdict);
  require(found == alike, found);
}

}  // namespace tessera::comm
