#include "tessera/plan/search.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/mesh/mesh.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/estimate.h"
#include "tessera/plan/operator_time.h"
#include "tessera/plan/settings.h"
#include "tessera/train/pipeline_layout.h"

// A dry run is a second description of nothing: it is the step. But it takes milliseconds to seconds, and a thousand devices have ten thousand layouts. So the
// formulas that everybody knows sort them, and the search climbs: from the best of the first few it goes to the best neighbour, until no neighbour is better.
// The neighbours that were run for that are the answer to "why not the other way".

namespace tessera::plan {
namespace {

constexpr size_t kFirst = 12;  ///< dry runs before climbing begins
constexpr double kShareOfFirst = 0.5, kShareOfAll = 0.8;

/// Ends a dry run for which nobody waits any longer.
struct OutOfPatience : std::runtime_error {
  OutOfPatience() : std::runtime_error("out of patience") {}
};

double seconds_a_token(const Tried& tried) { return tried.time.seconds / static_cast<double>(tried.choice.batch); }

/// Which is the better answer; of two that are as good always the same one, or a search would end at the one and name the other.
bool is_better(const Tried& a, const Tried& b) {
  if (a.fits != b.fits) return a.fits;
  const double seconds = a.fits ? seconds_a_token(a) : 0, others = a.fits ? seconds_a_token(b) : 0;
  return std::tie(seconds, a.needed_bytes, a.choice) < std::tie(others, b.needed_bytes, b.choice);
}

class Search {
 public:
  using Clock = std::chrono::steady_clock;

  /// `until`: a dry run that lasts longer is broken off.
  Search(const Config& config, int world, const Machine& machine, const SearchOptions& options, Clock::time_point until)
      : config_(config), world_(world), machine_(machine), options_(options), estimate_(config, world, machine), until_(until) {
    found_.world = world;
    found_.limit = config.run.memory_limit_bytes;
    found_.beside = options.beside;
  }

  LayoutSearch run() {
    const auto all = candidates();
    look_at(all, kShareOfFirst);
    climb();
    found_.exhausted = are_known(all);
    if (options_.on_the_host && (found_.complete || found_.exhausted) && (best() == nullptr || !best()->fits)) {
      const auto on_the_host = candidates(/*host_optimizer=*/true);
      if (found_.complete) put_optimizers_on_the_host(on_the_host);
      found_.exhausted = found_.exhausted && are_known(on_the_host);
    }
    finish();
    return std::move(found_);
  }

 private:
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }
  bool is_over(double share = 1) const {
    return elapsed() > share * static_cast<double>(options_.patience.count()) ||
           static_cast<double>(tried_.size()) >= share * static_cast<double>(options_.most_runs);
  }
  bool admits(const LayoutChoice& choice) const { return !options_.admits || options_.admits(choice); }

  struct Candidate {
    LayoutChoice choice;
    Estimate guess;
  };

  /// Those that may fit.
  std::vector<Candidate> candidates(bool host_optimizer = false) {
    auto batches = options_.batches;
    if (batches.empty()) batches.push_back(config_.batch.global_size);
    std::vector<Candidate> found;
    for (auto& choice : all_choices(config_, world_, machine_, batches, options_.fewest_columns)) {
      if (!admits(choice)) continue;
      choice.host_optimizer = host_optimizer;
      found_.possible += host_optimizer ? 0 : 1;
      const Estimate guess = estimate_(choice);
      if (guess.state_bytes > static_cast<double>(found_.limit)) {
        found_.too_large += host_optimizer ? 0 : 1;
      } else {
        found.push_back({.choice = std::move(choice), .guess = guess});
      }
    }
    return found;
  }

  bool are_known(const std::vector<Candidate>& all) const {
    return std::ranges::all_of(all, [&](const Candidate& each) { return tried_.contains(each.choice) || refused_.contains(each.choice); });
  }

  /// What the formulas miss of activations depends on the schedule and on what is recomputed, and shows in the dry runs so far.
  std::pair<std::string, std::string> kind_of(const LayoutChoice& choice) const { return {choice.schedule, choice.recompute}; }

  /// The lower, the sooner: what most probably fits by its time, behind it all else by its memory.
  double score(const Candidate& candidate) const {
    const auto known = activations_.find(kind_of(candidate.choice));
    const double factor = known == activations_.end() ? 1 : known->second;
    const double bytes = candidate.guess.state_bytes + factor * (candidate.guess.bytes - candidate.guess.state_bytes),
                 limit = static_cast<double>(found_.limit);
    return bytes > limit ? 1e6 * bytes / limit : candidate.guess.seconds / static_cast<double>(candidate.choice.batch);
  }

