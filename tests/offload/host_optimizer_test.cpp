// Updates by the host's cores of parameters that are on the device: the bits of an optimizer on the CPU, whatever it is.

#include "tessera/offload/host_optimizer.h"

#include <filesystem>
#include <map>
#include <set>

#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tessera/comm/testing.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/fp32_products.h"
#include "tessera/memory/history.h"
#include "tessera/memory/memory.h"
#include "tessera/offload/paged_optimizer.h"
#include "tests/optim/parameters.h"
#include "tests/refusal.h"

namespace tessera {
namespace {

using optim::make_parameters;

const std::vector<std::vector<int64_t>> kShapes{{7, 5}, {}, {0, 3}, {11}, {70, 64}};

OptimConfig config_of(const std::string& name) {
  OptimConfig config;
  config.name = name;
  config.momentum = name == "sgd" ? 0.9 : 0;
  config.weight_decay = 0.1;
  return config;
}

HostOptimizer::Build building(const std::string& name) {
  return [name](const std::vector<nn::NamedParameter>& copies) { return optim::make_optimizer(config_of(name), copies, optim::plain_model(copies)); };
}

/// Parameters on the device, the same on the CPU, and gradients of both.
struct Pair {
  Pair() : device(make_parameters(kShapes)), cpu(make_parameters(kShapes, at::kCPU)) { copy_values(); }
  void copy_values() {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < cpu.size(); ++i) {
      nn::set_slice(device[i].tensor, Slice::whole(device[i].name, kShapes[i]));
      nn::set_slice(cpu[i].tensor, Slice::whole(cpu[i].name, kShapes[i]));
      cpu[i].tensor.copy_(device[i].tensor);
    }
  }
  void draw(int step) {
    optim::draw_gradients(device, step);
    for (size_t i = 0; i < cpu.size(); ++i) {
      if (i == 3 && step == 1) at::Tensor(device[i].tensor).mutable_grad() = at::Tensor();  // sits one step out
      const at::Tensor gradient = device[i].tensor.grad();
      at::Tensor(cpu[i].tensor).mutable_grad() = gradient.defined() ? gradient.to(at::kCPU).clone() : at::Tensor();
    }
  }
  void expect_equal() const {
    for (size_t i = 0; i < cpu.size(); ++i) EXPECT_TRUE(at::equal(device[i].tensor.detach().to(at::kCPU), cpu[i].tensor.detach())) << i;
  }
  std::vector<nn::NamedParameter> device, cpu;
};

class HostOptimizerOf : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Offload, HostOptimizerOf, ::testing::Values("adamw", "sgd", "lion", "adafactor", "adam8bit", "muon"));

TEST_P(HostOptimizerOf, IsBitForBitInPiecesOfAnySize) {
  for (const int64_t piece : {int64_t{1}, int64_t{200}, HostOptimizer::kPieceBytes}) {
    Pair pair;
    const at::Device device = pair.device.front().tensor.device();
    HostOptimizer away(pair.device, device, building(GetParam()), piece);
    const auto plain = optim::make_optimizer(config_of(GetParam()), pair.cpu, optim::plain_model(pair.cpu));
    for (int step = 0; step < 4; ++step) {
      pair.draw(step);
      const auto scale = [](const std::vector<nn::NamedParameter>& parameters) {
        return at::full({}, 0.3, parameters.front().tensor.options().dtype(at::kDouble).requires_grad(false));
      };
      away.step(1e-2, {}, step == 1 ? scale(pair.device) : at::Tensor());
      plain->step(1e-2, {}, step == 1 ? scale(pair.cpu) : at::Tensor());
      if (step == 2) {  // somebody writes the weights
        const at::NoGradGuard no_grad;
        for (auto* all : {&pair.device, &pair.cpu}) at::Tensor(all->at(4).tensor).mul_(0.5);
      }
    }
    pair.expect_equal();
    EXPECT_EQ(away.kind(), GetParam());
    EXPECT_EQ(away.update_counts(), plain->update_counts());
    const auto mine = away.state(), want = plain->state();
    ASSERT_EQ(mine.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(mine[i].parameter + mine[i].state, want[i].parameter + want[i].state);
      EXPECT_TRUE(mine[i].tensor.is_cpu());
      EXPECT_TRUE(at::equal(mine[i].tensor, want[i].tensor)) << mine[i].parameter << " " << mine[i].state;
    }
  }
}

