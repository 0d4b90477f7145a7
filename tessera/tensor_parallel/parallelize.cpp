#include "tessera/tensor_parallel/parallelize.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/nn/adapter_names.h"
#include "tessera/nn/along.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/cut_parameter.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/head.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/operators.h"
#include "tessera/nn/part_watch.h"
#include "tessera/nn/sharing.h"
#include "tessera/nn/weights_in_use.h"
#include "tessera/tensor_parallel/convert.h"
#include "tessera/tensor_parallel/known_parts.h"
#include "tessera/tensor_parallel/linear.h"
#include "tessera/tensor_parallel/open_features.h"
#include "tessera/tensor_parallel/overlap.h"
#include "tessera/tensor_parallel/same_input.h"
#include "tessera/tensor_parallel/sequence.h"
#include "tessera/tensor_parallel/vocabulary.h"

// A plan is carried out pattern by pattern, and each style says three things of a parameter: how it is cut, who else holds the same elements, and whether a
// rank's gradient is the whole or a term. Sums of gradients and norms read the last two and need no list of layers. The check of a plan is no second
// description of the styles: it carries the same plan out on meta, in a world that computes nothing, and the same interceptors tell the trace what they take
// and give.

namespace tessera {

namespace {

using tensor_parallel::convertible;
using tensor_parallel::kName;
using tensor_parallel::KnownParts;
using tensor_parallel::WholeParts;

/// Carries a plan out on one module after the other. A style that computes owns its module; Prepare* add to it.
class Builder {
 public:
  Builder(std::shared_ptr<tensor_parallel::Context> context, const ParallelPlan& plan, const TensorParallelOptions& options)
      : context_(std::move(context)),
        options_(options),
        embeds_(std::ranges::any_of(plan, [](const auto& entry) { return std::holds_alternative<VocabParallelEmbedding>(entry.second); })) {}

  void apply(const std::string& path, nn::Module& module, const ParallelStyle& style) {
    path_ = path;
    style_ = to_string(style);
    if (!std::holds_alternative<PrepareInput>(style) && !std::holds_alternative<PrepareOutput>(style)) own(module);
    auto interceptor = make_alike(module, style);
    if (size() == 1) return;
    for (const at::Tensor& weight : nn::weights_in_use(module)) {
      if (!nn::slice_of(weight).is_whole()) cut_by_.emplace(weight.unsafeGetTensorImpl(), style_ + " of '" + path_ + "'");
    }
    styled_.push_back(&module);
    const auto* const column = std::get_if<ColumnParallel>(&style);
    gives_features_ |= column != nullptr && column->output == TensorLayout::Features;
    const auto* const row = std::get_if<RowParallel>(&style);
    if ((row != nullptr && row->output != TensorLayout::Partial) || std::holds_alternative<VocabParallelEmbedding>(style)) meeting_.insert(&module);
    attached_.add(nn::attach(module, std::move(interceptor)));
    attached_.add(nn::expect_call(module, "parallelize_module: " + style_ + " of '" + path + "'"));
    attach_check(module);
    if (!options_.check_inputs) return;
    for (const int argument : std::visit([&](const auto& one) { return from_outside(one); }, style)) {
      attached_.add(nn::attach(module, tensor_parallel::same_input(context_, argument)));
    }
  }

