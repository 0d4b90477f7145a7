#include "tessera/pipeline/chain_split.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

namespace tessera::pipeline {
namespace {

using Runs = std::vector<std::pair<int64_t, int64_t>>;

bool is_count(const std::string& text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

std::string list_of(const std::vector<std::string>& entries) {
  std::string text;
  for (const auto& entry : entries) text += (text.empty() ? "" : ", ") + entry;
  return "pipeline.split = [" + text + "]: ";
}

Runs from_counts(const std::vector<int64_t>& counts) {
  Runs runs;
  int64_t begin = 0;
  for (const int64_t count : counts) {
    runs.emplace_back(begin, begin + count);
    begin += count;
  }
  return runs;
}

Runs by_counts(int64_t links, int stages, const std::vector<std::string>& split) {
  std::vector<int64_t> counts;
  for (const auto& entry : split) {
    require(is_count(entry), list_of(split), "'", entry,
            "' stands among numbers of links; give a number for each stage, or the names of those that begin them");
    constexpr size_t kDigits = 9;
    require(entry.size() <= kDigits, list_of(split), "a stage of ", entry, " links, and the model has ", links);
    counts.push_back(std::stoll(entry));
    require(counts.back() > 0, list_of(split), "a stage has at least one link");
  }
  const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  require(std::ssize(counts) == stages, list_of(split), "names ", counts.size(), " stages, and mesh.pp x pipeline.virtual_stages = ", stages,
          "; give one number of links for each, or auto");
  require(sum == links, list_of(split), "adds up to ", sum, " links, and the model has ", links, ": the embedding, its blocks, and the norm with the head");
  return from_counts(counts);
}

Runs by_names(const std::vector<std::string>& names, int stages, const std::vector<std::string>& split) {
  Runs runs;
  int64_t begin = 0;
  for (const auto& entry : split) {
    const auto found = std::ranges::find(names, entry);
    require(found != names.end() || entry.find_first_not_of("0123456789, ") != std::string::npos, list_of(split),
            "numbers of links are given one by one, as strings: pipeline.split = [\"1\", \"4\", \"1\"]");
    require(found != names.end(), list_of(split), "the model's chain has no link '", entry, "'; the nearest is '", nearest(entry, names), "'");
    const int64_t link = found - names.begin();
    require(link > begin, list_of(split), "'", entry, "' ",
            link == 0 ? "is where the first stage begins anyway" : "does not come behind what is named before it",
            "; name the links that begin the stages after the first, in order");
    runs.emplace_back(begin, link);
    begin = link;
  }
  runs.emplace_back(begin, std::ssize(names));
  require(std::ssize(runs) == stages, list_of(split), "makes ", runs.size(), " stages, and mesh.pp x pipeline.virtual_stages = ", stages, "; name ", stages - 1,
          " links, or set auto");
  return runs;
}

}  // namespace

Runs split_by_cost(const std::vector<double>& costs, int stages) {
  const auto links = static_cast<int64_t>(costs.size());
  invariant(stages >= 1 && stages <= links, "a chain of ", links, " links in ", stages, " runs");
  // most[s][i]: the most expensive of the best s + 1 runs over the first i links; from[s][i]: where the last of them begins.
  std::vector<double> before(static_cast<size_t>(links) + 1);
  std::partial_sum(costs.begin(), costs.end(), before.begin() + 1);
  std::vector<std::vector<double>> most(static_cast<size_t>(stages), before);
  std::vector<std::vector<int64_t>> from(static_cast<size_t>(stages), std::vector<int64_t>(before.size()));
  for (int64_t s = 1; s < stages; ++s) {
    for (int64_t i = s + 1; i <= links; ++i) {
      double least = std::numeric_limits<double>::infinity();
      for (int64_t begin = s; begin < i; ++begin) {
        const double worst = std::max(most[s - 1][begin], before[i] - before[begin]);
        if (worst >= least) continue;
        least = worst;
        from[s][i] = begin;
      }
      most[s][i] = least;
    }
  }
  Runs runs;
  for (int64_t s = stages, end = links; s-- > 0; end = from[s][end]) runs.emplace_back(from[s][end], end);
  std::ranges::reverse(runs);
  return runs;
}

std::vector<std::pair<int64_t, int64_t>> split_chain(const std::vector<std::string>& names, int stages, const std::vector<std::string>& split) {
  const int64_t links = std::ssize(names);
  require(stages <= links, "mesh.pp x pipeline.virtual_stages = ", stages, " stages: the model is a chain of ", links,
          " links (the embedding, its blocks, and the norm with the head), and a stage has at least one; at most ", links, " stages");
  for (const std::string word : {"auto", "cost"}) {
    require(split.size() == 1 || std::ranges::find(split, word) == split.end(), list_of(split), "'", word,
            "' deals all links by itself, and stands alone; set it to [\"", word, "\"], or give a number of links, or a name, for each stage");
  }
  if (split == std::vector<std::string>{"auto"}) {
    std::vector<int64_t> counts;
    for (int stage = 0; stage < stages; ++stage) counts.push_back(chunk(links, stages, stage).second);
    return from_counts(counts);
  }
  const bool counted = !split.empty() && is_count(split.front());
  return counted ? by_counts(links, stages, split) : by_names(names, stages, split);
}

}  // namespace tessera::pipeline
