#include "tessera/train/recompute_blocks.h"

#include <functional>
#include <map>
#include <string>
#include <utility>

#include <ATen/ops/empty.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/meta.h"
#include "tessera/precision/policy.h"
#include "tessera/recompute/recompute.h"
#include "tessera/recompute/tiles.h"
#include "tessera/train/adapters.h"

namespace tessera {

namespace {

std::shared_ptr<LanguageModel> like_on_meta(const Config& config, Attachment& attached) {
  auto model = on_meta([&] { return make_model(config.model); });
  attached = add_adapters(config, *model);
  precision::apply(*model, precision::policy_from(config.precision));
  materialize(*model, static_cast<uint64_t>(config.run.seed), at::kMeta);
  return model;
}

/// Which rank of the pipeline runs a module: that of the link that it lies in.
std::function<int(const std::string&)> holder_of(const PipelineLayout& layout, const LanguageModel& model) {
  std::map<std::string, int> holders;
  for (int stage = 0; stage < layout.stages(); ++stage) {
    const ChainRange& links = layout.links[static_cast<size_t>(stage)];
    for (int64_t link = links.begin; link < links.end; ++link) holders.emplace(model.link_name(link), layout.rank_of[static_cast<size_t>(stage)]);
  }
  return [holders = std::move(holders)](const std::string& path) {
    for (const auto& [link, rank] : holders) {
      if (path == link || path.starts_with(link + ".")) return rank;
    }
    return 0;  // what is in no link is no module that a pattern of blocks names
  };
}

Attachment tile_layers(const Config& config, LanguageModel& model, const TiledParts& parts) {
  const bool any = config.recompute.ffn_tile > 0 && (config.model.experts == 0 || config.model.shared_ffn_dim > 0);
  return any ? tile_tokens(model, tiled_layers(config), config.recompute.ffn_tile, parts) : Attachment();
}

}  // namespace

std::string tiled_layers(const Config& config) { return config.model.experts > 0 ? "layers.*.feed_forward.shared" : "layers.*.feed_forward"; }

Attachment tile_routed(const Config& config, LanguageModel& model) {
  const bool any = config.recompute.ffn_tile > 0 && config.model.experts > 0;
  return any ? tile_experts(model, "layers.*.feed_forward.experts", config.recompute.ffn_tile) : Attachment();
}

void check_pattern(const char* key, LanguageModel& model, const std::string& pattern) {
  try {
    nn::modules_matching(model, pattern);
  } catch (const ConfigError& error) {
    throw ConfigError(detail::concat(key, " = '", pattern, "': ", error.what()));
  }
}

Attachment recompute_blocks(const Config& config, LanguageModel& model, const PipelineLayout& layout, int64_t columns, const TiledParts& parts) {
  const auto& asked = config.recompute;
  Attachment tiled = tile_layers(config, model, parts);
  if (asked.mode == "none") return tiled;
  check_pattern("recompute.modules", model, asked.modules);
  RecomputeOptions options{.modules = asked.modules,
                           .every = asked.every,
                           .segment = asked.segment,
                           .mode = asked.mode == "selective" ? RecomputeMode::Selective : RecomputeMode::Full,
                           .keep = asked.keep,
                           .budget_bytes = asked.budget_bytes};
  std::shared_ptr<LanguageModel> measured;
  Attachment measured_tiles;
  if (asked.budget_bytes > 0) {
    MemoryTracker aside;  // what the measurement takes on meta is no part of the run
    const TrackMemory not_counted(aside);
    measured = like_on_meta(config, measured_tiles);
    measured_tiles.add(tile_routed(config, *measured));
    measured_tiles.add(tile_layers(config, *measured, {}));
    options.measured = measured.get();
    options.holder = holder_of(layout, model);
    options.example = [&config, columns, model = measured.get()] {
      const at::Tensor tokens =
          at::empty({config.batch.micro_size, columns > 0 ? columns : config.data.seq_len}, at::TensorOptions(at::kLong).device(at::kMeta));
      model->loss_sum(tokens, tokens);
    };
  }
  tiled.add(recompute(model, options));
  return tiled;
}

}  // namespace tessera
