#include "tessera/pipeline/split/graph.h"

#include <algorithm>
#include <array>
#include <sstream>

#include <c10/core/ScalarType.h>

#include "tessera/comm/dtype_name.h"
#include "tessera/core/error.h"

namespace tessera::tape {

int64_t Form::bytes() const {
  int64_t elements = 1;
  for (size_t d = 0; d < sizes.size(); ++d) elements *= strides[d] == 0 && sizes[d] > 1 ? 1 : sizes[d];
  return elements * static_cast<int64_t>(c10::elementSize(dtype));
}

Form form_of(const at::Tensor& tensor) {
  return {.sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .offset = tensor.storage_offset(),
          .dtype = tensor.scalar_type(),
          .requires_grad = tensor.requires_grad()};
}

std::string to_string(const Form& form) { return detail::concat(comm::dtype_name(form.dtype), " ", at::IntArrayRef(form.sizes)); }

bool lies_alike(const at::Tensor& tensor, const Form& form) {
  bool alike = true;
  for (size_t d = 0; d < form.sizes.size(); ++d) alike &= form.sizes[d] == 1 || tensor.stride(static_cast<int64_t>(d)) == form.strides[d];
  return alike || tensor.numel() == 0;
}

const Form& Value::form_before(int position) const {
  const auto after = std::ranges::find_if(forms, [&](const Change& change) { return change.node >= position; });
  return after == forms.begin() ? after->form : std::prev(after)->form;
}

bool is_under(const std::string& name, const std::string& path) { return path.empty() || name == path || name.starts_with(path + "."); }

bool Value::is_called(const std::string& path) const {
  return is_under(name, path) || std::ranges::any_of(aliases, [&](const std::string& alias) { return is_under(alias, path); });
}

std::string short_name(const std::string& type) {
  const auto colons = type.rfind("::");
  const std::string name = colons == std::string::npos ? type : type.substr(colons + 2);
  return name.ends_with("Impl") ? name.substr(0, name.size() - 4) : name;
}

bool uses_state(const Graph& graph, int node) {
  bool uses = false;
  for_each_use(graph.nodes[static_cast<size_t>(node)], [&](int value) { uses |= graph.values[static_cast<size_t>(value)].is_state(); });
  return uses;
}

bool gives_term(const Graph& graph, const Node& node, int value) {
  bool takes = false, carries = false;
  for_each_use(node, [&](int used) { takes |= used == value; });
  for_each_result(node, [&](int made) { carries |= graph.values[static_cast<size_t>(made)].last_form().requires_grad; });
  return takes && carries;
}

std::set<int> storages_by_layout(const Graph& graph) {
  const auto storage_of = [&](int value) { return graph.values[static_cast<size_t>(value)].storage; };
  std::set<int> found, written;
  for (size_t n = graph.nodes.size(); n-- > 0;) {
    const Node& node = graph.nodes[n];
    constexpr std::array kinds = {"reshape", "reshape_as", "flatten", "ravel", "contiguous"};
    if (node.op && std::ranges::find(kinds, node.name) != kinds.end() && node.arguments[0].kind == Slot::Kind::Tensor) {
      const int from = storage_of(node.arguments[0].values[0]);
      for_each_result(node, [&](int made) {
        const int to = storage_of(made);
        if (written.contains(from) || written.contains(to) || found.contains(to)) found.insert(from);
      });
    }
    for (const int value : node.writes) written.insert(storage_of(value));
  }
  return found;
}

namespace {

void print_slots(std::ostream& out, const Graph& graph, const std::vector<Slot>& slots) {
  const char* before = "";
  for (const Slot& slot : slots) {
    out << std::exchange(before, ", ");
    if (slot.kind == Slot::Kind::Plain) {
      // What is printed is compared between ranks: no addresses.
      if (slot.plain.isTensor() || slot.plain.isGenerator() || slot.plain.isDevice() || slot.plain.isCapsule() || slot.plain.isObject()) {
        out << slot.plain.tagKind();
      } else {
        out << slot.plain;
      }
      continue;
    }
    if (slot.kind != Slot::Kind::Tensor) out << "[";
    const char* comma = "";
    for (const int value : slot.values) {
      out << std::exchange(comma, ", ");
      if (value < 0) {
        out << "none";
      } else if (const Value& known = graph.values[static_cast<size_t>(value)]; known.name.empty()) {
        out << "%" << value;
      } else {
        out << "'" << known.name << "'";
      }
    }
    if (slot.kind != Slot::Kind::Tensor) out << "]";
  }
}

/// Without the numbers of its results.
void print_call(std::ostream& out, const Graph& graph, int number) {
  const Node& node = graph.nodes[static_cast<size_t>(number)];
  out << (node.op ? detail::concat(node.op->schema().operator_name()) : node.name + " '" + node.path + "'") << "(";
  print_slots(out, graph, node.arguments);
  out << ")" << (node.grad_mode ? "" : " without gradients") << to_string(node.autocast);
  for_each_result(node, [&](int value) { out << "  " << to_string(graph.values[static_cast<size_t>(value)].form_before(number + 1)); });
}

}  // namespace

std::string to_string(const Graph& graph) {
  std::ostringstream out;
  for (int i = 0; i < graph.size(); ++i) {
    out << i << ": ";
    print_slots(out, graph, graph.nodes[static_cast<size_t>(i)].results);
    out << " = ";
    print_call(out, graph, i);
    out << "\n";
  }
  return std::move(out).str();
}

std::string first_difference(const Graph& before, const Graph& now) {
  const auto call = [](const Graph& graph, int node) {
    std::ostringstream out;
    if (node < graph.size()) print_call(out, graph, node);
    return node < graph.size() ? std::move(out).str() : std::string("nothing");
  };
  std::string path;
  for (int i = 0; i < std::max(before.size(), now.size()); ++i) {
    const std::string old = call(before, i), one = call(now, i);
    if (old != one) return detail::concat(path.empty() ? "" : "after '" + path + "': ", one, " in place of ", old);
    if (const std::string& at = now.nodes[static_cast<size_t>(i)].path; !at.empty()) path = at;
  }
  return path.empty() ? "a tensor that is filled by hand" : "a tensor that is filled by hand, in a pass whose last module is '" + path + "'";
}

}  // namespace tessera::tape
