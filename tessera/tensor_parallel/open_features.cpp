#include "tessera/tensor_parallel/open_features.h"

#include <algorithm>
#include <compare>
#include <set>
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

/// Of two factors, one of which may have no gradient.
bool is_product(const torch::autograd::Node& node) {
  static const std::unordered_set<std::string> products{"MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0"};
  return products.contains(node.name());
}

/// Whether its output has some elements of its input, whichever: of a function of the program's own nobody knows.
bool takes_some(const torch::autograd::Node& node) {
  static const std::unordered_set<std::string> takes{"SliceBackward0",  "SelectBackward0",      "SplitBackward0",  "SplitWithSizesBackward0",
                                                     "UnbindBackward0", "IndexBackward0",       "GatherBackward0", "IndexSelectBackward0",
                                                     "TakeBackward0",   "MaskedSelectBackward0"};
  return takes.contains(node.name()) || (node.num_outputs() == 1 && node.name().find("CppNode<") != std::string::npos);
}

std::string beside(const std::string& path) { return path.substr(0, path.rfind('.') + 1); }

}  // namespace

bool OpenFeatures::Opened::is_exceeded_by(const at::Tensor& x) const {
  return x.dim() > static_cast<int64_t>(sizes.size()) || num_rows(x.sizes()) > num_rows(sizes);
}

/// Of heads there are more dimensions, and of weights of attention more dimensions or rows than the layer gave. Where a rank has one head, its weights may be
/// as many as its features.
bool OpenFeatures::Opened::may_show_in(const at::Tensor& x) const { return x.size(-1) == share.size && !is_exceeded_by(x) && !is_softmax_of_rows(x); }

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
    if (!edge.is_valid()) {
      if (is_product(node)) return false;
      continue;
    }
    const at::IntArrayRef some = sizes_of(*edge.function, edge.input_nr);
    if (is_whole(some)) return false;
    grows |= c10::multiply_integers(some) < c10::multiply_integers(given);
    from.insert(edge.function.get());
  }
  return grows && from.size() == 1;
}

/// Whether a node gives as small a part of all features, be they in heads, as this rank has of them.
bool OpenFeatures::Opened::is_share_of_all(const Node& node, uint32_t place) const {
  const at::IntArrayRef given = sizes_of(node, place);
  const int64_t elements = c10::multiply_integers(given);
  if (all == share.size || given.empty() || elements == 0 || given.back() == all) return false;
  return std::ranges::any_of(node.next_edges(), [&](const torch::autograd::Edge& edge) {
    if (!edge.is_valid()) return false;
    const at::IntArrayRef from = sizes_of(*edge.function, edge.input_nr);
    const int64_t of = c10::multiply_integers(from);
    return elements * all == of * share.size && (from.back() == all || of == num_rows(sizes) * all);
  });
}

/// Whether a node takes this rank's features out of all. A run of them that begins where its own do may be what every rank has taken.
bool OpenFeatures::Opened::is_parted_by(const comm::Group& group, const Node& node, uint32_t place) const {
  return comm::differentiable::gives_its_own_on(group, node) && is_share_of_all(node, place);
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
  for (Opened& one : opened_) one.taken = one.taken || made_of(one, input) != Made::Otherwise || !one.node;
}

void OpenFeatures::bound(const at::Tensor& output) {
  if (has_graph(output)) bounds_.emplace_back(output.grad_fn());
}