TEST_P(HostOptimizerOf, IsBitForBitWithItsStatePagedInPiecesOfAnySize) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / ("tessera-paged-" + std::to_string(getpid()));
  for (const int64_t piece : {int64_t{1}, int64_t{200}, HostOptimizer::kPieceBytes}) {
    for (const OffloadPlace place : {OffloadPlace::Host, OffloadPlace::Disk}) {
      Pair pair;
      auto& updated = place == OffloadPlace::Host ? pair.device : pair.cpu;  // state comes to the device, and from disk to the host
      Pair same;
      auto& reference = place == OffloadPlace::Host ? same.device : same.cpu;
      PagedOptimizer paged(updated, {.place = place, .dir = folder, .piece_bytes = piece}, building(GetParam()));
      const auto plain = optim::make_optimizer(config_of(GetParam()), reference, optim::plain_model(reference));
      for (int step = 0; step < 4; ++step) {
        pair.draw(step);
        same.draw(step);
        if (step == 1) {
          for (auto* all : {&pair.device, &pair.cpu}) at::Tensor(all->at(3).tensor).mutable_grad() = at::Tensor();
        }
        if (step == 2) EXPECT_EQ(paged.state().size(), plain->state().size()) << "brought in, in the midst of a run";
        paged.step(1e-2);
        plain->step(1e-2);
      }
      for (size_t i = 0; i < updated.size(); ++i) {
        EXPECT_TRUE(at::equal(updated[i].tensor.detach(), reference[i].tensor.detach())) << i << " " << piece;
      }
      std::map<std::string, at::Tensor> want;
      for (const auto& held : plain->state()) want[held.parameter + held.state] = held.tensor;
      for (const auto& held : paged.state_to_save()) {
        const at::Tensor read = held.read ? held.read() : held.tensor;
        EXPECT_TRUE(at::equal(read.cpu(), want.at(held.parameter + held.state).cpu())) << held.parameter << held.state;
      }
      const auto mine = paged.state();
      ASSERT_EQ(mine.size(), want.size());
      for (const auto& held : mine) EXPECT_TRUE(at::equal(held.tensor, want.at(held.parameter + held.state))) << held.parameter << held.state;
    }
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove_all(folder);
}

/// On other ranks its pieces end elsewhere, and what it asks of them would meet something else.
TEST(PagedOptimizer, RefusesWhatLooksAtWholeTensorsWhereTheyAreCut) {
  const std::string grouped = "adafactor, but for what is cut";
  comm::run_ranks(2, [&](comm::World& world) {
    for (const std::string& name :
         {std::string("adamw"), std::string("lion"), std::string("adafactor"), std::string("adam8bit"), std::string("muon"), grouped}) {
      for (const bool cut : {false, true}) {
        SCOPED_TRACE(name + (cut ? ", cut" : ""));
        auto parameters = make_parameters({{8, 6}, {5}});
        OptimConfig config = config_of(name == grouped ? "adafactor" : name);
        if (name == grouped) config.groups = {parameters[0].name + ": name = sgd"};
        for (const auto& [parameter, tensor, aliases] : parameters) nn::set_slice(tensor, Slice::whole(parameter, tensor.sizes().vec()));
        if (cut) nn::set_slice(parameters[0].tensor, Slice::along(parameters[0].name, {16, 6}, 0, 8 * world.rank(), 8));
        const auto make = [&] {
          PagedOptimizer(parameters, {}, [&](const std::vector<nn::NamedParameter>& copies) {
            optim::WholeModel whole;
            whole.parameters = {Slice::whole(parameters[0].name, {16, 6}), Slice::whole(parameters[1].name, {5})};
            whole.ranks = world.group();
            return optim::make_optimizer(config, copies, whole);
          });
        };
        if (!cut || name == "adamw" || name == "lion" || name == grouped) {
          EXPECT_NO_THROW(make());
        } else {
          const std::string refused = "PagedOptimizer: " + name + " looks at whole tensors, and '" + parameters[0].name + "'";
          EXPECT_THAT(testing_support::refusal(make), ::testing::HasSubstr(refused));
        }
      }
    }
  });
}

