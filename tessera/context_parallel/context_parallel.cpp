#include "tessera/context_parallel/context_parallel.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "tessera/context_parallel/context.h"
#include "tessera/context_parallel/head_exchange.h"
#include "tessera/context_parallel/ring.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/module.h"
#include "tessera/nn/not_repeated.h"
#include "tessera/nn/noted.h"
#include "tessera/nn/sample_scope.h"

// A core's call is replaced, so nothing of a model knows that its sequence is cut. A method is made for each call: what it does follows from who holds which
// columns, a value (SequenceCut, and the documents in it), and is a list of tiles and messages before anything is sent.

namespace tessera {

namespace context {
namespace {

class Core : public nn::Interceptor {
 public:
  explicit Core(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& /*next*/) override {
    const at::Tensor q = inputs[0].toTensor(), k = inputs[1].toTensor(), v = inputs[2].toTensor();
    check(module, q, k);
    const uint64_t first = nn::Noted<uint64_t>::next([&] { return context_->cut_mark; });
    require(first == context_->cut_mark, "context_parallel of '", module.path(),
            "': is computed again for the backward pass of a forward that was made under another cut than set_cut said last; say that one again before its "
            "backward, or make the passes of both one after the other");
    const nn::AttentionReach reach = dynamic_cast<const nn::AttentionCoreImpl&>(module).reach();
    const bool packed = inputs.size() > 4 && inputs[4].isTensor();
    const auto documents = packed ? context_->documents_of(inputs[4].toTensor(), called_in_) : nullptr;
    const Sequence sequence = packed ? Sequence(*context_->cut, reach, *documents) : Sequence(*context_->cut, reach);
    if (q.requires_grad() && at::GradMode::is_enabled()) context_->group.in_backward().by_graphs = true;
    return {run(sequence, q, k, v)};
  }

 private:
  at::Tensor run(const Sequence& sequence, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
    const comm::Group& group = context_->group;
    const ContextParallelOptions& options = context_->options;
    switch (options.method) {
      case ContextMethod::AllGather:
        return attend(all_gather_method(group, sequence), q, k, v);
      case ContextMethod::RingFull: {
        auto [ring, columns] = ring_of(sequence, /*inner=*/1);
        return attend(ring_full_method(std::move(ring), std::move(columns), sequence.reach()), q, k, v);
      }
      case ContextMethod::Ring:
        return exchanged(sequence, 1, q, k, v);
      case ContextMethod::Ulysses:
        return exchanged(sequence, group.size(), q, k, v);
      case ContextMethod::UlyssesRing:
        return exchanged(sequence, options.ulysses, q, k, v);
    }
    return {};
  }

  /// Groups of `inner` neighbours exchange columns for heads, and those who then hold the same heads form a ring; either may be of one rank.
  at::Tensor exchanged(const Sequence& sequence, int inner, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
    auto [ring, columns] = ring_of(sequence, inner);
    const auto method = ring_method(std::move(ring), std::move(columns), sequence.reach());
    if (inner == 1) return attend(method, q, k, v);
    const HeadDeal deal(sequence.cut(), neighbours(context_->group.rank() / inner, inner), context_->group.rank() % inner, q.size(2), k.size(2));
    const HeadTensors heads = to_heads(context_->group, deal, {q, k, v});
    return to_columns(context_->group, deal, attend(method, heads[0], heads[1], heads[2]));
  }

  /// The ring across groups of `inner` neighbours, and what each place holds once they have exchanged.
  std::pair<Ring, std::vector<nn::AttentionColumns>> ring_of(const Sequence& sequence, int inner) const {
    const comm::Group& group = context_->group;
    Ring ring{.group = group, .ranks = {}, .columns = {}, .place = group.rank() / inner, .overlap = context_->options.overlap};
    std::vector<nn::AttentionColumns> columns;
    for (int place = 0; place < group.size() / inner; ++place) {
      ring.ranks.push_back(place * inner + group.rank() % inner);
      columns.push_back(sequence.columns(columns_together(sequence.cut(), neighbours(place, inner))));
      ring.columns.push_back(columns.back().size());
    }
    return {std::move(ring), std::move(columns)};
  }

  static std::vector<int> neighbours(int place, int inner) {
    std::vector<int> ranks(static_cast<size_t>(inner));
    std::iota(ranks.begin(), ranks.end(), place * inner);
    return ranks;
  }

  void check(const nn::Module& module, const at::Tensor& q, const at::Tensor& k) const {
    require(context_->cut.has_value(), "context_parallel of '", module.path(), "': which columns the ranks hold is not known; call set_cut before the model");
    const int64_t columns = context_->cut->columns(context_->group.rank());
    require(q.scalar_type() != at::kDouble || context_->options.method == ContextMethod::Ulysses, "context_parallel of '", module.path(),
            "': q is Double, and ", to_string(context_->options.method),
            " merges scores in fp32; compute in Float or BFloat16, or use ContextMethod::Ulysses, which merges nothing");
    require(q.size(1) == k.size(1), "context_parallel of '", module.path(), "': ", q.size(1), " queries to ", k.size(1),
            " keys; earlier keys of a cache are not cut over ranks, detach context parallelism for these calls");
    require(q.size(1) == columns, "context_parallel of '", module.path(), "': ", q.size(1), " columns, while set_cut says that rank ", context_->group.rank(),
            " holds ", columns, " of ", context_->cut->length);
  }

