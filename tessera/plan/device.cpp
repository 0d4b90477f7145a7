#include "tessera/plan/device.h"

#include <array>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/format.h"
#include "tessera/plan/hardware_files.h"
#include "tessera/plan/toml_table.h"

namespace tessera::plan {
namespace {

constexpr std::array kFormats{"fp4", "fp8", "bf16", "fp16", "tf32", "fp32"};
/// Shares of the figures above: large products, fused attention, memory, links in large messages, the link to the host and its memory. Then on how many
/// multiprocessors a product's tiles are dealt, and microseconds: a collective without any bytes for each doubling of its ranks, within a node and between, the
/// host asking for an operator or a collective, and between operators.
constexpr std::array kShares{"products", "attention", "memory", "inside", "between", "host", "host_memory"};
constexpr const char* kTiledOver = "multiprocessors";
constexpr std::array kMicroseconds{"inside_us", "between_us", "launch_us", "collective_launch_us", "gap_us"};

std::optional<Link> link_of(TomlTable& device, const std::string& key) {
  auto table = device.table(key);
  if (!table) return std::nullopt;
  Link link{.name = table->text("link"), .bytes_per_s = 1e9 * table->needed("gb_per_s")};
  if (const auto latency = table->number_or_none("latency_us")) link.latency_s = 1e-6 * *latency;
  link.contention = table->number_or_none("contention").value_or(0);
  table->end({"link", "gb_per_s", "latency_us", "contention"});
  return link;
}

std::optional<HostSide> host_of(TomlTable& device) {
  auto table = device.table("host");
  if (!table) return std::nullopt;
  HostSide host{.link = table->text("link"), .bytes_per_s = 1e9 * table->needed("gb_per_s"), .memory_bytes_per_s = 1e9 * table->needed("memory_gb_per_s")};
  table->end({"link", "gb_per_s", "memory_gb_per_s"});
  return host;
}

}  // namespace

Device parse_device(const std::string& text, const std::string& origin) {
  const toml::table parsed = parse_toml(text, origin);
  TomlTable file(parsed, origin);
  Device device{.key = origin, .name = file.text("name")};
  if (const auto year = file.count("year")) device.year = static_cast<int>(*year);
  device.memory_bytes = 1e9 * file.needed("memory_gb");
  require(device.memory_bytes >= 1, file.shown("memory_gb"), ": expected at least a byte, 1e-9");  // less would be no limit
  device.memory_bytes_per_s = 1e9 * file.needed("memory_gb_per_s");
  device.context_bytes = 1e9 * file.number_or_none("context_gb").value_or(0);
  require(device.context_bytes < device.memory_bytes, file.shown("context_gb"), ": expected less than memory_gb, of which it is a part");
  device.power_w = file.number("power_w");
  device.held_to_w = file.number("held_to_w");
  require(!device.held_to_w || (device.power_w && *device.held_to_w > 0 && *device.held_to_w <= *device.power_w), file.shown("held_to_w"),
          ": expected watts, at most those of power_w, which has to be given, too");
  const auto node = file.count("devices_per_node");
  require(node.has_value(), file.name_of("devices_per_node"), " is missing");
  device.devices_per_node = static_cast<int>(*node);
  auto rates = file.table("tflops");
  require(rates.has_value() && !rates->keys().empty(), file.name_of("tflops"), " is missing: rates of dense products by number format, such as bf16 = 989.4");
  for (const char* const format : kFormats) {
    if (const auto rate = rates->number(format)) device.flops_per_s[format] = 1e12 * *rate;
  }
  rates->end({kFormats.begin(), kFormats.end()});
  device.inside = link_of(file, "inside");
  device.between = link_of(file, "between");
  device.host = host_of(file);
  if (auto reaches = file.table("reaches")) {
    for (const char* const share : kShares) {
      const auto value = reaches->number(share);
      require(!value || *value <= 1, reaches->shown(share), ": expected a share, at most 1");
      if (value) device.reaches[share] = *value;
    }
    if (const auto value = reaches->count(kTiledOver)) device.reaches[kTiledOver] = *value;
    for (const char* const time : kMicroseconds) {
      if (const auto value = reaches->number_or_none(time)) device.reaches[time] = *value;
    }
    std::vector<std::string> known(kShares.begin(), kShares.end());
    known.emplace_back(kTiledOver);
    known.insert(known.end(), kMicroseconds.begin(), kMicroseconds.end());
    reaches->end(known);
  }
  if (auto sources = file.table("sources")) {
    for (const std::string& key : sources->keys()) device.sources[key] = sources->text(key);
  }
  file.end({"name", "year", "memory_gb", "memory_gb_per_s", "context_gb", "power_w", "held_to_w", "devices_per_node", "tflops", "inside", "between", "host",
            "reaches", "sources"});
  return device;
}

std::string to_toml(const Device& device) {
  const auto quoted = [](const std::string& text) {
    std::ostringstream out;
    out << toml::value<std::string>(text);
    return out.str();
  };
  const auto figure = [](double value) { return fmt::format("{:.6g}", value); };
  std::string text = "name = " + quoted(device.name) + (device.year ? fmt::format("\nyear = {}", *device.year) : "") +
                     "\nmemory_gb = " + figure(device.memory_bytes / 1e9) + "\nmemory_gb_per_s = " + figure(device.memory_bytes_per_s / 1e9) + "\n";
  if (device.context_bytes > 0) text += "context_gb = " + figure(device.context_bytes / 1e9) + "\n";
  if (device.power_w) text += "power_w = " + figure(*device.power_w) + "\n";
  if (device.held_to_w) text += "held_to_w = " + figure(*device.held_to_w) + "\n";
  text += fmt::format("devices_per_node = {}\n\n[tflops]\n", device.devices_per_node);
  for (const auto& [format, rate] : device.flops_per_s) text += format + " = " + figure(rate / 1e12) + "\n";
  for (const auto& [key, link] : {std::pair{"inside", device.inside}, {"between", device.between}}) {
    if (!link) continue;
    text += fmt::format("\n[{}]\nlink = {}\ngb_per_s = {}\n", key, quoted(link->name), figure(link->bytes_per_s / 1e9));
    if (link->latency_s) text += "latency_us = " + figure(*link->latency_s * 1e6) + "\n";
    if (link->contention > 0) text += "contention = " + figure(link->contention) + "\n";
  }
  if (device.host) {
    text += fmt::format("\n[host]\nlink = {}\ngb_per_s = {}\nmemory_gb_per_s = {}\n", quoted(device.host->link), figure(device.host->bytes_per_s / 1e9),
                        figure(device.host->memory_bytes_per_s / 1e9));
  }
  const auto table = [&](const char* name, const auto& entries, const auto& written) {
    if (!entries.empty()) text += fmt::format("\n[{}]\n", name);
    for (const auto& [key, value] : entries) text += key + " = " + written(value) + "\n";
  };
  table("reaches", device.reaches, figure);
  table("sources", device.sources, quoted);
  return text;
}

std::vector<std::string> device_names() { return names_of(kHardwareFiles); }

Device find_device(const std::string& name_or_file, const std::string& flag) {
  return read_named(name_or_file, kHardwareFiles, flag, "device", "those of tessera/plan/hardware, or one that `tessera bench device -o` wrote", parse_device);
}

}  // namespace tessera::plan
