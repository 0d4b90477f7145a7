#include "tessera/precision/master_weights.h"

#include <filesystem>
#include <map>
#include <set>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/core/rng.h"
#include "tessera/memory/memory.h"
#include "tessera/offload/host_optimizer.h"
#include "tessera/offload/paged_optimizer.h"
#include "tessera/optim/several.h"
#include "tessera/precision/gradient_dtype.h"
#include "tests/plain_model.h"
#include "tests/test_device.h"

namespace tessera::precision {
namespace {

using optim::StateTensor;

OptimConfig config_of(const std::string& name) {
  OptimConfig config;
  config.name = name;
  config.lr = 1e-3;
  config.momentum = name == "sgd" ? 0.9 : 0;
  config.weight_decay = 0.1;
  return config;
}

Policy policy(at::ScalarType params, at::ScalarType master = at::kFloat) { return {.params = params, .compute = params, .master = master}; }

at::Tensor values(at::IntArrayRef sizes, const std::string& stream, float scale = 1) {
  return testing_support::floats_by(sizes, [&](float* out, int64_t n) { CounterRng(9, stream).fill_uniform(out, 0, n, -scale, scale); });
}

std::vector<nn::NamedParameter> make_parameters(const std::vector<std::vector<int64_t>>& shapes, at::ScalarType dtype,
                                                at::Device device = testing_support::test_device()) {
  std::vector<nn::NamedParameter> parameters;
  for (const auto& shape : shapes) {
    const std::string name = "p" + std::to_string(parameters.size());
    const at::Tensor tensor = device.is_meta() ? at::empty(shape, at::TensorOptions(device).dtype(dtype)) : values(shape, name).to(dtype);
    tensor.set_requires_grad(true);
    nn::set_slice(tensor, Slice::whole(name, shape));
    parameters.push_back({name, tensor, {}});
  }
  return parameters;
}

void set_gradients(const std::vector<nn::NamedParameter>& parameters, int step, at::ScalarType dtype) {
  for (const auto& parameter : parameters) {
    const at::Tensor tensor = parameter.tensor;
    tensor.mutable_grad() = values(tensor.sizes(), parameter.name + "/" + std::to_string(step), 0.01f).to(dtype);
  }
}

class MasterWeightsOf : public ::testing::TestWithParam<std::string> {};

TEST_P(MasterWeightsOf, UpdatesAsFp32DoesAndShowsItRounded) {
  const at::NoGradGuard no_grad;  // parameters are written to
  const std::vector<std::vector<int64_t>> shapes{{7, 5}, {}, {0, 3}, {11}};
  const auto weights = make_parameters(shapes, at::kBFloat16);
  auto reference = make_parameters(shapes, at::kFloat);
  for (size_t i = 0; i < weights.size(); ++i) reference[i].tensor.copy_(weights[i].tensor);
  const auto masters = make_optimizer(config_of(GetParam()), policy(at::kBFloat16), 0, weights);
  const auto plain = make_optimizer(config_of(GetParam()), {}, 0, reference);
  for (int step = 0; step < 30; ++step) {
    set_gradients(weights, step, step % 2 ? at::kFloat : at::kBFloat16);
    set_gradients(reference, step, at::kBFloat16);
    for (size_t i = 0; i < weights.size(); ++i) {
      if (step % 2) weights[i].tensor.mutable_grad().copy_(reference[i].tensor.grad());
      reference[i].tensor.mutable_grad() = reference[i].tensor.grad().to(at::kFloat);
    }
    masters->step(1e-3);
    plain->step(1e-3);
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    EXPECT_EQ(weights[i].tensor.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(weights[i].tensor, reference[i].tensor.to(at::kBFloat16))) << i;
  }
  EXPECT_EQ(masters->update_counts(), plain->update_counts());
  size_t kept = 0;
  for (const StateTensor& state : masters->state()) {
    EXPECT_EQ(state.tensor.scalar_type(), at::kFloat);
    if (state.state != "master") continue;
    EXPECT_TRUE(at::equal(state.tensor, reference[kept].tensor));
    EXPECT_EQ(state.slice, nn::slice_of(weights[kept++].tensor));
  }
  EXPECT_EQ(kept, shapes.size());
}

TEST_P(MasterWeightsOf, FollowsWeightsThatAreWrittenBetweenSteps) {
  const at::NoGradGuard no_grad;  // parameters are written to
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto weights = make_parameters({{7, 5}, {11}}, dtype);
    const auto masters = make_optimizer(config_of(GetParam()), policy(dtype), 0, weights);
    for (int step = 0; step < 3; ++step) {
      set_gradients(weights, step, dtype);
      masters->step(1e-3);
    }
    std::vector<at::Tensor> before;
    for (const StateTensor& state : masters->state()) {
      if (state.state == "master") before.push_back(state.tensor.clone());
    }
    weights[0].tensor[2].fill_(3);  // some of it: the rest keeps what it has gathered
    weights[1].tensor.copy_(at::linspace(-1, 1, 11));
    for (const auto& weight : weights) weight.tensor.mutable_grad() = at::zeros_like(weight.tensor);
    masters->step(0);
    size_t i = 0;
    for (const StateTensor& state : masters->state()) {
      if (state.state != "master") continue;
      at::Tensor expected = before[i];
      i == 0 ? expected[2].fill_(3) : expected.copy_(weights[1].tensor);
      EXPECT_TRUE(at::equal(state.tensor, expected)) << state.tensor << expected;
      ++i;
    }
  }
}

TEST_P(MasterWeightsOf, GoesOnFromItsState) {
  const at::NoGradGuard no_grad;  // parameters are written to
  const auto weights = make_parameters({{5, 3}, {4}}, at::kHalf), resumed = make_parameters({{5, 3}, {4}}, at::kHalf);
  const auto first = make_optimizer(config_of(GetParam()), policy(at::kHalf), 0, weights);
  const auto run = [](optim::Optimizer& optimizer, const std::vector<nn::NamedParameter>& parameters, int from, int to) {
    for (int step = from; step < to; ++step) {
      set_gradients(parameters, step, at::kFloat);
      optimizer.step(1e-2);
    }
  };
  run(*first, weights, 0, 5);
  const auto second = make_optimizer(config_of(GetParam()), policy(at::kHalf), 0, resumed);
  for (size_t i = 0; i < weights.size(); ++i) resumed[i].tensor.copy_(weights[i].tensor);
  const auto saved = first->state(), loaded = second->state();
  ASSERT_EQ(saved.size(), loaded.size());
  for (size_t i = 0; i < saved.size(); ++i) loaded[i].tensor.copy_(saved[i].tensor);
  second->set_update_counts(first->update_counts());
  run(*first, weights, 5, 9);
  run(*second, resumed, 5, 9);
  for (size_t i = 0; i < weights.size(); ++i) EXPECT_TRUE(at::equal(weights[i].tensor, resumed[i].tensor));
  for (size_t i = 0; i < saved.size(); ++i) EXPECT_TRUE(at::equal(saved[i].tensor, loaded[i].tensor)) << saved[i].state;
}

INSTANTIATE_TEST_SUITE_P(Optimizers, MasterWeightsOf, ::testing::Values("adamw", "sgd"), [](const auto& info) { return info.param; });

/// Whatever is between the masters and who updates them, and whichever weights that writes along by itself.
class MasterWeightsAround : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  using Parameters = std::vector<nn::NamedParameter>;