/// Beside what is cut, in groups of their own, and in other pieces on each rank.
TEST(PagedOptimizer, UpdatesWholeTensorsWithoutAWordOfOtherRanks) {
  for (const std::string& name : {std::string("adafactor"), std::string("adam8bit"), std::string("muon")}) {
    for (const int world : {2, 3}) {
      SCOPED_TRACE(name);
      const std::vector<std::vector<int64_t>> wholes{{70, 64}, {5, 3}, {9, 4}};
      auto reference = make_parameters(wholes, testing_support::test_device());
      std::vector<at::Tensor> start;
      for (const auto& parameter : reference) start.push_back(parameter.tensor.detach().clone());
      for (const auto& [parameter, tensor, aliases] : reference) nn::set_slice(tensor, Slice::whole(parameter, tensor.sizes().vec()));
      const auto plain = optim::make_optimizer(config_of(name), reference, optim::plain_model(reference));
      std::vector<std::vector<at::Tensor>> gradients;
      for (int step = 0; step < 3; ++step) {
        optim::draw_gradients(reference, step);
        auto& drawn = gradients.emplace_back();
        for (const auto& parameter : reference) drawn.push_back(parameter.tensor.grad());
        plain->step(1e-2);
      }
      comm::run_ranks(world, [&](comm::World& ranks) {
        const int64_t rows = ranks.rank() == 0 ? 20 : 2, first = ranks.rank() == 0 ? 0 : 18 + 2 * ranks.rank();
        std::vector<nn::NamedParameter> parameters;
        optim::WholeModel whole;
        whole.ranks = ranks.group();
        for (const auto& [parameter, tensor, aliases] : reference) {
          parameters.push_back({parameter, start[parameters.size()].clone().requires_grad_(true), {}});
          nn::set_slice(parameters.back().tensor, Slice::whole(parameter, tensor.sizes().vec()));
          whole.parameters.push_back(Slice::whole(parameter, tensor.sizes().vec()));
          if (ranks.rank() > 0) whole.held_elsewhere.insert(parameter);
        }
        const std::vector<int64_t> shape{18 + 2 * ranks.size(), 6};
        const at::Tensor cut = at::zeros({rows, 6}, reference[0].tensor.options().requires_grad(false)).requires_grad_(true);
        nn::set_slice(cut, Slice::along("cut", shape, 0, first, rows));
        parameters.insert(parameters.begin() + 1, {"cut", cut, {}});
        whole.parameters.push_back(Slice::whole("cut", shape));
        OptimConfig config = config_of(name);
        config.groups = {"cut: name = sgd"};
        PagedOptimizer paged(parameters, {.piece_bytes = 200},
                             [&](const std::vector<nn::NamedParameter>& copies) { return optim::make_optimizer(config, copies, whole); });
        for (const auto& drawn : gradients) {
          for (size_t i = 0, of = 0; i < parameters.size(); ++i) {
            at::Tensor(parameters[i].tensor).mutable_grad() = i == 1 ? at::ones_like(cut) : drawn[of++];
          }
          paged.step(1e-2);
        }
        for (size_t i = 0, of = 0; i < parameters.size(); ++i) {
          if (i != 1) EXPECT_TRUE(at::equal(parameters[i].tensor.detach(), reference[of++].tensor.detach())) << i;
        }
      });
    }
  }
}

TEST(PagedOptimizer, IsSavedATensorAtATime) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / ("tessera-saved-" + std::to_string(getpid()));
  MemoryTracker memory;
  const TrackMemory track(memory);
  auto parameters = make_parameters(std::vector<std::vector<int64_t>>(8, {16, 16}), testing_support::test_device());
  constexpr int64_t kOne = 16 * 16 * 4;
  PagedOptimizer paged(parameters, {.place = OffloadPlace::Disk, .dir = folder, .piece_bytes = kOne}, building("adamw"));
  optim::draw_gradients(parameters, 1);
  paged.step(1e-2);
  const auto at = static_cast<size_t>(MemoryCategory::Optimizer);
  const int64_t before = memory.host_by_category()[at], here = memory.current();
  memory.reset_peak();
  size_t brought = 0;
  for (const auto& held : paged.state_to_save()) {
    if (!held.read) continue;
    EXPECT_EQ(static_cast<int64_t>(held.read().nbytes()), kOne);
    ++brought;
  }
  EXPECT_EQ(brought, 2 * 8u);
  EXPECT_LE(memory.host_peak_by_category()[at], before + kOne);
  EXPECT_EQ(memory.current(), here) << "none has come where it is updated";
  std::filesystem::remove_all(folder);
}

/// On the host, where what is on disk is memory that lies in the file.
TEST(PagedOptimizer, IsLoadedAPieceAtATime) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / ("tessera-loaded-" + std::to_string(getpid()));
  MemoryTracker memory;
  const TrackMemory track(memory);
  const std::vector<std::vector<int64_t>> shapes(8, {16, 16});
  auto parameters = make_parameters(shapes, at::kCPU), same = make_parameters(shapes, at::kCPU);
  constexpr int64_t kOne = 16 * 16 * 4;
  const auto plain = optim::make_optimizer(config_of("adamw"), same);
  optim::draw_gradients(same, 1);
  plain->step(1e-2);
  for (size_t i = 0; i < same.size(); ++i) parameters[i].tensor.detach().copy_(same[i].tensor.detach());
  std::map<std::string, at::Tensor> stored;
  for (const auto& held : plain->state()) stored[held.parameter + held.state] = held.tensor.clone();

  PagedOptimizer paged(parameters, {.place = OffloadPlace::Disk, .dir = folder, .piece_bytes = kOne}, building("adamw"));
  const int64_t before = total_of(memory.current_by_category()) + total_of(memory.host_by_category());
  memory.reset_peak();
  paged.hold_state(plain->update_counts());
  const auto state = paged.state();
  ASSERT_EQ(state.size(), stored.size());
  for (const auto& held : state) at::Tensor(held.tensor).copy_(stored.at(held.parameter + held.state));
  paged.set_update_counts(plain->update_counts());
  EXPECT_LE(memory.peak() + total_of(memory.host_peak_by_category()), before + 6 * kOne) << "the state of a piece, and what is written of it";
  for (int step = 2; step < 4; ++step) {
    for (auto* all : {&parameters, &same}) optim::draw_gradients(*all, step);
    paged.step(1e-2);
    plain->step(1e-2);
    for (size_t i = 0; i < same.size(); ++i) EXPECT_TRUE(at::equal(parameters[i].tensor.detach(), same[i].tensor.detach())) << i << ", step " << step;
  }
  std::filesystem::remove_all(folder);
}