  /// Says of every parameter of `module` who holds it: what no style has cut or shared lies whole on all ranks, with the whole of its gradient, unless somebody
  /// else who deals parameters over these ranks has said it (experts).
  std::unique_ptr<TensorParallel> finish(torch::nn::Module& module) {
    module.apply([this](const std::string& path, const torch::nn::Module& one) { require_whole(one, path); });
    const auto is_ours = [this](const nn::Sharing& sharing) { return sharing.axis == context_->group.name(); };
    follow_features(module);
    std::vector<nn::NamedParameter> parts;
    for (const auto& parameter : nn::unique_parameters(module)) {
      if (size() == 1) break;
      if (std::ranges::any_of(nn::sharings_of(parameter.tensor), is_ours)) continue;
      const auto found = sharings_.find(parameter.tensor.unsafeGetTensorImpl());
      const bool dealt = found == sharings_.end() && is_dealt_here(parameter);
      nn::Sharing sharing = dealt ? own_part() : found == sharings_.end() ? everyone(/*is_term=*/false) : found->second;
      sharing.even = even_;
      sharing.watched = options_.watch_terms;
      if (sharing.sets > 1) parts.push_back(parameter);
      if (sharing.sets > 1 && !dealt) {
        nn::note_dealt(parameter.tensor, {.group = context_->group, .first = sharing.first, .holders = sharing.holders, .by = kName});
      }
      nn::add_sharing(parameter.tensor, std::move(sharing));
    }
    const auto length = tensor_parallel::keeps_length(context_);
    for (nn::Module* const layer : styled_) attached_.add(nn::attach(*layer, length));
    if (options_.watch_terms && size() > 1) {
      const auto wholes = std::make_shared<WholeParts>(context_->group, nn::unique_parameters(module), meeting_, told_);
      for (nn::Module* const layer : styled_) attached_.add(nn::attach(*layer, wholes));
      if (!parts.empty()) attached_.add(nn::watch_parts(kName, parts));
    }
    return std::make_unique<TensorParallel>(context_->group, context_, alive_, std::move(attached_));
  }

 private:
  int size() const { return context_->group.size(); }
  nn::Sharing held_by(int first, int holders) const {
    return {.axis = context_->group.name(), .rank = context_->group.rank(), .first = first, .holders = holders};
  }
  nn::Sharing everyone(bool is_term) const {
    nn::Sharing sharing = held_by(0, size());
    sharing.is_term = is_term;
    return sharing;
  }
  nn::Sharing own_part() const {
    nn::Sharing sharing = held_by(context_->group.rank(), 1);
    sharing.set = sharing.rank;
    sharing.sets = size();
    return sharing;
  }

  /// Whether somebody else (expert_parallel) has given each rank of the group other elements of what no style cuts.
  bool is_dealt_here(const nn::NamedParameter& parameter) const {
    for (const nn::Dealt& dealt : nn::dealt_of(parameter.tensor)) {
      int others = 0;
      for (int member = 0; member < size(); ++member) others += dealt.holds_others(context_->group.world_rank(member)) ? 1 : 0;
      require(others == 0 || others == size() - 1, "parallelize_module: '", parameter.name, "' is dealt over ", dealt.group.name(), " by ", dealt.by,
              ", which has ", others + 1, " of the ", size(), " ranks of ", context_->group.name(), ": deal it over all of them, or over one");
      if (others > 0) return true;
    }
    return false;
  }

  size_t rank() const { return static_cast<size_t>(context_->group.rank()); }

  template <class... What>
  void check(bool condition, What&&... what) const {
    require(condition, "parallelize_module: ", style_, " of '", path_, "': ", std::forward<What>(what)...);
  }

  /// What is tied is cut once, and has to be cut alike.
  std::shared_ptr<nn::Interceptor> make_alike(nn::Module& module, const ParallelStyle& style) {
    std::string other;
    for (const at::Tensor& weight : nn::weights_in_use(module)) {
      if (const auto found = cut_by_.find(weight.unsafeGetTensorImpl()); found != cut_by_.end()) other = found->second;
    }
    try {
      return std::visit([&](const auto& one) { return make(module, one); }, style);
    } catch (const InternalError&) {
      check(other.empty(), "it shares a weight with ", other, ", which cuts it in another way; untie the two, or leave both whole");
      throw;
    }
  }

  /// Dropouts that the plan does not name may lie between a column-wise layer and the row-wise one behind it.
  void follow_features(torch::nn::Module& module) {
    if (size() == 1 || !gives_features_) return;
    std::set<const nn::Module*> seen;
    module.apply([&](torch::nn::Module& one) {
      auto* const drop = dynamic_cast<nn::DropoutImpl*>(&one);
      if (drop == nullptr || owners_.contains(drop) || !seen.insert(drop).second) return;
      if (!context_->open_features) context_->open_features = std::make_shared<tensor_parallel::OpenFeatures>(context_->group, takers_);
      attached_.add(nn::attach(*drop, tensor_parallel::drop_features(context_)));
    });
  }

