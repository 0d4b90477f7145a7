#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/pipeline/split/recording.h"

namespace tessera::tape {

namespace {

/// Operators in their order, those of one module on a line; what uses no parameters stands with the module before.
void print_operators(std::ostream& out, const Graph& graph, const StagePlan& stage) {
  std::string path;
  std::vector<std::pair<std::string, int>> names;  // and how often in a row
  const auto flush = [&] {
    if (names.empty()) return;
    out << "  " << (path.empty() ? "-" : path) << ":";
    for (const auto& [name, times] : names) out << " " << name << (times > 1 ? detail::concat(" x", times) : "");
    out << "\n";
    names.clear();
  };
  for (const int i : nodes_of(stage)) {
    const Node& node = graph.nodes[static_cast<size_t>(i)];
    if (!node.path.empty() && node.path != path) {
      flush();
      path = node.path;
    }
    if (!names.empty() && names.back().first == node.name) {
      ++names.back().second;
    } else {
      names.emplace_back(node.name, 1);
    }
  }
  flush();
}

void print_state(std::ostream& out, const Graph& graph, const StagePlan& stage) {
  int64_t elements = 0, bytes = 0;
  int parameters = 0, buffers = 0;
  for (const int v : stage.state) {
    const Value& value = graph.values[static_cast<size_t>(v)];
    int64_t count = 1;
    for (const int64_t size : value.last_form().sizes) count *= size;
    bytes += value.last_form().bytes();
    if (value.kind == Value::Kind::Buffer) {
      ++buffers;
    } else {
      ++parameters;
      elements += count;
    }
  }
  out << parameters << " parameters (" << elements << " elements)";
  if (buffers > 0) out << ", " << buffers << " buffers";
  out << ", " << format_bytes(bytes) << ", " << nodes_of(stage).size() << " operators\n";
}

}  // namespace

std::string to_string(const Recording& recording, const std::string& name) {
  const Graph& graph = *recording.graph;
  std::ostringstream out;
  out << name << " in " << recording.stages.size() << (recording.stages.size() == 1 ? " stage" : " stages") << "\n";
  for (int s = 0; s < recording.stages.size(); ++s) {
    const StagePlan& stage = recording.stages.stages[static_cast<size_t>(s)];
    out << "stage " << s << ": ";
    print_state(out, graph, stage);
    for (const int input : stage.fed) {
      const Value& value = graph.values[static_cast<size_t>(graph.inputs[static_cast<size_t>(input)])];
      out << "  takes " << value.name << ": " << to_string(value.forms.front().form) << "\n";
    }
    for (const int c : stage.receives) {
      const Crossing& crossing = recording.stages.crossings[static_cast<size_t>(c)];
      out << "  receives " << crossing.name << " from stage " << crossing.from << ": " << to_string(crossing.form) << "\n";
    }
    print_operators(out, graph, stage);
    for (const int c : stage.sends) {
      const Crossing& crossing = recording.stages.crossings[static_cast<size_t>(c)];
      out << "  sends " << crossing.name << " to stage " << crossing.to << ": " << to_string(crossing.form) << ", " << format_bytes(crossing.form.bytes())
          << (crossing.gradient ? ", and gets its gradient" : "") << "\n";
    }
    if (s + 1 < recording.stages.size()) continue;
    for (const int v : graph.outputs) out << "  gives " << to_string(graph.values[static_cast<size_t>(v)].last_form()) << "\n";
  }
  for (const SharedParameter& shared : recording.stages.shared) {
    out << "shared: '" << shared.name << "' by stages";
    for (const int stage : shared.stages) out << " " << stage;
    out << "; its gradients are summed\n";
  }
  return std::move(out).str();
}

}  // namespace tessera::tape