// The state behind a piece begins to come before anybody asks whether its parameter has a gradient.
TEST(PagedOptimizer, IsSavedWhileItComes) {
  constexpr int64_t kOne = 16 * 16 * 4;
  Pair pair;
  const auto drawn = [&](int step) {
    pair.draw(step);
    if (step == 2) {
      for (auto* all : {&pair.device, &pair.cpu}) at::Tensor(all->back().tensor).mutable_grad() = at::Tensor();
    }
  };
  PagedOptimizer paged(pair.device, {.place = OffloadPlace::Host, .piece_bytes = kOne}, building("sgd"));
  const auto plain = optim::make_optimizer(config_of("sgd"), pair.cpu);
  for (const int step : {0, 2}) {
    drawn(step);
    paged.step(1e-2);
    plain->step(1e-2);
  }
  std::map<std::string, at::Tensor> want;
  for (const auto& held : plain->state()) want[held.parameter + held.state] = held.tensor;
  const auto state = paged.state_to_save();
  ASSERT_TRUE(state.back().read);
  EXPECT_TRUE(at::equal(state.back().read(), want.at(state.back().parameter + state.back().state)));
}

TEST(PagedOptimizer, HoldsTheStateOfAPieceAndOfTheNext) {
  const std::vector<std::vector<int64_t>> shapes(8, {16, 16});
  for (const bool meta : {false, true}) {
    MemoryTracker memory;
    const TrackMemory track(memory);
    auto parameters = make_parameters(shapes, meta ? at::Device(at::kMeta) : testing_support::test_device());
    constexpr int64_t kOne = 16 * 16 * 4;
    PagedOptimizer paged(parameters, {.place = OffloadPlace::Host, .piece_bytes = kOne}, building("adamw"));
    for (int step = 0; step < 3; ++step) {
      optim::draw_gradients(parameters, step);
      const int64_t before = memory.current();
      memory.reset_peak();
      paged.step(1e-2);
      EXPECT_EQ(memory.current(), before);
      EXPECT_LE(memory.peak(), before + 5 * kOne) << "two averages of two parameters, and what the operator takes";
      EXPECT_EQ(memory.current(MemoryCategory::Optimizer), 4 * 8) << "counts of updates";
      EXPECT_EQ(memory.host_by_category()[static_cast<size_t>(MemoryCategory::Optimizer)], 2 * 8 * kOne);
    }
    EXPECT_EQ(paged.state_at_hand().size(), 0u);
  }
}

/// w(t+1) = w(t) + update of the gradient at w(t-1), whose gradient here is a function of the weights.
TEST(HostOptimizer, ADelayedUpdateIsThatOfTheGradientOfOneStepBefore) {
  const auto set_gradients = [](const std::vector<nn::NamedParameter>& all, const std::vector<at::Tensor>& at_weights, int step) {
    for (size_t i = 0; i < all.size(); ++i) at::Tensor(all[i].tensor).mutable_grad() = at_weights[i].detach().mul(0.5).add(0.1 * step);
  };
  Pair pair;  // `cpu` are the weights after an update more than `device` shows
  HostOptimizer away(pair.device, pair.device.front().tensor.device(), building("adamw"), HostOptimizer::kPieceBytes, /*delayed=*/true);
  const auto plain = optim::make_optimizer(config_of("adamw"), pair.cpu);
  std::vector<at::Tensor> shown;  // what the reference computes with: the weights of one update before
  for (const auto& one : pair.cpu) shown.push_back(one.tensor.detach().clone());
  for (int step = 0; step < 5; ++step) {
    std::vector<at::Tensor> on_device;
    for (size_t i = 0; i < shown.size(); ++i) {
      EXPECT_TRUE(at::equal(pair.device[i].tensor.detach().to(at::kCPU), shown[i])) << step << " " << i;
      on_device.push_back(pair.device[i].tensor);
    }
    set_gradients(pair.device, on_device, step);
    set_gradients(pair.cpu, shown, step);
    for (size_t i = 0; i < shown.size(); ++i) shown[i] = pair.cpu[i].tensor.detach().clone();  // of the update before this one
    away.step(1e-2);
    plain->step(1e-2);
  }
  EXPECT_EQ(away.update_counts(), plain->update_counts());
  size_t next = 0;
  for (const auto& held : away.state()) {
    if (held.state != optim::kNextState) continue;
    EXPECT_TRUE(at::equal(held.tensor, pair.cpu[next++].tensor.detach())) << held.parameter;
  }
  EXPECT_EQ(next, pair.cpu.size());
}

