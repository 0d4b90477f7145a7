#include "tessera/tensor_parallel/parallelize.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/head.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/operators.h"
#include "tessera/tensor_parallel/convert.h"
#include "tessera/tensor_parallel/linear.h"
#include "tessera/tensor_parallel/sequence.h"
#include "tessera/tensor_parallel/vocabulary.h"

namespace tessera {

namespace {

using tensor_parallel::convertible;

/// Carries a plan out on one module after the other. A style that computes owns its module; Prepare* add to it.
class Builder {
 public:
  explicit Builder(std::shared_ptr<tensor_parallel::Context> context) : context_(std::move(context)) {}

  void apply(const std::string& path, nn::Module& module, const ParallelStyle& style) {
    path_ = path;
    style_ = to_string(style);
    if (!std::holds_alternative<PrepareInput>(style) && !std::holds_alternative<PrepareOutput>(style)) own(module);
    auto interceptor = std::visit([&](const auto& one) { return make(module, one); }, style);
    if (size() > 1) attached_.add(nn::attach(module, std::move(interceptor)));
  }

  std::unique_ptr<TensorParallel> finish() {
    return std::make_unique<TensorParallel>(context_->group, std::move(attached_), std::move(cut_), std::move(shared_));
  }

 private:
  int size() const { return context_->group.size(); }
  TensorParallel::Holders everyone() const { return {.holders = size()}; }
  size_t rank() const { return static_cast<size_t>(context_->group.rank()); }

  template <class... What>
  void check(bool condition, What&&... what) const {
    require(condition, "parallelize_module: ", style_, " of '", path_, "': ", std::forward<What>(what)...);
  }

  void own(const nn::Module& module) {
    const auto [before, is_new] = owners_.emplace(&module, style_);
    check(is_new, "the plan gives this module to ", before->second, " already; leave one of the two out");
  }

  template <class Impl>
  Impl& as(nn::Module& module, const char* kind) const {
    auto* impl = dynamic_cast<Impl*>(&module);
    check(impl != nullptr, "it is no ", kind, " but ", module.name(), "; give the style to the layer itself");
    return *impl;
  }

  void check_layouts(TensorLayout from, TensorLayout to, const char* which) const {
    check(convertible(from, to), "its ", which, " is ", to_string(from), " and ", to_string(to), " is asked for: there is no way between them");
  }

  void remember_cut(const at::Tensor& parameter) {
    if (parameter.defined()) cut_.insert(nn::slice_of(parameter).name);
  }

  /// Where several ranks hold the same share.
  void remember_shared(const at::Tensor& parameter, const std::vector<FeatureShare>& shares) {
    const FeatureShare& own = shares[rank()];
    if (!parameter.defined() || std::ranges::all_of(shares, [](const FeatureShare& share) { return share.holders == 1; })) return;
    int sets = 0, set = 0;
    for (size_t holder = 0; holder < shares.size(); ++holder) {
      if (shares[holder].first_holder != static_cast<int>(holder)) continue;
      if (shares[holder].first_holder == own.first_holder) set = sets;
      ++sets;
    }
    share_gradient(parameter, {.first = own.first_holder, .holders = own.holders, .set = set, .sets = sets});
  }

  void share_gradient(const at::Tensor& parameter, TensorParallel::Holders holders) {
    if (parameter.requires_grad() && size() > 1) shared_.insert_or_assign(nn::slice_of(parameter).name, holders);
  }

  std::vector<FeatureShare> shares_of(const FeatureCut& cut, int64_t features) const {
    try {
      return cut.shares(features, size());
    } catch (const ConfigError& error) {
      throw ConfigError(detail::concat("parallelize_module: ", style_, " of '", path_, "': ", error.what()));
    }
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module& module, const ColumnParallel& style) {
    auto& linear = as<nn::LinearImpl>(module, "nn::Linear");
    check_layouts(style.input, TensorLayout::Copied, "input");
    check_layouts(TensorLayout::Features, style.output, "output");
    check(style.output == TensorLayout::Features || style.cut.by == FeatureCut::By::Feature,
          "features that are cut by heads are not gathered; leave output = Features, and let a RowParallel layer take them");
    auto shares = shares_of(style.cut, linear.options.out_features());
    tensor_parallel::cut_columns(linear, shares[rank()]);
    for (const at::Tensor& parameter : {linear.weight, linear.bias}) {
      remember_cut(parameter);
      remember_shared(parameter, shares);
    }
    return tensor_parallel::column_parallel(context_, style, std::move(shares));
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module& module, const RowParallel& style) {
    auto& linear = as<nn::LinearImpl>(module, "nn::Linear");
    check_layouts(style.input, TensorLayout::Features, "input");
    check_layouts(TensorLayout::Partial, style.output, "output");
    check(style.input == TensorLayout::Features || style.cut.by == FeatureCut::By::Feature,
          "an input that is cut by heads has to come that way from the layers before; leave input = Features");
    check(style.output != TensorLayout::Partial || !linear.bias.defined(),
          "output = Partial would have the bias added once a rank; ask for Replicated or Sequence, or build the layer without bias");
    const FeatureShare share = shares_of(style.cut, linear.options.in_features())[rank()];
    if (size() > 1) tensor_parallel::cut_rows(linear, share);
    remember_cut(linear.weight);
    if (linear.bias.defined() && style.output == TensorLayout::Sequence) share_gradient(linear.bias, everyone());
    return tensor_parallel::row_parallel(context_, style);
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module& module, const VocabParallelEmbedding& style) {
    auto& embedding = as<nn::EmbeddingImpl>(module, "nn::Embedding");
    check_layouts(TensorLayout::Partial, style.output, "output");
    check(style.output != TensorLayout::Partial, "what it looks up is a term of the sum on each rank; ask for Replicated or Sequence");
    tensor_parallel::cut_vocabulary(embedding.weight, context_->group);
    remember_cut(embedding.weight);
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
    tensor_parallel::cut_vocabulary(head.weight, context_->group);
    remember_cut(head.weight);
    if (size() == 1) return nullptr;
    return tensor_parallel::vocab_parallel_head(context_, style, head);
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module& module, const SequenceParallel&) {
    for (const at::Tensor& parameter : module.parameters()) {
      check(nn::slice_of(parameter).is_whole(), "its parameter '", nn::slice_of(parameter).name, "' is cut; a part of the sequence needs whole parameters");
      share_gradient(parameter, everyone());
    }
    return tensor_parallel::sequence_parallel(context_);
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module&, const PrepareInput& style) {
    check(style.argument >= 0, "argument = ", style.argument, " must not be negative");
    check_prepared(style.from, style.to);
    return tensor_parallel::prepare_input(context_, style);
  }

