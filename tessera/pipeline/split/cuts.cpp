#include "tessera/pipeline/split/cuts.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tessera/config/config.h"
#include "tessera/core/error.h"

// A split point names a module; a cut is a position in the list of operators. Where the module announces its calls, its call begins and ends somewhere in the
// list. Where it does not (libtorch's own), it is where its parameters are used, and between the neighbours' uses there is a stretch of operators that belong
// to nobody (an activation, a reshape): of its positions the one that the fewest bytes cross is taken, and none where memory that is still to be written would
// be torn.

namespace tessera {

std::string pipeline::to_string(const Split& split) {
  return detail::concat(split.point == SplitPoint::Beginning ? "beginning" : "end", " of '", split.path, "'",
                        split.call < 0 ? "" : detail::concat(", call ", split.call));
}

namespace tape {
namespace {

using pipeline::Split, pipeline::SplitPoint, pipeline::SplitSpec;

struct Run {
  int begin, end;
};

/// Modules with parameters or buffers of their own, in the order of registration.
std::vector<std::string> paths_with_state(const torch::nn::Module& root) {
  std::vector<std::string> paths;
  const auto modules = root.named_modules(/*name_prefix=*/"", /*include_self=*/false);
  for (const auto& module : modules) {
    if (!module.value()->parameters(/*recurse=*/false).empty() || !module.value()->buffers(/*recurse=*/false).empty()) paths.push_back(module.key());
  }
  return paths;
}

/// A module that is registered twice announces itself by its first path.
std::string first_path_of(const torch::nn::Module& root, const std::string& path) {
  const torch::nn::Module* wanted = nullptr;
  for (const auto& module : root.named_modules("", /*include_self=*/false)) {
    if (module.key() == path) wanted = module.value().get();
  }
  for (const auto& module : root.named_modules("", /*include_self=*/false)) {
    if (module.value().get() == wanted) return module.key();
  }
  return path;
}

class Cutter {
 public:
  Cutter(const torch::nn::Module& root, const Graph& graph) : root_(root), graph_(graph), last_use_(graph.values.size(), -1) {
    for (int node = 0; node < graph.size(); ++node) {
      for_each_use(graph.nodes[static_cast<size_t>(node)], [&](int value) { last_use_[static_cast<size_t>(value)] = node; });
    }
    for (const int value : graph.outputs) last_use_[static_cast<size_t>(value)] = graph.size();
    // Bytes that cross each position, as a sum of where they begin to and where they end.
    std::vector<int64_t> change(static_cast<size_t>(graph.size()) + 2);
    for (size_t v = 0; v < graph.values.size(); ++v) {
      const Value& value = graph.values[v];
      if (value.kind != Value::Kind::Result || last_use_[v] < value.maker) continue;
      change[static_cast<size_t>(value.maker) + 1] += value.last_form().bytes();
      change[static_cast<size_t>(last_use_[v]) + 1] -= value.last_form().bytes();
    }
    int64_t bytes = 0;
    for (const int64_t by : change) crossing_.push_back(bytes += by);
    mark_torn();
  }

  int place(const Split& split) const {
    const std::vector<Run> exact = announced(split);
    const std::vector<Run> runs = exact.empty() ? uses(split) : exact;
    const Run& run = choose(split, runs, exact.empty() ? shared_uses(split, runs) : "");
    const bool beginning = split.point == SplitPoint::Beginning;
    if (!exact.empty()) return beginning ? run.begin : run.end;
    int low = beginning ? run.begin : run.end, high = low;
    while (beginning && low > 0 && !uses_state(graph_, low - 1)) --low;
    while (!beginning && high < graph_.size() && !uses_state(graph_, high)) ++high;
    int best = -1;
    for (int position = high; position >= low; --position) {
      if (torn_[static_cast<size_t>(position)]) continue;
      if (best < 0 || crossing_[static_cast<size_t>(position)] < crossing_[static_cast<size_t>(best)]) best = position;
    }
    return best < 0 ? high : best;  // torn everywhere: planning the stages says what
  }

