#include "tessera/expert_parallel/expert_parallel.h"

#include <algorithm>
#include <map>
#include <unordered_set>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/split_with_sizes.h>
#include <ATen/ops/tensor.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/differentiable.h"
#include "tessera/comm/engine.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/expert_parallel/dry_load.h"
#include "tessera/expert_parallel/exchange.h"
#include "tessera/expert_parallel/in_flight.h"
#include "tessera/kernels/dispatch.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/cut_parameter.h"
#include "tessera/nn/dry_sizes.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/given_parts.h"
#include "tessera/nn/kept_memory.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meanwhile.h"
#include "tessera/nn/not_repeated.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/part_watch.h"
#include "tessera/nn/sharing.h"
#include "tessera/nn/weight_gradients.h"
#include "tessera/nn/write_watch.h"

// The model has sorted its rows by expert, so what goes to a rank lies together: one all-to-all, without packing. What comes lies by rank, and within that by
// expert; a permutation of rows makes it lie by expert, which is all that the grouped product asks for. Both ways back are the same two steps mirrored, and so
// is backward, which autograd finds by itself. Shapes depend on the data here and nowhere else: how many rows come is known when the counts have met. Where
// several ranks share an expert, a row goes to each of them in the same message, and a token's results are added up where the token is: one way for experts
// over ranks, rows of experts over ranks, and both. Nothing follows the order in which messages arrive: rows lie by expert, rank and place, and sums go by
// that.