  std::shared_ptr<nn::Interceptor> make(nn::Module&, const PrepareOutput& style) {
    check_prepared(style.from, style.to);
    return tensor_parallel::prepare_output(context_, style);
  }

  void check_prepared(TensorLayout from, TensorLayout to) const {
    check_layouts(from, to, "tensor");
    check(from != TensorLayout::Features && to != TensorLayout::Features,
          "how features are cut is known to the layers alone; ask ColumnParallel for output = Replicated, or RowParallel for input = Replicated");
  }

  std::shared_ptr<tensor_parallel::Context> context_;
  std::string path_, style_;
  std::map<const nn::Module*, std::string> owners_;
  std::set<std::string> cut_;
  std::map<std::string, TensorParallel::Holders> shared_;
  Attachment attached_;
};

}  // namespace

TensorParallel::TensorParallel(comm::Group group, Attachment attached, std::set<std::string> cut, std::map<std::string, Holders> shared)
    : group_(std::move(group)), attached_(std::move(attached)), cut_(std::move(cut)), shared_(std::move(shared)) {}

void TensorParallel::sum_shared_gradients(const std::vector<nn::NamedParameter>& updated) const {
  struct Place {
    at::Tensor gradient;
    int64_t offset;
  };
  const at::NoGradGuard no_grad;
  std::map<at::ScalarType, std::pair<int64_t, std::vector<Place>>> dtypes;  // elements, and where this rank's terms go
  for (const auto& [name, tensor, aliases] : updated) {
    const auto found = shared_.find(name);
    if (found == shared_.end() || !tensor.grad().defined()) continue;
    const Holders& holders = found->second;
    auto& [size, places] = dtypes[tensor.grad().scalar_type()];
    // Those who hold other elements use other places, and zeros here.
    const int64_t numel = tensor.grad().numel();
    places.push_back({tensor.grad(), size + numel * holders.set});
    size += numel * holders.sets;
  }
  const comm::CallSite site("tensor_parallel.shared");
  for (const auto& [dtype, layout] : dtypes) {
    const auto& [size, places] = layout;
    const at::Tensor flat = at::zeros({size}, places.front().gradient.options());
    for (const Place& place : places) flat.narrow(0, place.offset, place.gradient.numel()).copy_(place.gradient.reshape({-1}));
    comm::all_reduce(group_, flat);
    for (const Place& place : places) place.gradient.copy_(flat.narrow(0, place.offset, place.gradient.numel()).view(place.gradient.sizes()));
  }
}

std::vector<nn::NamedParameter> TensorParallel::counted_in_norm(const std::vector<nn::NamedParameter>& parameters) const {
  std::vector<nn::NamedParameter> counted;
  for (const auto& parameter : parameters) {
    const auto shared = shared_.find(parameter.name);
    const int first = shared != shared_.end() ? shared->second.first : cut_.contains(parameter.name) ? group_.rank() : 0;
    if (first == group_.rank()) counted.push_back(parameter);
  }
  return counted;
}

namespace {

std::unique_ptr<TensorParallel> carry_out(torch::nn::Module& module, const ParallelPlan& plan, std::shared_ptr<tensor_parallel::Context> context) {
  nn::assign_paths(module);
  nn::check_no_bypass(module);
  Builder builder(std::move(context));
  for (const auto& [pattern, style] : plan) {
    for (const auto& [path, matching] : nn::interceptable_modules(module, pattern)) builder.apply(path, *matching, style);
  }
  return builder.finish();
}

}  // namespace

std::unique_ptr<TensorParallel> parallelize_module(torch::nn::Module& module, comm::Group group, const ParallelPlan& plan) {
  return carry_out(module, plan, std::make_shared<tensor_parallel::Context>(tensor_parallel::Context{.group = std::move(group)}));
}

void check_parallel_plan(torch::nn::Module& module, int ranks, const ParallelPlan& plan, const std::function<void()>& forward) {
  const auto world = comm::World::dry(ranks, /*rank=*/0, std::make_shared<comm::Recorder>());
  const auto context = std::make_shared<tensor_parallel::Context>(tensor_parallel::Context{.group = world.group()});
  const auto parallel = carry_out(module, plan, context);
  context->trace = std::make_shared<tensor_parallel::LayoutTrace>(module);
  const at::NoGradGuard no_grad;
  const nn::OperatorScope traced(context->trace);
  forward();
}

}  // namespace tessera
