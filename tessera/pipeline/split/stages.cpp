#include "tessera/pipeline/split/stages.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include <c10/core/ScalarType.h>

#include "tessera/core/error.h"

// From a list of operators and the places where it is cut: what each stage holds, is sent and makes again. A value goes straight from the stage that made it
// to each stage that uses it, past those between. Writes in place decide the rest: a value that a stage has changed is handed on by that stage, memory that is
// read through two tensors may not be cut in two, and what comes from elsewhere is copied before it is written into. A value that a stage hooks it hands on,
// too.
//
// A gradient comes back for a value where an operator behind the cut uses it and has a part in the gradient of an output: one pass backward over the list
// finds those (`differentiated_`). Values that are made of numbers alone, as masks are, cost nothing to make and would cost a message (`free_`).

namespace tessera::tape {

int stage_of(const Stages& stages, int node) {
  const auto behind = std::ranges::upper_bound(stages.stages, node, {}, &StagePlan::begin);
  return static_cast<int>(behind - stages.stages.begin()) - 1;
}

std::vector<int> nodes_of(const StagePlan& stage) {
  std::vector<int> nodes = stage.again;
  for (int node = stage.begin; node < stage.end; ++node) nodes.push_back(node);
  return nodes;
}

namespace {

class Planner {
 public:
  Planner(const Graph& graph, const std::vector<int>& cuts)
      : graph_(graph), uses_(graph.values.size()), writes_(graph.values.size()), hooks_(graph.values.size()) {
    for (size_t s = 0; s <= cuts.size(); ++s) {
      plan_.stages.push_back({.begin = s == 0 ? 0 : cuts[s - 1], .end = s == cuts.size() ? graph.size() : cuts[s]});
    }
    for (int node = 0; node < graph.size(); ++node) {
      const int stage = stage_of(plan_, node);
      for_each_use(graph.nodes[static_cast<size_t>(node)], [&](int value) { uses_[static_cast<size_t>(value)].insert(stage); });
      for (const int value : graph.nodes[static_cast<size_t>(node)].hooked) hooks_[static_cast<size_t>(value)].insert(stage);
      for (const int value : graph.nodes[static_cast<size_t>(node)].writes) {
        uses_[static_cast<size_t>(value)].insert(stage);
        writes_[static_cast<size_t>(value)].insert(stage);
        written_storages_[graph.values[static_cast<size_t>(value)].storage].insert(stage);
      }
    }
    for (const int value : graph.outputs) uses_[static_cast<size_t>(value)].insert(last());
    for (size_t v = 0; v < graph.values.size(); ++v) by_storage_[graph.values[v].storage].push_back(static_cast<int>(v));
    find_differentiated();
    find_free();
  }

  Stages take() {
    for (int v = 0; v < static_cast<int>(graph_.values.size()); ++v) {
      if (value(v).is_state()) {
        place_state(v);
      } else if (value(v).kind == Value::Kind::Constant) {
        require(writes_[static_cast<size_t>(v)].empty() || uses_[static_cast<size_t>(v)].size() == 1,
                "pipeline: a stage writes into a tensor that was filled by hand, and another stage uses it; split elsewhere, or write into a clone()");
      } else {
        place(v);
      }
    }
    refuse_torn_memory();
    // Where a tensor goes to several stages, the last of them comes first: so its gradients are added up in autograd's order.
    std::ranges::sort(plan_.crossings, {}, [](const Crossing& c) { return std::tuple(c.from, -c.to, c.value); });
    take_back_what_is_handed_on();
    for (int i = 0; i < static_cast<int>(plan_.crossings.size()); ++i) {
      stage(plan_.crossings[static_cast<size_t>(i)].from).sends.push_back(i);
      stage(plan_.crossings[static_cast<size_t>(i)].to).receives.push_back(i);
    }
    for (int s = 0; s <= last(); ++s) find_copied(s);
    return std::move(plan_);
  }

 private:
  const Value& value(int v) const { return graph_.values[static_cast<size_t>(v)]; }
  StagePlan& stage(int s) { return plan_.stages[static_cast<size_t>(s)]; }
  int last() const { return static_cast<int>(plan_.stages.size()) - 1; }
  /// -1 for an input, which is there before all stages.
  int home(int v) const { return value(v).maker < 0 ? -1 : stage_of(plan_, value(v).maker); }