 private:
  /// Positions with two tensors before them that show one memory and are used behind them, where it is written as well.
  void mark_torn() {
    torn_.assign(static_cast<size_t>(graph_.size()) + 1, false);
    std::map<int, int> last_write;
    for (int node = 0; node < graph_.size(); ++node) {
      for (const int value : graph_.nodes[static_cast<size_t>(node)].writes) last_write[graph_.values[static_cast<size_t>(value)].storage] = node;
    }
    std::map<int, std::vector<int>> sharing;
    for (size_t v = 0; v < graph_.values.size(); ++v) {
      if (last_write.contains(graph_.values[v].storage)) sharing[graph_.values[v].storage].push_back(static_cast<int>(v));
    }
    for (const auto& [storage, values] : sharing) {
      if (values.size() < 2) continue;
      std::vector<int> count(static_cast<size_t>(graph_.size()) + 2);
      for (const int v : values) {
        const int from = graph_.values[static_cast<size_t>(v)].maker + 1, to = last_use_[static_cast<size_t>(v)];
        if (to < from) continue;
        ++count[static_cast<size_t>(from)];
        --count[static_cast<size_t>(to) + 1];
      }
      int alive = 0;
      for (int position = 0; position <= last_write[storage]; ++position) {
        alive += count[static_cast<size_t>(position)];
        if (alive > 1) torn_[static_cast<size_t>(position)] = true;
      }
    }
  }

  std::vector<Run> announced(const Split& split) const {
    const std::string path = first_path_of(root_, split.path);
    std::vector<Run> runs;
    for (const Span& span : graph_.spans) {
      if (span.path == path) runs.push_back({span.begin, span.end});
    }
    return runs;
  }

  /// Operators that use its state, in as many runs as there are uses of the same parameter with those of others between them.
  std::vector<Run> uses(const Split& split) const {
    std::vector<Run> runs;
    std::set<int> used;
    bool other = false;
    for (int node = 0; node < graph_.size(); ++node) {
      std::set<int> mine;
      bool others = false;
      for_each_use(graph_.nodes[static_cast<size_t>(node)], [&](int v) {
        const Value& value = graph_.values[static_cast<size_t>(v)];
        if (!value.is_state()) return;
        value.is_called(split.path) ? static_cast<void>(mine.insert(v)) : static_cast<void>(others = true);
      });
      if (!mine.empty()) {
        const bool again = std::ranges::any_of(mine, [&](int v) { return used.contains(v); });
        if (runs.empty() || (other && again)) {
          runs.push_back({node, node + 1});
          used.clear();
        }
        runs.back().end = node + 1;
        used.insert(mine.begin(), mine.end());
        other = false;
      }
      other |= others;
    }
    if (runs.empty()) refuse_unused(split);
    return runs;
  }

  [[noreturn]] void refuse_unused(const Split& split) const {
    const bool has_state = std::ranges::any_of(graph_.values, [&](const Value& value) { return value.is_state() && value.is_called(split.path); });
    require(!has_state, "pipeline: split point ", to_string(split),
            ": the pass uses none of its parameters, so that it has no place; split at a module that is called");
    const std::string near = nearest(split.path, paths_with_state(root_));
    throw ConfigError(
        detail::concat("pipeline: split point ", to_string(split),
                       ": it holds no parameter and no buffer, and is no module that announces its calls (TESSERA_MODULE), so that its operators are "
                       "nobody's; split before or behind a module with parameters",
                       near.empty() ? "" : ", such as '" + near + "'"));
  }

  /// What to say of uses of a parameter that other modules hold, too: nobody can tell whose call such an operator is of.
  std::string shared_uses(const Split& split, const std::vector<Run>& runs) const {
    std::string others;
    std::set<int> seen;
    for (size_t i = 0; runs.size() > 1 && i < runs.size(); ++i) {
      for (int node = runs[i].begin; node < runs[i].end; ++node) {
        for_each_use(graph_.nodes[static_cast<size_t>(node)], [&](int v) {
          const Value& value = graph_.values[static_cast<size_t>(v)];
          if (!value.is_state() || !value.is_called(split.path) || !seen.insert(v).second) return;
          std::vector<std::string> names = value.aliases;
          names.push_back(value.name);
          const auto elsewhere = std::ranges::find_if(names, [&](const std::string& name) { return !is_under(name, split.path); });
          if (elsewhere != names.end()) others += (others.empty() ? "'" : ", '") + *elsewhere + "'";
        });
      }
    }
    return others.empty() ? "" : "; it shares parameters with other modules (" + others + "), whose uses of them count here, too: 0 is the first use";
  }

