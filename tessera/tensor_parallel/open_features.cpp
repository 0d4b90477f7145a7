#include "tessera/tensor_parallel/open_features.h"

#include <algorithm>
#include <compare>
#include <cstdint>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "tessera/comm/collective_node.h"
#include "tessera/core/error.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/noted.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/nn/sharing.h"
#include "tessera/tensor_parallel/convert.h"

// What a tensor is made of the graph of the pass knows, and nothing else does: shapes do not tell h / t features of a feed-forward layer from h of the stream.
// A node is numbered when it is made, so nothing before an output is looked at. Where the graph ends in a tensor that has none, only where and when a dropout
// is called is left, and what that does not tell is unknown.

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

bool is_own_function(const torch::autograd::Node& node) { return node.name().find("CppNode<") != std::string::npos; }

/// Whether its output has some elements of its input, whichever: of a function of the program's own nobody knows.
bool takes_some(const torch::autograd::Node& node) {
  static const std::unordered_set<std::string> takes{"SliceBackward0",  "SelectBackward0",      "SplitBackward0",  "SplitWithSizesBackward0",
                                                     "UnbindBackward0", "IndexBackward0",       "GatherBackward0", "IndexSelectBackward0",
                                                     "TakeBackward0",   "MaskedSelectBackward0"};
  return takes.contains(node.name()) || (node.num_outputs() == 1 && is_own_function(node));
}

/// Whether it is a leaf that may be anything: one that the program has detached, or that came to a stage of a pipeline.
bool is_unknown_leaf(const torch::autograd::Node& node) {
  const auto* const leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node);
  return leaf != nullptr && nn::sharings_of(leaf->variable).empty();
}

std::string beside(const std::string& path) { return path.substr(0, path.rfind('.') + 1); }

}  // namespace

bool OpenFeatures::Opened::is_alive() const {
  return std::ranges::any_of(origins, [](const auto& origin) { return !origin.second.expired(); });
}

bool OpenFeatures::Opened::is_exceeded_by(const at::Tensor& x) const {
  return x.dim() > static_cast<int64_t>(sizes.size()) || num_rows(x.sizes()) > num_rows(sizes);
}

/// Of heads there are more dimensions, and of weights of attention more dimensions or rows than the layer gave. Where a rank has one head, its weights may be
/// as many as its features.
bool OpenFeatures::Opened::may_show_in(const at::Tensor& x) const { return x.size(-1) == share.size && !is_exceeded_by(x) && !is_softmax_of_rows(x); }

/// Whether a node gives all features of the layer's rows, or of fewer.
bool OpenFeatures::Opened::shows_all(const Node& node, uint32_t place) const {
  const at::IntArrayRef given = sizes_of(node, place);
  return !given.empty() && given.back() == all && num_rows(given) <= num_rows(sizes);
}

