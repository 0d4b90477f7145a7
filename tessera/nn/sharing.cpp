#include "tessera/nn/sharing.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/engine.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/names.h"

// Most parameters of this kind are small (norms, biases) and there are many: one message for all of a dtype, for each alone would cost a latency. Ranks that
// share other elements than mine meet in the same call: each set of holders has a place of its own in the buffer and brings zeros to the others', which adds
// nothing to them. That needs one place to mean one element on every rank; where the sharding behind the cut gave ranks runs of other lengths it does not, and
// the logical tensor's own places are used instead, over all ranks: as long as the whole parameters, and right for any cut.

namespace tessera::nn {
namespace {

constexpr const char* kSite = "tensor_parallel.shared";

/// A gradient of which this rank holds a term.
struct Term {
  at::Tensor parameter;  ///< or what is updated in its place
  Sharing sharing;
};

/// The runs of a slice's local tensor, row-major: visit(first element of the logical tensor, first of the local one, how many).
void for_each_place(const Slice& slice, const std::function<void(int64_t logical, int64_t local, int64_t count)>& visit) {
  invariant(slice.concat_dim() <= 0, "the parts of '", slice.name, "' lie side by side");
  int64_t local = 0;
  for (const Box& box : slice.boxes) {
    for_each_run(slice.shape, box, [&](int64_t first, int64_t count) {
      visit(first, local, count);
      local += count;
    });
  }
}

/// What sharding made of a parameter is the same part of it on every rank of the group.
void sum_aligned(const comm::Group& group, const std::vector<Term>& terms) {
  struct Place {
    at::Tensor gradient;
    int64_t offset;
  };
  std::map<at::ScalarType, std::pair<int64_t, std::vector<Place>>> dtypes;  // elements, and where this rank's terms go
  for (const auto& [parameter, sharing] : terms) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    auto& [size, places] = dtypes[gradient.scalar_type()];
    // Those who hold other elements use other places, and zeros here.
    places.push_back({gradient, size + gradient.numel() * sharing.set});
    size += gradient.numel() * sharing.sets;
  }
  for (const auto& [dtype, layout] : dtypes) {
    const auto& [size, places] = layout;
    const at::Tensor flat = at::zeros({size}, places.front().gradient.options());
    for (const Place& place : places) flat.narrow(0, place.offset, place.gradient.numel()).copy_(place.gradient.reshape({-1}));
    comm::all_reduce(group, flat);
    for (const Place& place : places) place.gradient.copy_(flat.narrow(0, place.offset, place.gradient.numel()).view(place.gradient.sizes()));
  }
}

/// The ranks' parts are different ones; of each element, a rank of each of its holders' has one term. Over one group after the other.
void sum_by_place(const std::vector<comm::Group>& groups, const std::vector<Term>& terms) {
  // All ranks have to agree on the buffer, those included that hold nothing of a parameter.
  std::vector<int64_t> begins;
  int64_t size = 0;
  bool wide = false;
  for (const Term& term : terms) {
    begins.push_back(size);
    size += c10::multiply_integers(slice_of(term.parameter).shape);
    wide |= term.parameter.scalar_type() == at::kDouble;
  }
  const at::Tensor all = at::zeros({size}, terms.front().parameter.options().dtype(wide ? at::kDouble : at::kFloat).requires_grad(false));
  for (size_t i = 0; i < terms.size(); ++i) {
    const at::Tensor& parameter = terms[i].parameter;
    if (!parameter.grad().defined()) continue;
    const at::Tensor own = parameter.grad().reshape({-1});
    for_each_place(slice_of(parameter),
                   [&](int64_t logical, int64_t local, int64_t count) { all.narrow(0, begins[i] + logical, count).copy_(own.narrow(0, local, count)); });
  }
  for (const comm::Group& group : groups) comm::all_reduce(group, all);
  for (size_t i = 0; i < terms.size(); ++i) {
    const at::Tensor& parameter = terms[i].parameter;
    if (!parameter.grad().defined()) continue;
    const at::Tensor sum = at::empty({parameter.grad().numel()}, parameter.grad().options());
    for_each_place(slice_of(parameter),
                   [&](int64_t logical, int64_t local, int64_t count) { sum.narrow(0, local, count).copy_(all.narrow(0, begins[i] + logical, count)); });
    parameter.mutable_grad().copy_(sum.view(parameter.grad().sizes()));
  }
}

/// The ranks that share out what is updated for the parameter, as whoever wraps it says.
std::optional<comm::Group> shard_group(const at::Tensor& updated) {
  const GradientSynchronizer* const owner = owner_of(updated);
  return owner == nullptr ? std::nullopt : std::optional(owner->norm_group());
}

/// Terms by who shares them out, in the order of the first of each, which is that of all ranks.
std::vector<std::pair<std::optional<comm::Group>, std::vector<Term>>> by_shard_group(std::vector<Term> terms) {
  std::vector<std::pair<std::optional<comm::Group>, std::vector<Term>>> found;
  for (Term& term : terms) {
    const auto group = shard_group(term.parameter);
    const auto is_same = [&](const auto& known) { return known.first ? group && known.first->engine() == group->engine() : !group; };
    auto place = std::ranges::find_if(found, is_same);
    if (place == found.end()) place = found.insert(place, {group, {}});
    place->second.push_back(std::move(term));
  }
  return found;
}

}  // namespace

