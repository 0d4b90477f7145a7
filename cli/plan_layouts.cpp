#include "cli/plan_layouts.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <numeric>
#include <sstream>
#include <tuple>

#include "cli/common.h"
#include "tessera/core/error.h"
#include "tessera/core/json_integer.h"
#include "tessera/core/json_text.h"
#include "tessera/core/text_file.h"
#include "tessera/plan/collective_time.h"

namespace tessera::cli {

namespace {

/// What a file has a line of each; refused as a whole where one of them is no layout.
std::vector<nlohmann::json> layouts_in(const std::string& path) {
  const auto refuse_unless = [&](bool good, const std::string& what) {
    require(good, "--layouts = ", path, ": ", what, R"(; give a file with a layout a line, such as {"world": 8, "set": ["mesh.tp=2"]})");
  };
  refuse_unless(is_there(path), "no such file");
  refuse_unless(std::filesystem::is_regular_file(path), "is not a regular file");
  std::vector<nlohmann::json> layouts;
  std::istringstream file(read_text_file("--layouts = " + path, path));
  for (std::string line; std::getline(file, line);) {
    const auto number = layouts.size() + 1;
    auto layout = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    refuse_unless(layout.is_object() && layout.value("set", nlohmann::json::array()).is_array() && layout.value("world", nlohmann::json(1)).is_number_integer(),
                  detail::concat("line ", number, " is no layout"));
    for (const auto& [key, value] : layout.items()) {
      const bool known = key == "world" || key == "set" || key == "all_reduce";
      refuse_unless(known, detail::concat("line ", number, " has ", json_text(nlohmann::json(key)), ", which is none of world, set and all_reduce"));
    }
    refuse_unless(!layout.contains("all_reduce") || !layout.contains("set"),
                  detail::concat("line ", number, " has all_reduce, which is a collective alone, beside set, which is of a step"));
    layouts.push_back(std::move(layout));
  }
  refuse_unless(!layouts.empty(), "is empty");
  return layouts;
}

/// {"all_reduce": bytes, "world": 8}: what a collective takes alone.
nlohmann::json all_reduce_json(const nlohmann::json& asked, int world, const plan::Device& device) {
  constexpr int64_t most = 1'000'000'000'000'000;
  const int64_t bytes = to_integer(asked, "--layouts: the bytes of all_reduce", 0, most);
  std::vector<int> ranks(static_cast<size_t>(world));
  std::iota(ranks.begin(), ranks.end(), 0);
  const CollectiveEvent call{
      .op = "all_reduce", .group_size = world, .bytes = bytes, .sent_bytes = 2 * (bytes / world * (world - 1) + bytes % world * (world - 1) / world)};
  const plan::Machine machine = plan::machine_of(device);
  return {{"seconds", plan::collective_cost(call, plan::placement_of(ranks, machine.devices_per_host), machine).seconds()}};
}

}  // namespace

void say_layouts(const PlanRequest& request) {
  const PlanFlags& flags = request.flags();
  const auto& [device, framework] = std::tie(request.device(), request.framework());
  const auto layouts = layouts_in(flags.layouts);
  const bool takes_world = std::ranges::any_of(layouts, [](const nlohmann::json& layout) { return !layout.contains("world"); });
  require(!flags.says_world || takes_world, "--world = ", flags.world, ": each line of --layouts = ", flags.layouts, " says its own; leave --world out");
  for (const nlohmann::json& layout : layouts) {
    nlohmann::json answer;
    try {
      int world = flags.world;
      if (layout.contains("world")) world = static_cast<int>(to_integer(layout["world"], "--layouts: world", 1, kMostRanks));
      if (layout.contains("all_reduce")) {
        require(device.has_value(), "--layouts: all_reduce: takes its time on a device; give --device");
        std::printf("%s\n", json_text(all_reduce_json(layout["all_reduce"], world, *device)).c_str());
        continue;
      }
      std::vector<std::string> sets = flags.sets;
      for (const auto& set : layout.value("set", nlohmann::json::array())) sets.push_back(set.is_string() ? set.get<std::string>() : set.dump());
      Config config = request.read(sets, world).config;
      request.settle(config, world, precision::Saying::Silent);
      plan::DryRun run = plan::dry_run(config, world, request.dry_options(config));
      add_remarks(config, run);
      answer = json_of(run, config, device, framework);
      int64_t peak = 0;
      for (const auto& ranks : answer["ranks"]) peak = std::max(peak, ranks["peak_bytes"]["total"].get<int64_t>());
      answer["peak_bytes"] = peak;
      answer["needed_bytes"] = plan::needed_bytes(plan::largest_class(run));
      answer.erase("ranks");
      answer.erase("pipeline");
    } catch (const std::exception& error) {
      answer = {{"refused", error.what()}};
    }
    std::printf("%s\n", json_text(answer).c_str());
    std::fflush(stdout);
  }
}

}  // namespace tessera::cli