/// Each parameter once, and none is forgotten (precision/master_weights.h hands on some gradients at a time).
TEST(HostOptimizer, ADelayedUpdateMayBeMadeOfSomeParametersAtATime) {
  Pair pair;
  HostOptimizer away(pair.device, pair.device.front().tensor.device(), building("adamw"), HostOptimizer::kPieceBytes, /*delayed=*/true);
  const auto plain = optim::make_optimizer(config_of("adamw"), pair.cpu);
  pair.draw(0);
  away.begin(1e-2);
  for (const bool odd : {false, true}) {
    for (size_t i = 0; i < kShapes.size(); ++i) {
      at::Tensor parameter = pair.device[i].tensor;
      parameter.mutable_grad() = (i % 2 == 1) == odd ? at::zeros_like(parameter) : at::Tensor();  // what begin() has read counts
    }
    away.apply({.lr = 1e-2});
  }
  plain->step(1e-2);
  for (const auto& parameter : pair.device) at::Tensor(parameter.tensor).mutable_grad() = at::Tensor();
  away.step(1e-2);  // shows it
  pair.expect_equal();
}

/// An update that is under way began with what the weights were before.
TEST(HostOptimizer, WhatIsWrittenBesideADelayedUpdateIsRefused) {
  Pair pair;
  HostOptimizer away(pair.device, pair.device.front().tensor.device(), building("adamw"), HostOptimizer::kPieceBytes, /*delayed=*/true);
  const auto plain = optim::make_optimizer(config_of("adamw"), pair.cpu);
  const auto step = [&](int number) {
    pair.draw(2 + number);
    away.step(1e-2);
  };
  {  // before the first step nothing is under way
    const at::NoGradGuard no_grad;
    for (auto* all : {&pair.device, &pair.cpu}) at::Tensor(all->at(4).tensor).clamp_(-0.01, 0.01);
  }
  step(0);
  plain->step(1e-2);
  step(1);
  pair.expect_equal();
  const at::Tensor weight = pair.device[4].tensor, kept = weight.detach().clone();
  {  // written, and what was there comes back: an optimizer of slices sees such
    const at::NoGradGuard no_grad;
    at::Tensor(weight).zero_();
    at::Tensor(weight).copy_(kept);
  }
  step(2);
  for (const bool in_place : {true, false}) {
    const at::NoGradGuard no_grad;
    const at::Tensor before = weight.detach().clone();
    in_place ? (void)at::Tensor(weight).clamp_(-0.001, 0.001) : weight.set_data(at::zeros_like(before));
    EXPECT_THAT(testing_support::refusal([&] { step(3); }),
                ::testing::AllOf(::testing::HasSubstr("'" + pair.device[4].name + "' was written since the last step"), ::testing::HasSubstr("delayed")));
    EXPECT_THAT(testing_support::refusal([&] { away.state_to_save(); }), ::testing::HasSubstr("was written since the last step")) << "nor is it lost in a save";
    weight.copy_(before);
    step(3);
  }
  // Taken up by another, whose first step shows the update that was under way.
  HostOptimizer resumed(pair.device, pair.device.front().tensor.device(), building("adamw"), HostOptimizer::kPieceBytes, /*delayed=*/true);
  std::map<std::string, at::Tensor> saved;
  std::set<std::string> ahead;
  for (const auto& held : away.state_to_save()) {
    saved[held.parameter + held.state] = held.tensor.clone();
    if (held.state == optim::kNextState) ahead.insert(held.parameter);
  }
  resumed.hold_state({});
  resumed.set_update_counts(away.update_counts());
  for (const auto& held : resumed.state()) held.tensor.copy_(saved.at(held.parameter + held.state));
  resumed.follow_all_but(ahead);
  {
    const at::NoGradGuard no_grad;
    at::Tensor(weight).zero_();
  }
  pair.draw(9);
  EXPECT_THAT(testing_support::refusal([&] { resumed.step(1e-2); }), ::testing::HasSubstr("'" + pair.device[4].name + "' was written since the last step"));
}