std::string flat_key(const at::Tensor& parameter) {
  std::string key;
  for (const Sharing& sharing : sharings_of(parameter)) {
    if (!sharing.even && sharing.holders > 1) key += fmt::format("{} {}+{};", sharing.axis, sharing.first, sharing.holders);
  }
  return key;
}

std::vector<NamedParameter> counted_once(const std::vector<NamedParameter>& parameters) {
  std::vector<NamedParameter> counted;
  for (const auto& parameter : parameters) {
    const auto sharings = sharings_of(parameter.tensor);
    if (std::ranges::all_of(sharings, [](const Sharing& sharing) { return sharing.first == sharing.rank; })) counted.push_back(parameter);
  }
  return counted;
}

namespace {

/// A name is all that ties a group to what was said of the parameters: under another one nothing would be summed.
void require_axis_of_terms(const comm::Group& group, const std::vector<NamedParameter>& updated) {
  if (group.size() == 1) return;
  std::string term, axis;
  for (const auto& parameter : updated) {
    for (const Sharing& sharing : sharings_of(parameter.tensor)) {
      if (sharing.axis == group.name()) return;
      if (sharing.is_term && term.empty()) term = parameter.name, axis = sharing.axis;
    }
  }
  require(term.empty(), "sum_terms: each rank of '", axis, "' has a term of the gradient of '", term, "', and no parameter is shared over '", group.name(),
          "': give the group that layers were cut over, which is parallelize_module's parallel->group()");
}

}  // namespace

namespace {

/// Of a parameter, or of what is updated in its place: whether all ranks of the group hold it, each with the whole of its gradient. Sharding cuts what all hold
/// alike on all of them, also where other parts are uneven (flat_key).
bool is_watched_whole(const at::Tensor& updated, const comm::Group& group) {
  return std::ranges::any_of(sharings_of(updated), [&](const Sharing& sharing) {
    return sharing.axis == group.name() && sharing.holders == group.size() && !sharing.is_term && sharing.watched;
  });
}

/// The sum of all values, and of their sizes, in fp64; in pieces, for a whole embedding in fp64 is twice or four times its memory.
at::Tensor sums_of(const at::Tensor& values) {
  constexpr int64_t kPiece = int64_t{1} << 20;
  const at::Tensor flat = values.reshape({-1}), sums = at::zeros({2}, flat.options().dtype(at::kDouble));
  for (int64_t begin = 0; begin < flat.numel(); begin += kPiece) {
    const at::Tensor piece = flat.narrow(0, begin, std::min(kPiece, flat.numel() - begin)).to(at::kDouble);
    sums.add_(at::stack({piece.sum(), piece.abs().sum()}));
  }
  return sums;
}

}  // namespace

