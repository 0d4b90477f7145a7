#include "tessera/tensor_parallel/open_features.h"

#include <algorithm>
#include <limits>
#include <unordered_set>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/noted.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/tensor_parallel/convert.h"

// What a tensor is made of the graph of the pass knows, and nothing else does: shapes do not tell h / t features of a feed-forward layer from h of the stream.
// A node is numbered when it is made, so nothing before the oldest output that is open is looked at.

namespace tessera::tensor_parallel {

namespace {
bool has_graph(const at::Tensor& tensor) { return tensor.requires_grad() && tensor.grad_fn() != nullptr; }
}  // namespace

void OpenFeatures::open(const std::string& path, const at::Tensor& output, const std::vector<FeatureShare>& shares, int rank) {
  std::erase_if(opened_, [&](const Opened& one) { return one.taken || (one.node ? one.node->expired() : one.path == path); });
  std::erase_if(bounds_, [](const auto& node) { return node.expired(); });
  opened_.push_back({.path = path,
                     .node = has_graph(output) ? std::optional<WeakNode>(output.grad_fn()) : std::nullopt,
                     .dims = output.dim(),
                     .share = shares[static_cast<size_t>(rank)],
                     .all = shares.back().begin + shares.back().size,
                     .ranks = static_cast<int>(shares.size())});
}

void OpenFeatures::close(const at::Tensor& input) {
  const std::vector<bool> taken = behind(input);
  for (size_t i = 0; i < opened_.size(); ++i) opened_[i].taken = opened_[i].taken || taken[i] || !opened_[i].node;
}

void OpenFeatures::bound(const at::Tensor& output) {
  if (has_graph(output)) bounds_.emplace_back(output.grad_fn());
}

/// Of which outputs the graph of x has the nodes.
std::vector<bool> OpenFeatures::behind(const at::Tensor& x) const {
  std::vector<bool> found(opened_.size(), false);
  if (!has_graph(x)) return found;
  std::unordered_set<const Node*> bounds, seen;
  for (const auto& bound : bounds_) bounds.insert(bound.lock().get());
  uint64_t oldest = std::numeric_limits<uint64_t>::max();
  std::vector<c10::intrusive_ptr<Node>> nodes;
  for (const Opened& one : opened_) {
    nodes.push_back(one.node ? one.node->lock() : c10::intrusive_ptr<Node>());
    if (nodes.back()) oldest = std::min(oldest, nodes.back()->sequence_nr());
  }
  std::vector<const Node*> next{x.grad_fn().get()};
  while (!next.empty()) {
    const Node* const node = next.back();
    next.pop_back();
    if (node == nullptr || node->sequence_nr() < oldest || bounds.contains(node) || !seen.insert(node).second) continue;
    for (size_t i = 0; i < nodes.size(); ++i) found[i] = found[i] || nodes[i].get() == node;
    for (const torch::autograd::Edge& edge : node->next_edges()) next.push_back(edge.function.get());
  }
  return found;
}

namespace {
std::string beside(const std::string& path) { return path.substr(0, path.rfind('.') + 1); }
}  // namespace

std::optional<OpenFeatures::Block> OpenFeatures::find(const std::string& path, const at::Tensor& x) const {
  const std::vector<bool> is_behind = behind(x);
  std::optional<Block> found;
  for (size_t i = 0; i < opened_.size(); ++i) {
    const Opened& one = opened_[i];
    const bool shows = x.size(-1) == one.share.size && x.dim() <= one.dims;
    const bool graph = one.node && x.requires_grad();
    if (x.size(-1) == one.all && one.all != one.share.size) continue;  // the program has brought all together
    if (graph ? !is_behind[i] : one.taken || !shows || !path.starts_with(beside(one.path))) continue;
    // Of queries and keys, which attention makes its output of, it has the queries' features: there are as many or more of them.
    if (shows && (!found || found->by_rank || one.all > found->all)) found = Block{.first = one.share.begin, .all = one.all};
    if (!shows && !found) found = Block{.first = one.share.first_holder, .all = one.ranks, .by_rank = true};
  }
  return found;
}

namespace {

class DropFeatures final : public nn::Interceptor {
 public:
  explicit DropFeatures(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    const at::Tensor x = inputs[0].toTensor();
    if (context_->trace) return followed(module, x, std::move(inputs), next);
    if (!module.is_training() || static_cast<const nn::DropoutImpl&>(module).p == 0 || x.dim() < 2) return next(std::move(inputs));
    // A dropout that is computed again by itself is given no graph.
    const auto noted = nn::Noted<nn::NotedValue>::next(
        [&]() -> nn::NotedValue { return std::make_shared<const std::optional<OpenFeatures::Block>>(context_->open_features->find(module.path(), x)); });
    const auto& block = *std::static_pointer_cast<const std::optional<OpenFeatures::Block>>(noted);
    if (!block) return next(std::move(inputs));
    nn::SampleContext here = nn::SampleScope::current();
    require(
        !block->by_rank || here.step == 0, "parallelize_module: Dropout '", module.path(), "' is given a tensor of shape ", x.sizes(),
        ", which is made of this rank's part of some features (of heads, say) and does not have them as its last dimension, so its mask would not be that of ",
        "one device; give it the features themselves, as in [B, S, D] by flatten(-2), or of weights of attention take torch::nn::Dropout");
    here.first_feature = block->by_rank ? block->first * x.size(-1) : block->first;  // of no stated step: at least other masks on each
    here.features = block->by_rank ? block->all * x.size(-1) : block->all;
    const nn::SampleScope scope(here);
    return next(std::move(inputs));
  }

 private:
  nn::Values followed(const nn::Module& module, const at::Tensor& x, nn::Values inputs, const nn::Next& next) const {
    Cut cut = context_->trace->features_of(x);
    if (!cut.defined()) return next(std::move(inputs));
    const LayoutTrace::Trusted trusted(context_->trace);
    nn::Values outputs = next(std::move(inputs));
    outputs[0] = outputs[0].toTensor().alias();
    context_->trace->gives(module.path(), outputs[0].toTensor(), TensorLayout::Features, std::move(cut));
    return outputs;
  }

  std::shared_ptr<Context> context_;
};

}  // namespace

std::shared_ptr<nn::Interceptor> drop_features(std::shared_ptr<Context> context) { return std::make_shared<DropFeatures>(std::move(context)); }

}  // namespace tessera::tensor_parallel
