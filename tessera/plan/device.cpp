#include "tessera/plan/device.h"

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string_view>

#include <toml++/toml.h>

#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/format.h"
#include "tessera/plan/hardware_files.h"

namespace tessera::plan {
namespace {

constexpr std::array kFormats{"fp4", "fp8", "bf16", "fp16", "tf32", "fp32"};
/// Shares of the figures above: large products, fused attention, memory, links in large messages. Then on how many multiprocessors a product's tiles are dealt,
/// and microseconds: a collective without any bytes for each doubling of its ranks, within a node and between, the host asking for an operator or a collective,
/// and between operators.
constexpr std::array kShares{"products", "attention", "memory", "inside", "between"};
constexpr std::array kCounts{"multiprocessors", "inside_us", "between_us", "launch_us", "collective_launch_us", "gap_us"};

constexpr double kMost = 1e9;  ///< of any figure, in the units of the file: an exabyte of memory

/// Reads a table key by key, and refuses what is left.
class DeviceTable {
 public:
  DeviceTable(const toml::table& table, std::string origin, std::string prefix = {}) : table_(table), origin_(std::move(origin)), prefix_(std::move(prefix)) {}

  std::optional<double> number(const std::string& key) {
    const toml::node* node = take(key);
    if (node == nullptr) return std::nullopt;
    const auto value = node->value<double>();
    require(value && node->is_number() && *value > 0, name_of(key), ": expected a number above 0");
    require(*value <= kMost, name_of(key), ": expected at most ", format_float(kMost));
    return value;
  }
  double needed(const std::string& key) {
    const auto value = number(key);
    require(value.has_value(), name_of(key), " is missing");
    return *value;
  }
  std::string text(const std::string& key) {
    const toml::node* node = take(key);
    require(node != nullptr && node->is_string(), name_of(key), node == nullptr ? " is missing" : ": expected a text");
    return *node->value<std::string>();
  }
  std::optional<DeviceTable> table(const std::string& key) {
    const toml::node* node = take(key);
    if (node == nullptr) return std::nullopt;
    require(node->is_table(), name_of(key), ": expected a table");
    return DeviceTable(*node->as_table(), origin_, prefix_ + key + ".");
  }
  std::vector<std::string> keys() const {
    std::vector<std::string> all;
    for (const auto& [key, node] : table_) all.emplace_back(key.str());
    return all;
  }
  /// `known`: what else could have been meant.
  void end(const std::vector<std::string>& known) const {
    for (const std::string& key : keys()) {
      if (taken_.contains(key)) continue;
      const auto near = nearest(key, known);
      throw ConfigError(detail::concat(name_of(key), " is unknown", near.empty() ? "" : "; did you mean " + near + "?"));
    }
  }
  std::string name_of(const std::string& key) const { return detail::concat(origin_, ": ", prefix_, key); }

 private:
  const toml::node* take(const std::string& key) {
    taken_.insert(key);
    return table_.get(key);
  }

  const toml::table& table_;
  std::string origin_, prefix_;
  std::set<std::string> taken_;
};

std::optional<Link> link_of(DeviceTable& device, const std::string& key) {
  auto table = device.table(key);
  if (!table) return std::nullopt;
  Link link{.name = table->text("link"), .bytes_per_s = 1e9 * table->needed("gb_per_s")};
  if (const auto latency = table->number("latency_us")) link.latency_s = 1e-6 * *latency;
  table->end({"link", "gb_per_s", "latency_us"});
  return link;
}

}  // namespace

Device parse_device(const std::string& text, const std::string& origin) {
  toml::table parsed;
  try {
    parsed = toml::parse(text, origin);
  } catch (const toml::parse_error& error) {
    std::ostringstream where;
    where << error.source().begin;
    throw ConfigError(detail::concat(origin, ": ", error.description(), " (", where.str(), ")"));
  }
  DeviceTable file(parsed, origin);
  Device device{.key = origin, .name = file.text("name")};
  device.memory_bytes = 1e9 * file.needed("memory_gb");
  device.memory_bytes_per_s = 1e9 * file.needed("memory_gb_per_s");
  device.power_w = file.number("power_w");
  const double node = file.needed("devices_per_node");
  require(node == static_cast<int>(node), file.name_of("devices_per_node"), " = ", node, ": expected a whole number");
  device.devices_per_node = static_cast<int>(node);
  auto rates = file.table("tflops");
  require(rates.has_value() && !rates->keys().empty(), file.name_of("tflops"), " is missing: rates of dense products by number format, such as bf16 = 989.4");
  for (const char* const format : kFormats) {
    if (const auto rate = rates->number(format)) device.flops_per_s[format] = 1e12 * *rate;
  }
  rates->end({kFormats.begin(), kFormats.end()});
  device.inside = link_of(file, "inside");
  device.between = link_of(file, "between");
  if (auto reaches = file.table("reaches")) {
    for (const char* const share : kShares) {
      const auto value = reaches->number(share);
      require(!value || *value <= 1, reaches->name_of(share), ": expected a share, at most 1");
      if (value) device.reaches[share] = *value;
    }
    for (const char* const count : kCounts) {
      if (const auto value = reaches->number(count)) device.reaches[count] = *value;
    }
    std::vector<std::string> known(kShares.begin(), kShares.end());
    known.insert(known.end(), kCounts.begin(), kCounts.end());
    reaches->end(known);
  }
  if (auto sources = file.table("sources")) {
    for (const std::string& key : sources->keys()) device.sources[key] = sources->text(key);
  }
  file.end({"name", "memory_gb", "memory_gb_per_s", "power_w", "devices_per_node", "tflops", "inside", "between", "reaches", "sources"});
  return device;
}

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const auto& [name, text] : kHardwareFiles) names.emplace_back(name);
  return names;
}

Device find_device(const std::string& name_or_file) {
  for (const auto& [name, text] : kHardwareFiles) {
    if (name == name_or_file) return parse_device(std::string(text), std::string(name));
  }
  if (is_there(name_or_file)) {
    require(!is_folder(name_or_file), "--device ", name_or_file, ": is a folder; name a file, or one of the devices that tessera plan knows");
    require(std::filesystem::is_regular_file(name_or_file), "--device ", name_or_file, ": is not a regular file; write it to one, and name that");
    std::ifstream file(name_or_file);
    return parse_device({std::istreambuf_iterator<char>(file), {}}, name_or_file);
  }
  std::string names;
  for (const auto& name : device_names()) names += " " + name;
  const auto near = nearest(name_or_file, device_names());
  throw ConfigError(
      detail::concat("--device = ", name_or_file, ": neither a device nor a file", near.empty() ? "" : "; did you mean " + near + "?", "; devices:", names));
}

}  // namespace tessera::plan