/// Frozen with an update on its way, saved, and taken up by another optimizer: it is shown when that steps, as it would have been.
TEST(HostOptimizer, ADelayedUpdateOfWhatWasFrozenSinceIsSaved) {
  Pair whole, resumed;
  const auto make = [](Pair& pair) {
    return std::make_unique<HostOptimizer>(pair.device, pair.device.front().tensor.device(), building("adamw"), HostOptimizer::kPieceBytes, /*delayed=*/true);
  };
  const auto steps = [](Pair& pair, HostOptimizer& optimizer, int first) {
    for (int step = first; step < first + 2; ++step) {
      pair.draw(2 + step);
      if (first > 0) at::Tensor(pair.device[0].tensor).mutable_grad() = at::Tensor();
      optimizer.step(1e-2);
    }
  };
  const auto freeze = [](Pair& pair) { at::Tensor(pair.device[0].tensor).requires_grad_(false); };
  auto optimizer = make(whole), before = make(resumed);
  steps(whole, *optimizer, 0);
  steps(resumed, *before, 0);
  freeze(whole);
  freeze(resumed);
  const at::Tensor at_save = whole.device[0].tensor.detach().clone();
  auto after = make(resumed);
  {  // as a checkpoint does
    std::map<std::string, at::Tensor> saved;
    std::set<std::string> ahead;
    for (const auto& held : before->state_to_save()) {
      saved[held.parameter + held.state] = held.tensor.clone();
      if (held.state == optim::kNextState) ahead.insert(held.parameter);
    }
    EXPECT_TRUE(ahead.contains(resumed.device[0].name));
    after->hold_state(before->update_counts());
    const at::NoGradGuard no_grad;
    for (const auto& held : after->state()) at::Tensor(held.tensor).copy_(saved.at(held.parameter + held.state));
    after->set_update_counts(before->update_counts());
    after->follow_all_but(ahead);
  }
  steps(whole, *optimizer, 2);
  steps(resumed, *after, 2);
  EXPECT_FALSE(at::equal(whole.device[0].tensor, at_save)) << "the update of the last step before it was frozen";
  for (size_t i = 0; i < whole.device.size(); ++i) EXPECT_TRUE(at::equal(whole.device[i].tensor, resumed.device[i].tensor)) << i;
}

/// Before the first step, or of what had no gradient in the last one: there is no update on its way, and a save has what the parameter is by now.
TEST(HostOptimizer, WhatIsWrittenWhereNoUpdateIsUnderWayIsSaved) {
  Pair pair;
  HostOptimizer away(pair.device, pair.device.front().tensor.device(), building("adamw"), HostOptimizer::kPieceBytes, /*delayed=*/true);
  const auto write = [&](size_t index) {
    const at::NoGradGuard no_grad;
    at::Tensor(pair.device[index].tensor).fill_(0.25);
  };
  const auto expect_saved = [&](size_t index) {
    for (const auto& state : {away.state(), away.state_to_save()}) {
      const auto next = std::ranges::find_if(
          state, [&](const optim::StateTensor& held) { return held.state == optim::kNextState && held.parameter == pair.device[index].name; });
      ASSERT_NE(next, state.end());
      EXPECT_TRUE(at::equal(next->tensor, pair.device[index].tensor.detach().to(at::kCPU))) << index;
    }
  };
  write(4);
  expect_saved(4);
  pair.draw(0);
  away.step(1e-2);
  pair.draw(1);  // without a gradient of the fourth
  away.step(1e-2);
  write(3);
  expect_saved(3);
  // Taken up in the midst of a run: what is loaded one update ahead is shown, whatever was on its way.
  away.hold_state(away.update_counts());
  for (const auto& held : away.state()) {
    const at::NoGradGuard no_grad;
    if (held.state == optim::kNextState && held.parameter == pair.device[3].name) at::Tensor(held.tensor).fill_(0.5);
  }
  away.set_update_counts(away.update_counts());
  away.follow_all_but({pair.device[3].name});
  pair.draw(1);
  away.step(1e-2);
  EXPECT_TRUE(pair.device[3].tensor.eq(0.5).all().item<bool>());
}

