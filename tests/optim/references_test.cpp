#include <cmath>
#include <map>
#include <mutex>
#include <optional>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/kernels/adam8bit.h"
#include "tessera/nn/operators.h"
#include "tessera/optim/adam8bit.h"
#include "tessera/optim/muon.h"
#include "tessera/optim/optimizer.h"
#include "tests/optim/parameters.h"
#include "tests/refusal.h"

// Optimizers that libtorch has none of in C++, beside the formulas of their papers in fp64; and those whose update is not element by element in parts, beside
// themselves whole.

namespace tessera::optim {
namespace {

const std::vector<std::vector<int64_t>> kReferenceShapes{{5, 3}, {1}, {}, {17}, {2, 3, 4}, {0, 4}, {1, 1}, {70, 67}, {4099}};

OptimConfig reference_config(const std::string& name, double momentum = 0) {
  OptimConfig config;
  config.name = name;
  config.momentum = momentum;
  config.weight_decay = 0.1;
  return config;
}

/// A parameter in fp64, and what its optimizer keeps of it.
struct Plain {
  at::Tensor p;
  std::map<std::string, at::Tensor> kept;
  int64_t updates = 0;

  at::Tensor& keep(const std::string& name, at::IntArrayRef sizes) {
    auto& tensor = kept[name];
    if (!tensor.defined()) tensor = at::zeros(sizes, p.options());
    return tensor;
  }
};

double rms(const at::Tensor& x) { return x.numel() == 0 ? 0 : std::sqrt(x.square().mean().item<double>()); }

void plain_lion(Plain& plain, const at::Tensor& g, const OptimConfig& config, double lr) {
  at::Tensor& m = plain.keep("exp_avg", g.sizes());
  const auto [beta1, beta2] = config.betas;
  plain.p = plain.p * (1 - lr * config.weight_decay) - lr * (beta1 * m + (1 - beta1) * g).sign();
  m = beta2 * m + (1 - beta2) * g;
}

void plain_adafactor(Plain& plain, const at::Tensor& g, const OptimConfig& config, double lr) {
  const auto k = static_cast<double>(plain.updates);
  const double share = std::pow(k, -0.8), size = std::max(1e-3, rms(plain.p));
  at::Tensor v;
  if (g.dim() >= 2) {
    const at::Tensor squares = g * g;
    auto mean_into = [&](const char* name, int64_t dim) {
      const at::Tensor mean = squares.mean(dim, /*keepdim=*/true);
      at::Tensor& average = plain.keep(name, mean.sizes());
      average = average * (1 - share) + mean * share;
      return average;
    };
    const at::Tensor row = mean_into("row", -1), column = mean_into("column", -2);
    v = row * column / row.mean(-2, true).clamp_min(config.eps);
  } else {
    at::Tensor& average = plain.keep("variance", g.sizes());
    average = average * (1 - share) + g * g * share;
    v = average;
  }
  at::Tensor u = g / v.clamp_min(config.eps * config.eps).sqrt();
  u = u / std::max(1.0, rms(u));
  if (const double momentum = config.momentum.value(); momentum > 0) {
    at::Tensor& average = plain.keep("exp_avg", g.sizes());
    average = average * momentum + u * (1 - momentum);
    u = average;
  }
  plain.p = plain.p * (1 - lr * config.weight_decay) - std::min(lr, 1 / std::sqrt(k)) * size * u;
}

void expect_reference(const OptimConfig& config, const std::function<void(Plain&, const at::Tensor&, const OptimConfig&, double)>& update) {
  const auto parameters = make_parameters(kReferenceShapes);
  std::vector<Plain> plain;
  for (const auto& parameter : parameters) plain.push_back({parameter.tensor.detach().to(at::kDouble), {}});
  const auto optimizer = make_optimizer(config, parameters, plain_model(parameters));
  for (int step = 1; step <= 8; ++step) {
    draw_gradients(parameters, step);
    if (step % 3 == 0) at::Tensor(parameters[0].tensor).mutable_grad().reset();
    const double lr = 0.3 / step;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].tensor.grad().defined()) continue;
      ++plain[i].updates;
      update(plain[i], parameters[i].tensor.grad().to(at::kDouble), config, lr);
    }
    optimizer->step(lr);
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(at::allclose(parameters[i].tensor.to(at::kDouble), plain[i].p, 1e-5, 1e-6)) << config.name << " " << parameters[i].tensor.sizes();
  }
}