  const Run& choose(const Split& split, const std::vector<Run>& runs, const std::string& shared) const {
    if (split.call < 0) {
      std::string places;
      for (size_t i = 0; runs.size() > 1 && i < runs.size(); ++i) {
        const Node& node = graph_.nodes[static_cast<size_t>(std::min(runs[i].begin, graph_.size() - 1))];
        places += detail::concat(i ? ", " : "", i, " (operator ", runs[i].begin, ", ", node.name, ")");
      }
      require(runs.size() == 1, "pipeline: split point ", to_string(split), ": the pass uses it ", runs.size(), " times: ", places, shared,
              "; say which, as {\"", split.path, "\", SplitPoint::", split.point == SplitPoint::Beginning ? "Beginning" : "End", ", 0}");
    }
    const size_t call = split.call < 0 ? 0 : static_cast<size_t>(split.call);
    require(call < runs.size(), "pipeline: split point ", to_string(split), ": the pass uses it ", runs.size(), runs.size() == 1 ? " time" : " times",
            "; calls are counted from 0");
    return runs[call];
  }

  const torch::nn::Module& root_;
  const Graph& graph_;
  std::vector<int> last_use_;
  std::vector<int64_t> crossing_;  ///< bytes, of results, at each position
  std::vector<bool> torn_;
};

}  // namespace

void check_split_points(const torch::nn::Module& root, const SplitSpec& splits) {
  std::vector<std::string> paths;
  for (const auto& module : root.named_modules(/*name_prefix=*/"", /*include_self=*/false)) paths.push_back(module.key());
  for (size_t i = 0; i < splits.size(); ++i) {
    const Split& split = splits[i];
    const std::string near = nearest(split.path, paths);
    require(std::ranges::find(paths, split.path) != paths.end(), "pipeline: split point ", to_string(split), ": ", short_name(root.name()),
            " has no such module", near.empty() ? "" : "; the nearest path is '" + near + "'");
    for (size_t j = 0; j < i; ++j) {
      require(splits[j].path != split.path || splits[j].point != split.point || splits[j].call != split.call, "pipeline: split point ", to_string(split),
              " is given twice; name each once");
    }
  }
  const size_t modules = paths_with_state(root).size(), stages = splits.size() + 1;
  require(splits.empty() || stages <= std::max<size_t>(modules, 2), "pipeline: ", splits.size(), " split points make ", stages, " stages, and ",
          short_name(root.name()), " has ", modules, " modules with parameters; give at most ", std::max<size_t>(modules, 1) - 1, " split points");
}

std::vector<int> choose_cuts(const torch::nn::Module& root, const Graph& graph, const SplitSpec& splits) {
  const Cutter cutter(root, graph);
  std::vector<std::pair<int, const Split*>> placed;
  for (const Split& split : splits) placed.emplace_back(cutter.place(split), &split);
  std::ranges::stable_sort(placed, {}, &std::pair<int, const Split*>::first);
  std::vector<int> cuts;
  for (size_t i = 0; i < placed.size(); ++i) {
    const auto& [position, split] = placed[i];
    require(position > 0, "pipeline: split point ", to_string(*split), ": nothing comes before it, so that stage 0 would be empty; leave it out");
    require(position < graph.size(), "pipeline: split point ", to_string(*split),
            ": nothing comes behind it, so that the last stage would be empty; leave it out");
    require(i == 0 || position > placed[i - 1].first, "pipeline: split points ", to_string(*placed[i > 0 ? i - 1 : 0].second), " and ", to_string(*split),
            " are the same place, so that stage ", i, " would be empty; leave one out");
    cuts.push_back(position);
  }
  return cuts;
}

}  // namespace tape
}  // namespace tessera