  /// Which nodes have a part in some gradient: backwards from the outputs.
  void find_differentiated() {
    std::vector<bool> wanted(graph_.values.size());
    for (const int v : graph_.outputs) wanted[static_cast<size_t>(v)] = value(v).last_form().requires_grad;
    differentiated_.assign(graph_.nodes.size(), false);
    for (int i = graph_.size() - 1; i >= 0; --i) {
      const Node& node = graph_.nodes[static_cast<size_t>(i)];
      bool gives = false;
      const auto look = [&](int v) { gives |= wanted[static_cast<size_t>(v)] && value(v).form_before(i + 1).requires_grad; };
      for_each_result(node, look);
      for (const int v : node.writes) look(v);
      for (const int v : node.rebased) look(v);
      differentiated_[static_cast<size_t>(i)] = gives && node.grad_mode;
      if (!differentiated_[static_cast<size_t>(i)]) continue;
      for_each_use(node, [&](int v) { wanted[static_cast<size_t>(v)] = wanted[static_cast<size_t>(v)] || value(v).form_before(i).requires_grad; });
    }
  }

  /// Values that operators make of nothing but numbers and constants, the same ones each time: a stage makes them again rather than being sent them. Another
  /// call of a module may give others, for it may count, or draw.
  void find_free() {
    free_.assign(graph_.values.size(), false);
    for (int i = 0; i < graph_.size(); ++i) {
      const Node& node = graph_.nodes[static_cast<size_t>(i)];
      bool is_free = node.op && node.writes.empty() && !node.op->hasTag(at::Tag::nondeterministic_seeded);
      for_each_use(node, [&](int v) { is_free &= free_[static_cast<size_t>(v)] || (value(v).kind == Value::Kind::Constant && is_unwritten(v)); });
      for_each_result(node, [&](int v) { is_free &= value(v).maker == i && is_unwritten(v) && !value(v).last_form().requires_grad; });
      for_each_result(node, [&](int v) { free_[static_cast<size_t>(v)] = is_free; });
    }
  }
  bool is_unwritten(int v) const { return !written_storages_.contains(value(v).storage); }

  void make_again(int v, int s) {
    if (!free_[static_cast<size_t>(v)]) return;
    const int maker = value(v).maker;
    auto& again = stage(s).again;
    const auto place = std::ranges::lower_bound(again, maker);
    if (maker >= stage(s).begin || (place != again.end() && *place == maker)) return;
    again.insert(place, maker);
    for_each_use(graph_.nodes[static_cast<size_t>(maker)], [&](int u) { make_again(u, s); });
  }

  void place_state(int v) {
    const auto& stages = uses_[static_cast<size_t>(v)];
    for (const int s : stages) stage(s).state.push_back(v);
    if (stages.size() < 2) return;
    const auto written = written_storages_.find(value(v).storage);
    require(written == written_storages_.end(), "pipeline: stages ", *stages.begin(), " and ", *stages.rbegin(), " use the ",
            value(v).kind == Value::Kind::Buffer ? "buffer" : "parameter", " '", value(v).name, "', and stage ",
            written == written_storages_.end() ? 0 : *written->second.begin(),
            " writes into it, which the others would not see; split elsewhere, or give each stage its own");
    if (value(v).kind == Value::Kind::Parameter) plan_.shared.push_back({value(v).name, {stages.begin(), stages.end()}});
  }

  void place(int v) {
    if (free_[static_cast<size_t>(v)]) {
      for (const int s : uses_[static_cast<size_t>(v)]) make_again(v, s);
      return;
    }
    int source = home(v);
    for (const int s : uses_[static_cast<size_t>(v)]) {
      if (s > source) {
        if (source < 0) {
          const auto input = std::ranges::find(graph_.inputs, v);
          stage(s).fed.push_back(static_cast<int>(input - graph_.inputs.begin()));
        } else {
          add_crossing(v, source, s);
        }
      }
      // Whoever changes it, or is to see all of its gradient, hands it on from there.
      const auto written = written_storages_.find(value(v).storage);
      const bool is_written = written != written_storages_.end() && written->second.contains(s);
      if (is_written || hooks_[static_cast<size_t>(v)].contains(s)) source = std::max(source, s);
    }
  }