/// U f(S) V^T of a singular value decomposition, f being the polynomial of the iteration.
at::Tensor plain_orthogonal(const at::Tensor& d, int steps) {
  auto [u, s, v] = at::linalg_svd(d, /*full_matrices=*/false);
  s = s / s.square().sum().sqrt();
  for (int step = 0; step < steps; ++step) s = 3.4445 * s - 4.7750 * s.pow(3) + 2.0315 * s.pow(5);
  return at::mm(u * s, v);
}

void plain_muon(Plain& plain, const at::Tensor& g, const OptimConfig& config, double lr) {
  if (g.dim() != 2 || g.numel() == 0) {  // AdamW's
    at::Tensor &m = plain.keep("exp_avg", g.sizes()), &v = plain.keep("exp_avg_sq", g.sizes());
    const auto [beta1, beta2] = config.betas;
    const auto k = static_cast<double>(plain.updates);
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    plain.p = plain.p * (1 - lr * config.weight_decay) - lr * (m / (1 - std::pow(beta1, k))) / ((v / (1 - std::pow(beta2, k))).sqrt() + config.eps);
    return;
  }
  at::Tensor& m = plain.keep("momentum_buffer", g.sizes());
  const double momentum = config.momentum.value_or(0.95);
  m = momentum * m + (1 - momentum) * g;
  const at::Tensor u = plain_orthogonal(momentum * m + (1 - momentum) * g, config.ns_steps);
  plain.p = plain.p * (1 - lr * config.weight_decay) - lr * 0.2 * std::sqrt(static_cast<double>(std::max(g.size(0), g.size(1)))) * u;
}

TEST(Muon, IsThePapersAndAdamWBesideIt) { expect_reference(reference_config("muon", 0.9), plain_muon); }
TEST(Muon, TakesAsManyStepsAsAsked) {
  OptimConfig config = reference_config("muon", 0.9);
  config.ns_steps = 3;
  expect_reference(config, plain_muon);
}

TEST(Muon, HasItsOwnMomentumWhereAProgramGivesNone) {
  OptimConfig config = reference_config("muon");
  config.momentum.reset();
  expect_reference(config, plain_muon);
}

/// By names no parameter tells its heads.
TEST(Muon, IsToldHeadsAsStacks) {
  OptimConfig config = reference_config("muon");
  config.split_heads = true;
  EXPECT_THAT(testing_support::refusal([&] { make_optimizer(config, make_parameters({{4, 3}})); }),
              testing::AllOf(testing::HasSubstr("optim.split_heads = true"), testing::HasSubstr("optim::WholeModel::stacks")));
  config.name = "adamw";
  EXPECT_NO_THROW(make_optimizer(config, make_parameters({{4, 3}})));
}

/// Experts, or heads: a parameter of several matrices is updated as these by themselves.
TEST(Muon, MatricesOfAStackAreOrthogonalEachByItself) {
  const auto stacked = make_parameters({{12, 5}, {9, 7}});
  std::vector<nn::NamedParameter> apart;
  for (int i = 0; i < 4; ++i) apart.push_back({"m" + std::to_string(i), stacked[0].tensor.detach().narrow(0, 3 * i, 3).clone().requires_grad_(), {}});
  WholeModel model;
  model.stacks["p0"] = 4;
  const auto optimizer = make_optimizer(reference_config("muon", 0.9), stacked, model),
             reference = make_optimizer(reference_config("muon", 0.9), apart, plain_model(apart));
  for (int step = 1; step <= 3; ++step) {
    draw_gradients(stacked, step);
    for (int i = 0; i < 4; ++i) apart[i].tensor.mutable_grad() = stacked[0].tensor.grad().narrow(0, 3 * i, 3).clone();
    optimizer->step(0.05);
    reference->step(0.05);
  }
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(at::allclose(stacked[0].tensor.narrow(0, 3 * i, 3), apart[i].tensor, 1e-5, 1e-6)) << i;
  model.stacks["p0"] = 5;
  EXPECT_THAT([&] { make_optimizer(reference_config("muon"), stacked, model); },
              testing::ThrowsMessage<ConfigError>(testing::HasSubstr("the 12 rows of 'p0' are not 5 matrices")));
}