namespace tessera {
namespace {

using experts::Exchange;

/// Rows of each expert that a rank sends to each rank, and that come from each, as make_exchange takes them.
struct Loads {
  std::vector<int64_t> own, arriving;
  std::vector<int64_t> told{};  ///< by each rank of its weights
};

/// The rows that a rank routes: this rank's part of those of all tokens that it shares with so many ranks.
struct Routed {
  experts::DryRows rows;
  int ranks;
};

/// In a dry run, which has no tokens: what routers are taken to send (experts::DryRoutingScope) from every rank of the group.
Loads dry_loads(const comm::Group& group, int sharers, int64_t experts, const Routed& routed) {
  const int64_t block = experts * sharers / group.size(), here = group.rank() / sharers;
  const auto rows_of = [&](int member) {
    const int64_t all = experts::dry_rows_of(group.world_rank(member), routed.rows.all, group.world_rank(group.rank()));
    const int part = routed.ranks == 1 ? 0 : experts::dry_part_of(group.world_rank(member), member % routed.ranks);
    const auto [begin, size] = chunk(all, routed.ranks, part);
    return experts::DryRows{.all = all, .begin = begin, .size = size};
  };
  std::map<experts::DryRows, std::vector<int64_t>> known;  // by rows: what a rank that has them sends to each rank
  const auto sent_of = [&](const experts::DryRows& rows) -> const std::vector<int64_t>& {
    const auto [found, is_new] = known.try_emplace(rows);
    if (is_new) found->second = experts::for_each_sharer(experts::dry_load(rows, experts, block, here), group.size(), sharers);
    return found->second;
  };
  Loads loads{.own = sent_of(routed.rows), .arriving = {}};
  const auto each = loads.own.size() / static_cast<size_t>(group.size()), first = each * static_cast<size_t>(group.rank());
  for (int member = 0; member < group.size(); ++member) {
    const auto& sent = member == group.rank() ? loads.own : sent_of(rows_of(member));
    loads.arriving.insert(loads.arriving.end(), sent.begin() + static_cast<std::ptrdiff_t>(first), sent.begin() + static_cast<std::ptrdiff_t>(first + each));
  }
  return loads;
}

/// Those of all ranks' rows, of which every rank knows its own counts [E] so far; behind them goes what it tells of its weights, so that every call looks, and
/// nobody waits for it. One small all-to-all, one read on the host.
Loads meet(const comm::Group& group, int sharers, const at::Tensor& counts, const Routed& routed, int64_t told) {
  const int64_t blocks = group.size() / sharers, here = counts.size(0) / blocks;
  const at::Tensor beside = at::full({blocks, sharers, 1}, told, counts.options());
  const at::Tensor sent = at::cat({counts.view({blocks, 1, here}).expand({blocks, sharers, here}), beside}, 2).view({-1});
  const at::Tensor arriving = at::empty_like(sent);
  comm::all_to_all(group, arriving, sent);
  if (counts.is_meta()) return dry_loads(group, sharers, counts.size(0), routed);
  const std::vector<int64_t> both = host_read_integers(at::cat({sent, arriving}), 0);
  Loads loads;
  for (size_t of_rank = 0; of_rank < both.size(); of_rank += static_cast<size_t>(here) + 1) {
    const auto first = both.begin() + static_cast<std::ptrdiff_t>(of_rank), behind = first + static_cast<std::ptrdiff_t>(here);
    const bool arrived = of_rank >= both.size() / 2;
    auto& rows = arrived ? loads.arriving : loads.own;
    rows.insert(rows.end(), first, behind);
    if (arrived) loads.told.push_back(*behind);
  }
  return loads;
}

/// Whether a rank's experts are copies of one, as those that begin as a dense layer are: then all ranks' are alike, each with its own.
bool are_copies(const std::vector<at::Tensor>& weights, int64_t experts) {
  const at::NoGradGuard no_grad;
  const nn::NotRepeated looking;
  return experts > 1 && std::ranges::all_of(weights, [&](const at::Tensor& weight) {
           const at::Tensor each = nn::in_use(weight).detach().to(at::kCPU).reshape({experts, -1});
           return each.eq(each[0]).all().item<bool>();
         });
}

at::Tensor index(const std::vector<int64_t>& values, at::Device device) { return at::tensor(values, at::TensorOptions(at::kLong)).to(device); }

/// out[i] = x[order[i]]; `places` is the inverse.
at::Tensor permuted(const at::Tensor& x, const at::Tensor& order, const at::Tensor& places) {
  return kernels::gather_rows(x, {.slots = places.unsqueeze(1), .order = order, .counts = {}});
}

/// Counts of each expert among the rows `begin` .. `begin + size` of those that `counts` sort.
at::Tensor counts_within(const at::Tensor& counts, int64_t begin, int64_t size) {
  const at::Tensor ends = at::cumsum(counts, 0);
  return ends.clamp(begin, begin + size).sub_((ends - counts).clamp_(begin, begin + size));
}

class Exchanged : public nn::Interceptor {
 public:
  Exchanged(comm::Group group, const ExpertParallelOptions& options, const nn::GroupedExpertsImpl& here)
      : group_(std::move(group)), sharers_(options.sharers), same_tokens_(options.same_tokens), apart_(options.apart) {
    if (!options.watch || group_.size() == 1 || !group_.engine()->moves_data()) return;
    dealt_on_meta_ = here.w1.is_meta();
    if (!dealt_on_meta_) since_dealt_.mark(weights_of(here), {true, true, true});
    for (const auto& weight : weights_of(here)) times_given_.push_back(nn::times_given(weight.tensor));
  }

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    const auto& here = static_cast<const nn::GroupedExpertsImpl&>(module);
    require_dealt(here);
    const at::Tensor rows = nn::cast(inputs[0].toTensor(), here.compute_dtype().value_or(nn::in_use(here.w1).scalar_type()));
    const at::Tensor counts = inputs[1].toTensor();
    const int64_t all = rows.size(0);
    if (same_tokens_.size() == 1) return {through_experts(here, rows, counts, {.all = all, .begin = 0, .size = all}, next)};
    const auto [begin, size] = chunk(all, same_tokens_.size(), same_tokens_.rank());
    const at::Tensor own = comm::differentiable::split(same_tokens_, rows);
    const at::Tensor results = through_experts(here, own, counts_within(counts, begin, size), {.all = all, .begin = begin, .size = size}, next);
    return {comm::differentiable::all_gather(same_tokens_, results, 0, all, comm::differentiable::Gradient::Replicated)};
  }

