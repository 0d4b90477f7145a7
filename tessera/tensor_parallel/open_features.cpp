#include "tessera/tensor_parallel/open_features.h"

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>

#include <torch/csrc/autograd/generated/Functions.h>

#include "tessera/comm/collective_node.h"
#include "tessera/core/error.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/noted.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/tensor_parallel/convert.h"

// What a tensor is made of the graph of the pass knows, and nothing else does: shapes do not tell h / t features of a feed-forward layer from h of the stream.
// A node is numbered when it is made, so nothing before an output is looked at.

namespace tessera::tensor_parallel {

namespace {

bool has_graph(const at::Tensor& tensor) { return tensor.requires_grad() && tensor.grad_fn() != nullptr; }

int64_t num_rows(at::IntArrayRef sizes) { return c10::multiply_integers(sizes.slice(0, sizes.size() - 1)); }

/// Of what a node gave as its output number `place`; empty where that has none.
at::IntArrayRef sizes_of(const torch::autograd::Node& node, uint32_t place) {
  const auto& output = node.input_metadata(place);
  if (output.was_default_constructed() || output.is_nested_tensor()) return {};
  return c10::asIntArrayRefSlowOpt(output.shape_as_dim_vector()).value_or(at::IntArrayRef());
}

/// As of weights of attention. Along features that are cut it would need the other ranks'.
bool is_softmax_of_rows(const at::Tensor& x) {
  const auto* const node = has_graph(x) ? dynamic_cast<const torch::autograd::generated::SoftmaxBackward0*>(x.grad_fn().get()) : nullptr;
  return node != nullptr && (node->dim == -1 || node->dim == x.dim() - 1);
}

}  // namespace

/// Of heads there are more dimensions, and of weights of attention more dimensions or rows than the layer gave. Where a rank has one head, its weights may be
/// as many as its features.
bool OpenFeatures::Opened::may_show_in(const at::Tensor& x) const {
  if (x.size(-1) != share.size || x.dim() > static_cast<int64_t>(sizes.size()) || is_softmax_of_rows(x)) return false;
  if (x.dim() < static_cast<int64_t>(sizes.size())) return num_rows(x.sizes()) <= num_rows(sizes);
  return std::equal(x.sizes().begin(), x.sizes().end() - 1, sizes.begin(), std::less_equal<>());
}

/// Whether a node gives all features of the layer's rows, or of fewer, of one tensor that has them not: so does a collective that the program has written
/// itself, or what arranges its result. (Of several tensors one rank alone makes that: two layers' features one beside the other; and of as many elements a
/// view of fewer rows.)
bool OpenFeatures::Opened::is_brought_together_by(const Node& node) const {
  if (all == share.size || node.num_inputs() != 1) return false;
  const at::IntArrayRef given = sizes_of(node, 0);
  const auto is_whole = [&](at::IntArrayRef some) { return !some.empty() && some.back() == all && num_rows(some) <= num_rows(sizes); };
  if (!is_whole(given)) return false;
  std::unordered_set<const Node*> from;
  bool grows = num_rows(given) == num_rows(sizes);
  for (const torch::autograd::Edge& edge : node.next_edges()) {
    if (!edge.is_valid()) continue;
    const at::IntArrayRef some = sizes_of(*edge.function, edge.input_nr);
    if (is_whole(some)) return false;
    grows |= c10::multiply_integers(some) < c10::multiply_integers(given);
    from.insert(edge.function.get());
  }
  return grows && from.size() == 1;
}

/// Whether a node takes this rank's features out of all.
bool OpenFeatures::Opened::is_parted_by(const comm::Group& group, const Node& node) const {
  static const std::unordered_set<std::string> cuts{"SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0", "SelectBackward0"};
  if (all == share.size || !(cuts.contains(node.name()) || comm::differentiable::gives_its_own_on(group, node))) return false;
  const auto has = [](at::IntArrayRef some, int64_t size) { return !some.empty() && some.back() == size; };
  return has(sizes_of(node, 0), share.size) && std::ranges::any_of(node.next_edges(), [&](const torch::autograd::Edge& edge) {
           return edge.is_valid() && has(sizes_of(*edge.function, edge.input_nr), all);
         });
}

void OpenFeatures::open(const std::string& path, const at::Tensor& output, const std::vector<FeatureShare>& shares) {
  std::erase_if(opened_, [&](const Opened& one) { return one.taken || (one.node ? one.node->expired() : one.path == path); });
  std::erase_if(bounds_, [](const auto& node) { return node.expired(); });
  opened_.push_back({.path = path,
                     .node = has_graph(output) ? std::optional<WeakNode>(output.grad_fn()) : std::nullopt,
                     .sizes = output.sizes().vec(),
                     .share = shares[static_cast<size_t>(group_.rank())],
                     .all = shares.back().begin + shares.back().size});
}

void OpenFeatures::close(const at::Tensor& input) {
  for (Opened& one : opened_) one.taken = one.taken || is_behind(one, input) || !one.node;
}

void OpenFeatures::bound(const at::Tensor& output) {
  if (has_graph(output)) bounds_.emplace_back(output.grad_fn());
}

/// Whether the graph of x has the output's node, and nothing lies between the two of which each rank has the whole, unless it took its own part of that again.
bool OpenFeatures::is_behind(const Opened& one, const at::Tensor& x) const {
  const c10::intrusive_ptr<Node> origin = one.node ? one.node->lock() : c10::intrusive_ptr<Node>();
  if (!origin || !has_graph(x)) return false;
  std::unordered_set<const Node*> bounds;
  for (const auto& bound : bounds_) bounds.insert(bound.lock().get());
  const auto gives_the_whole = [&](const Node& node) { return comm::differentiable::gives_the_same_on(group_, node) || one.is_brought_together_by(node); };
  std::array<std::unordered_set<const Node*>, 2> seen;  // by whether a part was taken
  std::vector<std::pair<const Node*, bool>> next{{x.grad_fn().get(), false}};
  while (!next.empty()) {
    auto [node, parted] = next.back();
    next.pop_back();
    if (node == origin.get()) return true;
    if (node == nullptr || node->sequence_nr() < origin->sequence_nr() || !seen[parted ? 1 : 0].insert(node).second) continue;
    if (bounds.contains(node) || (!parted && gives_the_whole(*node))) continue;
    parted |= one.is_parted_by(group_, *node);
    for (const torch::autograd::Edge& edge : node->next_edges()) next.emplace_back(edge.function.get(), parted);
  }
  return false;
}

namespace {
std::string beside(const std::string& path) { return path.substr(0, path.rfind('.') + 1); }
}  // namespace

std::optional<OpenFeatures::Block> OpenFeatures::find(const std::string& path, const at::Tensor& x) const {
  std::optional<Block> found;
  for (const Opened& one : opened_) {
    const bool shows = one.may_show_in(x), graph = one.node && x.requires_grad();
    if (graph ? !is_behind(one, x) : one.taken || !shows || !path.starts_with(beside(one.path))) continue;
    // Of queries and keys, which attention makes its output of, it has the queries' features: there are as many or more of them.
    if (shows && (!found || found->by_rank || one.all > found->all)) found = Block{.first = one.share.begin, .all = one.all};
    // Ranks that share keys drop other things of them, each of its own queries.
    if (!shows && (!found || (found->by_rank && one.share.holders == 1))) {
      found = Block{.first = one.share.first_holder, .all = group_.size(), .by_rank = true};
    }
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
