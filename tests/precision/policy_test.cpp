#include "tessera/precision/policy.h"

#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "tessera/core/error.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/norm.h"
#include "tessera/nn/operators.h"
#include "tests/test_device.h"

namespace tessera::precision {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

struct MixedImpl : nn::Module {
  MixedImpl() : embed(5, 3), norm(3), ours(3, 2), theirs(2, 1) {
    register_module("embed", embed);
    register_module("norm", norm);
    register_module("ours", ours);
    register_module("theirs", theirs);
  }
  nn::Embedding embed;
  nn::RMSNorm norm;
  nn::Linear ours;
  torch::nn::Linear theirs;
};

PrecisionConfig config_of(const std::string& params, const std::string& compute, const std::string& reduce = "fp32", const std::string& master = "fp32") {
  PrecisionConfig config;
  config.params = params;
  config.compute = compute;
  config.reduce = reduce;
  config.master = master;
  return config;
}

/// A small model's configuration with these settings, as validate() sees it.
void validate_with(const std::vector<std::string>& sets) {
  auto config = parse_config(
      "[model]\nfamily = \"mlp\"\ndim = 8\nlayers = 1\nffn_dim = 8\n[data]\nfiles = [\"x\"]\nseq_len = 4\n[batch]\nglobal_size = 2\n[optim]\nlr = "
      "0.1\n[run]\nsteps = 3\n",
      ".", sets);
  resolve(config);
  validate(config, 1);
}

TEST(Policy, SetsTheComputeTypeOfInterceptableModulesAndKeepsWeights) {
  MixedImpl model;
  precision::apply(model, policy_from(config_of("fp32", "bf16")));
  EXPECT_EQ(model.compute_dtype(), at::kBFloat16);
  EXPECT_EQ(model.ours->compute_dtype(), at::kBFloat16);
  for (const auto& parameter : model.parameters()) EXPECT_EQ(parameter.scalar_type(), at::kFloat);
  precision::apply(model, policy_from(config_of("fp32", "fp32")));
  EXPECT_EQ(model.ours->compute_dtype(), at::kFloat);
}

TEST(Policy, ParametersOfSixteenBitsKeepTheirRulesAndRoundTheSameValues) {
  for (const auto& [name, dtype] : std::map<std::string, at::ScalarType>{{"bf16", at::kBFloat16}, {"fp16", at::kHalf}}) {
    const auto wide = on_meta([] { return std::make_shared<MixedImpl>(); });
    materialize(*wide, 5, testing_support::test_device());
    const auto narrow = on_meta([] { return std::make_shared<MixedImpl>(); });
    precision::apply(*narrow, policy_from(config_of(name, name)));
    materialize(*narrow, 5, testing_support::test_device());
    const auto expected = wide->named_parameters();
    for (const auto& parameter : narrow->named_parameters()) {
      EXPECT_EQ(parameter.value().scalar_type(), dtype) << parameter.key();
      EXPECT_TRUE(at::equal(parameter.value(), expected[parameter.key()].to(dtype))) << parameter.key();
    }
  }
}

/// Weights that a program draws by operators of its own.
struct DrawnByHand : torch::nn::Module {
  DrawnByHand() {
    weight = register_parameter("weight", at::empty({6, 5}));
    const at::NoGradGuard no_grad;
    weight.normal_(0.5, 0.25).clamp_min_(0);
  }
  at::Tensor weight;
};

TEST(Policy, ParametersOfSixteenBitsAreDrawnAsTheProgramDrawsThem) {
  const auto wide = on_meta([] { return std::make_shared<DrawnByHand>(); });
  materialize(*wide, 5, testing_support::test_device());
  ASSERT_GT(wide->weight.mean().item<float>(), 0.3);
  const auto narrow = on_meta([] { return std::make_shared<DrawnByHand>(); });
  precision::apply(*narrow, policy_from(config_of("bf16", "bf16")));
  materialize(*narrow, 5, testing_support::test_device());
  EXPECT_TRUE(at::equal(narrow->weight, wide->weight.to(at::kBFloat16)));
}

TEST(Policy, AFormatThatNoModuleComputesInIsRefused) {
  const auto plain = std::make_shared<torch::nn::LinearImpl>(3, 2);
  EXPECT_THAT([&] { precision::apply(*plain, policy_from(config_of("fp32", "bf16"))); },
              ThrowsMessage<ConfigError>(HasSubstr("precision.compute = bf16 beside precision.params = fp32: module 'torch::nn::LinearImpl' has no "
                                                   "tessera::nn::Module with parameters")));
  EXPECT_THAT([&] { precision::apply(*plain, policy_from(config_of("bf16", "fp32"))); }, ThrowsMessage<ConfigError>(HasSubstr("precision.compute = fp32")));
  EXPECT_THAT([&] { precision::apply(*plain, policy_from(config_of("bf16", "fp8"))); }, ThrowsMessage<ConfigError>(HasSubstr("precision.compute = fp8")));
  for (const at::Tensor& parameter : plain->parameters()) EXPECT_EQ(parameter.scalar_type(), at::kFloat) << "refused before anything is touched";
  nn::Embedding embed(5, 3);
  EXPECT_THAT([&] { precision::apply(*embed, policy_from(config_of("bf16", "fp8"))); }, ThrowsMessage<ConfigError>(HasSubstr("no linear layer or experts")));
  EXPECT_NO_THROW(precision::apply(*embed, policy_from(config_of("fp32", "bf16"))));
  EXPECT_NO_THROW(precision::apply(*plain, policy_from(config_of("bf16", "bf16"))));
}

TEST(Policy, PartsStayThePartsThatTheyWere) {
  MixedImpl model;
  const Slice part = Slice::along("ours.weight", {8, 3}, 0, 4, 2);
  nn::set_slice(model.ours->weight, part);
  precision::apply(model, policy_from(config_of("bf16", "bf16")));
  EXPECT_EQ(model.ours->weight.scalar_type(), at::kBFloat16);
  EXPECT_EQ(nn::slice_of(model.ours->weight).name, part.name);
  EXPECT_EQ(nn::slice_of(model.ours->weight).shape, part.shape);
  EXPECT_EQ(nn::slice_of(model.ours->weight).boxes, part.boxes);
}

TEST(Policy, NormsAndTheResidualStreamAreFp32UnderSixteenBitWeights) {
  for (const std::string name : {"bf16", "fp16"}) {
    const auto model = on_meta([] { return std::make_shared<MixedImpl>(); });
    const auto policy = policy_from(config_of(name, name));
    precision::apply(*model, policy);
    materialize(*model, 5, testing_support::test_device());
    const at::Tensor stream = model->embed(at::arange(5));
    EXPECT_EQ(stream.scalar_type(), at::kFloat);
    const at::Tensor normalized = model->norm(stream * 1e-6);  // its mean square is below what fp16 holds
    EXPECT_EQ(normalized.scalar_type(), policy.compute);
    EXPECT_GT(normalized.to(at::kFloat).abs().max().item<float>(), 1e-5);
    EXPECT_EQ(model->ours(normalized).scalar_type(), policy.compute);
  }
}

TEST(Policy, HalfOnACpuRoundsOperandsAndMultipliesInFp32) {
  nn::Linear linear(64, 1);
  linear->set_compute_dtype(at::kHalf);
  const at::NoGradGuard no_grad;
  linear->weight.fill_(1);
  linear->bias.zero_();
  at::Tensor x = at::full({1, 64}, 1.0 / 1024);
  x[0][0] = 2048;                               // a sum in fp16 would lose all that follows: its neighbors are 2 apart
  EXPECT_EQ(linear(x).item<float>(), 2048.0f);  // 2048 + 63/1024, rounded once
  x.fill_(1025.0 / 1024 + 1.0 / 4096);          // the operand is rounded: to 1025/1024
  EXPECT_EQ(linear(x).item<float>(), at::full({}, 64 * 1025.0 / 1024).to(at::kHalf).item<float>());
  EXPECT_TRUE(std::isinf(linear(at::full({1, 64}, 60000.0)).item<float>())) << "overflows as fp16 does";
}

TEST(Policy, RefusesWhatADeviceHasNoProductsOf) {
  for (const std::string compute : {"fp32", "tf32", "bf16", "fp16", "fp8"}) EXPECT_NO_THROW(require_support(policy_from(config_of("fp32", compute)), at::kCPU));
  EXPECT_THAT([] { require_support({.compute = at::kBool}, at::kCPU); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("precision.compute = Bool: cpu has no such products ("), HasSubstr("set precision.compute = "))));
  EXPECT_NO_THROW(require_support({.compute = at::kBool}, at::kMeta)) << "a dry run is of another device";
}