 private:
  static constexpr int64_t kWritten = -1;  ///< what a rank tells that has seen experts written in place

  static std::vector<nn::NamedParameter> weights_of(const nn::GroupedExpertsImpl& here) {
    return {{"w1", here.w1, {}}, {"w2", here.w2, {}}, {"w3", here.w3, {}}};
  }

  int64_t experts_here(const nn::GroupedExpertsImpl& here) const { return here.experts() * sharers_ / group_.size(); }

  /// What a rank tells in the first call behind the deal: kWritten where it has seen weights written in place. Of what was dealt on meta, given or loaded
  /// since, or is another wrapper's it has seen nothing, and tells, below that, how the weights begin.
  int64_t writes_of(const nn::GroupedExpertsImpl& here, bool recorded) {
    if (recorded || times_given_.empty()) return 0;
    const std::vector<nn::NamedParameter> weights = weights_of(here);
    const std::vector<int64_t> before = std::exchange(times_given_, {});
    const bool seen = !dealt_on_meta_ && std::ranges::equal(weights, before, {}, [](const auto& weight) {
      return nn::keeps_memory(weight.tensor) ? -1 : nn::times_given(weight.tensor);
    });
    const bool written = seen && (!since_dealt_.first_written(weights).empty() || since_dealt_.changed(weights));
    since_dealt_.clear();
    if (seen) return written ? kWritten : 0;
    const bool is_given = std::ranges::all_of(weights, [](const auto& weight) { return nn::was_given(weight.tensor); });
    return is_given ? 0 : kWritten - nn::beginnings_of({here.w1, here.w2, here.w3});  // what was given told_of tells
  }

  /// Where some rank has written, or all tell of the same beginnings: all may have one rank's, which has written nothing where it has sent its own.
  void refuse_written_alike(const nn::GroupedExpertsImpl& here) const {
    const std::vector<at::Tensor> weights{here.w1, here.w2, here.w3};
    std::vector<int64_t> bits;
    for (const at::Tensor& weight : weights) bits.push_back(nn::bits_of(weight));
    const bool may_be_alike = experts_here(here) == 1 || are_copies(weights, experts_here(here));
    require(!nn::were_given_alike(nn::tell_ranks(group_, here.w1, may_be_alike ? 0 : nn::told_together(bits))), "expert_parallel: '", here.path(),
            "' has the same weights on every rank of ", group_.name(),
            ", and they were written since the experts were dealt: a broadcast gives all ranks one rank's experts; write the whole before "
            "expert_parallel, or load by checkpoint::load; where ranks are meant to hold alike experts set ExpertParallelOptions::watch = false");
  }

  /// Data of another shape is no part of the experts, as far as anybody knows.
  void require_dealt(const nn::GroupedExpertsImpl& here) const {
    if (group_.size() == 1) return;
    for (const auto& item : here.named_parameters(/*recurse=*/false)) {
      require(!nn::dealt_of(item.value()).empty(), "expert_parallel: '", here.path(), ".", item.key(), "', of which each rank of ", group_.name(),
              " holds the part of its experts, was given data of another shape since, ", item.value().sizes(),
              " (set_data, torch::load of a model that was not dealt); load by checkpoint::load, or before expert_parallel");
    }
  }

  /// What the other ranks of the group are to compare with their own (nn::told_of_given). A pass that is recorded for its shapes reads nothing.
  int64_t told_of(const nn::GroupedExpertsImpl& here, bool recorded) const {
    const std::vector<at::Tensor> weights{here.w1, here.w2, here.w3};
    if (recorded || std::ranges::none_of(weights, nn::was_given)) return 0;
    const int64_t told = nn::told_of_given(weights);
    if (told != 0 && !are_copies(weights, experts_here(here))) return told;
    std::ranges::for_each(weights, nn::forget_given);
    return 0;
  }

