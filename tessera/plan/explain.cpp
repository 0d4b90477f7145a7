#include "tessera/plan/explain.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/config/optim_groups.h"
#include "tessera/config/patterns.h"
#include "tessera/core/columns.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/memory/memory.h"
#include "tessera/models/flops.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/settings.h"
#include "tessera/precision/compute_format.h"
#include "tessera/precision/policy.h"

// States are arithmetic: so many bytes of each parameter, by number formats. Activations are not known by arithmetic but seen: dry runs of two depths and two
// batches give what a layer keeps of a token, for layers are alike, as tokens are; the law that follows is shown beside a dry run of the whole.

namespace tessera::plan {
namespace {

using Sets = std::vector<std::string>;

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

/// One rank, one micro-batch.
Config alone(const Config& config) {
  return with_settings(config, {"mesh.dp_replicate=1", "mesh.dp_shard=1", "mesh.pp=1", "mesh.cp=1", "mesh.tp=1", "mesh.ep=1", "mesh.expert_tp=1",
                                "zero.stage=0", "pipeline.schedule=1f1b", "pipeline.virtual_stages=1", "pipeline.split=[\"auto\"]", "run.memory_limit_bytes=0",
                                "batch.global_size=" + std::to_string(config.batch.micro_size)});
}

KeptStates states_of(const Config& config, std::string formats, Sets sets) {
  const Config asked = with_settings(config, sets);
  const BytesPerParameter bytes = bytes_per_parameter(asked);
  const double masters = precision::policy_from(asked.precision).has_masters() ? 4 * trained_share(asked) : 0;
  return {.formats = std::move(formats), .sets = std::move(sets), .bytes = bytes, .masters = masters};
}

/// The most that a step holds of a category.
int64_t most_of(const Events& events, MemoryCategory category) {
  int64_t now = 0, most = 0;
  for (const MemoryChange& change : only<MemoryChange>(events)) {
    if (change.category == category && !change.on_host) most = std::max(most, now += change.bytes);
  }
  return most;
}

struct Seen {
  int64_t activations, outputs;
};

Seen seen_of(const Config& config, const Sets& sets = {}) {
  const DryRun run = dry_run(sets.empty() ? config : with_settings(config, sets), 1, {.events = true});
  const Events& events = run.ranks.front().events;
  return {most_of(events, MemoryCategory::Activations), most_of(events, MemoryCategory::Outputs)};
}

/// Of the layers that a pattern names by their numbers ("layers.5.attention.*", "layers.1*") the last; -1: none does.
int64_t last_named_layer(const Config& config) {
  std::vector<std::string> patterns = config.lora.trained;
  for (const std::string* list : {&config.lora.modules, &config.quantize.modules, &config.recompute.modules}) {
    const auto some = patterns_in(*list);
    patterns.insert(patterns.end(), some.begin(), some.end());
  }
  for (const OptimGroup& group : optim_groups(config.optim)) patterns.push_back(group.pattern);
  int64_t last = -1;
  for (const std::string& pattern : patterns) {
    for (const std::string_view part : components_of(pattern)) {
      if (part.find_first_not_of('*') == std::string_view::npos) continue;
      for (int64_t layer = config.model.layers; --layer > last;) {
        if (component_matches(part, std::to_string(layer))) last = layer;
      }
    }
  }
  return last;
}

KeptActivations activations_of(const Config& one) {
  // The peak of a shallower model may lie elsewhere. Layers of which something is said are there in both, before one as all others are, and count as outside.
  const int64_t few_layers = std::max<int64_t>(3, last_named_layer(one) + 2), more_layers = few_layers + 2;
  using Part = KeptActivations::Part;
  const int64_t batch = one.batch.micro_size;
  const auto tokens = static_cast<double>(batch * one.data.seq_len);
  const auto at = [&](int64_t layers, int64_t times) {
    const std::string size = std::to_string(times * batch);
    return static_cast<double>(seen_of(one, {"model.layers=" + std::to_string(layers), "batch.micro_size=" + size, "batch.global_size=" + size}).activations);
  };
  const auto part = [&](double once, double twice) { return Part{.token = (twice - once) / tokens, .fixed = 2 * once - twice}; };
  const Part few = part(at(few_layers, 1), at(few_layers, 2)), more = part(at(more_layers, 1), at(more_layers, 2));
  const Seen whole = seen_of(one);
  const auto between = static_cast<double>(more_layers - few_layers), first = static_cast<double>(few_layers);
  KeptActivations kept{.of_layer = {(more.token - few.token) / between, (more.fixed - few.fixed) / between}};
  kept.outside = {few.token - first * kept.of_layer.token, few.fixed - first * kept.of_layer.fixed};
  kept.outputs = static_cast<double>(whole.outputs) / tokens;
  kept.seen = whole.activations, kept.seen_outputs = whole.outputs, kept.seen_tokens = static_cast<int64_t>(tokens);
  return kept;
}

std::vector<Change> changes_of(const Config& one, const KeptStates& now, double parameters, double activations, int ranks) {
  const auto states = [&](int stage) { return parameters * kept_per_parameter(now.bytes, stage, ranks).total(); };
  const std::string data = "mesh.dp_shard=" + std::to_string(ranks);
  std::vector<Change> changes{{"as it is", {}, 1, states(0), activations, "w + g + k"},
                              {"data parallel", {"mesh.dp_replicate=" + std::to_string(ranks)}, ranks, states(0), activations, "w + g + k"}};
  for (const auto& [stage, law] : {std::pair{1, "w + g + k / N"}, {2, "w + (g + k) / N"}, {3, "(w + g + k) / N"}}) {
    changes.push_back({fmt::format("ZeRO {}", stage), {data, fmt::format("zero.stage={}", stage)}, ranks, states(stage), activations, law});
  }
  for (const auto& [name, axis] : {std::pair{"tensor parallel", "mesh.tp"}, {"pipeline, a stage", "mesh.pp"}}) {
    changes.push_back({name, {fmt::format("{}={}", axis, ranks)}, ranks, states(3), -1, "(w + g + k) / N, nearly"});
  }
  const Sets full{"recompute.mode=full"};
  const auto again = static_cast<double>(seen_of(one, full).activations);
  changes.push_back({"all computed again", full, 1, states(0), again, "of a layer its input, and one layer whole"});
  return changes;
}

/// Of the rank that needs most.
int64_t needed_of(const Config& config, int world, const std::optional<DeviceAllocator>& allocator) {
  return needed_bytes(largest_class(dry_run(config, world, {.allocator = allocator})));
}

/// The fewest ranks of stage 3 that hold it, each with a micro-batch of its own.
void find_smallest(const Config& one, const KeptStates& formats, const std::optional<DeviceAllocator>& allocator, Verdict& verdict) {
  constexpr int kMost = 1 << 14;
  for (const Sets& more : {Sets{}, Sets{"recompute.mode=full"}}) {
    const auto needed = [&](int ranks) {
      Sets sets = formats.sets;
      sets.insert(sets.end(), {"zero.stage=3", "mesh.dp_shard=" + std::to_string(ranks), "mesh.dp_replicate=1",
                               "batch.global_size=" + std::to_string(ranks * one.batch.micro_size)});
      sets.insert(sets.end(), more.begin(), more.end());
      return needed_of(with_settings(one, sets), ranks, allocator);
    };
    int enough = static_cast<int>(std::clamp<int64_t>((verdict.states + verdict.memory - 1) / verdict.memory, 1, kMost + 1)), few = enough - 1;
    for (; enough <= kMost && needed(enough) > verdict.memory; enough *= 2) few = enough;
    if (enough > kMost) continue;
    while (enough - few > 1) {
      const int middle = few + (enough - few) / 2;
      (needed(middle) <= verdict.memory ? enough : few) = middle;
    }
    verdict.smallest = enough;
    verdict.sets = {"zero.stage=3"};
    verdict.sets.insert(verdict.sets.end(), more.begin(), more.end());
    verdict.needed_there = needed(enough);
    return;
  }
}

std::string grouped(int64_t number) {
  std::string text = std::to_string(number);
  for (auto at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) text.insert(static_cast<size_t>(at), ",");
  return text;
}

/// "7e9", "30e9", "6,738,415,616"
std::string count_text(double count) {
  const double exponent = 3 * std::floor(std::log10(count) / 3), mantissa = count / std::pow(10, exponent);
  const std::string brief = fmt::format("{:g}e{:g}", mantissa, exponent);
  return brief.size() <= 7 && exponent > 3 ? brief : grouped(static_cast<int64_t>(count));
}

std::string gib(double bytes) { return fmt::format("{:.2f} GiB", bytes / kGiB); }

std::string flags(const Sets& sets) { return sets.empty() ? "" : fmt::format("--set {}", fmt::join(sets, " --set ")); }

void add_states(const Explanation& explanation, const KeptStates& states, std::vector<std::vector<std::string>>& rows) {
  const bool apart = explanation.parameters != static_cast<double>(explanation.counted);
  const auto row = [&](const std::string& what, double bytes, const std::string& remark = "") {
    if (bytes == 0) return;
    rows.push_back({"  " + what, fmt::format("{} x {:g} B / 1024^3", count_text(explanation.parameters), bytes), gib(explanation.parameters * bytes),
                    apart ? gib(static_cast<double>(explanation.counted) * bytes) : "", remark});
  };
  rows.push_back({});
  rows.push_back({states.formats, "", "", "", flags(states.sets)});
  row("parameters", states.bytes.weight);
  row("in fewer bits", states.bytes.quantized, "which ZeRO 3 alone shards");
  row("gradients", states.bytes.gradient, explanation.adapted() ? "of what is trained" : "as many");
  row("masters", states.masters);
  row("moments", states.moments(), "what the optimizer keeps");
  row("together", states.bytes.total(), fmt::format("{:.4g} GB", explanation.parameters * states.bytes.total() / 1e9));
}

std::string verdict_text(const Explanation& explanation) {
  const Verdict& verdict = *explanation.verdict;
  const auto gb = [](int64_t bytes) { return fmt::format("{:.4g} GB", static_cast<double>(bytes) / 1e9); };
  std::string text = fmt::format("\nOn one device of {}, in 16 bits with masters in 32: {}. Its states take {}, a step needs {} at its peak.\n",
                                 gb(verdict.memory), verdict.fits() ? "yes" : "no", gb(verdict.states), gb(verdict.needed));
  if (verdict.fits()) return text;
  if (verdict.smallest == 0) return text + "On none of the numbers of devices that were tried does it fit; cut the layers too (mesh.tp, mesh.pp).\n";
  return text + fmt::format("The fewest that hold it, each with a micro-batch of its own: {}, with {}; each then needs {}.\n", verdict.smallest,
                            flags(verdict.sets), gb(verdict.needed_there));
}

}  // namespace

Explanation explain(const Config& config, double parameters, int ranks, const std::optional<DeviceAllocator>& allocator) {
  Config one = alone(config);
  precision::settle_compute(one, at::kMeta, precision::Saying::Silent);  // of a caller who has not
  Explanation explanation{.parameters = parameters, .counted = num_parameters(config.model), .layers = config.model.layers};
  if (parameters <= 0) explanation.parameters = static_cast<double>(explanation.counted);
  explanation.trained = trained_share(one);
  explanation.states = {
      states_of(one, "32 bits", {"precision.params=fp32", "precision.master=fp32", "precision.reduce=fp32"}),
      states_of(one, "16 bits, masters in 32", {"precision.params=bf16", "precision.master=fp32", "precision.reduce=bf16"}),
      states_of(one, "16 bits throughout", {"precision.params=bf16", "precision.master=bf16", "precision.reduce=bf16"}),
  };
  explanation.activations = activations_of(one);
  const auto counted = static_cast<double>(explanation.counted);
  explanation.changes = changes_of(one, states_of(one, "", {}), counted, static_cast<double>(explanation.activations.seen), ranks);
  if (config.run.memory_limit_bytes > 0) {
    const KeptStates& halves = explanation.states[1];
    Verdict verdict{.memory = config.run.memory_limit_bytes};
    verdict.states = static_cast<int64_t>(explanation.parameters * halves.bytes.total());
    verdict.needed = needed_of(with_settings(one, halves.sets), 1, allocator);
    if (!verdict.fits()) find_smallest(one, halves, allocator, verdict);
    explanation.verdict = std::move(verdict);
  }
  return explanation;
}

nlohmann::json to_json(const Explanation& explanation) {
  nlohmann::json states = nlohmann::json::array(), changes = nlohmann::json::array();
  for (const KeptStates& one : explanation.states) {
    states.push_back({{"formats", one.formats},
                      {"set", one.sets},
                      {"bytes_per_parameter",
                       {{"params", one.bytes.weight},
                        {"gradients", one.bytes.gradient},
                        {"masters", one.masters},
                        {"moments", one.moments()},
                        {"quantized", one.bytes.quantized}}},
                      {"bytes", explanation.parameters * one.bytes.total()}});
  }
  for (const Change& change : explanation.changes) {
    changes.push_back({{"name", change.name}, {"set", change.sets}, {"ranks", change.ranks}, {"states", change.states}});
    if (change.activations >= 0) changes.back()["activations"] = change.activations;
  }
  const KeptActivations& kept = explanation.activations;
  const auto json_of = [](const KeptActivations::Part& part) { return nlohmann::json{{"token", part.token}, {"fixed", part.fixed}}; };
  nlohmann::json json{{"parameters", explanation.parameters},
                      {"counted", explanation.counted},
                      {"trained", explanation.trained},
                      {"left_out", explanation.left_out},
                      {"states", std::move(states)},
                      {"activations",
                       {{"of_layer", json_of(kept.of_layer)},
                        {"outside", json_of(kept.outside)},
                        {"outputs", kept.outputs},
                        {"seen", kept.seen},
                        {"seen_tokens", kept.seen_tokens}}},
                      {"changes", std::move(changes)}};
  if (const auto& verdict = explanation.verdict) {
    json["verdict"] = {{"fits", verdict->fits()},
                       {"memory", verdict->memory},
                       {"states", verdict->states},
                       {"needed", verdict->needed},
                       {"smallest", verdict->smallest},
                       {"set", verdict->sets},
                       {"needed_there", verdict->needed_there}};
  }
  return json;
}

std::string to_string(const Explanation& explanation) {
  std::vector<std::vector<std::string>> rows{{"What training keeps of", count_text(explanation.parameters), "", "as counted", ""}};
  for (const KeptStates& states : explanation.states) add_states(explanation, states, rows);
  std::string text = fmt::format("{} parameters; the shape has {}\n", count_text(explanation.parameters), grouped(explanation.counted));
  if (!explanation.left_out.empty())
    text += fmt::format("Of one device that has all of it, so these settings are left out: {}.\n", fmt::join(explanation.left_out, ", "));
  text += "\n" + format_columns(rows, {0, 1, 4});
  if (explanation.adapted()) {
    text += fmt::format(
        "\nBytes of a parameter are means: lora.modules trains {:.3g}% as many elements as the shape has, and of the rest keeps the weight alone.\n",
        100 * explanation.trained);
  }
  const KeptActivations& kept = explanation.activations;
  const auto part = [](const KeptActivations::Part& one) {
    const bool fixed = std::abs(one.fixed) >= 1;
    return fmt::format("{}T x {:.0f} B{}", fixed ? "(" : "", one.token, fixed ? fmt::format(" + {})", format_bytes(static_cast<int64_t>(one.fixed))) : "");
  };
  text += fmt::format(
      "\nActivations of T = B S tokens in one pass, by dry runs of two depths and batches: layers x {} + {}; logits and loss: T x {:.0f} B.\n"
      "With T = {} that is {}; a dry run of all layers holds {}, and {} of logits and loss, at most.\n",
      part(kept.of_layer), part(kept.outside), kept.outputs, grouped(kept.seen_tokens),
      format_bytes(static_cast<int64_t>(kept.bytes(static_cast<double>(kept.seen_tokens), static_cast<double>(explanation.layers)))), format_bytes(kept.seen),
      format_bytes(kept.seen_outputs));
  std::vector<std::vector<std::string>> changes{{"a rank of N", "N", "states", "activations", "", ""}};
  for (const Change& change : explanation.changes) {
    changes.push_back({change.name, std::to_string(change.ranks), gib(change.states), change.activations < 0 ? "fewer" : gib(change.activations), change.law,
                       flags(change.sets)});
  }
  text += "\n" + format_columns(changes, {0, 4, 5});
  if (explanation.verdict) text += verdict_text(explanation);
  return text;
}

}  // namespace tessera::plan