  /// What no style owns computes with whole weights.
  void require_whole(const torch::nn::Module& module, const std::string& path) const {
    const auto* const ours = dynamic_cast<const nn::Module*>(&module);
    if (ours != nullptr && owners_.contains(ours)) return;
    for (const at::Tensor& weight : nn::weights_in_use(module)) {
      const auto found = cut_by_.find(weight.unsafeGetTensorImpl());
      require(found == cut_by_.end(), "parallelize_module: '", path, "' shares a weight that ", found == cut_by_.end() ? "" : found->second,
              " cuts, and has no style of its own; give it the one that cuts alike (VocabParallelHead beside VocabParallelEmbedding), or untie the two");
    }
  }

  void own(const nn::Module& module) {
    const auto [before, is_new] = owners_.emplace(&module, style_);
    check(is_new, "the plan gives this module to ", before->second, " already; leave one of the two out");
  }

  template <class Impl>
  Impl& as(nn::Module& module, const char* kind) const {
    auto* impl = dynamic_cast<Impl*>(&module);
    check(impl != nullptr, "it is no ", kind, " but ", module.name(), "; give the style to the layer itself");
    if constexpr (requires { impl->weight; })
      check(impl->weight.defined(), "its weight is gone, into fewer bits; call parallelize_module before quantize_weights");
    return *impl;
  }

  /// Around the call of what has parameters that the style has cut, or of whose gradients ranks have terms.
  void attach_check(nn::Module& module) {
    std::vector<at::Tensor> shared;
    for (const at::Tensor& parameter : module.parameters()) {
      if (owners_.contains(&module) && sharings_.contains(parameter.unsafeGetTensorImpl())) shared.push_back(parameter);
    }
    if (shared.empty()) return;
    attached_.add(nn::attach(module, std::make_shared<KnownParts>(context_->group.name(), shared, options_.watch_terms, told_)));
    nn::require_handle(module, alive_, kName);
  }

  void check_layouts(TensorLayout from, TensorLayout to, const char* which) const {
    check(convertible(from, to), "its ", which, " is ", to_string(from), " and ", to_string(to), " is asked for: there is no way between them");
  }

  void cut_vocabulary(const at::Tensor& weight) {
    tensor_parallel::cut_vocabulary(weight, context_->group);
    even_ &= nn::slice_of(weight).shape[0] % size() == 0;
    remember_cut(weight);
  }

  void remember(const at::Tensor& parameter, nn::Sharing sharing) {
    if (parameter.defined()) sharings_.insert_or_assign(parameter.unsafeGetTensorImpl(), std::move(sharing));
  }

  /// Each rank has a part of its own.
  void remember_cut(const at::Tensor& parameter) { remember(parameter, own_part()); }

  /// Each has one of these shares, which may be another's, too; then its gradient is one of several terms.
  void remember_shares(const at::Tensor& parameter, const std::vector<FeatureShare>& shares) {
    const FeatureShare& own = shares[rank()];
    if (std::ranges::all_of(shares, [](const FeatureShare& share) { return share.holders == 1; })) return remember_cut(parameter);
    int sets = 0, set = 0;
    for (size_t holder = 0; holder < shares.size(); ++holder) {
      if (shares[holder].first_holder != static_cast<int>(holder)) continue;
      if (shares[holder].first_holder == own.first_holder) set = sets;
      ++sets;
    }
    nn::Sharing sharing = held_by(own.first_holder, own.holders);
    sharing.set = set;
    sharing.sets = sets;
    sharing.is_term = true;
    remember(parameter, std::move(sharing));
  }

  /// What stands beside a weight of which dimension `dim` is cut into `shares`.
  void cut_beside(const nn::LinearImpl& linear, int64_t dim, const std::vector<FeatureShare>& shares) {
    for (const auto& item : linear.named_parameters(/*recurse=*/false)) {
      const at::Tensor& parameter = item.value();
      const auto along = nn::along_of(parameter);
      require(along || !nn::is_adapter(item.key()), "parallelize_module: '", linear.path(), ".", item.key(),
              "' does not know how it lies along its weight (it was given data of another shape since: set_data, torch::load); call lora::attach behind that");
      if (!along) continue;
      if (along->of_weight != dim) {
        remember(parameter, everyone(/*is_term=*/true));
        continue;
      }
      nn::cut_parameter(parameter, along->dim, shares[rank()].begin, shares[rank()].size);
      remember_shares(parameter, shares);
    }
  }