TEST(Muon, IsNotForEmbeddingsAndHeads) {
  const auto parameters = make_parameters({{6, 4}, {6, 4}, {6, 4}, {4}});
  const auto optimizer = make_optimizer(reference_config("muon", 0.9), parameters, {.looked_up = {"p0"}, .heads = {"p2"}});
  EXPECT_EQ(optimizer->kind(), "muon");
  std::map<std::string, std::string> kept;
  for (const auto& state : optimizer->state()) kept[state.parameter] += state.state + " ";
  const std::string adamw = "exp_avg exp_avg_sq ";
  EXPECT_EQ(kept, (std::map<std::string, std::string>{{"p0", adamw}, {"p1", "momentum_buffer "}, {"p2", adamw}, {"p3", adamw}}));
}

TEST(Lion, IsThePapers) { expect_reference(reference_config("lion"), plain_lion); }
TEST(Adafactor, IsThePapers) { expect_reference(reference_config("adafactor"), plain_adafactor); }
TEST(Adafactor, WithMomentumIsThePapers) { expect_reference(reference_config("adafactor", 0.9), plain_adafactor); }

TEST(Lion, OfOtherTypesIsTheSame) {
  const auto narrow = make_parameters({{13, 7}}), wide = make_parameters({{13, 7}});
  at::Tensor double_tensor = wide[0].tensor.detach().to(at::kDouble).requires_grad_();
  const std::vector<nn::NamedParameter> wider{{"p0", double_tensor, {}}};
  const auto first = make_optimizer(reference_config("lion"), narrow), second = make_optimizer(reference_config("lion"), wider);
  for (int step = 1; step <= 3; ++step) {
    draw_gradients(narrow, step);
    double_tensor.mutable_grad() = narrow[0].tensor.grad().to(at::kDouble);
    first->step(0.01);
    second->step(0.01);
  }
  EXPECT_TRUE(at::allclose(narrow[0].tensor.to(at::kDouble), double_tensor, 1e-5, 1e-6));
}

TEST(Adam8bit, NumbersCoverSevenDecades) {
  for (const bool is_signed : {true, false}) {
    const auto& numbers = kernels::dynamic_map(is_signed);
    EXPECT_TRUE(std::is_sorted(numbers.begin(), numbers.end()));
    EXPECT_EQ(numbers.back(), 1);
    EXPECT_TRUE(std::binary_search(numbers.begin(), numbers.end(), 0.0f));
    // The middles of the outermost parts of [0.1, 1], in 64 or 128 parts, and of the one part, or two, of the last decade.
    EXPECT_FLOAT_EQ(numbers[254], is_signed ? 0.1 + 0.9 * 63.5 / 64 : 0.1 + 0.9 * 127.5 / 128);
    EXPECT_FLOAT_EQ(numbers[is_signed ? 128 : 1], is_signed ? 0.55e-6 : 0.325e-6);
    EXPECT_FLOAT_EQ(numbers.front(), is_signed ? -numbers[254] : 0);
  }
}

