#include "tessera/train/places.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "tessera/config/offload_rules.h"
#include "tessera/config/optim_groups.h"
#include "tessera/config/patterns.h"
#include "tessera/core/error.h"
#include "tessera/models/model.h"
#include "tessera/nn/meta.h"
#include "tessera/offload/mapped_file.h"
#include "tessera/optim/adam8bit.h"
#include "tessera/optim/groups.h"
#include "tessera/train/adapters.h"
#include "tessera/train/compose.h"

namespace tessera {

namespace {

WaitingPlace place_named(const std::string& name) { return name == "disk" ? WaitingPlace::Disk : name == "host" ? WaitingPlace::Host : WaitingPlace::Device; }

/// How closely a pattern names a parameter, by any of its names: by the innermost module, then by as few '*' as may be.
using Closeness = std::pair<size_t, int64_t>;

std::optional<Closeness> closeness(const std::string& pattern, const nn::NamedParameter& parameter) {
  std::optional<size_t> depth = named_by(pattern, parameter.name);
  for (const std::string& alias : parameter.aliases) depth = std::max(depth, named_by(pattern, alias));
  if (!depth) return std::nullopt;
  return Closeness{*depth, -std::ranges::count(pattern, '*')};
}

using NamedPlace = std::pair<const std::string, std::string>;  // pattern, place

/// What names the parameter most closely; null where nothing does.
const NamedPlace* named_in(const char* key, const ByPattern& places, const nn::NamedParameter& parameter) {
  if (const auto own = places.by_pattern.find(parameter.name); own != places.by_pattern.end()) return &*own;
  std::optional<Closeness> closest;
  const NamedPlace* found = nullptr;
  for (const auto& one : places.by_pattern) {
    const auto close = closeness(one.first, parameter);
    if (!close || close < closest) continue;
    require(close != closest || one.second == found->second, key, ": '", found == nullptr ? "" : found->first, "' = ", found == nullptr ? "" : found->second,
            " and '", one.first, "' = ", one.second, " both name '", parameter.name,
            "', one as closely as the other; give both one place, or name it by its path");
    closest = close;
    found = &one;
  }
  return found;
}

/// Of the modules that each pattern is the closest to name, in the order of the model, those that are not among the first `fraction` stay on the device.
ByPattern narrowed(const char* key, const ByPattern& places, double fraction, const std::vector<nn::NamedParameter>& parameters) {
  if (places.by_pattern.empty()) return places;
  std::map<std::string, std::vector<std::string>> modules;  // by pattern
  const auto module_of = [&](const NamedPlace& named, const nn::NamedParameter& parameter) {
    for (const std::string& path : paths_to(parameter.name)) {
      if (path_matches(named.first, path)) return path;
    }
    return parameter.name;  // it is named by an alias
  };
  for (const auto& parameter : parameters) {
    const auto* const named = named_in(key, places, parameter);
    if (named == nullptr) continue;
    auto& found = modules[named->first];
    const std::string module = module_of(*named, parameter);
    if (std::ranges::find(found, module) == found.end()) found.push_back(module);
  }
  for (auto& [pattern, found] : modules) found.resize(static_cast<size_t>(std::llround(fraction * static_cast<double>(found.size()))));
  ByPattern all;
  for (const auto& parameter : parameters) {
    const auto* const named = named_in(key, places, parameter);
    const bool moves = named != nullptr && std::ranges::find(modules[named->first], module_of(*named, parameter)) != modules[named->first].end();
    all.by_pattern.emplace(parameter.name, moves ? named->second : "device");
  }
  return all;
}

}  // namespace

WaitingPlace place_of(const char* key, const ByPattern& places, const nn::NamedParameter& parameter) {
  if (places.by_pattern.empty()) return place_named(places.everywhere);
  const auto* const found = named_in(key, places, parameter);
  return found == nullptr ? WaitingPlace::Device : place_named(found->second);
}

void check_places(const char* key, const ByPattern& places, const std::vector<nn::NamedParameter>& parameters) {
  for (const auto& [pattern, place] : places.by_pattern) {
    const auto names = [&](const nn::NamedParameter& parameter) { return closeness(pattern, parameter).has_value(); };
    if (std::ranges::any_of(parameters, names)) continue;
    std::set<std::string> known;
    for (const auto& parameter : parameters) {
      for (auto& path : paths_to(parameter.name)) known.insert(std::move(path));
    }
    throw ConfigError(detail::concat(key, ": '", pattern, "' matches no module and no parameter; the nearest path is '",
                                     nearest(pattern, std::vector<std::string>(known.begin(), known.end())),
                                     "' ('*' is any text between two dots, '**' any number of parts)"));
  }
  for (const auto& parameter : parameters) (void)place_of(key, places, parameter);
  for (const auto& [pattern, place] : places.by_pattern) {
    const auto is_exception = [&](const nn::NamedParameter& parameter) {
      const auto* const closest = named_in(key, places, parameter);
      const auto sends = [&](const NamedPlace& other) { return other.second != "device" && closeness(other.first, parameter); };
      return closest != nullptr && closest->first == pattern && std::ranges::any_of(places.by_pattern, sends);
    };
    require(place != "device" || std::ranges::any_of(parameters, is_exception), idle_exception(key, pattern));
  }
}

void check_places(const Config& config, const std::vector<nn::NamedParameter>& parameters) {
  check_places("offload.params", config.offload.params, parameters);
  check_places("offload.optimizer", config.offload.optimizer, parameters);
  const OffloadConfig offload = settled_places(config);
  for (const auto& parameter : parameters) {
    const bool away = place_of("offload.params", offload.params, parameter) != WaitingPlace::Device;
    require(
        !away || place_of("offload.optimizer", offload.optimizer, parameter) != WaitingPlace::Device, "offload.optimizer: leaves the state of '",
        parameter.name,
        "' on the device, and by offload.params the host's cores update it; send it away in offload.optimizer as well, or leave that out, which then follows ",
        "offload.params");
  }
}

OffloadConfig settled_places(const Config& config) {
  OffloadConfig offload = config.offload;
  if (offload.params.by_pattern.empty() && offload.optimizer.by_pattern.empty()) return offload;
  const auto model = on_meta([&] { return make_model(config.model); });
  const Attachment adapted = add_adapters(config, *model);
  quantize_frozen(config, *model, at::kMeta);
  const auto parameters = nn::unique_parameters(*model);
  offload.params = narrowed("offload.params", offload.params, offload.fraction, parameters);
  offload.optimizer = narrowed("offload.optimizer", offload.optimizer, offload.fraction, parameters);
  return offload;
}

void place_slices(const Config& config, at::Device device, const DiskBytes& disk, FullyShardOptions& options) {
  const ByPattern places = settled_places(config).params;
  options.device = device;
  if (places.is("device")) return;
  options.place = [places](const nn::NamedParameter& parameter) {
    const WaitingPlace place = place_of("offload.params", places, parameter);
    return place == WaitingPlace::Disk ? Offload::Disk : place == WaitingPlace::Host ? Offload::Host : Offload::None;
  };
  if (places.uses("disk")) options.file = make_mapped_file(spill_folder(config), disk, /*dry=*/device.is_meta());
}

namespace {

/// What an optimizer leaves to AdamW, with averages in fp32, is AdamW's.
OptimConfig updated_by(const OptimConfig& config, const std::vector<OptimGroup>& groups, const nn::NamedParameter& parameter, const optim::WholeModel& uses) {
  OptimConfig optim = optim::settings_of(config, groups, parameter.name, static_cast<size_t>(parameter.tensor.dim()), uses).settings;
  if (optim.name == "adam8bit" && !optim::Adam8bit::quantizes(parameter.name, parameter.tensor.numel(), uses)) optim.name = "adamw";
  return optim;
}

}  // namespace

CountedElements count_elements(const Config& config) {
  const OffloadConfig offload = settled_places(config);
  const auto model = on_meta([&] { return make_model(config.model); });
  const Attachment adapted = add_adapters(config, *model);
  CountedElements counted{.elements = {}, .quantized_bytes = static_cast<double>(quantize_frozen(config, *model, at::kMeta).bytes)};
  const std::vector<OptimGroup> groups = optim_groups(config.optim);
  optim::WholeModel uses;
  optim::note_uses(uses, *model);
  using Kind = std::tuple<WaitingPlace, WaitingPlace, bool, bool, std::string, std::string, bool>;
  std::map<Kind, PlacedElements> elements;
  for (const auto& parameter : nn::unique_parameters(*model)) {
    PlacedElements kind{.params = place_of("offload.params", offload.params, parameter),
                        .optimizer = place_of("offload.optimizer", offload.optimizer, parameter),
                        .trained = config.lora.modules.empty() || parameter.tensor.requires_grad(),
                        .expert = parameter.name.find(".experts.") != std::string::npos,
                        .optim = updated_by(config.optim, groups, parameter, uses)};
    const OptimConfig& optim = kind.optim;
    const Kind what{kind.params, kind.optimizer, kind.trained, kind.expert, optim.name, optim.state_dtype, momentum_of(optim) > 0};
    elements.try_emplace(what, kind).first->second.count += static_cast<double>(parameter.tensor.numel());
  }
  for (const auto& [what, kind] : elements) counted.elements.push_back(kind);
  return counted;
}

}  // namespace tessera