/// Fails each operator, by `Exception`.
template <class Exception>
struct Fails final : nn::OperatorHooks {
  explicit Fails(Exception thrown) : error(std::move(thrown)) {}
  void call(nn::OperatorCall& operation) override {
    if (operation.name() == "aten::mm") throw error;
    operation.run();
  }
  Exception error;
};

TEST(Policy, WhatIsRefusedByItselfNamesNoFormat) {
  const auto said = [](const std::string& compute, auto error) -> std::string {
    const nn::OperatorScope scope(std::make_shared<Fails<decltype(error)>>(error));
    try {
      require_support(policy_from(config_of("fp32", compute)), at::kCPU);
    } catch (const ConfigError& refusal) {
      return refusal.what();
    }
    return "(accepted)";
  };
  EXPECT_EQ(said("fp32", ConfigError("TESSERA_CPU_PRODUCTS = bar: expected onednn")), "TESSERA_CPU_PRODUCTS = bar: expected onednn");
  const auto lacks = [&](const std::string& compute) { return said(compute, std::runtime_error("no kernel")); };
  for (const std::string compute : {"bf16", "fp16"}) {
    EXPECT_EQ(lacks(compute),
              "precision.compute = " + compute + ": cpu has no such products (no kernel); set precision.compute = fp32, or another format that it has");
  }
  for (const std::string compute : {"fp32", "tf32"}) {
    EXPECT_EQ(lacks(compute), "precision.compute = " + compute + ": cpu has no such products (no kernel); set precision.compute = a format that it has");
  }
}