  ~MasterWeightsAround() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<optim::Optimizer> make(const std::string& around, const Parameters& parameters) const {
    const auto inside = [name = std::get<1>(GetParam())](const Parameters& given) {
      return optim::make_optimizer(config_of(name), given, testing_support::plain_model(given));
    };
    const at::Device device = parameters.front().tensor.device();
    constexpr int64_t kPiece = 200;
    if (around == "paged") return std::make_unique<PagedOptimizer>(parameters, PagedOptimizerOptions{.piece_bytes = kPiece}, inside);
    if (around == "disk") {
      return std::make_unique<PagedOptimizer>(parameters, PagedOptimizerOptions{.place = OffloadPlace::Disk, .dir = folder_, .piece_bytes = kPiece}, inside);
    }
    if (around == "host") return std::make_unique<HostOptimizer>(parameters, device, inside, kPiece);
    if (around == "delayed") return std::make_unique<HostOptimizer>(parameters, device, inside, kPiece, /*delayed=*/true);
    if (around == "several") {
      std::vector<optim::Several::Part> parts;
      parts.push_back({.optimizer = inside({parameters.begin(), parameters.begin() + 2})});
      parts.push_back({.optimizer = make("disk", {parameters.begin() + 2, parameters.end()})});
      return std::make_unique<optim::Several>("several", std::move(parts));
    }
    return inside(parameters);
  }