  /// All ranks have been told the same, so all refuse.
  void require_own_parts(const nn::GroupedExpertsImpl& here, const std::vector<int64_t>& told) const {
    require(!nn::were_given_alike(told), "expert_parallel: '", here.path(), "' has the same weights on every rank of ", group_.name(),
            ", which were given since the experts were dealt: a file that torch::save made of one rank's model holds that rank's experts; load by "
            "checkpoint::load, each rank what it saved itself, or the whole before expert_parallel; experts that are to begin alike, one on each rank, are "
            "written by copy_");
    for (const at::Tensor& weight : {here.w1, here.w2, here.w3}) nn::forget_given(weight);  // behind the last refusal: else it is refused again
  }

  /// `lie`: where these rows are among those of all tokens that they are a part of.
  at::Tensor through_experts(const nn::GroupedExpertsImpl& here, const at::Tensor& rows, const at::Tensor& counts, const experts::DryRows& lie,
                             const nn::Next& next) {
    if (group_.size() == 1) return next(nn::Values{rows, counts})[0].toTensor();
    const bool recorded = rows.is_meta() || counts.is_meta() || here.w1.is_meta();
    const int64_t writes = writes_of(here, recorded), told = writes != 0 ? writes : told_of(here, recorded);
    const Loads loads = meet(group_, sharers_, counts, {.rows = lie, .ranks = same_tokens_.size()}, told);
    if (std::ranges::find(loads.told, kWritten) != loads.told.end() || (writes != 0 && nn::were_given_alike(loads.told))) {
      refuse_written_alike(here);
    } else if (told > 0) {
      require_own_parts(here, loads.told);
    }
    const nn::DrySizes sizes = rows.is_meta() ? experts::dry_sizes(group_.size() / sharers_) : nn::DrySizes::Known;
    const nn::DrySizesScope scope(sizes);
    const Exchange exchange = experts::make_exchange(loads.own, loads.arriving, group_.size());
    const at::Device device = rows.device();
    const int64_t own = exchange.sent() / sharers_, empty = rows.size(0) - own;
    at::Tensor moving = empty > 0 ? rows.narrow(0, 0, own) : rows;
    kernels::Dispatch copies;
    if (sharers_ > 1) {
      const auto [slots, places_of_copies] = experts::make_copies(exchange.to, sharers_);
      copies = {.slots = index(slots, device).view({own, sharers_}), .order = index(places_of_copies, device), .counts = {}};
      moving = kernels::gather_rows(moving, copies);
    }
    moving = sent_to_experts(moving, exchange);
    moving = apart_ ? computed_apart(here, moving, exchange.from, loads.arriving, next) : computed_together(moving, exchange, next);
    moving = comm::differentiable::all_to_all(group_, moving, exchange.to, exchange.from);
    if (sharers_ > 1) moving = kernels::combine_rows(moving, at::ones({own, sharers_}, moving.options().dtype(at::kFloat).requires_grad(false)), copies);
    const bool padded = empty > 0 || (sizes == nn::DrySizes::Most && experts::dry_rows_may_drop());  // one row that drops costs a copy of all
    return padded ? at::constant_pad_nd(moving, {0, 0, 0, empty}) : moving;
  }

  at::Tensor computed_together(const at::Tensor& came, const Exchange& exchange, const nn::Next& next) const {
    const at::Tensor order = index(exchange.order, came.device()), places = index(experts::inverse(exchange.order), came.device());
    return permuted(next(nn::Values{permuted(came, order, places), index(exchange.counts, came.device())})[0].toTensor(), places, order);
  }

  /// `from` each rank come so many rows, of each expert `arriving`.
  at::Tensor computed_apart(const nn::GroupedExpertsImpl& here, const at::Tensor& came, const std::vector<int64_t>& from, const std::vector<int64_t>& arriving,
                            const nn::Next& next) const {
    const auto& later = nn::LeaveWeightGradients::current();
    const nn::LeaveWeightGradients leave(later ? later : std::make_shared<nn::WeightGradients>(nn::WeightGradients::When::AtOnce));
    const std::vector<at::Tensor> rows = (hides_sources(here, came) ? came.detach().requires_grad_() : came).split_with_sizes(from);
    std::vector<at::Tensor> results;
    auto counts = arriving.begin();
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      const nn::GradientSource source(static_cast<int>(rank));
      const auto end = counts + static_cast<std::ptrdiff_t>(arriving.size() / rows.size());
      results.push_back(next(nn::Values{rows[rank], index({counts, end}, came.device())})[0].toTensor());
      counts = end;
    }
    return at::cat(results);
  }