  /// Of a layer's features; remembers whether they are even.
  std::vector<FeatureShare> cut_of(const FeatureCut& cut, int64_t features) {
    auto shares = shares_of(cut, features);
    even_ &= std::ranges::all_of(shares, [&](const FeatureShare& share) { return share.size == shares.front().size; });
    return shares;
  }

  std::vector<FeatureShare> shares_of(const FeatureCut& cut, int64_t features) const {
    try {
      return cut.shares(features, size());
    } catch (const ConfigError& error) {
      throw ConfigError(detail::concat(error.what(), " (", style_, " of '", path_, "')"));
    }
  }

  /// Heads that nothing is cut by would be taken for a cut that was asked for.
  void check_cut(const FeatureCut& cut) const {
    check(
        cut.by != FeatureCut::By::Feature || (cut.heads == 0 && cut.kv_heads == 0),
        "heads say nothing of features that are cut one by one; write .cut = FeatureCut::query_heads(heads, kv_heads), or key_value_heads of keys and values");
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module& module, const ColumnParallel& style) {
    auto& linear = as<nn::LinearImpl>(module, "nn::Linear");
    check_cut(style.cut);
    check_layouts(style.input, TensorLayout::Copied, "input");
    check_layouts(TensorLayout::Features, style.output, "output");
    check(style.output == TensorLayout::Features || style.cut.by == FeatureCut::By::Feature,
          "features that are cut by heads are not gathered; leave output = Features, and let a RowParallel layer take them");
    auto shares = cut_of(style.cut, linear.options.out_features());
    tensor_parallel::cut_columns(linear, shares[rank()]);
    for (const at::Tensor& parameter : {linear.weight, linear.bias}) remember_shares(parameter, shares);
    cut_beside(linear, 0, shares);
    if (context_->overlap) context_->overlap->features[&linear] = shares[rank()].size;
    return tensor_parallel::column_parallel(context_, style, std::move(shares));
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module& module, const RowParallel& style) {
    auto& linear = as<nn::LinearImpl>(module, "nn::Linear");
    check_cut(style.cut);
    check_layouts(style.input, TensorLayout::Features, "input");
    check_layouts(TensorLayout::Partial, style.output, "output");
    check(style.input == TensorLayout::Features || style.cut.by == FeatureCut::By::Feature,
          "an input that is cut by heads has to come that way from the layers before; leave input = Features");
    check(style.output != TensorLayout::Partial || !linear.bias.defined(),
          "output = Partial would have the bias added once a rank; ask for Replicated or Sequence, or build the layer without bias");
    auto shares = cut_of(style.cut, linear.options.in_features());
    if (size() > 1) tensor_parallel::cut_rows(linear, shares[rank()]);
    remember_cut(linear.weight);
    cut_beside(linear, 1, shares);
    if (style.output == TensorLayout::Sequence) remember(linear.bias, everyone(/*is_term=*/true));
    if (style.input == TensorLayout::Features) takers_[linear.path()] = linear.options.in_features();
    return tensor_parallel::row_parallel(context_, style, std::move(shares));
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module& module, const VocabParallelEmbedding& style) {
    auto& embedding = as<nn::EmbeddingImpl>(module, "nn::Embedding");
    check_layouts(TensorLayout::Partial, style.output, "output");
    check(style.output != TensorLayout::Partial, "what it looks up is a term of the sum on each rank; ask for Replicated or Sequence");
    cut_vocabulary(embedding.weight);
    if (auto& padding = embedding.options.padding_idx()) {
      const Box& held = nn::slice_of(embedding.weight).boxes.at(0);
      const int64_t row = *padding - held.offset[0];
      padding = row >= 0 && row < held.size[0] ? std::optional(row) : std::nullopt;
    }
    return tensor_parallel::vocab_parallel_embedding(context_, style, embedding);
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module& module, const VocabParallelHead& style) {
    auto& head = as<nn::LanguageModelHeadImpl>(module, "nn::LanguageModelHead");
    check_layouts(style.input, TensorLayout::Copied, "input");
    cut_vocabulary(head.weight);
    if (size() == 1) return nullptr;
    return tensor_parallel::vocab_parallel_head(context_, style, head);
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module& module, const SequenceParallel&) {
    for (const at::Tensor& parameter : module.parameters()) {
      check(nn::slice_of(parameter).is_whole(), "its parameter '", nn::slice_of(parameter).name, "' is cut; a part of the sequence needs whole parameters");
      remember(parameter, everyone(/*is_term=*/true));
    }
    return tensor_parallel::sequence_parallel(context_);
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module& module, const PrepareInput& style) {
    check(style.argument >= 0, "argument = ", style.argument, " must not be negative");
    check_prepared(style.from, style.to);
    std::vector<nn::LinearImpl*> layers;
    for (const std::string& pattern : style.layers) {
      for (const auto& [path, layer] : nn::interceptable_modules(module, pattern)) layers.push_back(&as<nn::LinearImpl>(*layer, "nn::Linear"));
    }
    check(layers.empty() || style.to == TensorLayout::Copied, "its layers take what is copied, and to = ", to_string(style.to));
    auto plain = tensor_parallel::prepare_input(context_, style);
    if (!context_->overlap || layers.empty()) return plain;
    return tensor_parallel::prepare_products(context_, style, std::move(layers), std::move(plain));
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module&, const PrepareOutput& style) {
    check_prepared(style.from, style.to);
    return tensor_parallel::prepare_output(context_, style);
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module&, const Gives& style) {
    if (style.layout != TensorLayout::Features) return tensor_parallel::gives(context_, style, {});
    check(style.cut.by != FeatureCut::By::Feature, "how features are cut is known to the layers alone, but for heads; give it the cut of the layers before");
    const int64_t heads = style.cut.by == FeatureCut::By::QueryHead ? style.cut.heads : style.cut.kv_heads;
    return tensor_parallel::gives(context_, style, shares_of(style.cut, heads)[rank()]);
  }