  std::shared_ptr<Context> context_;
  uint64_t called_in_ = 0;  ///< pass
};

/// Around what draws masks: they are those of this rank's columns.
class Columns : public nn::Interceptor {
 public:
  explicit Columns(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    nn::SampleContext here = nn::SampleScope::current();
    if (!module.is_training() || here.positions.defined() || !context_->cut || inputs.empty() || !inputs[0].isTensor()) return next(std::move(inputs));
    const at::Tensor x = inputs[0].toTensor();
    const int64_t columns = context_->cut->columns(context_->group.rank());
    // What has other columns is none of the sequence, unless somebody says that it is a part of them.
    const bool of_sequence = (x.dim() == 3 && (x.size(1) == columns || here.columns || nn::output_layout(module, x))) ||
                             (x.dim() > 3 && (x.size(1) == columns || x.size(2) == columns));  // which the module refuses
    if (!of_sequence) return next(std::move(inputs));
    here.positions = positions_on(x.device());
    here.seq_len = std::max(here.seq_len, context_->cut->length);  // what was said of a part of this rank's columns is less
    const nn::SampleScope scope(here);
    return next(std::move(inputs));
  }

 private:
  const at::Tensor& positions_on(at::Device device) const {
    at::Tensor& made = context_->positions;
    if (made.defined() && made.device() == device) return made;
    const nn::NotRepeated shared;  // with the calls that follow
    return made = context_->cut->positions(context_->group.rank(), device);
  }

  std::shared_ptr<Context> context_;
};

}  // namespace
}  // namespace context

std::string_view to_string(ContextMethod method) {
  switch (method) {
    case ContextMethod::Ring:
      return "ring";
    case ContextMethod::RingFull:
      return "ring_full";
    case ContextMethod::Ulysses:
      return "ulysses";
    case ContextMethod::UlyssesRing:
      return "ulysses_ring";
    case ContextMethod::AllGather:
      return "all_gather";
  }
  return "?";
}

void ContextParallel::set_cut(const SequenceCut& cut) {
  require(cut.ranks() == group_.size(), "context_parallel: a cut over ", cut.ranks(), " ranks for a group of ", group_.size());
  for (int rank = 0; rank < cut.ranks(); ++rank) {
    require(cut.columns(rank) > 0, "context_parallel: a sequence of ", cut.length, " columns leaves rank ", rank, " of ", cut.ranks(),
            " without any; sequences must have a column for each rank: make them longer, or mesh.cp smaller");
  }
  context_->begin_pass();
  if (context_->cut == cut) return;
  context_->cut = cut;
  context_->positions = at::Tensor();
  Hasher hash;
  hash.update(&cut.length, sizeof(cut.length));
  for (const auto& runs : cut.runs) {
    const auto count = static_cast<int64_t>(runs.size());
    hash.update(&count, sizeof(count)).update(runs.data(), runs.size() * sizeof(ColumnRun));
  }
  context_->cut_mark = hash.value();
}

std::unique_ptr<ContextParallel> context_parallel(torch::nn::Module& model, comm::Group group, const ContextParallelOptions& options,
                                                  const std::string& pattern) {
  const bool both = options.method == ContextMethod::UlyssesRing;
  require(!both || (options.ulysses > 0 && group.size() % options.ulysses == 0), "context.ulysses = ", options.ulysses, ": must divide the ", group.size(),
          " ranks of mesh.cp into groups of one size (context.method = ulysses_ring)");
  require(both || options.ulysses == 0, "context.ulysses = ", options.ulysses, " has no meaning with context.method = ", to_string(options.method),
          "; set ulysses_ring, or leave it out");
  nn::assign_paths(model);
  nn::check_no_bypass(model);
  const auto context = std::make_shared<context::Context>();
  context->group = group;
  context->options = options;
  Attachment attached;
  for (const auto& [path, module] : nn::interceptable_modules(model, pattern)) {
    require(dynamic_cast<nn::AttentionCoreImpl*>(module.get()) != nullptr, "context_parallel: '", path, "' is no nn::AttentionCore but ", module->name(),
            ": nothing else is known to attend along a sequence that could be cut");
    if (group.size() > 1) attached.add(nn::attach(*module, std::make_shared<context::Core>(context)));
  }
  if (group.size() > 1) {
    const auto columns = std::make_shared<context::Columns>(context);
    model.apply([&](torch::nn::Module& module) {
      auto* const own = dynamic_cast<nn::Module*>(&module);
      if (own != nullptr && nn::draws_masks(*own)) attached.add(nn::attach(*own, columns));
    });
  }
  return std::make_unique<ContextParallel>(std::move(group), context, std::move(attached));
}

}  // namespace tessera
