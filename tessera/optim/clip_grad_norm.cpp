#include "tessera/optim/clip_grad_norm.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/nn/divided_model.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sharing.h"
#include "tessera/optim/clip.h"

// A program's own clip_grad_norm_ would take the norm of the parts that lie on this rank. Which parameters are whose is asked of themselves (their dispatcher
// names the wrapper), so any mixture in one model comes to one norm: for each wrapper the sum over the ranks that hold its parts, and what nobody wraps as it
// is here; of layers that are cut besides, over the ranks of the cut as well, where the first of those that hold the same elements counts them.

namespace tessera {
namespace {

[[noreturn]] void refuse_cut(const std::string& name) {
  throw ConfigError(detail::concat("clip_grad_norm: '", name,
                                   "' is cut, and nothing says over which ranks: neither a wrapper nor parallelize_module nor expert_parallel. Take "
                                   "optim::global_norm with a sum over the ranks that hold the other parts, and optim::clip_gradients by it: docs/2d.md"));
}

void refuse_cut_layers(const std::vector<nn::NamedParameter>& parameters) {
  for (const auto& [name, tensor, aliases] : parameters) {
    const Slice& slice = nn::slice_of(tensor);
    if (slice.numel() != slice.logical_numel() && nn::dealt_of(tensor).empty()) refuse_cut(name);
  }
}

/// The ranks of the group have to hold all of the wrapper's parameters between them, those as well that a newer one has of it, unless others are known that
/// layers are cut over.
void refuse_cut_layers(const GradientSynchronizer& synchronizer, const std::vector<nn::NamedParameter>& owned, const comm::Group& group) {
  if (group.size() == 1 || synchronizer.held_elements(0).empty()) return refuse_cut_layers(owned);
  const std::vector<nn::NamedParameter> parts = synchronizer.updated();
  if (std::ranges::any_of(parts, [](const auto& part) { return !nn::dealt_of(part.tensor).empty(); })) return;
  int64_t held = 0, all = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    for (const int64_t elements : synchronizer.held_elements(rank)) held += elements;
  }
  for (const auto& part : parts) all += nn::slice_of(part.tensor).logical_numel();
  if (held != all) refuse_cut(parts.front().name);
}

using Groups = std::vector<comm::Group>;

bool is_same(const comm::Group& a, const comm::Group& b) { return a.engine() == b.engine(); }

/// What `within`, a wrapper's ranks, hold of these parameters: a group for each set of ranks that layers are cut over besides, in the order of their first
/// parameter, which is that of all ranks. Sums meet over one group of ranks after the other, which are the axes of a grid.
void add_norm_groups(std::vector<nn::NamedParameter> parameters, const comm::Group& within, std::vector<optim::NormGroup>& groups) {
  std::vector<std::pair<Groups, optim::NormGroup>> found;
  nn::require_terms_summed("clip_grad_norm", parameters);
  for (auto& parameter : parameters) {
    Groups over;
    if (within.size() > 1) over.push_back(within);
    bool counts = true;
    for (const nn::Dealt& dealt : nn::dealt_of(parameter.tensor)) {
      if (dealt.group.size() > 1) over.push_back(dealt.group);
      counts &= dealt.counts_here();
    }
    auto place = std::ranges::find_if(found, [&](const auto& known) { return std::ranges::equal(known.first, over, is_same); });
    if (place == found.end()) place = found.insert(place, {over, {}});
    (counts ? place->second.parameters : place->second.elsewhere).push_back(std::move(parameter));
  }
  for (auto& [over, group] : found) {
    if (!over.empty()) {
      group.reduce = [over = over](at::Tensor& sums) {
        const comm::CallSite site("norm");
        for (const comm::Group& ranks : over) comm::all_reduce(ranks, sums);
      };
    }
    groups.push_back(std::move(group));
  }
}

/// Of a wrapper's parameters. Returns how many of them have gradients.
size_t add_norm_groups(const GradientSynchronizer& synchronizer, std::vector<nn::NamedParameter> parameters, std::vector<optim::NormGroup>& groups) {
  require(!parameters.empty(), "clip_grad_norm: the wrapper has no parameters");
  const comm::Group group = synchronizer.norm_group();
  refuse_cut_layers(synchronizer, parameters, group);
  const auto with_gradients =
      std::ranges::count_if(parameters, [](const auto& parameter) { return parameter.tensor.is_floating_point() || parameter.tensor.is_complex(); });
  add_norm_groups(std::move(parameters), group, groups);
  return static_cast<size_t>(with_gradients);
}

/// Of a model in stages, all that has gradients has to be there, with memory.
void refuse_part_of_a_model(const std::vector<nn::NamedParameter>& parameters) {
  std::map<std::shared_ptr<const nn::DividedModel>, size_t> held;
  for (const auto& [name, tensor, aliases] : parameters) {
    const auto model = nn::divided_model_of(tensor);
    if (model && (tensor.is_floating_point() || tensor.is_complex())) held[model] += tensor.is_meta() ? 0 : 1;
  }
  for (const auto& [model, count] : held) {
    require(count == model->parameters, "clip_grad_norm: it is given ", count, " of the ", model->parameters,
            " parameters of a model in stages: ", model->way_out);
  }
}

at::Tensor clip(const std::vector<optim::NormGroup>& groups, double max_norm) {
  require(max_norm > 0, "clip_grad_norm: max_norm = ", max_norm, ": a norm above 0 is expected");
  const nn::Unwatched quietly;  // wrappers refuse norms of slices by others
  at::Tensor norm = optim::global_norm(groups);
  optim::clip_gradients(groups, norm, max_norm);
  return norm;
}

}  // namespace