  /// Arguments that have to be the same on every rank and come from outside. Activations do where the plan embeds no ids of which they were made.
  std::vector<int> from_outside(const VocabParallelEmbedding&) const { return {0}; }
  std::vector<int> from_outside(const VocabParallelHead& style) const {
    std::vector<int> arguments = activations(style.input, 0);
    arguments.push_back(1);  // labels
    return arguments;
  }
  std::vector<int> from_outside(const PrepareInput& style) const { return activations(style.from, style.argument); }
  template <class Style>
  std::vector<int> from_outside(const Style& style) const {
    if constexpr (requires { style.input; }) return activations(style.input, 0);
    return {};
  }
  std::vector<int> activations(TensorLayout layout, int argument) const {
    return layout == TensorLayout::Replicated && !embeds_ ? std::vector{argument} : std::vector<int>{};
  }

  void check_prepared(TensorLayout from, TensorLayout to) const {
    check_layouts(from, to, "tensor");
    check(from != TensorLayout::Features && to != TensorLayout::Features,
          "how features are cut is known to the layers alone; ask ColumnParallel for output = Replicated, or RowParallel for input = Replicated");
  }

  std::shared_ptr<tensor_parallel::Context> context_;
  TensorParallelOptions options_;
  bool embeds_;                            ///< whether the plan turns ids into activations
  bool gives_features_ = false;            ///< whether a layer of the plan gives a part of its features
  std::map<std::string, int64_t> takers_;  ///< layers that take such parts, and of how many features in all
  std::string path_, style_;
  std::vector<nn::Module*> styled_;
  std::set<const nn::Module*> meeting_;  ///< of those, layers whose forward adds up the ranks' results
  std::shared_ptr<tensor_parallel::ToldParts> told_ = std::make_shared<tensor_parallel::ToldParts>();
  std::map<const nn::Module*, std::string> owners_;
  std::map<const c10::TensorImpl*, nn::Sharing> sharings_;
  std::map<const c10::TensorImpl*, std::string> cut_by_;         ///< of what is cut: the style that did
  std::shared_ptr<const void> alive_ = std::make_shared<int>();  ///< as long as the handle is
  bool even_ = true;                                             ///< ranks hold parts of one size, of each parameter
  Attachment attached_;
};

/// What one plan has said of all parameters (whole on all ranks, or a term) another would not change, and layers of both would convert twice.
void require_first_plan(const torch::nn::Module& root, const comm::Group& group) {
  if (group.size() == 1) return;
  const auto check = [&](bool is_first, const std::string& name) {
    require(is_first, "parallelize_module: '", name, "' is cut over ", group.name(),
            " by an earlier call, which has said of every parameter who holds it; give one plan for the whole model");
  };
  for (const auto& parameter : nn::unique_parameters(root)) {
    for (const nn::Dealt& dealt : nn::dealt_of(parameter.tensor)) {
      check(dealt.by != kName || dealt.group.name() != group.name(), parameter.name);
    }
  }
  root.apply([&](const std::string& path, const torch::nn::Module& module) {
    const auto* const ours = dynamic_cast<const nn::Module*>(&module);
    if (ours == nullptr || ours->chain() == nullptr) return;
    for (const auto& interceptor : *ours->chain()) {
      const auto* const known = dynamic_cast<const KnownParts*>(interceptor.get());
      check(known == nullptr || known->axis() != group.name(), path);
    }
  });
}

/// What is cut would add to a gradient of the whole, and what is summed over ranks to one that all of them have.
void refuse_gradients(const torch::nn::Module& module, const comm::Group& group) {
  if (group.size() == 1) return;
  for (const auto& parameter : nn::unique_parameters(module)) {
    require(!parameter.tensor.grad().defined(), "parallelize_module: '", parameter.name,
            "' has a gradient of an earlier pass, which is of the whole; call zero_grad() before");
  }
}

/// A module with values is cut as it is on each rank: of ranks that differ the parts would be those of different models.
void equalize(torch::nn::Module& module, const comm::Group& group, ReplicaStart start) {
  const auto is_whole_here = [](const nn::NamedParameter& parameter) { return nn::dealt_of(parameter.tensor).empty(); };
  const auto parameters = nn::unique_parameters(module, is_whole_here);
  if (std::ranges::any_of(parameters, [](const auto& parameter) { return parameter.tensor.is_meta(); })) return;
  equalize_replicas(module, group, start, is_whole_here, kName);
}

std::unique_ptr<TensorParallel> carry_out(torch::nn::Module& module, const ParallelPlan& plan, std::shared_ptr<tensor_parallel::Context> context,
                                          const TensorParallelOptions& options = {}) {
  require(!plan.empty(), "parallelize_module: the plan has no entries, so every rank would compute the whole; give it path patterns with their styles");
  nn::assign_paths(module);
  nn::check_no_bypass(module);
  require_first_plan(module, context->group);
  refuse_gradients(module, context->group);
  equalize(module, context->group, options.replicas);
  Builder builder(std::move(context), plan, options);
  for (const auto& [pattern, style] : plan) {
    std::set<const nn::Module*> seen;  // one layer may lie at several places
    for (const auto& [path, matching] : nn::interceptable_modules(module, pattern)) {
      if (seen.insert(matching.get()).second) builder.apply(path, *matching, style);
    }
  }
  return builder.finish(module);
}

}  // namespace

void TensorParallel::set_sequence(int64_t length) {
  context_->sequence = length;
  context_->says_sequence = true;
}

int64_t TensorParallel::sequence() const { return context_->sequence; }

std::unique_ptr<TensorParallel> parallelize_module(torch::nn::Module& module, comm::Group group, const ParallelPlan& plan,
                                                   const TensorParallelOptions& options) {
  const auto context = std::make_shared<tensor_parallel::Context>(tensor_parallel::Context{.group = std::move(group)});
  if (options.overlap) context->overlap = std::make_shared<tensor_parallel::Overlap>();
  return carry_out(module, plan, context, options);
}

void check_parallel_plan(torch::nn::Module& module, int ranks, const ParallelPlan& plan, const std::function<void()>& forward) {
  const auto world = comm::World::dry(ranks, /*rank=*/0, std::make_shared<comm::Recorder>());
  const auto context = std::make_shared<tensor_parallel::Context>(tensor_parallel::Context{.group = world.group()});
  const auto parallel = carry_out(module, plan, context, {.watch_terms = false});  // nothing is updated
  context->trace = std::make_shared<tensor_parallel::LayoutTrace>(module);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView as_written;
  const nn::OperatorScope traced(context->trace);
  forward();
}

}  // namespace tessera
