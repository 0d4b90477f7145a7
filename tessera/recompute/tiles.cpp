#include "tessera/recompute/tiles.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/recompute/recomputed_call.h"

// A tile is a call of the module that is recomputed, so that nothing is known here of what it keeps; all tiles leave x by one node (split), which puts their
// gradients together once, where slices by themselves would each be added up at full size.

namespace tessera {

namespace {

class Tiles final : public nn::Interceptor {
 public:
  explicit Tiles(int64_t tile) : tile_(tile) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    require(inputs.size() == 1 && inputs[0].isTensor() && inputs[0].toTensor().dim() == 3, "recompute.ffn_tile: '", module.path(),
            "' does not take one tensor [B, S, D], which could be cut into tiles of tokens");
    const at::Tensor x = inputs[0].toTensor();
    const int64_t columns = std::max<int64_t>(1, tile_ / std::max<int64_t>(1, x.size(0)));
    std::vector<at::Tensor> outputs;
    int64_t begin = 0;
    for (const at::Tensor& part : x.split(columns, 1)) {
      nn::SampleContext here = nn::SampleScope::current();
      if (here.seq_len == 0) here.seq_len = x.size(1);
      here.first_column += begin;
      begin += part.size(1);
      const nn::SampleScope scope(here);
      outputs.push_back(of_tile(module, part, next));
    }
    return {outputs.size() == 1 ? outputs.front() : at::cat(outputs, 1)};
  }

 private:
  static at::Tensor of_tile(nn::Module& module, const at::Tensor& part, const nn::Next& next) {
    const bool again = at::GradMode::is_enabled() && module.is_training();
    return (again ? RecomputedCall::call(module, {part}, next, nullptr) : next({part})).at(0).toTensor();
  }

  int64_t tile_;
};

/// A tile of several rows lies in pieces: put together once, in what is computed again, each layer that takes it need not do so by itself.
class InOnePiece final : public nn::Interceptor {
 public:
  nn::Values call(nn::Module& /*module*/, nn::Values inputs, const nn::Next& next) override { return next({inputs[0].toTensor().contiguous()}); }
};

}  // namespace

Attachment tile_tokens(torch::nn::Module& root, const std::string& pattern, int64_t tile) {
  require(tile >= 1, "recompute.ffn_tile = ", tile, ": expected 1 token or more in a tile");
  Attachment attached;
  for (const auto& [path, module] : nn::interceptable_modules(root, pattern)) {
    attached.add(nn::attach(*module, std::make_shared<InOnePiece>()));
    attached.add(nn::attach(*module, std::make_shared<Tiles>(tile)));
    attached.add(nn::expect_call(*module, "recompute.ffn_tile"));
  }
  return attached;
}

}  // namespace tessera