/// The graph of x has the output's node, and nothing lies between the two of which each rank has the whole, unless it took its own part of that again. Where
/// it took as much of that in another way, nobody can tell whether other ranks have taken others.
OpenFeatures::Made OpenFeatures::made_of(const Opened& one, const at::Tensor& x) const {
  const c10::intrusive_ptr<Node> origin = one.node ? one.node->lock() : c10::intrusive_ptr<Node>();
  if (!origin || !has_graph(x)) return Made::Otherwise;
  std::unordered_set<const Node*> bounds;
  for (const auto& bound : bounds_) bounds.insert(bound.lock().get());
  const auto gives_the_whole = [&](const Node& node) { return comm::differentiable::gives_the_same_on(group_, node) || one.is_brought_together_by(node); };
  enum Taken : size_t { Nothing, OwnPart, SomePart };
  struct Step {
    const Node* node;
    uint32_t place;  ///< which of its outputs
    Taken taken;     ///< behind it
    auto operator<=>(const Step&) const = default;
  };
  std::set<Step> seen;
  std::vector<Step> next{{x.grad_fn().get(), static_cast<uint32_t>(x.output_nr()), Nothing}};
  bool own_again = false, unknown = false;
  while (!next.empty()) {
    auto [node, place, taken] = next.back();
    next.pop_back();
    if (node == origin.get() && taken != OwnPart) return Made::OfFeatures;
    own_again |= node == origin.get();
    if (node == nullptr || node->sequence_nr() < origin->sequence_nr() || !seen.insert({node, place, taken}).second || bounds.contains(node)) continue;
    if (taken != OwnPart && gives_the_whole(*node)) {
      unknown |= taken == SomePart;
      continue;
    }
    if (one.is_parted_by(group_, *node, place)) {
      taken = OwnPart;
    } else if (taken == Nothing && takes_some(*node) && one.is_share_of_all(*node, place)) {
      taken = SomePart;
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) next.push_back({edge.function.get(), edge.input_nr, taken});
  }
  return unknown ? Made::OfFeaturesOrAll : own_again ? Made::OfFeatures : Made::Otherwise;
}

/// Where no row-wise layer takes the features, the program has brought them together, or is about to. What shows none may be the stream, of which more layers
/// are about to be given some, but for what is larger: heads, weights of attention.
OpenFeatures::Made OpenFeatures::made_without_graph(const Opened& one, const std::string& path, const at::Tensor& x) const {
  const std::string here = beside(one.path), above = here.empty() ? here : beside(here.substr(0, here.size() - 1));
  if (one.taken || !path.starts_with(here)) return Made::Otherwise;
  const bool is_taken_later = std::ranges::any_of(
      takers_, [&](const auto& taker) { return taker.first.starts_with(here) || (taker.second == one.all && taker.first.starts_with(above)); });
  if (!one.may_show_in(x)) return !one.node && is_taken_later && one.is_exceeded_by(x) ? Made::OfFeatures : Made::Otherwise;
  return is_taken_later ? Made::OfFeatures : Made::OfFeaturesOrAll;
}

std::optional<OpenFeatures::Block> OpenFeatures::find(const std::string& path, const at::Tensor& x) const {
  std::optional<Block> found;
  std::string unknown_of;
  for (const Opened& one : opened_) {
    const Made made = one.node && x.requires_grad() ? made_of(one, x) : made_without_graph(one, path, x);
    if (made == Made::OfFeaturesOrAll) unknown_of = one.path;
    if (made != Made::OfFeatures) continue;
    const bool shows = one.may_show_in(x);
    // Of queries and keys, which attention makes its output of, it has the queries' features: there are as many or more of them.
    if (shows && (!found || found->by_rank || one.all > found->all)) found = Block{.first = one.share.begin, .all = one.all};
    // Ranks that share keys drop other things of them, each of its own queries.
    if (!shows && (!found || (found->by_rank && one.share.holders == 1))) {
      found = Block{.first = one.share.first_holder, .all = group_.size(), .by_rank = true};
    }
  }
  if (!found && !unknown_of.empty()) found = Block{.unknown_of = unknown_of};
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
        block->unknown_of.empty() || here.step == 0, "parallelize_module: Dropout '", module.path(), "' is given a tensor of shape ", x.sizes(), " behind '",
        block->unknown_of,
        "', and nobody can tell whether it is this rank's part of some features, or the same on every rank, so its mask might not be that of one device; of "
        "what was brought together take a part by comm::differentiable::split; of what records no graph let a "
        "RowParallel layer beside take the features; of what all ranks hold alike take torch::nn::Dropout");
    if (!block->unknown_of.empty()) return next(std::move(inputs));  // of no stated step: all ranks' mask
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