  void learn(const Tried& tried) {
    const Estimate guess = estimate_(tried.choice);
    if (guess.bytes <= guess.state_bytes) return;
    double& factor = activations_[kind_of(tried.choice)];
    factor = std::max(factor, (static_cast<double>(tried.needed_bytes) - guess.state_bytes) / (guess.bytes - guess.state_bytes));
  }

  /// Null where the rules refuse it, and the reason kept.
  const Tried* look(const LayoutChoice& choice) {
    if (const auto known = tried_.find(choice); known != tried_.end()) return &known->second;
    if (refused_.contains(choice)) return nullptr;
    if (options_.progress) options_.progress(fmt::format("layout {} of at most {}: {}", tried_.size() + 1, found_.possible, to_string(choice, world_)));
    try {
      Config changed = with_settings(config_, settings_of(choice, world_));
      validate(changed, world_, Purpose::Plan);
      const auto machine = options_.driven ? options_.driven(changed) : machine_;
      check_pipeline(changed, mesh_shape(changed.mesh, changed.zero.stage, world_));
      const auto patient = [this](const DryRunProgress&) {
        if (Clock::now() > until_) throw OutOfPatience();
      };
      DryRunOptions dry{.machine = machine, .alike_stages = true, .limits_units = true, .progress = patient};
      if (options_.allocator) dry.allocator = DeviceAllocator{.within = found_.limit};
      const DryRun run = dry_run(changed, world_, dry);
      const RankClass& largest = largest_class(run);
      return &tried_
                  .emplace(choice, Tried{.choice = choice,
                                         .peak_bytes = total_of(largest.peak_bytes),
                                         .needed_bytes = needed_bytes(largest),
                                         .fits = needed_bytes(largest) <= found_.limit,
                                         .time = run.time.value(),
                                         .estimated_seconds = estimate_(choice).seconds})
                  .first->second;
    } catch (const NoRate&) {
      throw;  // of any layout
    } catch (const ConfigError& error) {
      refused_.emplace(choice, error.what());
      return nullptr;
    } catch (const OutOfPatience&) {
      found_.complete = false;
      return nullptr;
    }
  }

  /// The best of those that were run and of which `counts`; null where there is none.
  template <class Counts>
  const Tried* best_where(Counts counts) const {
    const Tried* found = nullptr;
    for (const auto& [choice, tried] : tried_) {
      if (counts(tried) && (found == nullptr || is_better(tried, *found))) found = &tried;
    }
    return found;
  }

  const Tried* best() const {
    return best_where([](const Tried&) { return true; });
  }

  /// Of each mesh the most promising, and a second one where that does not fit, until there are enough; then whatever comes, until something fits.
  void look_at(const std::vector<Candidate>& all, double share) {
    std::map<std::tuple<int, int, int, int>, int> looks;
    const auto mesh = [](const LayoutChoice& c) { return std::tuple(c.tp, c.pp, c.cp, c.ep); };
    bool spreads = true;
    while (found_.complete && (tried_.empty() || !is_over(share))) {
      spreads = spreads && tried_.size() < kFirst;
      if (!spreads && best() != nullptr && best()->fits) break;
      const Candidate* next = nullptr;
      for (const Candidate& each : all) {
        if (tried_.contains(each.choice) || refused_.contains(each.choice) || (spreads && looks[mesh(each.choice)] > 1)) continue;
        if (next == nullptr || score(each) < score(*next)) next = &each;
      }
      if (next == nullptr && !spreads) break;
      if (next == nullptr) {  // few ranks have few meshes
        spreads = false;
        continue;
      }
      if (const Tried* tried = look(next->choice)) looks[mesh(next->choice)] += tried->fits ? 2 : 1;
    }
  }

  /// Slower wherever it is needed, and so tried where nothing fits without it alone.
  void put_optimizers_on_the_host(const std::vector<Candidate>& all) {
    if (all.empty()) return;
    look_at(all, kShareOfAll);
    if (best() == nullptr || !best()->fits) return;
    found_.observations.emplace_back("nothing that was run fits with the optimizer's state on the device; on the host it does (offload.optimizer)");
    climb();
  }