/// Steps of AdamW whose averages are rounded to the nearest of the numbers, block by block, found by comparing with every one of them.
TEST(Adam8bit, RoundsAveragesToTheNearestNumber) {
  const auto parameters = make_parameters({{70, 67}});
  const auto config = reference_config("adam8bit");
  const auto optimizer = make_optimizer(config, parameters, plain_model(parameters));
  const int64_t n = parameters[0].tensor.numel();
  const at::Tensor plain = parameters[0].tensor.detach().flatten().clone();
  at::Tensor m = at::zeros_like(plain), v = at::zeros_like(plain);
  const auto rounded = [&](const at::Tensor& average, bool is_signed) {
    const auto& numbers = kernels::dynamic_map(is_signed);
    const at::Tensor all = at::tensor(at::ArrayRef<float>(numbers.data(), numbers.size()), plain.options());
    at::Tensor result = at::empty_like(average);
    for (int64_t begin = 0; begin < n; begin += kernels::kAdam8bitBlock) {
      const at::Tensor block = average.slice(0, begin, std::min(n, begin + kernels::kAdam8bitBlock)), scale = block.abs().max();
      const at::Tensor x = block / scale, place = (x.unsqueeze(1) - all).abs().argmin(1);
      at::Tensor near = all.index_select(0, place);
      near = at::where(at::logical_and(average.slice(0, begin, begin + block.numel()) < 0, near == 0), -0.55e-6, near).to(at::kFloat);
      result.slice(0, begin, begin + block.numel()).copy_(near * scale);
    }
    return result;
  };
  for (int step = 1; step <= 5; ++step) {
    draw_gradients(parameters, step);
    const at::Tensor g = parameters[0].tensor.grad().flatten().clone();
    optimizer->step(0.01);
    m = 0.9f * m + 0.1f * g;
    v = 0.999f * v + 0.001f * (g * g);
    plain.mul_(1 - 0.01 * 0.1).sub_(0.01 / (1 - std::pow(0.9, step)) * m / (v.sqrt() / std::sqrt(1 - std::pow(0.999, step)) + 1e-8));
    m = rounded(m, true);
    v = rounded(v, false);
    EXPECT_TRUE(at::allclose(parameters[0].tensor.flatten(), plain, 1e-5, 1e-6)) << step;
  }
}

TEST(Adam8bit, AnAverageNearZeroKeepsItsSign) {
  const auto parameters = make_parameters({{70, 67}});
  const auto optimizer = make_optimizer(reference_config("adam8bit"), parameters, plain_model(parameters));
  const at::Tensor gradient = at::zeros_like(parameters[0].tensor.detach());
  gradient.view({-1})[0] = 1;
  gradient.view({-1})[1] = -1e-8;
  gradient.view({-1})[2] = 1e-8;
  at::Tensor(parameters[0].tensor).mutable_grad() = gradient;
  optimizer->step(0.01);
  for (const auto& state : optimizer->state()) {
    if (state.state != "exp_avg") continue;
    const at::Tensor codes = state.tensor.flatten().cpu();
    const auto number = [&](int64_t i) { return kernels::dynamic_map(/*is_signed=*/true)[codes[i].item<uint8_t>()]; };
    EXPECT_EQ(number(0), 1);
    EXPECT_LT(number(1), 0);
    EXPECT_GE(number(2), 0);
    EXPECT_EQ(number(3), 0);
  }
}

TEST(Optimizer, AsksWhatMatricesAreFor) {
  const auto refused = [](const std::string& name, const std::vector<std::vector<int64_t>>& shapes, const WholeModel& model) {
    return testing_support::refusal([&] { make_optimizer(reference_config(name), make_parameters(shapes), model); });
  };
  EXPECT_THAT(refused("muon", {{3}, {4, 3}}, {}), testing::HasSubstr("optim.name = muon: 'p1' may be an embedding, a head or a stack of experts"));
  EXPECT_THAT(refused("adam8bit", {{64, 64}}, {}), testing::HasSubstr("optim.name = adam8bit: 'p0' may be"));
  const auto taken = [](const std::string& name, const std::vector<std::vector<int64_t>>& shapes, const WholeModel& model) {
    EXPECT_NO_THROW(make_optimizer(reference_config(name), make_parameters(shapes), model)) << name;
  };
  taken("adam8bit", {{64, 63}, {5000}}, {});
  taken("adamw", {{64, 64}}, {});
  taken("muon", {{4, 3}}, {.looked_up = {"p0"}});
  taken("muon", {{4, 3}}, plain_model(make_parameters({{4, 3}})));
}

