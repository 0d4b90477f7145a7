#include "tessera/plan/rates_picture.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <optional>

#include <fmt/format.h>

#include "tessera/core/format.h"
#include "tessera/core/svg.h"

namespace tessera::plan {
namespace {

constexpr std::array kWidestFirst = {"fp32", "tf32", "fp16", "bf16", "fp8", "fp4"};

std::optional<double> rate_of(const Device& device, const std::string& format) {
  const auto found = device.flops_per_s.find(format);
  return found == device.flops_per_s.end() ? std::nullopt : std::optional(found->second);
}

/// What the others are compared with.
std::string widest(const Device& device) {
  return *std::ranges::find_if(kWidestFirst, [&](const char* format) { return rate_of(device, format).has_value(); });
}

/// A file of a user's by its name alone.
std::string label_of(const Device& device) {
  const std::string name = std::filesystem::path(device.key).filename().string();
  return device.year ? fmt::format("{} ({})", name, *device.year) : name;
}

}  // namespace

std::string rates_svg(const Device& measured, std::vector<Device> data_sheets) {
  std::ranges::stable_sort(data_sheets, {}, [](const Device& device) { return device.year.value_or(0); });
  std::vector<const Device*> devices{&measured};
  for (const Device& device : data_sheets) devices.push_back(&device);
  constexpr double left = 250, plot = 560, width = left + plot + 190, top = 64, bar = 15, gap = 14;
  std::vector<std::string> formats;
  size_t bars = 0;
  double most = 2, least = 1;
  for (const char* format : kWidestFirst) {
    const auto of_format = std::ranges::count_if(devices, [&](const Device* device) { return rate_of(*device, format).has_value(); });
    if (of_format == 0) continue;
    formats.emplace_back(format);
    bars += static_cast<size_t>(of_format);
    for (const Device* device : devices) {
      if (const auto rate = rate_of(*device, format)) {
        const double times = *rate / *rate_of(*device, widest(*device));
        most = std::max(most, times), least = std::min(least, times);
      }
    }
  }
  const double low = std::floor(std::log2(least)) - 1, high = std::ceil(std::log2(most));  // a bar of once as fast has a length, too
  const double bottom = top + bar * static_cast<double>(bars) + gap * static_cast<double>(formats.size());
  Svg svg(width, bottom + 30);
  svg.text(16, 24, "products by number format, in times a device's fp32 (a star: its widest format, where it has none)", {.size = 14, .bold = true});
  svg.rect(16, 36, 11, 11, Svg::color(5)).text(32, 46, "measured", {.color = "#666666"});
  svg.rect(116, 36, 11, 11, Svg::color(4)).text(132, 46, "data sheet, by the year of its introduction", {.color = "#666666"});
  const auto x = [&](double times) { return left + plot * (std::log2(times) - low) / (high - low); };
  for (double power = low; power <= high; ++power) {
    svg.line(x(std::exp2(power)), top, x(std::exp2(power)), bottom, "#cccccc", 0.5);
    svg.text(x(std::exp2(power)), bottom + 16, fmt::format("{:g}x", std::exp2(power)), {.size = 11, .color = "#666666", .anchor = "middle"});
  }
  double y = top;
  for (const std::string& format : formats) {
    y += gap;
    svg.text(16, y + 11, format, {.size = 13, .bold = true});
    for (const Device* device : devices) {
      const auto rate = rate_of(*device, format);
      if (!rate) continue;
      const std::string base = widest(*device);
      const double times = *rate / *rate_of(*device, base);
      const std::string text = fmt::format("{:.3g}x, {}FLOP/s", times, format_count(*rate));
      svg.text(left - 8, y + 11, label_of(*device) + (base == "fp32" ? "" : "*"), {.size = 11, .anchor = "end"});
      svg.rect(left, y + 2, x(times) - left, bar - 4, Svg::color(device == &measured ? 5 : 4), device->name + ": " + text);
      svg.text(x(times) + 6, y + 11, text, {.size = 11, .color = "#666666"});
      y += bar;
    }
  }
  return svg.str();
}

}  // namespace tessera::plan