  void climb() {
    for (const Tried* at = best(); at != nullptr;) {
      std::vector<std::pair<double, LayoutChoice>> next;
      for (auto& neighbour : neighbours_of(at->choice, config_, world_, machine_, options_.fewest_columns)) {
        if (admits(neighbour.choice)) next.emplace_back(estimate_(neighbour.choice).seconds, std::move(neighbour.choice));
      }
      std::ranges::sort(next);
      const Tried* better = at;
      for (const auto& [guess, choice] : next) {
        if (is_over()) {
          found_.complete = false;
          break;
        }
        const Tried* tried = look(choice);
        if (!found_.complete) break;
        if (tried != nullptr && is_better(*tried, *better)) better = tried;
      }
      if (better == at || is_over()) break;
      at = better;
    }
  }

  /// What the one takes longer for.
  static std::string loss_of(const Tried& tried, const Tried& best) {
    const double slower = seconds_a_token(tried) / seconds_a_token(best) - 1;
    const auto batch = static_cast<double>(tried.choice.batch) / static_cast<double>(best.choice.batch);
    std::pair<double, const char*> parts[] = {{tried.time.computing - batch * best.time.computing, "computing"},
                                              {tried.time.exposed - batch * best.time.exposed, "waiting for collectives"},
                                              {tried.time.asked - batch * best.time.asked, "waiting for the host"},
                                              {tried.time.copied - batch * best.time.copied, "waiting for copies from and to the host"},
                                              {tried.time.bubble - batch * best.time.bubble, "waiting for other stages"}};
    const auto& most = *std::ranges::max_element(parts);
    if (slower < 0.0005) return "as fast";
    return fmt::format("{:.1f}% slower: {:.2g} s more {}", 100 * slower, most.first, most.second);
  }

  void explain(const Tried& best) {
    for (const auto& [what, choice] : neighbours_of(best.choice, config_, world_, machine_, options_.fewest_columns)) {
      if (const auto tried = tried_.find(choice); tried != tried_.end()) {
        const bool fits = tried->second.fits;
        found_.losing.push_back(
            {what, fits ? loss_of(tried->second, best) : fmt::format("needs {} of {}", format_bytes(tried->second.needed_bytes), format_bytes(found_.limit))});
      } else if (const auto refused = refused_.find(choice); refused != refused_.end()) {
        found_.losing.push_back({what, "refused: " + refused->second});
      } else if (const double state = estimate_(choice).state_bytes; state > static_cast<double>(found_.limit)) {
        found_.losing.push_back({what, fmt::format("needs {} for its state alone", format_bytes(static_cast<int64_t>(state)))});
      }
    }
  }

  /// Of those that fit, too.
  template <class Holds>
  const Tried* fastest(Holds holds) const {
    return best_where([&](const Tried& tried) { return tried.fits && holds(tried.choice); });
  }

  template <class Holds>
  std::string nothing_fits(Holds holds) const {
    if (best_where([&](const Tried& tried) { return holds(tried.choice); }) != nullptr) return "nothing that was run fits";
    for (const auto& [choice, reason] : refused_) {
      if (holds(choice)) return "no layout is possible: " + reason;
    }
    return "none of the layouts that may fit was run";
  }

  void observe(const Tried& best) {
    const auto add = [&](std::string text) { found_.observations.push_back(std::move(text)); };
    const int host = machine_.devices_per_host;
    const auto behind = [&](const Tried* other) { return fmt::format("{:.0f}%", 100 * (seconds_a_token(*other) / seconds_a_token(best) - 1)); };
    if (world_ > host) {
      const Tried* across = fastest([&](const LayoutChoice& c) { return c.tp > host; });
      if (best.choice.tp > host) {
        add(fmt::format("tensor parallelism goes across hosts here (tp {} on hosts of {}), against the rule of thumb", best.choice.tp, host));
      } else if (across != nullptr) {
        add(fmt::format("tensor parallelism stays inside a host: across hosts (tp {}) the best is {} slower", across->choice.tp, behind(across)));
      }
    }
    if (const Tried* other = fastest([&](const LayoutChoice& c) { return (c.pp > 1) != (best.choice.pp > 1); })) {
      add(best.choice.pp > 1 ? fmt::format("without a pipeline the best is {} slower", behind(other))
                             : fmt::format("a pipeline does not pay: the best with one is {} slower", behind(other)));
    } else if (best.choice.pp > 1) {
      add("without a pipeline " + nothing_fits([](const LayoutChoice& c) { return c.pp == 1; }));
    }
    if (const Tried* other = fastest([&](const LayoutChoice& c) { return (c.tp > 1) != (best.choice.tp > 1); })) {
      add(best.choice.tp > 1 ? fmt::format("without tensor parallelism the best is {} slower", behind(other))
                             : fmt::format("tensor parallelism does not pay: the best with it is {} slower", behind(other)));
    } else if (best.choice.tp > 1) {
      add("without tensor parallelism " + nothing_fits([](const LayoutChoice& c) { return c.tp == 1; }));
    }
    if (options_.micro_size && *options_.micro_size != best.choice.micro_size) {
      const std::string terms = terms_of_a_micro_batch(config_);
      if (!terms.empty()) {
        add(fmt::format(
            "batch.micro_size = {0} where it was {1} trains another objective, since these are taken over a micro-batch: {2}; to keep it, plan this "
            "layout with --set batch.micro_size={1}",
            best.choice.micro_size, *options_.micro_size, terms));
      }
    }
  }