TEST(Adam8bit, KeepsSmallTensorsAndEmbeddingsInFp32) {
  const auto parameters = make_parameters({{70, 67}, {17, 5}, {80, 64}});
  WholeModel model;
  model.looked_up = {"p2"};
  const auto optimizer = make_optimizer(reference_config("adam8bit"), parameters, model);
  std::map<std::string, int64_t> bytes;
  for (const auto& state : optimizer->state()) bytes[state.parameter] += static_cast<int64_t>(state.tensor.nbytes());
  const int64_t blocks = (70 * 67 + 255) / 256;
  EXPECT_EQ(bytes, (std::map<std::string, int64_t>{{"p0", 2 * 70 * 67 + 8 * blocks}, {"p1", 8 * 17 * 5}, {"p2", 8 * 80 * 64}}));
}

TEST(Optimizer, SayWhatTheyKeep) {
  const auto bytes = [](const char* name, double momentum, const char* state_dtype = "fp32") {
    const auto parameters = make_parameters({{512, 256}});
    OptimConfig config = reference_config(name, momentum);
    config.state_dtype = state_dtype;
    int64_t sum = 0;
    for (const auto& state : make_optimizer(config, parameters, plain_model(parameters))->state()) sum += static_cast<int64_t>(state.tensor.nbytes());
    return static_cast<double>(sum) / (512 * 256);
  };
  EXPECT_EQ(bytes("adamw", 0), 8);
  EXPECT_EQ(bytes("lion", 0), 4);
  EXPECT_EQ(bytes("adam8bit", 0), 2 + 8.0 / 256);
  EXPECT_EQ(bytes("adafactor", 0), 4.0 * (512 + 256) / (512 * 256));
  EXPECT_EQ(bytes("adafactor", 0.5), 4 + 4.0 * (512 + 256) / (512 * 256));
  EXPECT_EQ(bytes("muon", 0.95), 4);
  EXPECT_EQ(bytes("adamw", 0, "bf16"), 4);
  EXPECT_EQ(bytes("lion", 0, "bf16"), 2);
  EXPECT_EQ(bytes("sgd", 0, "bf16"), 0);
  EXPECT_EQ(bytes("sgd", 0.5, "bf16"), 2);
}

// ---- in parts ----

const std::vector<std::vector<int64_t>> kCutShapes{{5, 3}, {70, 67}, {17}, {2, 3, 4}, {1, 4}, {4099}, {}, {61, 81}};

enum class Cut { Elements, Rows, Columns, Whole };

Slice part_of(Cut cut, const std::string& name, const std::vector<int64_t>& shape, int ranks, int rank) {
  const Slice whole = Slice::whole(name, shape);
  if (cut == Cut::Whole || shape.empty()) return whole;
  if (cut == Cut::Elements) {
    const auto [begin, size] = chunk(whole.numel(), ranks, rank);
    return elements(whole, begin, size);
  }
  const int64_t dim = cut == Cut::Rows || shape.size() < 2 ? 0 : 1;
  const auto [begin, size] = chunk(shape[static_cast<size_t>(dim)], ranks, rank);
  if (size == 0) return {name, shape, {}};
  return Slice::along(name, shape, dim, begin, size);
}

