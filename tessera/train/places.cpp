#include "tessera/train/places.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/models/model.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/paths_to.h"
#include "tessera/offload/mapped_file.h"
#include "tessera/train/compose.h"

namespace tessera {

namespace {

WaitingPlace place_named(const std::string& name) { return name == "disk" ? WaitingPlace::Disk : name == "host" ? WaitingPlace::Host : WaitingPlace::Device; }

/// How closely a pattern names a parameter, by any of its names: by the innermost module, then by as few '*' as may be.
using Closeness = std::pair<size_t, int64_t>;

std::optional<Closeness> closeness(const std::string& pattern, const nn::NamedParameter& parameter) {
  std::optional<size_t> depth = nn::named_by(pattern, parameter.name);
  for (const std::string& alias : parameter.aliases) depth = std::max(depth, nn::named_by(pattern, alias));
  if (!depth) return std::nullopt;
  return Closeness{*depth, -std::ranges::count(pattern, '*')};
}

}  // namespace

WaitingPlace place_of(const char* key, const Placement& places, const nn::NamedParameter& parameter) {
  if (places.by_pattern.empty()) return place_named(places.everywhere);
  std::optional<Closeness> closest;
  const std::pair<const std::string, std::string>* found = nullptr;
  for (const auto& one : places.by_pattern) {
    const auto close = closeness(one.first, parameter);
    if (!close || close < closest) continue;
    require(close != closest || one.second == found->second, key, ": '", found == nullptr ? "" : found->first, "' = ", found == nullptr ? "" : found->second,
            " and '", one.first, "' = ", one.second, " both name '", parameter.name,
            "', one as closely as the other; give both one place, or name it by its path");
    closest = close;
    found = &one;
  }
  return found == nullptr ? WaitingPlace::Device : place_named(found->second);
}

void check_places(const char* key, const Placement& places, const std::vector<nn::NamedParameter>& parameters) {
  for (const auto& [pattern, place] : places.by_pattern) {
    const auto names = [&](const nn::NamedParameter& parameter) { return closeness(pattern, parameter).has_value(); };
    if (std::ranges::any_of(parameters, names)) continue;
    std::set<std::string> known;
    for (const auto& parameter : parameters) {
      for (auto& path : nn::paths_to(parameter.name)) known.insert(std::move(path));
    }
    throw ConfigError(detail::concat(key, ": '", pattern, "' matches no module and no parameter; the nearest path is '",
                                     nearest(pattern, std::vector<std::string>(known.begin(), known.end())),
                                     "' ('*' is any text between two dots, '**' any number of parts)"));
  }
  for (const auto& parameter : parameters) (void)place_of(key, places, parameter);
}

void check_places(const OffloadConfig& offload, const std::vector<nn::NamedParameter>& parameters) {
  check_places("offload.params", offload.params, parameters);
  check_places("offload.optimizer", offload.optimizer, parameters);
  for (const auto& parameter : parameters) {
    const bool away = place_of("offload.params", offload.params, parameter) != WaitingPlace::Device;
    require(!away || place_of("offload.optimizer", offload.optimizer, parameter) != WaitingPlace::Device, "offload.optimizer: leaves the state of '",
            parameter.name,
            "' on the device, and by offload.params the host's cores update it; name it in offload.optimizer as well, or leave that out, which then follows ",
            "offload.params");
  }
}

void place_slices(const Config& config, at::Device device, const DiskBytes& disk, FullyShardOptions& options) {
  const Placement& places = config.offload.params;
  options.device = device;
  if (places.is("device")) return;
  options.place = [places](const nn::NamedParameter& parameter) {
    const WaitingPlace place = place_of("offload.params", places, parameter);
    return place == WaitingPlace::Disk ? Offload::Disk : place == WaitingPlace::Host ? Offload::Host : Offload::None;
  };
  if (places.uses("disk")) options.file = make_mapped_file(spill_folder(config), disk, /*dry=*/device.is_meta());
}

std::vector<PlacedShare> placed_shares(const Config& config) {
  const auto& [params, optimizer] = std::tie(config.offload.params, config.offload.optimizer);
  if (params.by_pattern.empty() && optimizer.by_pattern.empty()) {
    return {{.params = place_named(params.everywhere), .optimizer = place_named(optimizer.everywhere)}};
  }
  const auto model = on_meta([&] { return make_model(config.model); });
  std::map<std::pair<WaitingPlace, WaitingPlace>, int64_t> elements;
  int64_t all = 0;
  for (const auto& parameter : nn::unique_parameters(*model)) {
    elements[{place_of("offload.params", params, parameter), place_of("offload.optimizer", optimizer, parameter)}] += parameter.tensor.numel();
    all += parameter.tensor.numel();
  }
  std::vector<PlacedShare> shares;
  for (const auto& [places, count] : elements) {
    shares.push_back({.params = places.first, .optimizer = places.second, .share = static_cast<double>(count) / static_cast<double>(all)});
  }
  return shares;
}

}  // namespace tessera