  /// By formulas, which say what the state needs, and one dry run each.
  void look_for_a_world() {
    constexpr int most = 1 << 16;
    for (int64_t world = int64_t{2} * world_; world <= most && !is_over(2); world *= 2) {
      SearchOptions options = options_;
      options.patience = std::chrono::seconds(0);
      Search other(config_, static_cast<int>(world), machine_, options, begin_ + 2 * options_.patience);
      const auto all = other.candidates();
      if (!all.empty()) other.look_at(all, kShareOfFirst);
      if (const Tried* tried = other.best(); tried != nullptr && tried->fits) {
        found_.smallest_world = static_cast<int>(world);
        return;
      }
      if (other.found_.possible == 0) {  // nor of more
        found_.too_many_for_a_step = static_cast<int>(world);
        return;
      }
      if (other.are_known(all) && other.are_known(other.candidates(/*host_optimizer=*/true))) {
        found_.most_ruled_out = static_cast<int>(world);
      } else if (!other.tried_.empty()) {
        found_.most_looked_at = static_cast<int>(world);
      }
    }
  }

  /// What refuses most layouts.
  std::string refusal() const {
    std::map<std::string, size_t> counts;
    for (const auto& [choice, reason] : refused_) ++counts[reason];
    const auto most = std::ranges::max_element(counts, {}, [](const auto& counted) { return counted.second; });
    return most == counts.end() ? "" : most->first;
  }

  void finish() {
    found_.refused = static_cast<size_t>(std::ranges::count_if(refused_, [](const auto& refused) { return !refused.first.host_optimizer; }));
    found_.refusal = refusal();
    const bool is_for_want_of_memory = !tried_.empty() || found_.too_large > 0 || refused_.empty();
    for (const auto& [choice, tried] : tried_) found_.ranked.push_back(tried);
    std::ranges::stable_sort(found_.ranked, is_better);
    if (const Tried* best = found_.best()) {
      explain(*best);
      observe(*best);
    } else if (options_.on_the_host && is_for_want_of_memory && (found_.complete || !found_.ranked.empty())) {
      look_for_a_world();
    }
    found_.seconds = elapsed();
  }

  const Config& config_;
  int world_;
  const Machine& machine_;
  const SearchOptions& options_;
  Estimator estimate_;
  Clock::time_point begin_ = Clock::now(), until_;
  LayoutSearch found_{};
  std::map<LayoutChoice, Tried> tried_{};
  std::map<LayoutChoice, std::string> refused_{};
  std::map<std::pair<std::string, std::string>, double> activations_{};  ///< measured over guessed
};

}  // namespace

LayoutSearch search_layouts(const Config& config, int world, const Machine& machine, const SearchOptions& options) {
  require(config.run.memory_limit_bytes > 0, "--search: run.memory_limit_bytes is not set, and anything fits; set it, or name a device");
  return Search(config, world, machine, options, std::chrono::steady_clock::now() + options.patience).run();
}

nlohmann::json to_json(const LayoutSearch& search) {
  nlohmann::json layouts = nlohmann::json::array(), losing = nlohmann::json::array();
  for (const Tried& tried : search.ranked) {
    layouts.push_back({{"layout", to_string(tried.choice, search.world)},
                       {"set", settings_of(tried.choice, search.world, search.beside)},
                       {"peak_bytes", tried.peak_bytes},
                       {"needed_bytes", tried.needed_bytes},
                       {"fits", tried.fits},
                       {"batch", tried.choice.batch},
                       {"estimated_seconds", tried.estimated_seconds},
                       {"time", to_json(tried.time)}});
  }
  for (const Loses& other : search.losing) losing.push_back({{"instead", other.what}, {"reason", other.reason}});
  nlohmann::json json{{"world", search.world},     {"limit", search.limit},     {"possible", search.possible},        {"too_large", search.too_large},
                      {"refused", search.refused}, {"seconds", search.seconds}, {"complete", search.complete},        {"exhausted", search.exhausted},
                      {"layouts", layouts},        {"neighbours", losing},      {"observations", search.observations}};
  if (!search.refusal.empty()) json["refusal"] = search.refusal;
  if (search.smallest_world) json["smallest_world"] = *search.smallest_world;
  return json;
}