  const std::filesystem::path folder_ = std::filesystem::temp_directory_path() / ("tessera-masters-" + std::to_string(getpid()));
};
INSTANTIATE_TEST_SUITE_P(Optimizers, MasterWeightsAround,
                         ::testing::Combine(::testing::Values("nothing", "several", "paged", "disk", "host", "delayed"),
                                            ::testing::Values("adamw", "sgd", "lion", "adafactor", "adam8bit", "muon")),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param); });

TEST_P(MasterWeightsAround, AWeightIsItsMasterRounded) {
  const at::NoGradGuard no_grad;  // parameters are written to
  const std::string around = std::get<0>(GetParam());
  const std::vector<std::vector<int64_t>> shapes{{7, 5}, {}, {0, 3}, {11}, {70, 64}};
  const auto weights = make_parameters(shapes, at::kBFloat16), reference = make_parameters(shapes, at::kFloat);
  for (size_t i = 0; i < weights.size(); ++i) at::Tensor(reference[i].tensor).copy_(weights[i].tensor);
  MasterWeights masters(weights, [&](const Parameters& given) { return make(around, given); });
  const auto plain = make(around, reference);
  const at::Tensor half = at::full({}, 0.5, weights[0].tensor.options().dtype(at::kDouble).requires_grad(false));
  for (int step = 0; step < 6; ++step) {
    set_gradients(weights, step, at::kBFloat16);
    if (step == 3) at::Tensor(weights[3].tensor).mutable_grad() = at::Tensor();  // sits it out
    for (size_t i = 0; i < weights.size(); ++i) {
      const at::Tensor& gradient = weights[i].tensor.grad();
      at::Tensor(reference[i].tensor).mutable_grad() = gradient.defined() ? gradient.to(at::kFloat) : at::Tensor();
    }
    masters.step(1e-2, {}, step == 1 ? half : at::Tensor());
    plain->step(1e-2, {}, step == 1 ? half : at::Tensor());
    for (size_t i = 0; i < weights.size(); ++i) {
      EXPECT_TRUE(at::equal(weights[i].tensor, reference[i].tensor.to(at::kBFloat16))) << step << " " << i;
    }
    if (step == 2 && around != "delayed") {  // somebody writes weights
      for (const size_t i : {size_t{0}, size_t{4}}) at::Tensor(reference[i].tensor).copy_(at::Tensor(weights[i].tensor).mul_(0.5));
    }
  }
  EXPECT_FALSE(at::equal(weights[4].tensor, make_parameters(shapes, at::kBFloat16)[4].tensor));
  EXPECT_EQ(masters.update_counts(), plain->update_counts());
  size_t kept = 0;
  for (const StateTensor& state : masters.state_to_save()) {
    if (state.state == "master") EXPECT_TRUE(at::equal(state.tensor, reference[kept++].tensor)) << state.parameter;
  }
  EXPECT_EQ(kept, shapes.size());
}