/// Parameters after four steps, and their state, in parts on `ranks` and put together again.
std::map<std::string, at::Tensor> trained_in_parts(const OptimConfig& config, Cut cut, int ranks) {
  std::map<std::string, at::Tensor> results;
  const auto whole = make_parameters(kCutShapes);  // here, for ranks that are threads share one generator
  std::vector<std::vector<at::Tensor>> gradients;
  for (int step = 1; step <= 4; ++step) {
    draw_gradients(whole, step);
    auto& drawn = gradients.emplace_back();
    for (const auto& parameter : whole) drawn.push_back(parameter.tensor.grad().clone());
  }
  comm::run_ranks(ranks, [&](comm::World& world) {
    const comm::Group& group = world.group();
    WholeModel model;
    model.looked_up = {"p7"};
    model.stacks = {{"p1", 7}};
    for (size_t i = 0; i < whole.size(); ++i) model.parameters.push_back(Slice::whole(whole[i].name, kCutShapes[i]));
    model.ranks = group;
    std::vector<nn::NamedParameter> mine;
    for (size_t i = 0; i < whole.size(); ++i) {
      const Slice part = part_of(cut, whole[i].name, kCutShapes[i], ranks, group.rank());
      if (part.is_whole() && group.rank() > 0) model.held_elsewhere.insert(whole[i].name);
      const at::Tensor local = take(whole[i].tensor.detach(), part).clone().requires_grad_();
      nn::set_slice(local, part);
      mine.push_back({whole[i].name, local, {}});
    }
    const auto optimizer = make_optimizer(config, mine, model);
    for (const auto& drawn : gradients) {
      for (size_t i = 0; i < whole.size(); ++i) mine[i].tensor.mutable_grad() = take(drawn[i], nn::slice_of(mine[i].tensor)).clone();
      optimizer->step(0.05);
    }
    const auto put = [&](const std::string& name, const at::Tensor& local, const Slice& slice) {
      const at::Tensor all = at::full(slice.shape, -1e9, local.options().dtype(at::kFloat));
      for (size_t b = 0; b < slice.boxes.size(); ++b) {
        at::Tensor to = all;
        for (size_t d = 0; d < slice.shape.size(); ++d) to = to.narrow(static_cast<int64_t>(d), slice.boxes[b].offset[d], slice.boxes[b].size[d]);
        to.copy_(box_of(local.detach().contiguous(), slice, b));
      }
      comm::all_reduce(group, all, comm::Op::Max);  // what several ranks hold is the same on all of them
      if (group.rank() == 0) results[name] = all;
    };
    for (const auto& parameter : mine) put(parameter.name, parameter.tensor, nn::slice_of(parameter.tensor));
    std::map<std::string, StateTensor> held;
    for (const auto& state : optimizer->state()) held.emplace(state.parameter + "." + state.state, state);
    std::map<std::string, Slice> named;
    for (const auto& state : make_optimizer(config, whole, {.looked_up = {"p7"}, .stacks = {{"p1", 7}}})->state())
      named.emplace(state.parameter + "." + state.state, state.slice);
    for (const auto& [name, slice] : named) {
      const auto found = held.find(name);  // on every rank, if with nothing in it: a checkpoint is loaded by names
      ASSERT_NE(found, held.end()) << name;
      EXPECT_EQ(found->second.slice.shape, slice.shape) << name;
      put(name, found->second.tensor, found->second.slice);
    }
  });
  return results;
}

class InParts : public testing::TestWithParam<std::tuple<std::string, Cut, int>> {};
INSTANTIATE_TEST_SUITE_P(Cuts, InParts,
                         testing::Combine(testing::Values("adam8bit", "adafactor", "adamw", "lion", "muon", "sgd"),
                                          testing::Values(Cut::Elements, Cut::Rows, Cut::Columns, Cut::Whole), testing::Values(2, 3, 8)));

