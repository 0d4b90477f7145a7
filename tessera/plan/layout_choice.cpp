#include "tessera/plan/layout_choice.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <utility>

#include <fmt/format.h>

namespace tessera::plan {
namespace {

std::vector<int> divisors(int64_t of, int64_t most) {
  std::vector<int> found;
  for (int64_t d = 1; d <= std::min(of, most); ++d) {
    if (of % d == 0) found.push_back(static_cast<int>(d));
  }
  return found;
}

/// To which divisors of `of` one goes from `at`, the larger ones first: the next on either side, and those a prime times as large or as small, with which what
/// was dealt evenly still is; none more than 64 times as large.
std::vector<int> steps_from(int64_t at, int64_t of) {
  if (of % at != 0) return {};
  const std::vector<int> all = divisors(of, 64 * at);
  const auto here = std::ranges::find(all, at);
  const auto is_step = [&](const int& other) {
    const int64_t larger = std::max<int64_t>(other, at), smaller = std::min<int64_t>(other, at);
    const bool is_prime = larger % smaller == 0 && divisors(larger / smaller, larger / smaller).size() == 2;
    return is_prime || std::abs(&other - &*here) == 1;
  };
  std::vector<int> steps;
  std::copy_if(here + 1, all.end(), std::back_inserter(steps), is_step);
  std::copy_if(std::make_reverse_iterator(here), all.rend(), std::back_inserter(steps), is_step);
  return steps;
}

struct PipelineChoice {
  const char* schedule;
  int chunks;
};

/// What is worth a look: the plain ones, those that trade messages, or activations, for a smaller bubble, and those of half and a third of the activations.
std::vector<PipelineChoice> schedules(int pp, int64_t layers) {
  if (pp == 1) return {{"1f1b", 1}};
  std::vector<PipelineChoice> found{{"1f1b", 1}, {"zb_h1", 1}};
  for (const int chunks : {2, 4}) {
    if (layers >= int64_t{pp} * chunks) found.push_back({"interleaved", chunks});
  }
  if (layers >= int64_t{pp} * 2) found.insert(found.end(), {{"zb_v", 2}, {"v_half", 2}, {"v_min", 2}});
  return found;
}

/// `cp`: ranks of a sequence share out its state, too, if each data rank has one alone.
std::vector<std::pair<int, int>> shardings(int data_ranks, int cp, int data_ranks_of_a_host) {
  if (data_ranks * cp == 1) return {{0, 1}};
  std::vector<std::pair<int, int>> found{{0, 1}, {1, data_ranks}, {2, data_ranks}, {3, data_ranks}};
  if (data_ranks_of_a_host > 1 && data_ranks_of_a_host < data_ranks && data_ranks % data_ranks_of_a_host == 0) {
    found.insert(found.end(), {{1, data_ranks_of_a_host}, {3, data_ranks_of_a_host}});
  }
  return found;
}

/// Data ranks are the neighbours of their kind every tp x cp x pp ranks.
int on_a_host(const LayoutChoice& choice, const Machine& machine) { return std::max(1, machine.devices_per_host / (choice.tp * choice.cp * choice.pp)); }

/// Over which mesh.ep and mesh.expert_tp deal experts (docs/moe.md).
int ranks_of_experts(const LayoutChoice& c) { return c.stage > 0 ? c.shard * c.cp * c.tp : c.tp; }

/// What is left of mesh.tp to cut each expert over, where mesh.ep has dealt them.
int most_expert_tp(const LayoutChoice& c, const ModelConfig& model) {
  if (model.experts == 0 || ranks_of_experts(c) % c.ep != 0) return 1;
  const int64_t width = std::gcd(model.ffn_dim.value_or(0), int64_t{c.tp});
  return static_cast<int>(std::gcd(width, int64_t{ranks_of_experts(c) / c.ep}));
}

/// Routers that look at all tokens of a forward pass: no rank may have a part of them (rules.cpp).
bool cuts_sequences(const Config& config) { return config.moe.capacity_factor == 0 && (config.model.experts == 0 || config.model.router != "expert_choice"); }

/// mesh.ep and mesh.expert_tp: experts whole, or cut over as many ranks of mesh.tp as there are left.
std::vector<std::pair<int, int>> dealings(LayoutChoice c, const ModelConfig& model, int world) {
  std::vector<std::pair<int, int>> found;
  for (const int ep : divisors(std::max<int64_t>(1, model.experts), world)) {
    found.emplace_back(ep, 1);
    c.ep = ep;
    if (const int most = most_expert_tp(c, model); most > 1) found.emplace_back(ep, most);
  }
  return found;
}

/// What no rule allows, for any model.
bool is_possible(const LayoutChoice& c, const Config& config, int world) {
  const ModelConfig& model = config.model;
  if (world % (c.tp * c.pp * c.cp) != 0 || c.tp > std::max<int64_t>(1, model.heads) || c.pp * c.chunks > model.layers) return false;
  if (c.cp > config.data.seq_len) return false;
  if (c.batch % c.micro_size != 0 || c.batch / c.micro_size < c.data_ranks(world)) return false;
  if (c.ep > 1 && model.experts % c.ep != 0) return false;
  if (ranks_of_experts(c) % (c.ep * c.expert_tp) != 0) return false;
  if (c.schedule == "interleaved" && c.micro_batches(world) % std::max<int64_t>(1, c.micro_batches(world) / c.pp) != 0) return false;
  return c.shard <= c.data_ranks(world) && c.data_ranks(world) % c.shard == 0;
}

std::vector<int64_t> micro_sizes(int64_t batch, int64_t data_ranks) {
  std::vector<int64_t> found;
  for (const int64_t size : divisors(batch, 16)) {
    if (size * data_ranks <= batch) found.push_back(size);
  }
  return found;
}

}  // namespace

std::vector<std::string> settings_of(const LayoutChoice& c, int world, const std::vector<std::string>& beside) {
  const auto of = [](const char* key, auto value) { return fmt::format("{}={}", key, value); };
  std::vector<std::string> sets{of("mesh.tp", c.tp),
                                of("mesh.pp", c.pp),
                                of("mesh.cp", c.cp),
                                of("mesh.ep", c.ep),
                                of("mesh.expert_tp", c.expert_tp),
                                of("mesh.dp_shard", c.shard),
                                of("mesh.dp_replicate", c.data_ranks(world) / c.shard),
                                of("zero.stage", c.stage),
                                of("batch.global_size", c.batch),
                                of("batch.micro_size", c.micro_size),
                                of("recompute.mode", c.recompute),
                                of("tensor.sequence_parallel", c.tp > 1 && c.sequence_parallel),
                                of("pipeline.schedule", c.schedule),
                                of("pipeline.virtual_stages", c.chunks)};
  if (c.offload) sets.insert(sets.end(), {"offload.params=host", "offload.gradients=host", "offload.optimizer=host"});
  if (c.host_optimizer) sets.emplace_back("offload.optimizer=host");
  const std::vector<std::string> chosen = sets;
  std::ranges::copy_if(beside, std::back_inserter(sets), [&](const std::string& set) {
    return std::ranges::none_of(chosen, [&](const std::string& own) { return own.starts_with(set.substr(0, set.find('=') + 1)); });
  });
  return sets;
}

std::string to_string(const LayoutChoice& c, int world) {
  std::string out;
  const auto add = [&](const std::string& text) { out += (out.empty() ? "" : ", ") + text; };
  if (c.tp > 1) add(fmt::format("tp {}{}", c.tp, c.sequence_parallel ? "" : " without sp"));
  if (c.cp > 1) add(fmt::format("cp {}", c.cp));
  if (c.pp > 1) add(fmt::format("pp {} {}{}", c.pp, c.schedule, c.chunks > 1 ? fmt::format(" x{}", c.chunks) : ""));
  const int data = c.data_ranks(world);
  add(fmt::format("dp {}", data));
  if (c.stage > 0) out += fmt::format(" (zero {}{})", c.stage, c.shard < data ? fmt::format(" over {}", c.shard) : "");
  if (c.ep > 1) add(fmt::format("ep {}", c.ep));
  if (c.expert_tp > 1) add(fmt::format("expert tp {}", c.expert_tp));
  add(fmt::format("micro {}", c.micro_size));
  if (c.recompute != "none") add("recompute " + c.recompute);
  if (c.offload) add("offload");
  if (c.host_optimizer) add("optimizer on the host");
  return out;
}

std::vector<LayoutChoice> all_choices(const Config& config, int world, const Machine& machine, const std::vector<int64_t>& batches, int64_t fewest_columns) {
  const int most_tp = 2 * machine.devices_per_host;  // beyond a host once, so that what that costs is seen
  std::vector<LayoutChoice> found;
  for (const int tp : divisors(world, most_tp)) {
    for (const int cp : divisors(world / tp, std::max<int64_t>(1, config.data.seq_len / fewest_columns))) {
      for (const int pp : divisors(world / tp / cp, config.model.layers)) {
        for (const int64_t batch : batches) {
          LayoutChoice choice{.tp = tp, .pp = pp, .cp = cp, .batch = batch, .sequence_parallel = cuts_sequences(config)};
          const int data = choice.data_ranks(world);
          for (const auto& [stage, shard] : shardings(data, cp, on_a_host(choice, machine))) {
            choice.stage = stage, choice.shard = shard;
            for (const auto& [ep, expert_tp] : dealings(choice, config.model, world)) {
              for (const int64_t micro_size : micro_sizes(batch, data)) {
                for (const auto& [schedule, chunks] : schedules(pp, config.model.layers)) {
                  for (const char* recompute : {"none", "selective", "full"}) {
                    choice.ep = ep, choice.expert_tp = expert_tp, choice.micro_size = micro_size;
                    choice.schedule = schedule, choice.chunks = chunks, choice.recompute = recompute;
                    if (is_possible(choice, config, world)) found.push_back(choice);
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  return found;
}

std::vector<Neighbour> neighbours_of(const LayoutChoice& at, const Config& config, int world, const Machine& machine, int64_t fewest_columns) {
  std::vector<Neighbour> found;
  const auto add = [&](const std::string& what, auto change) {
    LayoutChoice next = at;
    change(next);
    const int data = next.data_ranks(std::max(world, next.tp * next.pp * next.cp));
    if (at.shard == at.data_ranks(world) || next.shard > data) next.shard = next.stage > 0 ? std::max(1, data) : 1;  // all of them, as before
    if (next.stage == 0) next.shard = 1;
    if (data * next.cp == 1) next.stage = 0, next.shard = 1;
    if (at.expert_tp > 1 && next.expert_tp == at.expert_tp) next.expert_tp = most_expert_tp(next, config.model);  // cut, as before
    if (next.pp == 1) next.schedule = "1f1b", next.chunks = 1;
    if (next != at && is_possible(next, config, world)) found.push_back({what, next});
  };
  const auto step = [&](const char* name, auto LayoutChoice::* size, int64_t of, int64_t most = INT64_MAX) {
    for (const int next : steps_from(at.*size, of)) {
      if (next < at.*size || next <= most) add(fmt::format("{} {}", name, next), [&](LayoutChoice& c) { c.*size = next; });
    }
  };
  const int data_ranks = at.data_ranks(world);
  step("tp", &LayoutChoice::tp, int64_t{at.tp} * data_ranks);
  step("pp", &LayoutChoice::pp, int64_t{at.pp} * data_ranks);
  step("cp", &LayoutChoice::cp, int64_t{at.cp} * data_ranks, config.data.seq_len / fewest_columns);
  if (config.model.experts > 0) step("ep", &LayoutChoice::ep, std::gcd(config.model.experts, int64_t{ranks_of_experts(at)}));
  if (at.expert_tp > 1) add("experts whole", [](LayoutChoice& c) { c.expert_tp = 1; });
  if (const int most = most_expert_tp(at, config.model); most > at.expert_tp)
    add(fmt::format("expert tp {}", most), [&](LayoutChoice& c) { c.expert_tp = most; });
  for (const int tp : steps_from(at.tp, int64_t{at.tp} * at.pp)) {
    const int pp = at.tp * at.pp / tp;
    add(fmt::format("tp {} and pp {}", tp, pp), [&](LayoutChoice& c) { c.tp = tp, c.pp = pp; });
  }
  for (const auto& [stage, shard] : shardings(at.data_ranks(world), at.cp, on_a_host(at, machine))) {
    if (stage == at.stage && shard == at.shard) continue;
    LayoutChoice next = at;
    next.stage = stage, next.shard = shard;
    if (at.expert_tp > 1) next.expert_tp = most_expert_tp(next, config.model);
    if (is_possible(next, config, world))
      found.push_back({fmt::format("zero {}{}", stage, shard > 1 && shard < at.data_ranks(world) ? fmt::format(" over {}", shard) : ""), next});
  }
  step("micro", &LayoutChoice::micro_size, at.batch);
  for (const char* recompute : {"none", "selective", "full"}) {
    if (at.recompute != recompute) add(std::string("recompute ") + recompute, [&](LayoutChoice& c) { c.recompute = recompute; });
  }
  if (at.host_optimizer) add("optimizer on the device", [](LayoutChoice& c) { c.host_optimizer = false; });
  for (const auto& [schedule, chunks] : schedules(at.pp, config.model.layers)) {
    if (schedule == at.schedule && chunks == at.chunks) continue;
    add(chunks > 1 ? fmt::format("{} x{}", schedule, chunks) : schedule,
        [&, schedule = schedule, chunks = chunks](LayoutChoice& c) { c.schedule = schedule, c.chunks = chunks; });
  }
  return found;
}

}  // namespace tessera::plan