/// Masters that wait elsewhere have no memory while other pieces are updated.
class PagedMasters : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  using Parameters = std::vector<nn::NamedParameter>;
  static constexpr int64_t kPiece = 200;

  ~PagedMasters() override { std::filesystem::remove_all(folder_); }

  /// Of 16-bit weights, state in their masters' type, paged in pieces of so many bytes; 0: it stays.
  std::unique_ptr<optim::Optimizer> make(const Parameters& weights, int64_t piece_bytes) const {
    const auto& [name, place] = GetParam();
    OptimConfig config = config_of(name == "groups" ? "adamw" : name);
    if (name == "groups") config.groups = {"p4: name = muon"};
    const HostOptimizer::Build masters = [config](const Parameters& given) {
      return make_optimizer(config, policy(at::kBFloat16), 0, given, testing_support::plain_model(given));
    };
    const HostOptimizer::Build paged = [&, masters](const Parameters& given) -> std::unique_ptr<optim::Optimizer> {
      if (piece_bytes == 0) return masters(given);
      const auto waits = place == "host" ? OffloadPlace::Host : OffloadPlace::Disk;
      return std::make_unique<PagedOptimizer>(given, PagedOptimizerOptions{.place = waits, .dir = folder_, .piece_bytes = piece_bytes}, masters);
    };
    if (place == "host" || place == "disk") return paged(weights);
    return std::make_unique<HostOptimizer>(weights, weights.front().tensor.device(), paged, kPiece, place == "delayed");
  }

  const std::filesystem::path folder_ = std::filesystem::temp_directory_path() / ("tessera-paged-masters-" + std::to_string(getpid()));
};
INSTANTIATE_TEST_SUITE_P(Optimizers, PagedMasters,
                         ::testing::Combine(::testing::Values("adamw", "lion", "adafactor", "adam8bit", "muon", "groups"),
                                            ::testing::Values("host", "disk", "updated_on_the_host", "delayed")),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param); });

TEST_P(PagedMasters, AreBitForBitThoseThatStay) {
  const at::NoGradGuard no_grad;  // parameters are written to
  const bool delayed = std::get<1>(GetParam()) == "delayed";
  const std::vector<std::vector<int64_t>> shapes{{7, 5}, {}, {0, 3}, {11}, {70, 64}, {9, 8}};
  for (const int64_t piece : {int64_t{1}, kPiece, int64_t{1} << 20}) {
    SCOPED_TRACE(piece);
    const auto away = make_parameters(shapes, at::kBFloat16), stays = make_parameters(shapes, at::kBFloat16);
    for (const auto* both : {&away, &stays}) both->back().tensor.set_requires_grad(false);  // frozen at first
    auto paged = make(away, piece), plain = make(stays, 0);
    const auto step = [&](optim::Optimizer& optimizer, const Parameters& weights, int number) {
      set_gradients(weights, number, at::kBFloat16);
      if (number == 2) at::Tensor(weights[3].tensor).mutable_grad() = at::Tensor();  // sits it out, and its master waits
      if (number < 3) at::Tensor(weights[5].tensor).mutable_grad() = at::Tensor();
      if (number == 3) weights[5].tensor.set_requires_grad(true);
      optimizer.step(1e-2);
      if (number == 1 && !delayed) at::Tensor(weights[3].tensor).mul_(0.5);  // somebody writes it
    };
    const auto expect_equal = [&](const optim::Optimizer& mine, const Parameters& weights) {
      for (size_t i = 0; i < shapes.size(); ++i) EXPECT_TRUE(at::equal(weights[i].tensor, stays[i].tensor)) << i;
      std::map<std::string, at::Tensor> want;
      for (const StateTensor& held : plain->state()) want[held.parameter + held.state] = held.tensor;
      const auto state = mine.state();
      EXPECT_EQ(state.size(), want.size());
      for (const StateTensor& held : state) EXPECT_TRUE(at::equal(held.tensor, want.at(held.parameter + held.state))) << held.parameter << held.state;
    };
    for (int number = 0; number < 5; ++number) {
      step(*paged, away, number);
      step(*plain, stays, number);
    }
    expect_equal(*paged, away);
    // Taken up from what it saved.
    const auto resumed = make_parameters(shapes, at::kBFloat16);
    const auto again = make(resumed, piece);
    for (size_t i = 0; i < shapes.size(); ++i) resumed[i].tensor.copy_(away[i].tensor);
    again->hold_state(paged->update_counts());
    std::map<std::string, at::Tensor> saved;
    for (const StateTensor& held : paged->state_to_save()) saved[held.parameter + held.state] = (held.read ? held.read() : held.tensor).clone();
    std::set<std::string> ahead;
    for (const StateTensor& held : again->state()) {
      at::Tensor(held.tensor).copy_(saved.at(held.parameter + held.state));
      if (held.state == optim::kNextState) ahead.insert(held.parameter);
    }
    again->set_update_counts(paged->update_counts());
    again->follow_all_but(ahead);
    for (int number = 5; number < 7; ++number) {
      step(*again, resumed, number);
      step(*plain, stays, number);
    }
    expect_equal(*again, resumed);
  }
}