/// The rows of a weight that is cut by columns are as many runs of elements, none of which has operators of its own.
TEST(Adam8bit, UpdatesAsManyRowsByTheSameOperators) {
  static thread_local int64_t operators;
  const auto count = [](int64_t rows) {
    int64_t most = 0;
    comm::run_ranks(2, [&](comm::World& world) {
      const auto [begin, size] = chunk(1000, 2, world.group().rank());
      const Slice part = Slice::along("w", {rows, 1000}, 1, begin, size);
      const at::Tensor local = at::ones({rows, size}, testing_support::test_device()).requires_grad_();
      nn::set_slice(local, part);
      WholeModel model;
      model.parameters = {Slice::whole("w", part.shape)};
      model.ranks = world.group();
      const auto optimizer = make_optimizer(reference_config("adam8bit"), {{"w", local, {}}}, model);
      local.mutable_grad() = at::ones_like(local);
      operators = 0;
      const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
        ++operators;
        return nullptr;
      }));
      optimizer->step(0.1);
      at::removeCallback(handle);
      if (world.group().rank() == 0) most = operators;
    });
    return most;
  };
  EXPECT_EQ(count(8), count(64));
}

TEST_P(InParts, IsTheWhole) {
  const auto& [name, cut, ranks] = GetParam();
  const OptimConfig config = reference_config(name, name == "adafactor" || name == "muon" || name == "sgd" ? 0.8 : 0);
  const auto whole = trained_in_parts(config, Cut::Whole, 1), parts = trained_in_parts(config, cut, ranks);
  ASSERT_EQ(whole.size(), parts.size());
  for (const auto& [what, expected] : whole) {
    ASSERT_TRUE(parts.contains(what)) << what;
    const at::Tensor& actual = parts.at(what);
    if (name == "adafactor") {  // whose means are sums over ranks
      EXPECT_TRUE(at::allclose(actual, expected, 1e-5, 1e-6)) << what << (actual - expected).abs().max();
    } else {
      EXPECT_TRUE(at::equal(actual, expected)) << what << " differs by " << (actual - expected).abs().max();
    }
  }
}

/// However few matrices meet at once, on ranks that hold rows of each.
TEST(Muon, RoundsDoNotShowInTheBits) {
  const std::vector<std::vector<int64_t>> shapes{{9, 4}, {5, 11}, {3, 3}, {8, 8}, {1, 6}};
  const auto whole = make_parameters(shapes);
  draw_gradients(whole, 1);
  std::map<std::pair<int64_t, int>, std::vector<at::Tensor>> results;
  for (const int64_t round_bytes : {int64_t{1}, int64_t{300}, int64_t{1} << 20}) {
    comm::run_ranks(3, [&](comm::World& world) {
      std::vector<nn::NamedParameter> mine;
      WholeModel model;
      model.ranks = world.group();
      for (size_t i = 0; i < whole.size(); ++i) {
        const Slice part = part_of(Cut::Rows, whole[i].name, shapes[i], 3, world.rank());
        const at::Tensor local = take(whole[i].tensor.detach(), part).clone().requires_grad_();
        nn::set_slice(local, part);
        at::Tensor(local).mutable_grad() = take(whole[i].tensor.grad(), part).clone();
        mine.push_back({whole[i].name, local, {}});
        model.parameters.push_back(Slice::whole(whole[i].name, shapes[i]));
      }
      Muon(std::vector{ParameterGroup{mine}}, {.round_bytes = round_bytes}, model).step(0.1);
      std::vector<at::Tensor> tensors;
      for (const auto& parameter : mine) tensors.push_back(parameter.tensor.detach());
      static std::mutex held;
      const std::lock_guard lock(held);
      results[{round_bytes, world.rank()}] = tensors;
    });
  }
  for (const auto& [key, tensors] : results) {
    const auto& expected = results.at({int64_t{1} << 20, key.second});
    for (size_t i = 0; i < tensors.size(); ++i) EXPECT_TRUE(at::equal(tensors[i], expected[i])) << key.first << " bytes, parameter " << i;
  }
}