TEST(Policy, KnowsWhatLinearLayersAloneCastAtEachUse) {
  MixedImpl model;
  const auto cast = [&](const std::string& params, const std::string& compute) {
    std::vector<std::string> names;
    const auto policy = policy_from(config_of(params, compute));
    const auto is_cast = cast_at_use(model, policy);
    for (const auto& parameter : nn::unique_parameters(model)) {
      if (is_cast(parameter)) names.push_back(parameter.name);
    }
    return names;
  };
  for (const std::string compute : {"bf16", "fp16"}) EXPECT_THAT(cast("fp32", compute), ElementsAre("ours.weight", "ours.bias"));
  EXPECT_THAT(cast("fp32", "fp8"), IsEmpty()) << "which rounds weights from fp32 by itself";
  EXPECT_THAT(cast("fp32", "fp32"), IsEmpty());
  EXPECT_THAT(cast("bf16", "bf16"), IsEmpty());
  model.register_parameter("shared", model.ours->weight);
  EXPECT_THAT(cast("fp32", "bf16"), ElementsAre("ours.bias")) << "another module may want it as it is";
}

TEST(Policy, Tf32IsASwitchOfTheProcessAndACpuHasNone) {
  const bool before = at::globalContext().allowTF32CuBLAS();
  for (const bool allowed : {true, false}) {
    EXPECT_FALSE(use_tf32(allowed, at::kCPU));
    EXPECT_EQ(at::globalContext().allowTF32CuBLAS(), allowed);
    EXPECT_EQ(at::globalContext().allowTF32CuDNN(), allowed);
    EXPECT_EQ(use_tf32(allowed, at::Device(at::kCUDA, 0)), allowed);
  }
  use_tf32(before, at::kCPU);
}

TEST(Policy, SaysInWhatGradientsAreSummed) {
  EXPECT_EQ(policy_from(config_of("fp32", "bf16")).gradient_dtype(), std::nullopt);
  EXPECT_EQ(policy_from(config_of("bf16", "bf16")).gradient_dtype(), at::kFloat);
  EXPECT_EQ(policy_from(config_of("bf16", "bf16", "bf16")).gradient_dtype(), std::nullopt);
  EXPECT_EQ(policy_from(config_of("fp16", "fp16", "fp16")).gradient_dtype(), at::kFloat);
}

TEST(PrecisionRules, RefuseByName) {
  const auto refuses = [](const std::vector<std::string>& sets, const std::string& text) {
    EXPECT_THAT([&] { validate_with(sets); }, ThrowsMessage<ConfigError>(HasSubstr(text)));
  };
  refuses({"precision.params=fp8"}, "precision.params = fp8: fp8 is a format of matrix products, and parameters are kept in one of fp32, bf16, fp16");
  refuses({"precision.reduce=tf32"}, "precision.reduce = tf32");
  refuses({"precision.master=bf16"}, "precision.master = bf16: a copy narrower than the parameters");
  refuses({"precision.params=fp16", "precision.master=fp16"}, "rounded stochastically in bf16 only");
  refuses({"precision.params=bf16", "precision.compute=fp16"}, "precision.compute = fp16: precision.params = bf16 would be rounded twice");
  refuses({"precision.params=bf16", "precision.reduce=fp16"}, "precision.reduce = fp16: precision.params = bf16");
  refuses({"precision.reduce=bf16", "comm.compression=fp16"}, "comm.compression = fp16: precision.reduce = bf16 says otherwise");
  refuses({"precision.reduce=bf16", "run.deterministic=true"}, "run.deterministic adds whole gradients");
  for (const std::string compute : {"fp32", "tf32", "bf16", "fp8"}) {
    refuses({"precision.compute=" + compute, "precision.loss_scale=dynamic"},
            "precision.loss_scale = dynamic: gradients are scaled against the underflow of fp16");
  }
  refuses({"precision.compute=fp16", "precision.loss_scale=-2"}, "precision.loss_scale = -2: expected a positive number");
  refuses({"precision.compute=fp16", "precision.loss_scale=dynamic", "comm.compression=powersgd"}, "in the unit of a scale that moves; set a number");
  refuses({"precision.max_skips=0"}, "precision.max_skips = 0");
  EXPECT_NO_THROW(validate_with({"precision.compute=fp16", "precision.loss_scale=1024"}));
  EXPECT_NO_THROW(validate_with({"precision.compute=fp16", "precision.loss_scale=8", "comm.compression=powersgd"}));
  EXPECT_NO_THROW(validate_with({"precision.params=bf16", "precision.compute=bf16", "precision.master=bf16"}));
  EXPECT_NO_THROW(validate_with({"precision.reduce=bf16", "comm.compression=bf16"}));
  EXPECT_NO_THROW(validate_with({"precision.reduce=fp16", "precision.loss_scale=dynamic"}));
}

}  // namespace
}  // namespace tessera::precision