/// A weight that is frozen at first has itself for a master, and in its place a copy in 16 bits.
TEST(MasterWeights, OfWhatIsUnfrozenLaterTrainInsideOfAHostOptimizerToo) {
  const auto trained = [](const std::optional<bool>& delayed) {
    auto weights = make_parameters({{8}, {8}}, at::kBFloat16);
    for (const auto& weight : weights) at::Tensor(weight.tensor).data().fill_(1);
    weights[1].tensor.set_requires_grad(false);
    MasterWeights masters(weights, [&](const std::vector<nn::NamedParameter>& given) -> std::unique_ptr<optim::Optimizer> {
      const auto inside = [](const std::vector<nn::NamedParameter>& some) { return optim::make_optimizer(config_of("adamw"), some); };
      if (!delayed) return inside(given);
      return std::make_unique<HostOptimizer>(given, given.front().tensor.device(), inside, /*piece_bytes=*/200, *delayed);
    });
    for (int step = 0; step < 100; ++step) {
      if (step == 1) weights[1].tensor.set_requires_grad(true);
      for (const auto& weight : weights) {
        if (weight.tensor.requires_grad()) at::Tensor(weight.tensor).mutable_grad() = at::ones_like(weight.tensor);
      }
      masters.step(1e-4);
    }
    return std::vector{weights[0].tensor.detach(), weights[1].tensor.detach()};
  };
  const auto plain = trained({}), host = trained(false), delayed = trained(true);
  EXPECT_LT(plain[1].max().item<double>(), 1);
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(at::equal(host[i], plain[i])) << i;
    EXPECT_LT(delayed[i].max().item<double>(), 1) << i;
  }
}

TEST(MasterWeights, RefuseWhatIsWrittenWhileADelayedUpdateIsUnderWay) {
  for (const bool sits_out : {false, true}) {
    const auto weights = make_parameters({{8}, {8}}, at::kBFloat16);
    MasterWeights masters(weights, [](const std::vector<nn::NamedParameter>& given) {
      const auto inside = [](const std::vector<nn::NamedParameter>& some) { return optim::make_optimizer(config_of("adamw"), some); };
      return std::make_unique<HostOptimizer>(given, given.front().tensor.device(), inside, /*piece_bytes=*/200, /*delayed=*/true);
    });
    for (int step = 0; step < 2; ++step) {
      set_gradients(weights, step, at::kBFloat16);
      masters.step(1e-2);
    }
    at::Tensor(weights[0].tensor).data().fill_(5);
    set_gradients(weights, 2, at::kBFloat16);
    if (sits_out) at::Tensor(weights[0].tensor).mutable_grad() = at::Tensor();
    EXPECT_THAT([&] { masters.step(1e-2); }, ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("was written since the last step"))) << sits_out;
  }
}

