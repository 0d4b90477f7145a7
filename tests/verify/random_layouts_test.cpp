// Random recipes in random layouts against one device: all axes of the mesh in any order, stages of sharding, schedules, number formats, recomputation,
// optimizers and terms of the loss, on small models of odd sizes, each compared module by module. Whatever a recipe says together, it is refused before a rank
// begins, or trains as one device does. A recipe that does not is printed with what can be left out of it left out.
//
// TESSERA_SEED=n runs DISABLED_Many with that seed alone, TESSERA_SEEDS=n,m with those from n to m.

#include <atomic>
#include <cstdlib>
#include <iostream>
#include <regex>

#include "tessera/core/error.h"
#include "tests/comm/order_alone.h"
#include "tests/dice.h"
#include "tests/train/random_layout.h"
#include "tests/train/random_schedule.h"
#include "tests/verify/fixture.h"

namespace tessera {
namespace {

using testing_support::LayoutDice;
using testing_support::RandomLayout;
using Settings = std::vector<std::string>;

class RandomLayouts : public testing_support::VerifyFixture {
 protected:
  RandomLayout draw(uint64_t seed) const { return LayoutDice(seed, write_lines()).draw(); }

  /// What is wrong with it: empty where nothing is. Nothing where it is refused before a rank has begun, which is other tests' business.
  std::optional<std::string> fault_of(const RandomLayout& layout) const {
    // Attention stays soft (matrix_test.cpp).
    Settings sets{"run.steps=2", "run.threads=1", "optim.lr=1e-3", "comm.timeout_s=120", "mesh.dp_replicate=1"};
    sets.insert(sets.end(), layout.sets.begin(), layout.sets.end());
    std::atomic<bool> began = false;
    VerifyOptions options;
    options.plant.network = [&](std::shared_ptr<comm::Engine> engine, const comm::GroupInfo& group) {
      began = true;
      return by_order_alone_ ? testing_support::order_alone()(std::move(engine), group) : engine;
    };
    try {
      const Config made = config(layout.family, sets);
      const VerifyReport report = verify(made, made.mesh, options);
      const bool found = parts(report.forward.first) || parts(report.backward.first) || report.forward.unseen + report.backward.unseen > 0;
      return report.passed() && !found && report.skipped < report.steps ? "" : to_string(report);
    } catch (const ConfigError& refusal) {
      if (began) return refusal.what();
      if (std::getenv("TESSERA_SHOW_REFUSALS") != nullptr) std::cout << refusal.what() << "\n";
      return std::nullopt;
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  /// The bound of gradients in fewer bits is of their sum. Terms of ranks and micro-batches that cancel are larger than it, and round by more: by a few bounds,
  /// in that alone, and not where they are computed, and cross, in fp32.
  std::string fault_beyond_cancelling(const RandomLayout& layout, std::string fault) const {
    static const std::regex far(R"(\n  gradients +([0-9.e+-]+) +([0-9.e+-]+)  FAR)");
    std::smatch found;
    RandomLayout wide = layout;
    std::erase_if(wide.sets, [](const std::string& set) {
      return set.starts_with("precision.reduce=") || set.starts_with("precision.compute=") || set.starts_with("precision.fp8_scales=") ||
             set.starts_with("comm.compression=");
    });
    const bool alone = wide.sets.size() < layout.sets.size() && std::regex_search(fault, found, far) && fault.find("FAR") == fault.rfind("FAR");
    constexpr double kFew = 4;
    if (!alone || std::stod(found[1]) > kFew * std::stod(found[2])) return fault;
    return fault_of(wide).value_or("refused").empty() ? "" : fault;
  }

  /// Beyond what rounding explains of one module. What is zero in exact arithmetic is rounding alone: gradients of queries and keys where each has one partner.
  /// And as the small difference of large numbers, where it has two, they are off by more than rounding of their size.
  static bool parts(const std::optional<Parting>& first) {
    if (!first || first->value <= 30 * first->allowed) return false;
    return !first->module.ends_with("attention.wq") && !first->module.ends_with("attention.wk");
  }

  /// What a fault is told by, whatever else a recipe says: another one is no smaller case of it.
  static std::string kind(const std::string& fault) {
    const bool compared = fault.find(" against one device: ") != std::string::npos;
    return compared ? "another run" : fault.substr(0, fault.find(": "));
  }

  /// The same fault with nothing in the recipe that can be left out.
  RandomLayout smallest(RandomLayout layout, const std::string& fault) const {
    for (size_t i = layout.sets.size(); i-- > 0;) {
      if (layout.sets[i].starts_with("precision.loss_scale")) continue;  // without which fp16 loses gradients
      RandomLayout less = layout;
      less.sets.erase(less.sets.begin() + static_cast<std::ptrdiff_t>(i));
      const std::string left = fault_of(less).value_or("");
      if (!left.empty() && kind(left) == kind(fault)) layout = std::move(less);
    }
    return layout;
  }

  /// `as_found`: as the seed drew before there were the subjects of LayoutDice::draw_wide().
  void run_seeds(uint64_t begin, uint64_t end, bool shrink, bool as_found = false) const {
    uint64_t ran = 0;
    for (uint64_t seed = begin; seed < end; ++seed) {
      RandomLayout layout;
      std::optional<std::string> fault;
      const RandomLayout drawn = draw(seed);
      for (const RandomLayout& less : (as_found ? drawn.as_found() : drawn).ever_less()) {
        layout = as_found ? less : testing_support::by_file(less, seed, folder_);
        if ((fault = fault_of(layout))) break;
        if (layout.sets == less.sets) continue;
        layout = less;
        if ((fault = fault_of(layout))) break;
      }
      if (!fault) continue;
      fault = fault_beyond_cancelling(layout, std::move(*fault));
      ++ran;
      if (fault->empty()) continue;
      const RandomLayout least = shrink ? smallest(layout, *fault) : layout;
      ADD_FAILURE() << "seed " << seed << ": " << least.text() << "\n" << (shrink ? fault_of(least).value_or("") : *fault);
    }
    if (end - begin > 1 && testing_support::asked_text().empty()) EXPECT_GE(2 * ran, end - begin) << "most layouts are refused: the dice test nothing";
  }

  bool by_order_alone_ = false;  ///< messages meet as NCCL lets them
};

TEST_F(RandomLayouts, AreOneDevice) { run_seeds(0, 12, /*shrink=*/false); }

/// The second step of this one has documents whose queries see one key each: what queries and keys learn there is rounding.
TEST_F(RandomLayouts, AreOneDeviceInAStepWithoutAttention) { run_seeds(2925, 2926, /*shrink=*/false, /*as_found=*/true); }

TEST_F(RandomLayouts, AreOneDeviceWhereMessagesMeetByTheirOrderAlone) {
  by_order_alone_ = true;
  run_seeds(0, 6, /*shrink=*/false);
}

TEST_F(RandomLayouts, DISABLED_ManyByOrderAlone) {
  by_order_alone_ = true;
  const auto [begin, end] = testing_support::seeds_asked(6, 300);
  run_seeds(begin, end, /*shrink=*/false);
}

TEST_F(RandomLayouts, DISABLED_Many) {
  const auto [begin, end] = testing_support::seeds_asked(12, 3000);
  run_seeds(begin, end, /*shrink=*/true);
}

}  // namespace
}  // namespace tessera