at::Tensor clip_grad_norm(const GradientSynchronizer& synchronizer, double max_norm) {
  synchronizer.refuse_gradients_that_wait("clip_grad_norm");
  auto parameters = synchronizer.updated();
  refuse_part_of_a_model(parameters);
  std::vector<optim::NormGroup> groups;
  add_norm_groups(synchronizer, std::move(parameters), groups);
  return clip(groups, max_norm);
}

std::vector<optim::NormGroup> optim::norm_groups(const torch::nn::Module& model) {
  std::vector<const GradientSynchronizer*> wrappers;  // in the order of registration, so that their collectives match on all ranks
  std::map<const GradientSynchronizer*, size_t> wrapped;
  std::vector<nn::NamedParameter> alone;
  for (auto& parameter : nn::unique_parameters(model)) {
    if (!parameter.tensor.is_floating_point() && !parameter.tensor.is_complex()) continue;
    const GradientSynchronizer* const owner = nn::owner_of(parameter.tensor);
    if (owner == nullptr) {
      alone.push_back(std::move(parameter));
    } else if (wrapped[owner]++ == 0) {
      wrappers.push_back(owner);
    }
  }
  std::vector<optim::NormGroup> groups;
  for (const GradientSynchronizer* wrapper : wrappers) {
    wrapper->refuse_gradients_that_wait("clip_grad_norm");
    const size_t with_gradients = add_norm_groups(*wrapper, nn::owned_by(*wrapper), groups);
    require(wrapped[wrapper] == with_gradients, "clip_grad_norm: '", model.name(), "' has ", wrapped[wrapper], " of the ", with_gradients,
            " parameters of a wrapped module; clip the wrapper, or the module that it wraps");
  }
  refuse_cut_layers(alone);
  add_norm_groups(std::move(alone), comm::Group::self(), groups);
  return groups;
}

at::Tensor clip_grad_norm(const torch::nn::Module& model, double max_norm) {
  refuse_part_of_a_model(nn::unique_parameters(model));
  const auto groups = optim::norm_groups(model);
  require(!groups.empty(), "clip_grad_norm: '", model.name(), "' has no parameters");
  return clip(groups, max_norm);
}

}  // namespace tessera