/// The update, clipping, and the weight in one pass: the bits of a pass for each, and no memory beside it.
TEST(MasterWeights, UpdateInOnePassOnTheHost) {
  if (!testing_support::test_device().is_cpu()) GTEST_SKIP() << "devices round in a pass of its own";
  const at::NoGradGuard no_grad;  // parameters are written to
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const auto of_gradient : {dtype, at::kFloat}) {
      const std::vector<std::vector<int64_t>> shapes{{7, 5}, {}, {0, 3}, {1000}};
      auto weights = make_parameters(shapes, dtype), reference = make_parameters(shapes, at::kFloat);
      weights.push_back({"gaps", values({6, 8}, "gaps").to(dtype).narrow(1, 2, 3).detach().requires_grad_(true), {}});
      reference.push_back({"gaps", weights.back().tensor.detach().to(at::kFloat).contiguous().requires_grad_(true), {}});
      for (const auto* both : {&weights, &reference}) nn::set_slice(both->back().tensor, Slice::whole("gaps", {6, 3}));
      for (size_t i = 0; i < weights.size(); ++i) reference[i].tensor.copy_(weights[i].tensor);
      const auto masters = make_optimizer(config_of("adamw"), policy(dtype), 0, weights), plain = make_optimizer(config_of("adamw"), {}, 0, reference);
      const at::Tensor scale = at::full({}, 0.37, at::kDouble);
      for (int step = 0; step < 3; ++step) {
        set_gradients(weights, step, of_gradient);
        set_gradients(reference, step, of_gradient);
        for (const auto& parameter : reference) at::Tensor(parameter.tensor).mutable_grad() = parameter.tensor.grad().to(at::kFloat) * 0.37f;
        const auto version = weights[0].tensor._version();
        masters->step(1e-2, {}, scale);
        plain->step(1e-2);
        EXPECT_GT(weights[0].tensor._version(), version) << "who keeps copies of weights sees by this that they changed";
        if (step > 0) continue;
        for (const auto* both : {&weights, &reference}) {  // somebody writes some of them, also of the one with gaps
          for (const size_t written : {size_t{0}, shapes.size()}) at::Tensor(both->at(written).tensor)[1].fill_(2);
        }
      }
      for (size_t i = 0; i < weights.size(); ++i) EXPECT_TRUE(at::equal(weights[i].tensor, reference[i].tensor.to(dtype))) << dtype << " " << i;
      weights.pop_back();
      const auto alike = make_optimizer(config_of("adamw"), policy(dtype), 0, weights);
      MemoryTracker tracker;
      const TrackMemory tracking(tracker);
      alike->step(1e-2, {}, scale);
      EXPECT_LE(tracker.peak(), 64) << "counts alone, and nothing is staged";
    }
  }
}

/// Weights on both sides are updated in several passes, which follow nothing by themselves.
TEST(MasterWeights, FollowWritesToTheHostsWeightsBesideADevices) {
  const at::NoGradGuard no_grad;  // parameters are written to
  auto weights = make_parameters({{8}, {8}}, at::kBFloat16);
  weights[1].tensor = weights[1].tensor.detach().to(at::kCPU).requires_grad_(true);
  nn::set_slice(weights[1].tensor, Slice::whole("p1", {8}));
  const auto masters = make_optimizer(config_of("adamw"), policy(at::kBFloat16), 0, weights);
  const auto step = [&] {
    for (const auto& weight : weights) at::Tensor(weight.tensor).mutable_grad() = at::zeros_like(weight.tensor);
    masters->step(1e-3);
  };
  step();
  std::vector<at::Tensor> written;
  for (const auto& weight : weights) {
    at::Tensor(weight.tensor).add_(2);
    written.push_back(weight.tensor.detach().clone());
  }
  step();
  for (size_t i = 0; i < weights.size(); ++i) EXPECT_LT((weights[i].tensor - written[i]).abs().max().item<double>(), 0.1) << i;
}

TEST(MasterWeights, GathersUpdatesThatSixteenBitsWouldRoundAway) {
  const at::NoGradGuard no_grad;  // parameters are written to
  OptimConfig config = config_of("sgd");
  config.momentum = 0;
  config.weight_decay = 0;
  auto parameters = make_parameters({{1}}, at::kBFloat16);
  parameters[0].tensor.fill_(1);
  const auto optimizer = make_optimizer(config, policy(at::kBFloat16), 0, parameters);
  for (int step = 0; step < 64; ++step) {
    parameters[0].tensor.mutable_grad() = at::full({1}, -1.0);
    optimizer->step(1.0 / 1024);  // a quarter of bf16's distance to the next number
  }
  EXPECT_EQ(parameters[0].tensor.item<float>(), 1 + 64.0f / 1024);
}

