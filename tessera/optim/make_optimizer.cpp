#include <utility>

#include "tessera/core/error.h"
#include "tessera/optim/adafactor.h"
#include "tessera/optim/adam8bit.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/groups.h"
#include "tessera/optim/lion.h"
#include "tessera/optim/muon.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/rounded.h"
#include "tessera/optim/several.h"
#include "tessera/optim/sgd.h"

namespace tessera::optim {

namespace {

std::unique_ptr<Optimizer> make_named(const OptimConfig& settings, std::vector<ParameterGroup> groups, WholeModel model, uint64_t seed) {
  if (settings.state_dtype == "bf16") return make_rounded(settings, std::move(groups), seed);
  require(settings.state_dtype == "fp32", "optim.state_dtype = ", settings.state_dtype, ": must be one of fp32, bf16");
  const auto [beta1, beta2] = settings.betas;
  if (settings.name == "adamw") return std::make_unique<AdamW>(std::move(groups), AdamWOptions{beta1, beta2, settings.eps});
  if (settings.name == "sgd") return std::make_unique<Sgd>(std::move(groups), SgdOptions{momentum_of(settings)});
  if (settings.name == "lion") return std::make_unique<Lion>(std::move(groups), LionOptions{beta1, beta2});
  if (settings.name == "adafactor")
    return std::make_unique<Adafactor>(std::move(groups), AdafactorOptions{.eps = settings.eps, .momentum = momentum_of(settings)}, std::move(model));
  if (settings.name == "adam8bit") return std::make_unique<Adam8bit>(std::move(groups), AdamWOptions{beta1, beta2, settings.eps}, std::move(model));
  if (settings.name == "muon")
    return std::make_unique<Muon>(std::move(groups), MuonOptions{.momentum = momentum_of(settings), .steps = settings.ns_steps}, std::move(model));
  throw ConfigError(detail::concat("optim.name = ", settings.name, ": not built yet; available: adamw, sgd, lion, adafactor, adam8bit, muon"));
}

void check_groups_here(const OptimConfig& config, const std::vector<nn::NamedParameter>& parameters, const WholeModel& model) {
  try {
    check_groups(config, parameters, model);
  } catch (const ConfigError& error) {
    throw ConfigError(detail::concat(error.what(), "; an optimizer of some of a model's parameters (a stage) is given optim::WholeModel with of_more = true"));
  }
}

/// Muon and Adam in 8 bits leave weights that are looked up or make logits to others, and take stacked experts one by one: nothing in a tensor says it is one.
void check_told(const std::vector<OptimizerShare>& shares) {
  for (const OptimizerShare& share : shares) {
    const bool is_muon = share.settings.name == "muon";
    if (!is_muon && share.settings.name != "adam8bit") continue;
    for (const ParameterGroup& group : share.groups) {
      for (const auto& [name, tensor, aliases] : group.parameters) {
        const Slice& slice = nn::slice_of(tensor);
        require(slice.shape.size() != 2 || !slice.is_whole() || (!is_muon && slice.logical_numel() < Adam8bit::kLeastElements),
                "optim.name = ", share.settings.name, ": '", name,
                "' may be an embedding, a head or a stack of experts, whose update is another (docs/optimizers.md); pass optim::whole_model(model), or an ",
                "optim::WholeModel whose `parameters`, `looked_up`, `heads` and `stacks` say so");
      }
    }
  }
}

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimConfig& config, const std::vector<nn::NamedParameter>& parameters, WholeModel model, uint64_t seed) {
  require(!config.split_heads || !uses_optimizer(config, {"muon"}), "optim.split_heads = true: no weight says here which of its rows are a head's; set ",
          "optim::WholeModel::stacks[NAME] to the number of heads for each weight of queries, keys and values, and leave split_heads false");
  check_optimizers(config);
  if (!model.of_more) check_groups_here(config, parameters, model);
  auto shares = deal_groups(config, parameters, model);
  if (!model.is_told()) check_told(shares);
  if (shares.empty()) return make_named(config, {}, std::move(model), seed);
  std::vector<Several::Part> optimizers;
  for (auto& [settings, groups, whole] : shares) optimizers.push_back({.optimizer = make_named(settings, std::move(groups), std::move(whole), seed)});
  if (optimizers.size() == 1 && optimizers.front().optimizer->kind() == config.name) return std::move(optimizers.front().optimizer);
  return std::make_unique<Several>(config.name, std::move(optimizers));
}

}  // namespace tessera::optim