  /// A weight's gradient is told whose rows it is of by a product that leaves it for later (nn/weight_gradients.h), and only one whose rows have a gradient
  /// does. Where nothing before the experts learns, rows have none.
  static bool hides_sources(const nn::GroupedExpertsImpl& here, const at::Tensor& came) {
    return at::GradMode::is_enabled() && !came.requires_grad() && (here.w1.requires_grad() || here.w2.requires_grad() || here.w3.requires_grad());
  }

  /// While the rows are on their way, what waits for nothing is computed; and so it is in backward, when their gradients come back.
  at::Tensor sent_to_experts(const at::Tensor& rows, const Exchange& exchange) const {
    if (!nn::Meanwhile::any()) return comm::differentiable::all_to_all(group_, rows, exchange.from, exchange.to);
    const experts::InFlight coming = experts::begin_all_to_all(group_, rows, exchange.from, exchange.to);
    {
      const nn::DrySizesScope elsewhere(nn::DrySizes::Known);
      nn::Meanwhile::run();
    }
    return experts::end_all_to_all(coming);
  }

  comm::Group group_;
  int sharers_;
  comm::Group same_tokens_;
  bool apart_;
  nn::ParameterWrites since_dealt_;
  bool dealt_on_meta_ = false;
  std::vector<int64_t> times_given_;  ///< of the weights when they were dealt, until the first call
};

/// Rows `begin` .. `begin + size` of each of `experts` blocks of `rows`, from block `first` on.
std::vector<Box> rows_of_each(const Slice& whole, int64_t first, int64_t experts, int64_t rows, int64_t begin, int64_t size) {
  if (size == rows) return {Box{{first * rows, 0}, {experts * rows, whole.shape[1]}}};
  std::vector<Box> boxes;
  for (int64_t expert = first; expert < first + experts; ++expert) boxes.push_back({{expert * rows + begin, 0}, {size, whole.shape[1]}});
  return boxes;
}

/// Members of `group` whose tokens are others'.
int ranks_with_tokens(const comm::Group& group, const comm::Group& same_tokens) {
  int alike = 0;
  for (int other = 0; other < same_tokens.size(); ++other) {
    for (int member = 0; member < group.size(); ++member) alike += group.world_rank(member) == same_tokens.world_rank(other) ? 1 : 0;
  }
  return group.size() / std::max(1, alike);
}

void cut_experts(const nn::GroupedExpertsImpl& experts, const comm::Group& group, int sharers, int losses) {
  const int64_t here = experts.experts() * sharers / group.size(), first = here * (group.rank() / sharers);
  const int64_t width = experts.ffn_dim() / sharers, begin = width * (group.rank() % sharers);
  for (const at::Tensor& weight : {experts.w1, experts.w3}) {
    Slice part = nn::slice_of(weight);
    part.boxes = rows_of_each(part, first, here, experts.ffn_dim(), begin, width);
    nn::cut_parameter(weight, std::move(part));
  }
  Slice part = nn::slice_of(experts.w2);
  const int64_t rows = part.shape[0] / experts.experts();
  part.boxes = {Box{{first * rows, begin}, {here * rows, width}}};
  nn::cut_parameter(experts.w2, std::move(part));
  for (const at::Tensor& weight : {experts.w1, experts.w2, experts.w3})
    nn::note_dealt(weight, {.group = group, .first = group.rank(), .by = kExpertParallel, .losses = losses});
}