/// Two of four matrices begin to learn in the second step: on one rank, and on two that hold rows of each, whose models say so.
TEST(Muon, LeavesOutWhatIsFrozenUntilItIsNot) {
  const std::vector<std::vector<int64_t>> shapes(4, {8, 6});
  constexpr int kSteps = 3;
  const auto learns = [](int step, size_t i) { return i < 2 || step > 1; };
  const auto alone = make_parameters(shapes);
  std::vector<at::Tensor> begin;
  for (const auto& parameter : alone) begin.push_back(parameter.tensor.detach().clone());
  std::vector<std::vector<at::Tensor>> gradients(kSteps + 1);
  std::vector<double> flops;
  Muon reference(std::vector{ParameterGroup{alone}});
  for (int step = 1; step <= kSteps; ++step) {
    draw_gradients(alone, step);
    for (size_t i = 0; i < alone.size(); ++i) {
      gradients[step].push_back(alone[i].tensor.grad().clone());
      if (!learns(step, i)) at::Tensor(alone[i].tensor).mutable_grad().reset();
    }
    const auto counter = std::make_shared<nn::FlopCounter>();
    const nn::OperatorScope scope(counter);
    reference.step(0.1);
    flops.push_back(counter->flops());
  }
  EXPECT_GT(flops[0], 0);
  EXPECT_EQ(flops[1], 2 * flops[0]);

  const auto recorder = std::make_shared<comm::Recorder>();
  const auto body = [&](comm::World& world) {
    const at::Device here = testing_support::test_device();
    WholeModel model;
    model.ranks = world.group();
    std::vector<nn::NamedParameter> mine;
    for (size_t i = 0; i < shapes.size(); ++i) {
      add_parameter(model, {alone[i].name, at::zeros(shapes[i]).requires_grad_(learns(1, i)), {}});
      const Slice part = part_of(Cut::Rows, alone[i].name, shapes[i], 2, world.rank());
      const at::Tensor local = take(begin[i], part).clone().to(here).requires_grad_();
      nn::set_slice(local, part);
      mine.push_back({alone[i].name, local, {}});
    }
    Muon optimizer(std::vector{ParameterGroup{mine}}, {}, model);
    for (int step = 1; step <= kSteps; ++step) {
      for (const auto& parameter : model.frozen) at::Tensor(parameter.tensor).requires_grad_(step > 1);
      for (size_t i = 0; i < mine.size(); ++i) {
        if (learns(step, i)) mine[i].tensor.mutable_grad() = take(gradients[step][i], nn::slice_of(mine[i].tensor)).clone().to(here);
      }
      optimizer.step(0.1);
    }
    for (size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(at::allclose(mine[i].tensor.detach().cpu(), take(alone[i].tensor.detach(), nn::slice_of(mine[i].tensor)).cpu(), 1e-5, 1e-6)) << mine[i].name;
    }
    for (const auto& parameter : model.frozen) at::Tensor(parameter.tensor).requires_grad_(false);
    Muon other(std::vector{ParameterGroup{mine}}, {}, model);
    EXPECT_THAT(testing_support::refusal([&] { other.step(0.1); }), testing::HasSubstr("'p2' has a gradient and requires none"));
  };
  comm::run_ranks(2, body, {.decorators = {comm::recording(recorder)}});
  int64_t sent = 0;
  for (const auto& record : recorder->records()) sent += record.site == "optimizer" ? record.sent_bytes : 0;
  // Of n = 2 ranks each sends 8 (n - 1) / n bytes of each element.
  EXPECT_EQ(sent, 2 * 8 * (2 + 4 + 4) * (8 * 6) / 2);
}

TEST(InParts, NeedsToKnowWhoHoldsTheRest) {
  for (const char* name : {"adafactor", "adam8bit", "muon"}) {
    const auto parameters = make_parameters({{4, 3}});
    nn::set_slice(parameters[0].tensor, Slice::along("p0", {10, 3}, 0, 2, 4));
    EXPECT_THAT([&] { make_optimizer(reference_config(name), parameters); },
                testing::ThrowsMessage<ConfigError>(testing::AllOf(testing::HasSubstr(name), testing::HasSubstr("'p0' is a part"))));
  }
}

}  // namespace
}  // namespace tessera::optim