/// Until then the weight stands for its master, and the optimizer inside is not to mind its type. Paged state begins so as well.
TEST(MasterWeights, OfWeightsThatAreFrozenBeginWithTheirFirstUpdate) {
  for (const std::string name : {"adamw", "adam8bit", "lion"}) {
    OptimConfig config = config_of(name);
    if (name == "lion" && testing_support::test_device().is_cpu()) config.state_dtype = "bf16";  // no device has a kernel of it yet
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      const auto frozen = make_parameters({{7, 5}, {70, 64}}, dtype), trained = make_parameters({{7, 5}, {70, 64}}, dtype);
      for (const auto& weight : frozen) weight.tensor.set_requires_grad(false);
      const auto later = make_optimizer(config, policy(dtype), 0, frozen, testing_support::plain_model(frozen));
      const auto always = make_optimizer(config, policy(dtype), 0, trained, testing_support::plain_model(trained));
      EXPECT_TRUE(later->state().empty()) << name;
      for (int step = 0; step < 3; ++step) {
        set_gradients(frozen, step, at::kFloat);
        set_gradients(trained, step, at::kFloat);
        later->step(1e-2);
        always->step(1e-2);
      }
      for (size_t i = 0; i < frozen.size(); ++i) EXPECT_TRUE(at::equal(frozen[i].tensor, trained[i].tensor)) << name << " " << i;
      EXPECT_EQ(later->state().size(), always->state().size()) << name;
    }
  }
}

/// Gradients are copied in several goes where they are many: a parameter that was updated in the first is left alone in the second.
TEST(MasterWeights, UpdateEachParameterOnceHoweverTheyAreStaged) {
  OptimConfig config = config_of("sgd");
  config.momentum = 0;
  config.weight_decay = 0;
  auto parameters = make_parameters({{2}, {0}}, at::kBFloat16);
  parameters[0].tensor.detach().fill_(1);
  parameters[1].tensor = at::ones({MasterWeights::kStagingBytes / 4 + 1}, at::kBFloat16).requires_grad_();
  nn::set_slice(parameters[1].tensor, Slice::whole("p1", parameters[1].tensor.sizes().vec()));
  const auto optimizer = make_optimizer(config, policy(at::kBFloat16), 0, parameters);
  for (auto& parameter : parameters) parameter.tensor.mutable_grad() = at::full_like(parameter.tensor, 0.25);
  for (int step = 0; step < 2; ++step) optimizer->step(0.5);
  EXPECT_EQ(parameters[0].tensor[0].item<float>(), 0.75);
  EXPECT_EQ(parameters[1].tensor[-1].item<float>(), 0.75);
}

TEST(MasterWeights, PolicyPicksTheOptimizer) {
  const auto fp32 = make_parameters({{3}}, at::kFloat), bf16 = make_parameters({{3}}, at::kBFloat16);
  EXPECT_EQ(make_optimizer(config_of("adamw"), {}, 0, fp32)->state().size(), 2);
  EXPECT_EQ(make_optimizer(config_of("adamw"), policy(at::kBFloat16), 0, bf16)->state().size(), 3);
  EXPECT_EQ(make_optimizer(config_of("adamw"), policy(at::kBFloat16, at::kBFloat16), 0, bf16)->state().size(), 2);
  EXPECT_THAT([&] { make_optimizer(config_of("adafactor"), policy(at::kBFloat16, at::kBFloat16), 0, bf16); },
              ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("optim.name = adafactor has no update with stochastic rounding")));
}

TEST(MasterWeights, GradientsOfARankAloneAddUpInFp32) {
  const at::Tensor weight = at::ones({2}, at::kBFloat16).requires_grad_(true);
  take_gradients_in(at::kFloat, {{"w", weight, {}}});
  for (const double part : {1.0, 1.0 / 512}) (weight * part).sum().backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(weight.grad()[0].item<float>(), 1 + 1.0f / 512) << "which bf16 would round to 1";
}

}  // namespace
}  // namespace tessera::precision
