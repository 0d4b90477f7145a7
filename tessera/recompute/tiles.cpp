#include "tessera/recompute/tiles.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

#include "tessera/core/error.h"
#include "tessera/kernels/consecutive.h"
#include "tessera/kernels/grouped_linear.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/recompute/recomputed_call.h"

// A tile is a call of the module that is recomputed, so that nothing is known here of what it keeps; all tiles leave x by one node (split), which puts their
// gradients together once, where slices by themselves would each be added up at full size.

namespace tessera {

namespace {

nn::Values of_tile(nn::Module& module, nn::Values part, const nn::Next& next) {
  const bool again = at::GradMode::is_enabled() && module.is_training();
  return again ? RecomputedCall::call(module, std::move(part), next, nullptr) : next(std::move(part));
}

/// Of how many columns here each tile is, and of how many positions on all ranks.
struct TileSize {
  int64_t columns, positions;
};

class Tiles final : public nn::Interceptor {
 public:
  Tiles(int64_t tile, TiledParts parts) : tile_(tile), parts_(std::move(parts)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    require(inputs.size() == 1 && inputs[0].isTensor() && inputs[0].toTensor().dim() == 3, "recompute.ffn_tile: '", module.path(),
            "' does not take one tensor [B, S, D], which could be cut into tiles of tokens");
    const at::Tensor x = inputs[0].toTensor();
    const std::vector<TileSize> tiles = sizes(x);
    std::vector<int64_t> columns;
    for (const TileSize& tile : tiles) columns.push_back(tile.columns);
    std::vector<at::Tensor> outputs;
    int64_t begin = 0;
    for (const at::Tensor& part : x.split_with_sizes(columns, 1)) {
      const nn::SampleScope scope(of_columns(nn::SampleScope::current(), x, begin, tiles[outputs.size()]));
      begin += part.size(1);
      nn::Values given{part};
      if (parts_.ranks > 1) given.emplace_back(tiles[outputs.size()].positions);  // for TileOfParts
      outputs.push_back(of_tile(module, std::move(given), next).at(0).toTensor());
    }
    return {outputs.size() == 1 ? outputs.front() : at::cat(outputs, 1)};
  }

 private:
  /// As many on every rank: those that hold one position more have it in their last tile.
  std::vector<TileSize> sizes(const at::Tensor& x) const {
    const int64_t ranks = parts_.ranks, whole = ranks > 1 ? parts_.sequence() : x.size(1), least = whole / ranks;
    const int64_t columns = std::max<int64_t>(1, tile_ / std::max<int64_t>(1, x.size(0) * ranks));
    std::vector<TileSize> tiles;
    int64_t begin = 0;
    for (; begin + columns < least; begin += columns) tiles.push_back({columns, columns * ranks});
    tiles.push_back({x.size(1) - begin, whole - begin * ranks});
    return tiles;
  }

  /// What the layers inside see is of all ranks: their columns from `begin` on, one rank's behind the other's, which is no piece of the sequence. Masks of what
  /// is brought together, and of this rank's part of it, are those of where each column lies.
  nn::SampleContext of_columns(nn::SampleContext here, const at::Tensor& x, int64_t begin, const TileSize& tile) const {
    const int64_t whole = parts_.ranks > 1 ? parts_.sequence() : x.size(1);
    if (here.seq_len == 0) here.seq_len = whole;
    if (parts_.ranks == 1) {
      here.first_column += begin;
      here.columns = tile.columns;
      return here;
    }
    std::vector<at::Tensor> columns;
    for (int rank = 0; rank < parts_.ranks; ++rank) {
      const int64_t first = here.first_column + chunk(whole, parts_.ranks, rank).first + begin;
      columns.push_back(kernels::consecutive(first, chunk(tile.positions, parts_.ranks, rank).second, x.device()));
    }
    const at::Tensor lie = at::cat(columns);
    here.positions = here.positions.defined() ? here.positions.index_select(0, lie) : lie;
    if (here.padding.defined()) {
      here.padding = here.padding.index_select(1, lie);
      if (tile.positions < whole) here.padding_size = std::nullopt;
    }
    here.first_column = 0;
    here.columns = tile.positions;
    return here;
  }