/// Whether a node may be a collective that the program has written itself: it gives all ranks' elements of one tensor. (No operator of libtorch's does,
/// whatever its result's shape is.)
bool OpenFeatures::Opened::is_brought_together_by(const comm::Group& group, const Node& node) const {
  const auto is_valid = [](const torch::autograd::Edge& edge) { return edge.is_valid(); };
  if (all == share.size || node.num_inputs() != 1 || std::ranges::count_if(node.next_edges(), is_valid) != 1 || !is_own_function(node)) return false;
  const torch::autograd::Edge& edge = *std::ranges::find_if(node.next_edges(), is_valid);
  const int64_t given = c10::multiply_integers(sizes_of(node, 0)), from = c10::multiply_integers(sizes_of(*edge.function, edge.input_nr));
  return given == from * group.size() || given * share.size == from * all;
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

OpenFeatures::Pass OpenFeatures::pass_of(const at::Tensor& tensor) {
  const nn::SampleContext& here = nn::SampleScope::current();
  return {here.seed, here.step, here.first_sample, tensor.is_meta()};
}

void OpenFeatures::open(const std::string& path, const at::Tensor& output, const std::vector<FeatureShare>& shares) {
  const Pass pass = pass_of(output);
  std::erase_if(opened_, [&](const Opened& one) { return !one.is_alive() && (one.path == path || one.pass != pass); });
  std::erase_if(bounds_, [](const auto& bound) { return bound.second.expired(); });
  std::erase_if(wholes_, [](const auto& whole) { return whole.second.expired(); });
  std::map<Output, WeakNode> origins;
  for (const at::Tensor& given : {output, output.is_view() ? at::Tensor(output._base()) : output}) {
    if (has_graph(given)) origins.emplace(Output(given.grad_fn().get(), given.output_nr()), given.grad_fn());
  }
  std::set<int64_t> widths;
  for (const FeatureShare& share : shares) widths.insert(share.size);
  opened_.push_back({.path = path,
                     .origins = std::move(origins),
                     .since = at::sequence_number::peek(),
                     .pass = pass,
                     .sizes = output.sizes().vec(),
                     .share = shares[static_cast<size_t>(group_.rank())],
                     .widths = std::move(widths),
                     .all = shares.back().begin + shares.back().size});
}

void OpenFeatures::close(const at::Tensor& output) {
  for (Opened& one : opened_) one.taken = true;
  if (has_graph(output)) bounds_.emplace(Output(output.grad_fn().get(), output.output_nr()), output.grad_fn());
  note_whole(output);
}

void OpenFeatures::note_whole(const at::Tensor& input) {
  if (input.has_storage()) wholes_.emplace(input.storage().unsafeGetStorageImpl(), input.storage().getWeakStorageImpl());
}

OpenFeatures::Behind OpenFeatures::behind(const at::Tensor& x) const {
  Behind behind;
  behind.is_bound =
      has_graph(x) ? bounds_.contains({x.grad_fn().get(), x.output_nr()}) : x.has_storage() && wholes_.contains(x.storage().unsafeGetStorageImpl());
  behind.is_whole = behind.is_bound;
  if (!has_graph(x) || behind.is_bound) return behind;
  std::map<Output, const Opened*> origins;
  uint64_t first = at::sequence_number::peek();
  for (const Opened& one : opened_) {
    for (const auto& [output, node] : one.origins) origins.emplace(output, &one);
    first = std::min(first, one.since);
  }
  bool is_known = true;
  std::set<Output> seen;
  std::vector<Output> next{{x.grad_fn().get(), static_cast<uint32_t>(x.output_nr())}};
  while (!next.empty()) {
    const Output output = next.back();
    const Node* const node = output.first;
    next.pop_back();
    if (!seen.insert(output).second) continue;
    const auto origin = origins.find(output);
    if (origin != origins.end()) {
      behind.layers.insert(origin->second);
    } else if (node == nullptr || is_unknown_leaf(*node)) {
      is_known = false;
    } else if (bounds_.contains(output)) {
      behind.is_whole = true;
    } else {
      behind.oldest = std::min(behind.oldest, node->sequence_nr());
      if (node->sequence_nr() < first) continue;
      for (const torch::autograd::Edge& edge : node->next_edges()) next.emplace_back(edge.function.get(), edge.input_nr);
    }
  }
  behind.is_whole |= is_known;
  return behind;
}

/// Nothing lies between x and the layer of which each rank has the whole, unless it took its own part of that again. Where it took as much of that in another
/// way, nobody can tell whether other ranks have taken others.
OpenFeatures::Made OpenFeatures::made_of(const Opened& one, const at::Tensor& x) const {
  enum Taken : size_t { Nothing, OwnPart, SomePart };
  struct Step {
    const Node* node;
    uint32_t place;  ///< which of its outputs
    Taken taken;     ///< behind it
    bool all;        ///< whether something behind it has the features of all ranks
    auto operator<=>(const Step&) const = default;
  };
  std::set<Step> seen;
  std::vector<Step> next{{x.grad_fn().get(), static_cast<uint32_t>(x.output_nr()), Nothing, false}};
  bool own_again = false, unknown = false;
  while (!next.empty()) {
    auto [node, place, taken, all] = next.back();
    next.pop_back();
    const bool is_origin = one.origins.contains({node, place});
    if (is_origin && taken != OwnPart) return Made::OfFeatures;
    own_again |= is_origin;
    if (node == nullptr || node->sequence_nr() < one.since || !seen.insert({node, place, taken, all}).second || bounds_.contains({node, place})) continue;
    all |= one.shows_all(*node, place);
    if (taken != OwnPart && (comm::differentiable::gives_the_same_on(group_, *node) || (all && one.is_brought_together_by(group_, *node)))) {
      unknown |= taken == SomePart;
      continue;
    }
    if (one.is_parted_by(group_, *node, place)) {
      taken = OwnPart;
    } else if (taken == Nothing && !all && takes_some(*node) && one.is_share_of_all(*node, place)) {
      taken = SomePart;
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) next.push_back({edge.function.get(), edge.input_nr, taken, all});
  }
  return unknown ? Made::OfFeaturesOrAll : own_again ? Made::OfFeatures : Made::Otherwise;
}

/// Where no row-wise layer takes the features, the program has brought them together, or is about to. What shows none may be the stream, of which more layers
/// are about to be given some, but for what is larger: heads, weights of attention. Where shares are uneven another rank may not know what this one does.
OpenFeatures::Made OpenFeatures::made_without_graph(const Opened& one, const std::string& path, const at::Tensor& x) const {
  const std::string here = beside(one.path), above = here.empty() ? here : beside(here.substr(0, here.size() - 1));
  if (one.pass != pass_of(x) || !path.starts_with(here)) return Made::Otherwise;
  const bool is_next = one.origins.empty() && !one.taken && std::ranges::any_of(takers_, [&](const auto& taker) {
                         return taker.first.starts_with(here) || (taker.second == one.all && taker.first.starts_with(above));
                       });
  if (is_next && (one.may_show_in(x) || one.is_exceeded_by(x))) return Made::OfFeatures;
  return one.widths.contains(x.size(-1)) && !one.is_exceeded_by(x) && !is_softmax_of_rows(x) ? Made::OfFeaturesOrAll : Made::Otherwise;
}

std::optional<OpenFeatures::Block> OpenFeatures::found(const std::string& path, const at::Tensor& x, const Behind& behind) const {
  std::optional<Block> found;
  std::string unknown_of;
  for (const Opened& one : opened_) {
    const bool is_behind = behind.layers.contains(&one);
    const bool is_told = one.origins.empty() ? behind.is_bound : behind.is_whole || behind.oldest < one.since;
    const Made made = is_behind ? made_of(one, x) : is_told ? Made::Otherwise : made_without_graph(one, path, x);
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

std::optional<OpenFeatures::Block> OpenFeatures::find(const std::string& path, const at::Tensor& x) {
  if (!x.is_meta() && opened_.empty() && recorded_.empty()) return {};
  const Behind behind = this->behind(x);
  const auto known = recorded_.find(path);
  if (!x.is_meta() && behind.layers.empty() && !behind.is_whole && known != recorded_.end()) return known->second;
  auto block = found(path, x, behind);
  if (!x.is_meta()) return block;
  if (known == recorded_.end()) {
    recorded_.emplace(path, block);
  } else if (known->second != block && (known->second || block->unknown_of.empty())) {  // a second recording knows less of the stream before its first layer
    known->second = Block{.unknown_of = opened_.back().path};                           // it is given this and that
  }
  return block;
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
        block->unknown_of.empty() || here.step == 0 || x.is_meta(), "parallelize_module: Dropout '", module.path(), "' is given a tensor of shape ", x.sizes(),
        " behind '", block->unknown_of,
        "', and nobody can tell whether it is this rank's part of some features, or the same on every rank, so its mask might not be that of one device; of "
        "what was brought together take a part by comm::differentiable::split; of what records no graph, or was detached, let a RowParallel layer beside take "
        "the features behind the dropout, and no other before; of what all ranks hold alike say so in the plan, {\"",
        module.path(), "\", Gives{.layout = TensorLayout::Replicated}}; a module that drops features here and the stream there becomes two");
    if (!block->unknown_of.empty()) return next(std::move(inputs));  // of no stated step: all ranks' mask; or for its shape alone
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