/// Whoever was refused a load has nothing loaded: what a program writes instead is followed, or refused, as before.
TEST(HostOptimizer, AnnouncedStateThatNeverCameChangesNothing) {
  Pair pair;
  HostOptimizer away(pair.device, pair.device.front().tensor.device(), building("adamw"), HostOptimizer::kPieceBytes, /*delayed=*/true);
  const auto write = [&] {
    const at::NoGradGuard no_grad;
    at::Tensor(pair.device[4].tensor).fill_(0.25);
  };
  std::map<std::string, int64_t> counts;
  for (const auto& parameter : pair.device) counts[parameter.name] = 1;
  away.hold_state(counts);
  write();
  for (const auto& held : away.state_to_save()) {
    if (held.state == optim::kNextState && held.parameter == pair.device[4].name) EXPECT_TRUE(held.tensor.eq(0.25).all().item<bool>());
  }
  pair.draw(2);
  away.step(1e-2);
  EXPECT_TRUE(pair.device[4].tensor.eq(0.25).all().item<bool>()) << "there was no update to be shown";
  away.hold_state(counts);
  write();
  pair.draw(3);
  away.step(1e-2);  // the same values: no write
  EXPECT_FALSE(pair.device[4].tensor.eq(0.25).any().item<bool>()) << "the update that was under way";
  away.hold_state(counts);
  write();
  EXPECT_THAT(testing_support::refusal([&] { away.step(1e-2); }), ::testing::HasSubstr("'" + pair.device[4].name + "' was written since the last step"));
  // A load that comes is the way out.
  away.hold_state(counts);
  EXPECT_NO_THROW(away.state());
  away.set_update_counts(away.update_counts());
  away.follow_all_but({});
  away.step(1e-2);
  EXPECT_TRUE(pair.device[4].tensor.eq(0.25).all().item<bool>());
}

/// What was under way when something else was loaded is lost with its gradients: no later step makes an update of them.
TEST(HostOptimizer, ALoadLeavesNoGradientOfTheUpdateThatWasUnderWay) {
  Pair pair;
  HostOptimizer away(pair.device, pair.device.front().tensor.device(), building("adamw"), HostOptimizer::kPieceBytes, /*delayed=*/true);
  const auto plain = optim::make_optimizer(config_of("adamw"), pair.cpu);
  const auto state_of_third = [](const optim::Optimizer& optimizer) {
    std::map<std::string, at::Tensor> state;
    for (const auto& held : optimizer.state()) {
      if (held.parameter == "p3" && held.state != optim::kNextState) state[held.state] = held.tensor.clone();
    }
    return state;
  };
  pair.draw(2);
  plain->step(1e-2);
  pair.draw(3);
  away.step(1e-2);
  pair.copy_values();
  {  // as a checkpoint of a run without a delay is loaded
    away.hold_state(plain->update_counts());
    std::map<std::string, at::Tensor> saved;
    for (const auto& held : plain->state()) saved[held.parameter + held.state] = held.tensor;
    const at::NoGradGuard no_grad;
    for (const auto& held : away.state()) {
      if (held.state != optim::kNextState) at::Tensor(held.tensor).copy_(saved.at(held.parameter + held.state));
    }
    away.set_update_counts(plain->update_counts());
    away.follow_all_but({});
  }
  pair.draw(1);  // none of the third
  plain->step(1e-2);
  away.step(1e-2);
  const auto mine = state_of_third(away), want = state_of_third(*plain);
  ASSERT_FALSE(want.empty());
  for (const auto& [name, tensor] : want) EXPECT_TRUE(at::equal(mine.at(name), tensor)) << name;
  pair.draw(2);  // shows the update of the others
  plain->step(1e-2);
  away.step(1e-2);
  pair.draw(4);
  away.step(1e-2);
  pair.expect_equal();
}

/// What an optimizer inside finds on the thread that updates it.
class ThreadNotes final : public optim::Optimizer {
 public:
  struct Found {
    int threads = 0;
    bool fast_products = false;
    kernels::KernelChoices choices;
    bool operator==(const Found&) const = default;
    static Found here() { return {at::get_num_threads(), kernels::FastProducts::are_wanted(), kernels::kernel_choices()}; }
  };
  ThreadNotes(const std::vector<nn::NamedParameter>& parameters, Found& found) : Optimizer({{.parameters = parameters}}), found_(found) {}
  std::string kind() const override { return "notes"; }
  std::vector<optim::StateTensor> state() const override { return {}; }

 private:
  void update(const Batch&) override { found_ = Found::here(); }
  Found& found_;
};

TEST(HostOptimizer, ADelayedUpdateIsComputedAsItsRankComputes) {
  for (const bool fast : {true, false}) {
    Pair pair;
    const kernels::FastProducts products(fast);
    const kernels::KernelChoiceGuard choices(fast ? kernels::KernelChoice::Reference : kernels::KernelChoice::Auto);
    ThreadNotes::Found found;
    HostOptimizer away(
        pair.device, pair.device.front().tensor.device(), [&](const auto& copies) { return std::make_unique<ThreadNotes>(copies, found); },
        HostOptimizer::kPieceBytes, /*delayed=*/true);
    pair.draw(0);
    away.step(1e-2);
    (void)away.state();  // waits for it
    EXPECT_EQ(found, ThreadNotes::Found::here());
    EXPECT_EQ(found.fast_products, fast);
  }
}

