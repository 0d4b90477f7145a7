#include "tessera/plan/machine.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <set>
#include <utility>

#include <toml++/toml.h>

#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/plan/hardware_files.h"

namespace tessera::plan {
namespace {

/// The keys of one table; those that nobody asked for are refused.
class Table {
 public:
  Table(const toml::table& table, std::string name, const std::string& place) : table_(table), name_(std::move(name)), place_(place) {}

  double number(const std::string& key, double otherwise, bool zero = false) {
    const toml::node* node = at(key);
    return node == nullptr ? otherwise : checked(*node, key, zero);
  }
  double number(const std::string& key) { return checked(needed(key), key, /*zero=*/false); }

  std::string text(const std::string& key) {
    const auto value = needed(key).value_exact<std::string>();
    require(value && !value->empty(), where(key), ": it must be a text");
    return *value;
  }
  std::vector<std::string> texts(const std::string& key) {
    const toml::array* array = needed(key).as_array();
    require(array != nullptr && !array->empty(), where(key), ": it must be a list of texts");
    std::vector<std::string> found;
    for (const toml::node& node : *array) {
      const auto value = node.value_exact<std::string>();
      require(value.has_value(), where(key), ": it must be a list of texts");
      found.push_back(*value);
    }
    return found;
  }
  Table table(const std::string& key) {
    const toml::table* inner = needed(key).as_table();
    require(inner != nullptr, where(key), ": it must be a table");
    return {*inner, full(key), place_};
  }
  std::vector<std::string> keys() const {
    std::vector<std::string> keys;
    for (const auto& [key, node] : table_) keys.emplace_back(key.str());
    return keys;
  }
  /// Call it when all has been asked for.
  void end() const {
    for (const auto& key : keys()) {
      const std::vector<std::string> known(asked_.begin(), asked_.end());
      const auto near = nearest(key, known);
      require(asked_.contains(key), where(key), ": there is no such key", near.empty() ? "" : "; did you mean " + near + "?");
    }
  }

 private:
  std::string full(const std::string& key) const { return name_.empty() ? key : name_ + "." + key; }
  std::string where(const std::string& key) const {
    const toml::node* node = table_.get(key);
    const auto line = node == nullptr ? table_.source().begin.line : node->source().begin.line;
    return tessera::detail::concat(place_, ":", line, ": ", full(key));
  }
  const toml::node* at(const std::string& key) {
    asked_.insert(key);
    return table_.get(key);
  }
  const toml::node& needed(const std::string& key) {
    const toml::node* node = at(key);
    require(node != nullptr, where(key), ": it is missing");
    return *node;
  }
  double checked(const toml::node& node, const std::string& key, bool zero) const {
    const auto value = node.is_number() ? node.value<double>() : std::nullopt;
    require(value && std::isfinite(*value) && (*value > 0 || (zero && *value == 0)), where(key), ": it must be a number above zero");
    return *value;
  }

  const toml::table& table_;
  std::string name_;
  const std::string& place_;
  std::set<std::string> asked_;
};

int whole(double number) { return static_cast<int>(std::clamp(number, 1.0, 1e6)); }

LinkRates link_of(Table table) {
  const LinkRates link{.bandwidth = table.number("bandwidth"), .latency = table.number("latency")};
  table.end();
  return link;
}

DeviceRates device_of(Table table) {
  const DeviceRates usual;
  DeviceRates device{.product_share = table.number("product_share", usual.product_share),
                     .attention_share = table.number("attention_share", usual.attention_share),
                     .memory_bandwidth = table.number("memory_bandwidth"),
                     .memory_share = table.number("memory_share", usual.memory_share),
                     .multiprocessors = whole(table.number("multiprocessors")),
                     .kernel_gap = table.number("kernel_gap", usual.kernel_gap, /*zero=*/true),
                     .launch = table.number("launch", usual.launch, /*zero=*/true),
                     .collective_launch = table.number("collective_launch", usual.collective_launch, /*zero=*/true)};
  Table flops = table.table("flops");
  const std::map<std::string, c10::ScalarType> types = {{"fp32", at::kFloat}, {"fp16", at::kHalf}, {"bf16", at::kBFloat16}, {"fp8", at::kFloat8_e4m3fn}};
  for (const auto& [name, type] : types) {
    if (const double rate = flops.number(name, 0); rate > 0) device.flops[type] = rate;
  }
  device.tf32_flops = flops.number("tf32", 0);
  flops.number("fp4", 0);  // for the table of formats: nothing here computes in it
  flops.end();
  table.end();
  return device;
}

}  // namespace

Machine parse_machine(std::string_view text, const std::string& place) {
  toml::table parsed;
  try {
    parsed = toml::parse(text, place);
  } catch (const toml::parse_error& e) {
    throw ConfigError(tessera::detail::concat(place, ":", e.source().begin.line, ": ", e.description()));
  }
  Table root(parsed, "", place);
  Machine machine{.title = root.text("title"),
                  .sources = root.texts("sources"),
                  .memory_bytes = static_cast<int64_t>(root.number("memory_bytes")),
                  .power_watts = root.number("power_watts", 0, /*zero=*/true),
                  .device = device_of(root.table("device"))};
  Table links = root.table("links");
  machine.devices_per_host = whole(links.number("devices_per_host"));
  machine.inside = link_of(links.table("inside"));
  machine.across = link_of(links.table("across"));
  links.end();
  root.end();
  return machine;
}

std::vector<std::string> machine_names() {
  std::vector<std::string> names;
  for (const auto& [name, text] : hardware_files()) names.emplace_back(name);
  return names;
}

Machine find_machine(const std::string& name_or_file) {
  for (const auto& [name, text] : hardware_files()) {
    if (name == name_or_file) return parse_machine(text, std::string(name) + ".toml");
  }
  if (is_there(name_or_file)) {
    std::ifstream file(name_or_file);
    require(!is_folder(name_or_file) && file.good(), "--device ", name_or_file, ": cannot be read");
    return parse_machine(std::string{std::istreambuf_iterator<char>(file), {}}, name_or_file);
  }
  std::string names;
  for (const auto& name : machine_names()) names += " " + name;
  const auto near = nearest(name_or_file, machine_names());
  throw ConfigError(tessera::detail::concat("--device ", name_or_file, ": neither a device that is known nor a file", near.empty() ? "" : "; did you mean " + near + "?",
                                   "; known:", names));
}

}  // namespace tessera::plan