  void add_crossing(int v, int from, int to) {
    const Form& form = value(v).form_before(plan_.stages[static_cast<size_t>(from)].end);
    plan_.crossings.push_back(
        {.value = v, .from = from, .to = to, .form = form, .gradient = brings_gradient(v, form, to), .copied = is_kept(v), .name = name_of(v)});
  }

  bool is_kept(int v) const {
    return std::ranges::any_of(by_storage_.at(value(v).storage), [&](int u) { return value(u).is_state() || value(u).kind == Value::Kind::Input; });
  }

  /// A stage that changes a tensor and hands it on uses it, if by that alone: the gradient comes back through it.
  void take_back_what_is_handed_on() {
    for (int to = last(); to > 0; --to) {
      for (Crossing& crossing : plan_.crossings) {
        if (crossing.to != to || !crossing.form.requires_grad) continue;
        crossing.gradient |=
            std::ranges::any_of(plan_.crossings, [&](const Crossing& next) { return next.value == crossing.value && next.from == to && next.gradient; });
      }
    }
  }

  bool brings_gradient(int v, const Form& form, int to) {
    if (!form.requires_grad) return false;
    if (to == last() && std::ranges::find(graph_.outputs, v) != graph_.outputs.end()) return true;
    const StagePlan& plan = stage(to);
    for (int i = plan.begin; i < plan.end; ++i) {
      bool used = false;
      const Node& node = graph_.nodes[static_cast<size_t>(i)];
      for_each_use(node, [&](int u) { used |= u == v; });
      if (used && differentiated_[static_cast<size_t>(i)]) return true;
    }
    return false;
  }

  /// What made it, and the module before.
  std::string name_of(int v) const {
    const int maker = value(v).maker;
    if (maker < 0) return value(v).name;
    for (int i = maker; i >= 0; --i) {
      const Node& node = graph_.nodes[static_cast<size_t>(i)];
      if (!node.path.empty()) return i == maker ? "'" + node.path + "'" : graph_.nodes[static_cast<size_t>(maker)].name + " after '" + node.path + "'";
    }
    return graph_.nodes[static_cast<size_t>(maker)].name;
  }

  void refuse_torn_memory() const {
    for (const auto& [storage, stages] : written_storages_) {
      const auto& values = by_storage_.at(storage);
      for (const int w : stages) {
        std::vector<int> known;
        for (const int v : values) {
          const auto& uses = uses_[static_cast<size_t>(v)];
          if (!value(v).is_state() && value(v).kind != Value::Kind::Constant && home(v) < w && !uses.empty() && *uses.rbegin() >= w) known.push_back(v);
        }
        require(known.size() < 2, "pipeline: stage ", w,
                " writes in place into memory that came before it, and that is read through two tensors from there on (",
                known.empty() ? "" : name_of(known.front()), " and ", known.size() < 2 ? "" : name_of(known.back()),
                "), each of which would be sent by itself; split elsewhere, or write the operator that does not work in place");
      }
    }
  }

  void find_copied(int s) {
    const auto is_written = [&](int v) {
      const auto found = written_storages_.find(value(v).storage);
      return found != written_storages_.end() && found->second.contains(s);
    };
    StagePlan& plan = stage(s);
    for (const int c : plan.receives) {
      if (is_written(plan_.crossings[static_cast<size_t>(c)].value)) plan.copied.push_back(plan_.crossings[static_cast<size_t>(c)].value);
    }
    for (const int input : plan.fed) {
      if (is_written(graph_.inputs[static_cast<size_t>(input)])) plan.copied.push_back(graph_.inputs[static_cast<size_t>(input)]);
    }
    for (size_t v = 0; v < graph_.values.size(); ++v) {
      if (graph_.values[v].kind == Value::Kind::Constant && uses_[v].contains(s) && is_written(static_cast<int>(v))) plan.copied.push_back(static_cast<int>(v));
    }
  }

  const Graph& graph_;
  Stages plan_;
  std::vector<std::set<int>> uses_, writes_, hooks_;  ///< stages, by value
  std::map<int, std::set<int>> written_storages_;     ///< stages that write into it
  std::map<int, std::vector<int>> by_storage_;
  std::vector<bool> differentiated_;  ///< nodes
  std::vector<bool> free_;            ///< values
};

}  // namespace

Stages plan_stages(const Graph& graph, const std::vector<int>& cuts) { return Planner(graph, cuts).take(); }

}  // namespace tessera::tape
