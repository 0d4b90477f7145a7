#include "tessera/train/expert_load.h"

#include <algorithm>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/host_read.h"
#include "tessera/memory/memory.h"
#include "tessera/mesh/roles.h"
#include "tessera/train/pipeline_layout.h"

// Every rank takes part in the one sum, whatever layers it holds, so that no stage waits for another that has no mixture. The rows are all layers of the model:
// a stage leaves those of others zero.

namespace tessera {

namespace {

/// The number in "layers.N.feed_forward.router".
int64_t layer_of(const std::string& path) {
  const size_t begin = path.find('.') + 1;
  return std::stoll(path.substr(begin, path.find('.', begin) - begin));
}

}  // namespace

double ExpertLoad::busiest() const { return share.empty() ? 0 : *std::max_element(share.begin(), share.end()) * static_cast<double>(share.size()); }

ExpertLoads::ExpertLoads(const Config& config, const Mesh& mesh, CutModel& run)
    : all_(mesh[mesh_roles(config).world]),
      counts_(config.tensor.sequence_parallel || mesh.rank(mesh_roles(config).layers) == 0),
      rate_(config.moe.bias_rate),
      layers_(config.model.experts > 0 ? config.model.layers : 0),
      experts_(config.model.experts),
      per_token_(config.model.experts_per_token),
      device_(run.device) {
  for (MixtureFeedForwardImpl* mixture : mixtures_of(*run.model)) held_.push_back({layer_of(mixture->router().path()), &mixture->router()});
}

void ExpertLoads::meet() {
  if (!any()) return;
  const at::NoGradGuard no_grad;
  const MemoryScope memory(MemoryCategory::Other);
  const comm::CallSite site("expert load");
  if (!sums_.defined()) sums_ = at::zeros({layers_, experts_ + nn::RouterImpl::kBehindLoad}, at::TensorOptions(at::kDouble).device(device_));
  sums_.zero_();
  for (const Held& held : held_) {
    if (counts_ && held.router->statistics().defined()) sums_.select(0, held.layer).copy_(held.router->statistics());
    held.router->clear_statistics();
  }
  if (all_.size() > 1) comm::all_reduce(all_, sums_);
}

void ExpertLoads::balance() {
  if (!any() || rate_ == 0) return;
  for (const Held& held : held_) {
    // Beside a frozen router (LoRA) the bias would go on alone, to another choice of experts than the model has that adapters are trained for.
    if (held.router->weight.requires_grad()) held.router->balance(sums_.select(0, held.layer).narrow(0, 0, experts_), rate_);
  }
}

std::vector<ExpertLoad> ExpertLoads::read() const {
  std::vector<ExpertLoad> loads;
  if (!any() || !sums_.defined()) return loads;
  const auto numbers = host_read_all(sums_, 0);
  const auto columns = static_cast<size_t>(experts_ + nn::RouterImpl::kBehindLoad), experts = static_cast<size_t>(experts_);
  for (int64_t layer = 0; layer < layers_; ++layer) {
    const double* const row = numbers.data() + static_cast<size_t>(layer) * columns;
    const double* const tokens = row + experts;  // and behind it the terms and what was dropped, as RouterImpl::statistics() has them
    double all = 0;
    for (size_t expert = 0; expert < experts; ++expert) all += row[expert];
    ExpertLoad load{.layer = layer};
    for (size_t expert = 0; expert < experts; ++expert) load.share.push_back(all > 0 ? row[expert] / all : 0);
    if (tokens[0] > 0) {
      load.balance = tokens[1] / tokens[0];
      load.z = tokens[2] / tokens[0];
      load.dropped = tokens[3] / (tokens[0] * static_cast<double>(per_token_));
    }
    loads.push_back(std::move(load));
  }
  return loads;
}

}  // namespace tessera