void require_alike(const comm::Group& group, const std::vector<NamedParameter>& updated) {
  if (!group.engine()->moves_data()) return;  // a dry world tells of calls, and answers nothing
  std::vector<std::string> names;
  std::vector<at::Tensor> sums;
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor, aliases] : updated) {
    if (!is_watched_whole(tensor, group) || !tensor.is_floating_point() || tensor.is_meta()) continue;
    names.push_back(name);
    sums.push_back(sums_of(tensor.detach()).to(message_device(tensor, group)));
  }
  if (names.empty() || group.size() == 1) return;
  const auto count = static_cast<int64_t>(names.size());
  const at::Tensor own = at::stack(sums), all = at::empty({group.size() * count, 2}, own.options());
  comm::all_gather(group, all, own);
  constexpr double kRounding = 1e-6;  // of a mean element; an update by another gradient is more
  const std::vector<double> read = host_read_all(all, 0);
  for (int rank = 1; rank < group.size(); ++rank) {
    for (int64_t i = 0; i < count; ++i) {
      const auto first = static_cast<size_t>(2 * i), other = first + static_cast<size_t>(2 * count * rank);
      if (!std::isfinite(read[first]) && !std::isfinite(read[other])) continue;  // a run that has diverged, on all ranks
      require(
          std::abs(read[other] - read[first]) <= kRounding * read[first + 1], "parallelize_module: '", names[static_cast<size_t>(i)],
          "' is whole on all ranks of ", group.name(), ", and has other values on rank ", rank,
          " than on rank 0 after some updates: it works on a part of the ",
          "features, heads or positions, and each rank updates it by another gradient. Give it the style SequenceParallel, whose gradients sum_terms adds up, "
          "or what it works on another layout; check_parallel_plan names what does not meet");
    }
  }
}

void sum_terms(const comm::Group& group, const std::vector<NamedParameter>& updated, const comm::Group& everyone) {
  std::vector<Term> aligned, placed;
  require_axis_of_terms(group, updated);
  const auto whole = std::ranges::find_if(updated, [&](const auto& parameter) { return is_watched_whole(parameter.tensor, group); });  // alike on all ranks
  if (whole != updated.end() && is_due(count_sum_of_terms(whole->tensor))) require_alike(group, updated);
  for (const auto& parameter : updated) {
    if (!parameter.tensor.requires_grad()) continue;
    for (Sharing& sharing : sharings_of(parameter.tensor)) {
      if (!sharing.is_term || sharing.axis != group.name()) continue;
      // What all ranks hold lies in buffers of its own where parts are uneven (flat_key), and sharding cuts those alike.
      auto& terms = sharing.even || sharing.sets == 1 ? aligned : placed;
      terms.push_back({parameter.tensor, std::move(sharing)});
      note_terms_summed(parameter.tensor);
    }
  }
  const at::NoGradGuard no_grad;
  const comm::CallSite site(kSite);
  sum_aligned(group, aligned);
  for (const auto& [shard, theirs] : by_shard_group(std::move(placed))) {
    const int ranks = shard ? shard->size() * group.size() : everyone.size();
    if (ranks <= group.size()) {
      sum_aligned(group, theirs);
    } else {
      sum_by_place(everyone.size() == ranks ? std::vector{everyone} : std::vector{*shard, group}, theirs);
    }
  }
}

void require_terms_summed(const std::string& caller, const std::vector<NamedParameter>& updated) {
  for (const auto& [name, tensor, aliases] : updated) {
    if (!tensor.grad().defined()) continue;
    const auto axis = axis_of_unsummed_term(tensor);
    require(!axis, caller, ": each rank of '", axis.value_or(""), "' has a term of the gradient of '", name,
            "', and they were never summed, so ranks would drift apart: behind the backward pass call nn::sum_terms(parallel->group(), wrapper.updated()), or, "
            "without a wrapper, of nn::unique_parameters(*model): docs/2d.md");
  }
}

void sum_gradients(const comm::Group& group, const std::vector<NamedParameter>& parameters) {
  if (group.size() == 1) return;
  std::vector<Term> terms;
  for (const auto& parameter : parameters) terms.push_back({parameter.tensor, {}});
  const at::NoGradGuard no_grad;
  sum_aligned(group, terms);
}

}  // namespace tessera::nn