/// Who else holds what of the experts has to be known to whoever cuts the other layers, and is known here: so it is said first.
void require_unspoken_of(const nn::GroupedExpertsImpl& experts, const std::string& path, const comm::Group& group, const comm::Group& same_tokens) {
  const auto sharings = nn::sharings_of(experts.w1);
  for (const nn::Sharing& sharing : sharings) {
    require(sharing.is_term || sharing.holders == 1, "expert_parallel: '", path, "' was taken by parallelize_module for what all ranks of ", sharing.axis,
            " hold alike; call expert_parallel before it");
  }
  const auto is_member = [&](int member) {
    for (int other = 0; other < group.size(); ++other) {
      if (group.world_rank(other) == same_tokens.world_rank(member)) return true;
    }
    return false;
  };
  for (int member = 0; member < same_tokens.size() && same_tokens.size() > 1; ++member) {
    require(is_member(member) || std::ranges::any_of(sharings, [&](const auto& sharing) { return sharing.axis == same_tokens.name(); }), "expert_parallel: '",
            path, "': same_tokens (", same_tokens.name(), ") has ranks that are not in the group (", group.name(),
            "), so several ranks hold the same experts and each a ",
            "term of their gradients: deal experts over all ranks of same_tokens, or say by nn::add_sharing of each weight what they hold, first");
  }
}

}  // namespace

std::unique_ptr<ExpertParallel> expert_parallel(torch::nn::Module& module, comm::Group group, const ExpertParallelOptions& options) {
  nn::assign_paths(module);
  Attachment attached;
  const auto alive = std::make_shared<int>();
  std::vector<nn::NamedParameter> parts;
  for (const auto& [path, found] : nn::interceptable_modules(module, options.experts)) {
    auto* held = dynamic_cast<nn::GroupedExpertsImpl*>(found.get());
    require(held != nullptr, "expert_parallel: '", path, "' is no GroupedExperts but ", found->name(), "; give the path of the experts themselves");
    require(options.sharers >= 1 && group.size() % options.sharers == 0, "expert_parallel: sharers = ", options.sharers, " of ", group.size(),
            " ranks; use a divisor of them");
    const int64_t blocks = group.size() / options.sharers;
    require(held->experts() % blocks == 0, "expert_parallel: '", path, "' has ", held->experts(), " experts, which ", blocks,
            options.sharers == 1 ? " ranks do not divide; use a number of ranks that does" : " sets of sharers do not divide; use a number that does");
    require(held->ffn_dim() % options.sharers == 0, "expert_parallel: '", path, "' has experts of width ", held->ffn_dim(), ", which ", options.sharers,
            " sharers do not divide; use a number of sharers that does");
    if (group.size() == 1 && options.same_tokens.size() == 1) continue;
    require_unspoken_of(*held, path, group, options.same_tokens);
    if (group.size() > 1) {
      cut_experts(*held, group, options.sharers, ranks_with_tokens(group, options.same_tokens));
      for (const at::Tensor& weight : {held->w1, held->w2, held->w3}) parts.push_back({nn::slice_of(weight).name, weight, {}});
    }
    nn::require_handle(*held, alive, kExpertParallel);
    attached.add(nn::attach(*held, std::make_shared<Exchanged>(group, options, *held)));
    attached.add(nn::expect_call(*held, "expert_parallel: '" + path + "'"));
  }
  if (options.watch && !parts.empty()) attached.add(nn::watch_parts(kExpertParallel, parts));
  return std::make_unique<ExpertParallel>(std::move(group), alive, std::move(attached));
}

nn::ParameterFilter experts_of(torch::nn::Module& module, bool experts) {
  std::unordered_set<const c10::TensorImpl*> weights;
  for (const auto& below : module.modules()) {
    if (const auto* found = dynamic_cast<const nn::GroupedExpertsImpl*>(below.get())) {
      for (const at::Tensor& weight : {found->w1, found->w2, found->w3}) weights.insert(weight.unsafeGetTensorImpl());
    }
  }
  return [weights = std::move(weights), experts](const nn::NamedParameter& parameter) {
    return weights.contains(parameter.tensor.unsafeGetTensorImpl()) == experts;
  };
}

}  // namespace tessera
