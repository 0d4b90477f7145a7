#include "tessera/optim/clip_grad_norm.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
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
// is here.

namespace tessera {
namespace {

int64_t logical_elements(const Slice& slice) { return std::accumulate(slice.shape.begin(), slice.shape.end(), int64_t{1}, std::multiplies<>()); }

[[noreturn]] void refuse_cut(const std::string& name, const at::Tensor& tensor) {
  require(
      nn::dealt_by(tensor) != "expert_parallel", "clip_grad_norm: '", name,
      "' is dealt over the ranks of expert_parallel, each of which has experts of its own, whose terms of the norm it does not see: take optim::global_norm of "
      "two groups, the rest of the model with its wrapper's sum and the experts with a sum over expert_parallel's group, then optim::clip_gradients of both: "
      "docs/moe.md");
  throw ConfigError(detail::concat("clip_grad_norm: '", name,
                                   "' is cut over further ranks (tensor parallelism), whose terms of the norm it does not see; after nn::sum_terms take "
                                   "optim::global_norm of nn::counted_once(wrapper.updated()) with a sum over those ranks and the wrapper's (of a mesh "
                                   "mesh[{\"dp\", \"tp\"}]), then optim::clip_gradients(wrapper.updated(), norm, max_norm): docs/2d.md"));
}

void refuse_cut_layers(const std::vector<nn::NamedParameter>& parameters) {
  for (const auto& [name, tensor, aliases] : parameters) {
    const Slice& slice = nn::slice_of(tensor);
    if (slice.numel() != logical_elements(slice)) refuse_cut(name, tensor);
  }
}

/// The ranks of the group have to hold all of the parameters between them.
void refuse_cut_layers(const GradientSynchronizer& synchronizer, const std::vector<nn::NamedParameter>& parts, const comm::Group& group) {
  if (group.size() == 1 || synchronizer.held_elements(0).empty()) return refuse_cut_layers(parts);
  int64_t held = 0, all = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    for (const int64_t elements : synchronizer.held_elements(rank)) held += elements;
  }
  for (const auto& part : parts) all += logical_elements(nn::slice_of(part.tensor));
  if (held != all) refuse_cut(parts.front().name, parts.front().tensor);
}

optim::NormGroup norm_group(const GradientSynchronizer& synchronizer) {
  optim::NormGroup terms{.parameters = synchronizer.updated(), .reduce = {}};
  require(!terms.parameters.empty(), "clip_grad_norm: the wrapper has no parameters");
  const comm::Group group = synchronizer.norm_group();
  refuse_cut_layers(synchronizer, terms.parameters, group);
  if (group.size() > 1) {
    terms.reduce = [group](at::Tensor& sums) {
      const comm::CallSite site("norm");
      comm::all_reduce(group, sums);
    };
  }
  return terms;
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
  for (const auto& group : groups) optim::clip_gradients(group.parameters, norm, max_norm);
  return norm;
}

}  // namespace

at::Tensor clip_grad_norm(const GradientSynchronizer& synchronizer, double max_norm) {
  const optim::NormGroup group = norm_group(synchronizer);
  refuse_part_of_a_model(group.parameters);
  return clip({group}, max_norm);
}

std::vector<optim::NormGroup> optim::norm_groups(const torch::nn::Module& model) {
  std::vector<const GradientSynchronizer*> wrappers;  // in the order of registration, so that their collectives match on all ranks
  std::map<const GradientSynchronizer*, size_t> wrapped;
  std::vector<nn::NamedParameter> alone;
  for (auto& parameter : nn::unique_parameters(model)) {
    if (!parameter.tensor.is_floating_point() && !parameter.tensor.is_complex()) continue;
    const auto* const dispatcher = nn::GradientDispatcher::find(parameter.tensor);
    const GradientSynchronizer* const owner = dispatcher == nullptr ? nullptr : dispatcher->owner();
    if (owner == nullptr) {
      alone.push_back(std::move(parameter));
    } else if (wrapped[owner]++ == 0) {
      wrappers.push_back(owner);
    }
  }
  std::vector<optim::NormGroup> groups;
  for (const GradientSynchronizer* wrapper : wrappers) {
    groups.push_back(norm_group(*wrapper));
    const auto with_gradients = static_cast<size_t>(std::ranges::count_if(
        groups.back().parameters, [](const auto& parameter) { return parameter.tensor.is_floating_point() || parameter.tensor.is_complex(); }));
    require(wrapped[wrapper] == with_gradients, "clip_grad_norm: '", model.name(), "' has ", wrapped[wrapper], " of the ", with_gradients,
            " parameters of a wrapped module; clip the wrapper, or the module that it wraps");
  }
  refuse_cut_layers(alone);
  if (!alone.empty()) groups.push_back({.parameters = std::move(alone), .reduce = {}});
  return groups;
}

at::Tensor clip_grad_norm(const torch::nn::Module& model, double max_norm) {
  refuse_part_of_a_model(nn::unique_parameters(model));
  const auto groups = optim::norm_groups(model);
  require(!groups.empty(), "clip_grad_norm: '", model.name(), "' has no parameters");
  return clip(groups, max_norm);
}

}  // namespace tessera