  int64_t tile_;
  TiledParts parts_;
};

/// Next to Tiles, and inside of what is computed again: says how long the sequence is that the ranks' parts of a tile make up.
class TileOfParts final : public nn::Interceptor {
 public:
  explicit TileOfParts(TiledParts parts) : parts_(std::move(parts)) {}

  nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
    const int64_t whole = parts_.sequence();
    parts_.set_sequence(inputs.at(1).toInt());
    const Attachment after([&] { parts_.set_sequence(whole); });
    return next({inputs[0]});
  }

 private:
  TiledParts parts_;
};

class ExpertTiles final : public nn::Interceptor {
 public:
  explicit ExpertTiles(int64_t tile) : tile_(tile) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    const at::Tensor rows = inputs[0].toTensor(), counts = inputs[1].toTensor();
    std::vector<at::Tensor> outputs;
    int64_t begin = 0;
    const std::vector<int64_t> sizes = kernels::group_sizes(counts, rows.size(0));
    for (const at::Tensor& part : rows.split(tile_)) {
      outputs.push_back(of_tile(module, {part, counts_within(counts, sizes, begin, part.size(0))}, next).at(0).toTensor());
      begin += part.size(0);
    }
    return {outputs.size() == 1 ? outputs.front() : at::cat(outputs)};
  }

 private:
  /// How many of `rows` rows from `begin` on are of each expert. In a dry run, which has no counts, all alike.
  static at::Tensor counts_within(const at::Tensor& counts, const std::vector<int64_t>& sizes, int64_t begin, int64_t rows) {
    if (counts.is_meta()) return at::empty_like(counts);
    std::vector<int64_t> within;
    int64_t first = 0;
    for (const int64_t size : sizes) {
      within.push_back(std::max<int64_t>(0, std::min(first + size, begin + rows) - std::max(first, begin)));
      first += size;
    }
    return at::tensor(within, at::TensorOptions(at::kLong));
  }

  int64_t tile_;
};

/// A tile of several rows lies in pieces: put together once, in what is computed again, each layer that takes it need not do so by itself.
class InOnePiece final : public nn::Interceptor {
 public:
  nn::Values call(nn::Module& /*module*/, nn::Values inputs, const nn::Next& next) override { return next({inputs[0].toTensor().contiguous()}); }
};

using Interceptors = std::vector<std::shared_ptr<nn::Interceptor>>;  ///< the innermost first

Attachment attach_tiles(torch::nn::Module& root, const std::string& pattern, int64_t tile, const std::function<Interceptors(const nn::Module&)>& make) {
  require(tile >= 1, "recompute.ffn_tile = ", tile, ": expected 1 token or more in a tile");
  Attachment attached;
  for (const auto& [path, module] : nn::interceptable_modules(root, pattern)) {
    for (auto& interceptor : make(*module)) attached.add(nn::attach(*module, interceptor));
    attached.add(nn::expect_call(*module, "recompute.ffn_tile"));
  }
  return attached;
}

}  // namespace

Attachment tile_tokens(torch::nn::Module& root, const std::string& pattern, int64_t tile, const TiledParts& parts) {
  return attach_tiles(root, pattern, tile, [&](const nn::Module&) {
    Interceptors made{std::make_shared<InOnePiece>()};
    if (parts.ranks > 1) made.push_back(std::make_shared<TileOfParts>(parts));
    made.push_back(std::make_shared<Tiles>(tile, parts));
    return made;
  });
}

Attachment tile_experts(torch::nn::Module& root, const std::string& pattern, int64_t tile) {
  return attach_tiles(root, pattern, tile, [&](const nn::Module& module) {
    require(dynamic_cast<const nn::GroupedExpertsImpl*>(&module) != nullptr, "tile_experts: '", module.path(), "' is no GroupedExperts but ", module.name());
    return Interceptors{std::make_shared<ExpertTiles>(tile)};
  });
}

}  // namespace tessera
