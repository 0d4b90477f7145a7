#include "tessera/recompute/recompute.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/calls.h"
#include "tessera/recompute/budget.h"
#include "tessera/recompute/recomputed_call.h"

namespace tessera {

namespace {

/// Modules in a row: a call continues the segment of the one just before it, where that was of the module that stands before it.
struct Segments {
  int64_t length;
  std::weak_ptr<RecomputedCall> latest{};
  size_t position = 0;  ///< of its module
};

class Recompute final : public nn::Interceptor {
 public:
  Recompute(std::shared_ptr<const std::set<std::string>> keep, std::shared_ptr<Segments> segments, size_t position)
      : keep_(std::move(keep)), segments_(std::move(segments)), position_(position) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    if (!at::GradMode::is_enabled() || !module.is_training()) return next(std::move(inputs));
    if (!segments_) return RecomputedCall::call(module, std::move(inputs), next, keep_);
    const bool continues = position_ % static_cast<size_t>(segments_->length) != 0 && segments_->position + 1 == position_;
    auto before = continues ? segments_->latest.lock() : nullptr;
    segments_->position = position_;
    return RecomputedCall::call(module, std::move(inputs), next, keep_, std::move(before), &segments_->latest);
  }

 private:
  std::shared_ptr<const std::set<std::string>> keep_;  ///< operators; null: none
  std::shared_ptr<Segments> segments_;                 ///< null: each module from its own inputs
  size_t position_;                                    ///< among the modules
};

using Found = std::pair<std::string, std::shared_ptr<nn::Module>>;

std::vector<Found> every_nth(const std::vector<Found>& found, int64_t n) {
  std::vector<Found> chosen;
  for (size_t i = 0; i < found.size(); i += static_cast<size_t>(n)) chosen.push_back(found[i]);
  return chosen;
}

std::vector<Found> attention_cores(const std::vector<Found>& modules, const std::string& pattern) {
  std::vector<Found> cores;
  for (const auto& [path, module] : modules) {
    module->apply(
        [&](const std::string& within, torch::nn::Module& inside) {
          if (auto core = std::dynamic_pointer_cast<nn::AttentionCoreImpl>(nn::share(inside))) cores.emplace_back(within, core);
        },
        path);
  }
  require(!cores.empty(), "recompute.mode = selective: no attention core in the modules of recompute.modules = ", pattern,
          "; name operators to keep in recompute.keep, or set recompute.mode = full (RecomputeMode::Full)");
  return cores;
}

std::vector<Found> within_budget(torch::nn::Module& root, const RecomputeOptions& options, const std::vector<Found>& modules) {
  require(options.example != nullptr, "recompute.budget_bytes = ", options.budget_bytes, ": needs an example, a forward pass to measure");
  require(options.mode == RecomputeMode::Full && options.every == 1, "recompute.budget_bytes = ", options.budget_bytes,
          ": picks among whole modules itself; set recompute.mode = full (RecomputeMode::Full) and recompute.every = 1");
  const auto costs = measure_recompute(options.measured ? *options.measured : root, options.modules, options.example);
  invariant(costs.size() == modules.size(), "recompute: ", costs.size(), " modules measured, ", modules.size(), " to recompute");
  std::map<int, std::vector<size_t>> held;
  for (size_t i = 0; i < modules.size(); ++i) held[options.holder ? options.holder(modules[i].first) : 0].push_back(i);
  std::set<size_t> recomputed;
  for (const auto& [holder, indices] : held) {
    std::vector<RecomputeCost> own;
    for (const size_t i : indices) own.push_back(costs[i]);
    for (const size_t k : choose_recompute(own, options.budget_bytes).recomputed) recomputed.insert(indices[k]);
  }
  std::vector<Found> chosen;
  for (const size_t i : recomputed) chosen.push_back(modules[i]);
  return chosen;
}

}  // namespace

Attachment recompute(torch::nn::Module& root, const RecomputeOptions& options) {
  require(options.every >= 1, "recompute.every = ", options.every, ": expected 1 or more");
  require(options.budget_bytes >= 0, "recompute.budget_bytes = ", options.budget_bytes, ": expected 0 (off) or more");
  require(options.segment >= 0, "recompute.segment = ", options.segment, ": expected 0 (off) or more");
  require(options.segment <= 1 || (options.mode == RecomputeMode::Full && options.every == 1 && options.budget_bytes == 0),
          "recompute.segment = ", options.segment,
          ": recomputes every module of a run of them; set recompute.mode = full (RecomputeMode::Full) and recompute.every = 1, and no recompute.budget_bytes");
  const bool selective = options.mode == RecomputeMode::Selective;
  require(options.keep.empty() || selective,
          "recompute.keep: full recomputation keeps no operator's output; set recompute.mode = selective "
          "(RecomputeOptions{.mode = RecomputeMode::Selective})");

  auto modules = every_nth(nn::interceptable_modules(root, options.modules), options.every);
  if (options.budget_bytes > 0) modules = within_budget(root, options, modules);
  if (selective && options.keep.empty()) modules = attention_cores(modules, options.modules);
  const auto keep = options.keep.empty() ? nullptr : std::make_shared<const std::set<std::string>>(keepable_operators(options.keep));
  const auto segments = options.segment > 1 ? std::make_shared<Segments>(Segments{.length = options.segment}) : nullptr;
  Attachment attached;
  size_t position = 0;
  for (const auto& [path, module] : modules) {
    attached.add(nn::attach(*module, std::make_shared<Recompute>(keep, segments, position++)));
    attached.add(nn::expect_call(*module, "recompute.modules = " + options.modules));
  }
  return attached;
}

}  // namespace tessera
