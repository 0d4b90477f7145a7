#include "cli/inspect_text.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/columns.h"
#include "tessera/core/format.h"
#include "tessera/core/json_text.h"

namespace tessera::cli {

namespace {

using nlohmann::json;
using Rows = std::vector<std::vector<std::string>>;

/// The facts that come first; all others stand behind them.
constexpr std::array kFacts = {"kind", "step", "valid", "problem", "replay", "parameters", "active_parameters", "optimizer", "ranks", "layout"};

std::string facts_text(const json& found) {
  std::string out;
  const auto add = [&](const std::string& key, const json& value) {
    if (value.is_structured() || value == "") return;
    const std::string text = value.is_string() ? value.get<std::string>() : json_text(value);
    out += fmt::format("{:<18}{}\n", key, key == "bytes" ? fmt::format("{} ({})", text, format_bytes(value.get<int64_t>())) : text);
  };
  for (const char* key : kFacts) {
    if (found.contains(key)) add(key, found[key]);
  }
  for (const auto& [key, value] : found.items()) {
    if (std::ranges::find(kFacts, key) == kFacts.end()) add(key, value);
  }
  return out;
}

std::string dims_text(const json& sizes) { return fmt::format("[{}]", fmt::join(sizes.get<std::vector<int64_t>>(), ", ")); }

int64_t bytes_of(const json& tensor) {
  if (tensor.contains("bytes")) return tensor["bytes"].get<int64_t>();
  const auto dtype = checkpoint::dtype_from_name(tensor["dtype"].get<std::string>());
  return static_cast<int64_t>(checkpoint::tensor_bytes(dtype, tensor["shape"].get<std::vector<int64_t>>()).value_or(0));
}

/// "parameters"; of what else there is the names' beginnings: "optimizer.exp_avg", "buffer". Of a file, which has no kinds, "tensors".
std::string kind_of(const json& tensor) {
  const std::string kind = tensor.value("kind", "tensor"), name = tensor["name"].get<std::string>();
  if (kind != "state") return kind + "s";
  const size_t first = name.find('.');
  return name.substr(0, name.starts_with("optimizer.") ? name.find('.', first + 1) : first);
}

std::string sums_text(const json& tensors) {
  struct Sum {
    int64_t tensors = 0, bytes = 0;
  };
  std::map<std::pair<std::string, std::string>, Sum> sums;
  for (const auto& tensor : tensors) {
    Sum& sum = sums[{kind_of(tensor), tensor["dtype"].get<std::string>()}];
    ++sum.tensors;
    sum.bytes += bytes_of(tensor);
  }
  Rows rows{{"holds", "dtype", "tensors", "bytes"}};
  for (const auto& [kind, sum] : sums) rows.push_back({kind.first, kind.second, std::to_string(sum.tensors), format_bytes(sum.bytes)});
  return format_columns(rows, {0, 1});
}

std::string files_text(const json& files) {
  constexpr size_t most = 16;  // lines; of more, their sum says enough
  Rows rows{{"file", "bytes"}};
  int64_t total = 0;
  for (const auto& [name, bytes] : files.items()) {
    total += bytes.get<int64_t>();
    if (files.size() <= most) rows.push_back({name, format_bytes(bytes.get<int64_t>())});
  }
  if (files.size() != 1) rows.push_back({fmt::format("{} files", files.size()), format_bytes(total)});
  return format_columns(rows, {0});
}

/// One line for a tensor that lies in one file whole; else a line for each box of each slice below it.
std::string tensors_text(const json& tensors) {
  Rows rows;
  std::vector<std::string> below;
  for (const auto& tensor : tensors) {
    const json slices = tensor.value("slices", json::array());
    const bool whole = slices.size() == 1 && slices[0]["boxes"].size() == 1;
    rows.push_back(
        {tensor["name"].get<std::string>(), tensor["dtype"].get<std::string>(), dims_text(tensor["shape"]), whole ? slices[0]["file"].get<std::string>() : ""});
    std::string lines;
    for (const auto& slice : slices) {
      for (const auto& box : slice["boxes"]) {
        if (!whole) lines += fmt::format("    {} at {} in {}\n", dims_text(box["size"]), dims_text(box["offset"]), slice["file"].get<std::string>());
      }
    }
    below.push_back(std::move(lines));
  }
  const std::string columns = format_columns(rows, {0, 1, 2, 3});
  std::string out;
  size_t begin = 0;
  for (const auto& lines : below) {
    const size_t end = columns.find('\n', begin) + 1;
    out += columns.substr(begin, end - begin) + lines;
    begin = end;
  }
  return out;
}

}  // namespace

std::string found_text(const json& found, bool tensors) {
  std::string out = facts_text(found);
  if (!found.contains("tensors")) return out;
  out += "\n" + sums_text(found["tensors"]);
  if (found.contains("files")) out += "\n" + files_text(found["files"]);
  out += "\n";
  return out + (tensors ? tensors_text(found["tensors"]) : "--tensors lists each tensor\n");
}

std::string devices_text(const json& found) {
  const auto yes = [](const json& value) { return value.is_null() ? "?" : value.get<bool>() ? "yes" : "no"; };
  const auto bytes = [](const json& device, const char* key) {
    const auto number = device.value(key, int64_t{0});
    return number == 0 ? std::string() : format_bytes(number);
  };
  struct Column {
    std::string heading;
    bool left = true;
    std::vector<std::string> cells{};
  };
  std::vector<Column> columns{{"device"}, {"model"}, {"memory", false}, {"free", false}, {"bf16"}, {"kernels"}, {"reaches"}};
  for (const auto& device : found["devices"]) {
    const std::string model = device.contains("cores") ? fmt::format("{} cores", device["cores"].get<unsigned>()) : device.value("model", "");
    const std::string peers = fmt::format("{}", fmt::join(device.value("peers", std::vector<std::string>()), " "));
    const std::vector<std::string> cells{device["name"].get<std::string>(),
                                         model,
                                         bytes(device, "memory_bytes"),
                                         bytes(device, "free_bytes"),
                                         yes(device["bf16"]),
                                         yes(device["kernels"]),
                                         peers};
    for (size_t i = 0; i < cells.size(); ++i) columns[i].cells.push_back(cells[i]);
  }
  Rows rows(1 + found["devices"].size());
  std::set<size_t> left;
  for (const Column& column : columns) {
    if (std::ranges::all_of(column.cells, &std::string::empty)) continue;
    if (column.left) left.insert(rows[0].size());
    rows[0].push_back(column.heading);
    for (size_t i = 0; i < column.cells.size(); ++i) rows[i + 1].push_back(column.cells[i]);
  }
  const auto& cuda = found["cuda"];
  return format_columns(rows, left) +
         fmt::format("torch {}, {} CUDA; this build has {} for it\n", found["torch"].get<std::string>(), cuda["torch"].get<bool>() ? "with" : "without",
                     cuda["build"].get<bool>() ? "kernels" : "no kernels") +
         fmt::format("engines: {}\n", fmt::join(found["engines"].get<std::vector<std::string>>(), ", ")) +
         fmt::format("run.device = auto: {}\n", found["auto"].get<std::string>());
}

}  // namespace tessera::cli
