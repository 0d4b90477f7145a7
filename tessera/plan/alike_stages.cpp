#include "tessera/plan/alike_stages.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "tessera/mesh/positions.h"
#include "tessera/pipeline/executor.h"
#include "tessera/plan/read_events.h"

// Most stages of a long pipeline hold as many layers as their neighbours, and a dry run of each would repeat the same operators. One is run, and the others'
// step is told from its events: what is theirs is the order of the whole step's actions, which a rehearsal sets anyway, and to whom they send.

namespace tessera::plan {
namespace {

/// "layers.8-15" of any eight layers.
std::string without_numbers(std::string links) {
  std::erase_if(links, [](unsigned char c) { return std::isdigit(c) != 0; });
  return links;
}

}  // namespace

StageKinds::StageKinds(const PipelinePlan& pipeline, const MeshShape& shape, const Axes& stages)
    : pipeline_(pipeline),
      last_(size_along(shape, stages) - 1),
      stage_(ranks_along(shape, stages.names)),
      beside_(ranks_along(shape, axes_beside(stages.names, shape))) {}

std::optional<StageKind> StageKinds::operator()(int rank) const {
  const int stage = pipeline_rank(rank);
  if (stage == 0 || stage == last_) return std::nullopt;
  StageKind kind{.beside = beside_[static_cast<size_t>(rank)]};
  for (const int held : pipeline_.stages_of(stage)) {
    if (held == 0 || held + 1 == static_cast<int>(pipeline_.stages.size())) return std::nullopt;
    const auto& of = pipeline_.stages[static_cast<size_t>(held)];
    kind.flops.push_back(std::llround(1e6 * of.flops_share));
    kind.links.push_back(without_numbers(of.links));
  }
  return kind;
}

bool treats_layers_alike(const Config& config) {
  const RecomputeConfig& recompute = config.recompute;
  return recompute.modules == RecomputeConfig{}.modules && recompute.every == 1 && recompute.segment == 0 && recompute.budget_bytes == 0 &&
         config.offload == OffloadConfig{} && config.lora == LoraConfig{} && config.quantize == QuantizeConfig{} && config.optim.groups.empty() &&
         config.zero.wrap == ZeroConfig{}.wrap && !config.run.deterministic;
}

std::vector<pipeline::Leg> renamed_legs(std::vector<pipeline::Leg> legs, const std::vector<int>& from, const std::vector<int>& to) {
  const auto like = [&](int stage) { return to.at(static_cast<size_t>(std::ranges::find(from, stage) - from.begin())); };
  const auto rename = [&](std::vector<pipeline::Message>& messages, bool arrives) {
    for (pipeline::Message& message : messages) {
      const int behind = message.gradient != arrives ? 1 : 0;  // a crossing goes from a stage to the next, of which one is this rank's
      message.crossing = like(message.crossing + behind) - behind;
    }
  };
  for (pipeline::Leg& leg : legs) {
    leg.action.stage = like(leg.action.stage);
    rename(leg.posts, /*arrives=*/true);
    rename(leg.needs, /*arrives=*/true);
    rename(leg.sends, /*arrives=*/false);
  }
  return legs;
}

bool readdress(Events& events, const std::vector<pipeline::Leg>& legs, int rank, int stages, const std::vector<std::string>& channels) {
  std::vector<CollectiveEvent*> calls;
  for (Event& event : events) {
    auto* call = std::get_if<CollectiveEvent>(&event.what);
    if (call != nullptr && is_message(*call) && std::ranges::find(channels, call->group) != channels.end()) calls.push_back(call);
  }
  std::vector<const pipeline::Message*> messages;
  for (const pipeline::Leg& leg : legs) {
    for (const auto& post : leg.posts) messages.push_back(&post);
    for (const auto& sent : leg.sends) messages.push_back(&sent);
  }
  if (calls.size() != messages.size()) return false;
  const int of_crossing = pipeline::end_of_tags(1, pipeline::chain(2)), of_micro_batch = pipeline::end_of_tags(1, pipeline::chain(stages));
  for (size_t i = 0; i < calls.size(); ++i) {
    const int crossing = calls[i]->tag % of_micro_batch / of_crossing;
    calls[i]->tag += (messages[i]->crossing - crossing) * of_crossing;
    calls[i]->peer = messages[i]->peer;
    calls[i]->group_rank = rank;
  }
  return true;
}

}  // namespace tessera::plan