/// A skipped step begins no update, so what is written behind it is followed, or refused, as it would be without that step.
TEST(HostOptimizer, ASkippedStepOfADelayedRunLosesNoWrite) {
  Pair pair;
  HostOptimizer away(pair.device, pair.device.front().tensor.device(), building("adamw"), HostOptimizer::kPieceBytes, /*delayed=*/true);
  const auto plain = optim::make_optimizer(config_of("adamw"), pair.cpu);
  const auto write = [&] {
    const at::NoGradGuard no_grad;
    for (auto* all : {&pair.device, &pair.cpu}) at::Tensor(all->at(4).tensor).fill_(0.25);
  };
  const auto skip = [&] {
    away.step(1e-2, at::full({1}, 1.0f, pair.device.front().tensor.options().requires_grad(false)));
    away.take_back_count();
  };
  pair.draw(2);
  skip();
  at::Tensor(pair.device[0].tensor).requires_grad_(false);
  for (const auto& held : away.state_to_save()) EXPECT_FALSE(held.state == optim::kNextState && held.parameter == pair.device[0].name) << "none is under way";
  at::Tensor(pair.device[0].tensor).requires_grad_(true);
  write();
  pair.draw(3);
  away.step(1e-2);
  plain->step(1e-2);
  EXPECT_TRUE(pair.device[4].tensor.eq(0.25).all().item<bool>());
  pair.draw(4);
  away.step(1e-2);
  pair.expect_equal();
  EXPECT_EQ(away.update_counts().at(pair.device[4].name), 2);

  skip();  // beside an update that is under way
  write();
  EXPECT_THAT(testing_support::refusal([&] { away.step(1e-2); }), ::testing::HasSubstr("'" + pair.device[4].name + "' was written since the last step"));
}

TEST(HostOptimizer, WhatIsSkippedIsAsItWas) {
  Pair pair;
  HostOptimizer away(pair.device, pair.device.front().tensor.device(), building("adamw"));
  const auto plain = optim::make_optimizer(config_of("adamw"), pair.cpu);
  for (int step = 0; step < 3; ++step) {
    pair.draw(step);
    if (step == 1) {
      away.step(1e-2, at::full({1}, 1.0f, pair.device.front().tensor.options().requires_grad(false)));
      away.take_back_count();
      continue;
    }
    away.step(1e-2);
    plain->step(1e-2);
  }
  pair.expect_equal();
  EXPECT_EQ(away.update_counts(), plain->update_counts());
}

TEST(HostOptimizer, LoadedWeightsAreFollowedWhoeverWroteThem) {
  Pair pair;
  HostOptimizer away(pair.device, pair.device.front().tensor.device(), building("adamw"));
  const auto plain = optim::make_optimizer(config_of("adamw"), pair.cpu);
  pair.draw(0);
  away.step(1e-2);
  plain->step(1e-2);
  {  // past every version counter, as a file is read
    const at::InferenceMode quiet;
    for (auto* all : {&pair.device, &pair.cpu}) {
      at::Tensor view = all->at(4).tensor.variable_data();
      view.mul_(3);
    }
  }
  away.set_update_counts(plain->update_counts());
  pair.draw(2);
  away.step(1e-2);
  plain->step(1e-2);
  pair.expect_equal();
}

TEST(HostOptimizer, LeavesTheDeviceParametersAndGradients) {
  for (const bool meta : {false, true}) {
    MemoryTracker memory;
    const TrackMemory track(memory);
    auto parameters = make_parameters(kShapes, meta ? at::Device(at::kMeta) : testing_support::test_device());
    const int64_t alone = memory.current();
    HostOptimizer away(parameters, parameters.front().tensor.device(), building("adamw"));
    const auto on_host = [&](MemoryCategory category) { return memory.host_by_category()[static_cast<size_t>(category)]; };
    const int64_t elements = 35 + 1 + 11 + 70 * 64;
    EXPECT_EQ(memory.current(), alone);
    EXPECT_EQ(on_host(MemoryCategory::Optimizer), 3 * 4 * elements + 4 * static_cast<int64_t>(kShapes.size())) << "two averages, a copy, and counts of updates";
    optim::draw_gradients(parameters, 0);
    const int64_t before = memory.current();
    memory.reset_peak();
    away.step(1e-2);
    EXPECT_EQ(memory.current(), before);
    EXPECT_EQ(memory.peak(), before);
    EXPECT_EQ(memory.host_peak_by_category()[static_cast<size_t>(MemoryCategory::Gradients)], 4 * elements);
    EXPECT_EQ(on_host(MemoryCategory::Gradients), 0);
  }
}

}  // namespace
}  // namespace tessera