std::string to_string(const LayoutSearch& search, size_t rows) {
  const Tried* best = search.best();
  std::string out =
      fmt::format("{} layout{} of {} rank{}, {} of them too large by their state alone; {} run dry in {}{}\n", search.possible, search.possible == 1 ? "" : "s",
                  search.world, search.world == 1 ? "" : "s", search.too_large, search.ranked.size(), format_duration(search.seconds),
                  search.complete && (best != nullptr || search.exhausted) ? "" : ", and more would have been looked at with more patience (--patience)");
  if (search.possible == 0) {
    return fmt::format(
        "no layout deals a step over {} ranks: each data rank needs a sequence of its own, and the rest of the ranks divisors of the model; give "
        "a step more sequences (--batch, --max-batch), or name another number of ranks\n",
        search.world);
  }
  if (search.ranked.empty() && !search.exhausted) return out + "no dry run came to its end in time; give it more (--patience)\n";
  if (best == nullptr) {
    // Only where all were run, refused or too large is anything known of those that were not.
    const std::string limit = format_bytes(search.limit);
    const bool one = !search.exhausted && search.ranked.size() == 1, refused = search.ranked.empty() && search.refused > 0;
    out += refused            ? fmt::format("{} refused, however much memory there is: {}", search.too_large > 0 ? "the others are" : "all are", search.refusal)
           : search.exhausted ? fmt::format("none fits in {} a rank", limit)
           : one              ? "the one that was run does not fit"
                              : fmt::format("none of the {} that were run fits in {} a rank", search.ranked.size(), limit);
    if (!search.ranked.empty()) {
      const Tried& least = search.ranked.front();
      out += fmt::format("; {}{}, needs {}{}", one ? "" : "the least, ", to_string(least.choice, search.world), format_bytes(least.needed_bytes),
                         one ? fmt::format(" of {} a rank", limit) : "");
    }
    if (search.smallest_world) {
      out += fmt::format("; {} such devices would do", *search.smallest_world);
    } else if (!refused) {
      if (search.most_ruled_out > 0) out += fmt::format("; nor does it in {} of these devices", search.most_ruled_out);
      if (search.most_looked_at > search.most_ruled_out) out += fmt::format("; nor does what was run of up to {} of these devices", search.most_looked_at);
      if (search.too_many_for_a_step > 0) {
        out += fmt::format("; a step has too few sequences for {} of these devices: give it more (--batch, --max-batch)", search.too_many_for_a_step);
      }
    }
    out += "\n";
    return out;
  }
  size_t width = 6;
  for (size_t i = 0; i < std::min(rows, search.ranked.size()); ++i) width = std::max(width, to_string(search.ranked[i].choice, search.world).size());
  out += fmt::format("\n     {:<{}}  {:>9}  {:>9}  {:>14}  {:>5}\n", "layout", width, "memory", "step", "tokens/s/rank", "peak");
  for (size_t i = 0; i < std::min(rows, search.ranked.size()); ++i) {
    const Tried& tried = search.ranked[i];
    if (!tried.fits) break;
    out += fmt::format("{:>3}  {:<{}}  {:>9}  {:>9}  {:>14.0f}  {:>4.0f}%\n", i + 1, to_string(tried.choice, search.world), width,
                       format_bytes(tried.needed_bytes), format_duration(tried.time.seconds), tried.time.tokens_per_second, 100 * tried.time.mfu);
  }
  if (!search.losing.empty()) out += "\nwhy not, in place of the first:\n";
  size_t what = 0;
  for (const Loses& other : search.losing) what = std::max(what, other.what.size());
  for (const Loses& other : search.losing) out += fmt::format("  {:<{}}  {}\n", other.what, what, other.reason);
  if (!search.observations.empty()) out += "\n";
  for (const auto& text : search.observations) out += "- " + text + "\n";
  return out;
}

}  // namespace tessera::plan
