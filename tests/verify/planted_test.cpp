// Bugs that are put into a layout on purpose: each must be found, and the first module or tensor that it spoils named.

#include <atomic>
#include <cstring>
#include <memory>

#include <gmock/gmock.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/linear.h"
#include "tessera/offload/host_optimizer.h"
#include "tests/verify/fixture.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

using Planted = testing_support::VerifyFixture;

constexpr const char* kSequence = "tensor.sequence_parallel=true";

/// Adds 1e-3 of its largest entry to one number of a module's output.
struct Nudge : nn::Interceptor {
  nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
    nn::Values outputs = next(std::move(inputs));
    const at::Tensor output = outputs[0].toTensor();
    at::Tensor nudge = at::zeros_like(output);
    nudge.view(-1)[3] = 1e-3 * output.detach().abs().max();
    outputs[0] = output + nudge;
    return outputs;
  }
};

TEST_F(Planted, AModuleThatIsOffOnOneRankIsNamed) {
  VerifyOptions options;
  options.plant.attach = [](Composition& run, int rank) {
    return rank == 1 ? nn::attach(*run.model, "layers.1.feed_forward.w3", std::make_shared<Nudge>()) : Attachment();
  };
  const auto report = run("dp_replicate=3", "llama", {}, options);
  ASSERT_TRUE(report.forward.first) << to_string(report);
  EXPECT_EQ(report.forward.first->module, "layers.1.feed_forward.w3");
  EXPECT_EQ(report.forward.first->rank, 1);
  EXPECT_EQ(report.forward.first->micro_batch, 3);  // the first of rank 1: ranks hold 3, 2 and 2
  EXPECT_NEAR(report.forward.first->value, 1e-3, 1e-4);
  EXPECT_FALSE(report.passed());
  EXPECT_THAT(to_string(report), HasSubstr("look at layers.1.feed_forward.w3 first"));
}

/// The gradient that arrives at one module's output is halved on its way further back: what lies before it gets it wrong.
struct HalfGradient : nn::Interceptor {
  nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
    const at::Tensor input = inputs[0].toTensor() * 1;
    input.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
    inputs[0] = input;
    return next(std::move(inputs));
  }
};

TEST_F(Planted, AGradientScaleThatIsHalvedIsNamed) {
  VerifyOptions options;
  options.plant.attach = [](Composition& run, int) { return nn::attach(*run.model, "layers.1.feed_forward.w2", std::make_shared<HalfGradient>()); };
  const auto report = run("dp_replicate=2", "mlp", {}, options);
  EXPECT_FALSE(report.passed());
  EXPECT_FALSE(report.forward.first) << to_string(report);
  ASSERT_TRUE(report.backward.first);
  EXPECT_EQ(report.backward.first->module, "layers.1.feed_forward.w1");  // the halved gradient is the first thing it gets
  EXPECT_NEAR(report.backward.first->value, 0.5, 1e-3);
  for (const auto& each : report.gradients.each) {
    const bool before = each.name.find("layers.0") == 0 || each.name.find("layers.1.feed_forward.w1") == 0 || each.name.find("layers.1.ffn_norm") == 0;
    if (before) EXPECT_GT(each.value, report.gradients.bound) << each.name;
    if (each.name.find("layers.1.feed_forward.w2") == 0 || each.name.find("head") == 0) EXPECT_LE(each.value, report.gradients.bound) << each.name;
  }
}

at::Tensor parameter(const Composition& run, const std::string& name) {
  for (const auto& each : run.parameters)
    if (each.name == name) return each.tensor;
  throw std::runtime_error("no parameter " + name);
}

Attachment hook_gradients(const std::vector<nn::NamedParameter>& parameters, const std::function<at::Tensor(const at::Tensor&)>& change) {
  Attachment attached;
  for (const auto& each : parameters) {
    const unsigned hook = each.tensor.register_hook(change);
    attached.add(Attachment([tensor = each.tensor, hook] { tensor.remove_hook(hook); }));
  }
  return attached;
}

TEST_F(Planted, ARanksContributionThatIsDroppedIsFound) {
  VerifyOptions options;
  options.plant.attach = [](Composition& run, int rank) {
    return rank == 2 ? hook_gradients(run.parameters, [](const at::Tensor& g) { return at::zeros_like(g); }) : Attachment();
  };
  const auto report = run("dp_replicate=3", "llama", {}, options);
  EXPECT_FALSE(report.passed());
  EXPECT_FALSE(report.forward.first);
  EXPECT_FALSE(report.backward.first);  // every module computes what it should
  for (const auto& each : report.gradients.each) EXPECT_GT(each.value, 1e-3) << each.name;
  EXPECT_TRUE(report.losses.within());
  EXPECT_TRUE(report.weights.within()) << "given the gradients, the update is right";
  EXPECT_THAT(to_string(report), HasSubstr("how gradients are added up"));
}

/// What a rank adds up by itself takes the place of the sum over all: over data ranks, or over parts of the sequence.
void expect_unreduced_norm_is_named(const std::function<VerifyReport(const VerifyOptions&)>& run) {
  VerifyOptions options{.steps = 1};  // in the second, the replicas have drifted apart
  std::vector<at::Tensor> local(3);
  options.plant.attach = [&](Composition& run, int rank) {
    at::Tensor& own = local[static_cast<size_t>(rank)];
    own = at::zeros_like(parameter(run, "layers.0.ffn_norm.weight"));
    return hook_gradients({{"layers.0.ffn_norm.weight", parameter(run, "layers.0.ffn_norm.weight"), {}}}, [&own](const at::Tensor& g) {
      own.add_(g);
      return g;
    });
  };
  options.plant.gradients = [&](Composition& run, int rank) {
    at::Tensor& own = local[static_cast<size_t>(rank)];
    parameter(run, "layers.0.ffn_norm.weight").mutable_grad().copy_(own);
    own.zero_();
  };
  const auto report = run(options);
  EXPECT_FALSE(report.passed());
  EXPECT_EQ(report.gradients.worst().name, "layers.0.ffn_norm.weight");
  for (const auto& each : report.gradients.each) {
    if (each.name != "layers.0.ffn_norm.weight") EXPECT_LE(each.value, report.gradients.bound) << each.name;
  }
  EXPECT_FALSE(report.weights.within()) << "each rank updates its replica by its own";
}

TEST_F(Planted, ANormWhoseGradientIsNotReducedIsNamed) {
  expect_unreduced_norm_is_named([&](const VerifyOptions& options) { return run("dp_replicate=3", "llama", {}, options); });
  expect_unreduced_norm_is_named([&](const VerifyOptions& options) { return run("tp=3", "llama", {kSequence}, options); });
}

TEST_F(Planted, AnotherStartAndAnotherUpdateAreFound) {
  VerifyOptions options;
  options.plant.attach = [](Composition& run, int) {
    parameter(run, "norm.weight").mutable_data_ptr<float>()[0] += 1e-6f;
    return Attachment();
  };
  const auto other_start = run("dp_replicate=2", "mlp", {}, options);
  EXPECT_FALSE(other_start.initial_weights.within());
  EXPECT_EQ(other_start.initial_weights.worst().name, "norm.weight");
  EXPECT_FALSE(other_start.passed());

  options = {};
  options.plant.attach = [](Composition& run, int) {
    run.optimizer = optim::make_optimizer({}, run.updated);  // with betas other than the configuration's
    return Attachment();
  };
  const auto other_update = run("dp_replicate=2", "mlp", {"optim.betas=[0.5, 0.9]"}, options);
  EXPECT_TRUE(other_update.gradients.within()) << to_string(other_update);
  EXPECT_FALSE(other_update.weights.within()) << to_string(other_update);
  EXPECT_THAT(to_string(other_update), HasSubstr("look at the update"));
}

/// No step shows the last update of those that come late.
TEST_F(Planted, AnotherLateUpdateIsFoundInTheOnlyStep) {
  VerifyOptions options{.steps = 1};
  const std::vector<std::string> sets{"offload.optimizer=host", "offload.delayed_update=true", "optim.eps=1e-2"};
  const auto same = run("dp_replicate=2", "mlp", sets, options);
  EXPECT_TRUE(same.passed()) << to_string(same);
  options.plant.attach = [](Composition& run, int) {
    const auto with_another_eps = [](const std::vector<nn::NamedParameter>& copies) { return optim::make_optimizer({}, copies); };
    run.optimizer = std::make_unique<HostOptimizer>(run.updated, run.device, with_another_eps, HostOptimizer::kPieceBytes, /*delayed=*/true);
    return Attachment();
  };
  const auto other = run("dp_replicate=2", "mlp", sets, options);
  EXPECT_FALSE(other.weights.within()) << to_string(other);
  EXPECT_TRUE(other.gradients.within()) << to_string(other);
}

/// A network that does something wrong in the calls of one op that come from one place.
class WrongNetwork final : public comm::DecoratedEngine {
 public:
  using Forward = std::function<comm::Work()>;
  using Wrong = std::function<comm::Work(int rank, const comm::Call& call, const Forward& forward)>;

  WrongNetwork(const comm::GroupInfo& group, std::shared_ptr<comm::Engine> inner, std::string op, std::string site, Wrong wrong)
      : DecoratedEngine(group, std::move(inner)), op_(std::move(op)), site_(std::move(site)), wrong_(std::move(wrong)) {}

  comm::Work start(const comm::Call& call) override {
    const bool meant = to_string(call.op) == op_ && comm::CallSite::current() == site_;
    return meant ? wrong_(group().rank, call, [&] { return inner()->start(call); }) : inner()->start(call);
  }

 private:
  std::string op_, site_;
  Wrong wrong_;
};

comm::Decorator wrong_network(const std::string& op, const std::string& site, WrongNetwork::Wrong wrong) {
  return [=](std::shared_ptr<comm::Engine> inner, const comm::GroupInfo& group) {
    return std::make_shared<WrongNetwork>(group, std::move(inner), op, site, wrong);
  };
}

/// The gradients of tensors below `module`, and no others, are beyond the bound.
void expect_only_gradients_of(const std::string& module, const VerifyReport& report) {
  EXPECT_FALSE(report.passed());
  EXPECT_FALSE(report.forward.first) << to_string(report);
  EXPECT_FALSE(report.backward.first) << to_string(report);
  std::string first;
  for (const auto& each : report.gradients.each) {
    const bool inside = each.name.starts_with(module);
    EXPECT_EQ(each.value > report.gradients.bound, inside) << each.name << ": " << each.value;
    if (inside && first.empty()) first = each.name;
  }
  EXPECT_THAT(to_string(report), HasSubstr("added up over micro-batches and ranks, first that of " + first));
}

TEST_F(Planted, AShardsContributionThatIsDroppedInOneUnitIsFound) {
  for (const char* mesh : {"dp_shard=3", "dp_replicate=2,dp_shard=2"}) {
    VerifyOptions options{.steps = 1};
    options.plant.network = wrong_network("reduce_scatter", "layers.1", [](int rank, const comm::Call& call, const auto& forward) {
      if (rank == 1) at::Tensor(call.inputs[0]).zero_();
      return forward();
    });
    expect_only_gradients_of("layers.1.", run(mesh, "llama", {"zero.stage=3"}, options));
  }
}

TEST_F(Planted, AReductionThatIsLeftOutInOneUnitIsFound) {
  VerifyOptions options{.steps = 1};
  options.plant.network = wrong_network("reduce_scatter", "layers.0", [](int rank, const comm::Call& call, const auto&) {
    at::Tensor part = call.outputs[0];
    part.view(-1).copy_(call.inputs[0].view(-1).narrow(0, rank * part.numel(), part.numel()).clone());
    return comm::completed_work();
  });
  expect_only_gradients_of("layers.0.", run("dp_shard=2", "llama", {"zero.stage=3"}, options));
}

TEST_F(Planted, AReplicaSumThatIsLeftOutIsFound) {
  VerifyOptions options{.steps = 1};
  options.plant.network = wrong_network("all_reduce", "zero.bucket", [](int, const comm::Call&, const auto&) { return comm::completed_work(); });
  const auto report = run("dp_replicate=2,dp_shard=2", "mlp", {"zero.stage=2"}, options);
  EXPECT_FALSE(report.passed());
  for (const auto& each : report.gradients.each) EXPECT_GT(each.value, 1e-3) << each.name;
}

TEST_F(Planted, AStaleGatherIsNamedInTheStepThatMeetsIt) {
  for (const int culprit : {0, 2}) {
    VerifyOptions options;
    std::array<std::atomic<bool>, 3> updated{};
    std::array<at::Tensor, 3> first;
    options.plant.gradients = [&](Composition&, int rank) { updated[static_cast<size_t>(rank)] = true; };
    options.plant.network = wrong_network("all_gather", "layers.1", [&, culprit](int rank, const comm::Call& call, const auto& forward) {
      const auto stale = [&, rank, culprit, output = call.outputs[0]] {
        at::Tensor& kept = first[static_cast<size_t>(rank)];
        if (!kept.defined()) kept = output.clone();
        if (rank == culprit && updated[static_cast<size_t>(rank)]) std::memcpy(output.mutable_data_ptr(), kept.const_data_ptr(), kept.nbytes());
      };
      return comm::staged_work({{.work = forward(), .after = stale}});
    });
    const auto report = run("dp_shard=3", "llama", {"zero.stage=3"}, options);
    EXPECT_FALSE(report.passed());
    ASSERT_TRUE(report.forward.first) << to_string(report);
    EXPECT_THAT(report.forward.first->module, ::testing::StartsWith("layers.1.")) << to_string(report);
    EXPECT_EQ(report.forward.first->step, 2);
    EXPECT_EQ(report.forward.first->rank, culprit);
    EXPECT_THAT(to_string(report), HasSubstr("look at " + report.forward.first->module + " first"));
  }
}

TEST_F(Planted, ASliceThatIsOffByOneRowIsNamed) {
  constexpr const char* kName = "layers.1.feed_forward.w1.weight";
  VerifyOptions options;
  options.plant.attach = [&](Composition& run, int rank) {
    const at::Tensor slice = parameter(run, kName).detach();
    const at::Tensor rolled = slice.roll(1, 0);
    if (rank == 1) std::memcpy(slice.mutable_data_ptr(), rolled.const_data_ptr(), slice.nbytes());
    return Attachment();
  };
  const auto report = run("dp_shard=3", "llama", {"zero.stage=3"}, options);
  EXPECT_FALSE(report.passed());
  EXPECT_EQ(report.initial_weights.worst().name, kName);
  EXPECT_EQ(report.initial_weights.worst().rank, 1);
  ASSERT_TRUE(report.forward.first);
  EXPECT_EQ(report.forward.first->module, "layers.1.feed_forward.w1");
}

TEST_F(Planted, AGradientsSliceThatIsOffByOneElementIsNamed) {
  for (const char* stage : {"zero.stage=1", "zero.stage=2", "zero.stage=3"}) {
    VerifyOptions options{.steps = 1};
    std::string name;  // the largest that rank 1 holds some of
    options.plant.gradients = [&](Composition& run, int rank) {
      if (rank != 1) return;
      const auto largest =
          std::max_element(run.updated.begin(), run.updated.end(), [](const auto& a, const auto& b) { return a.tensor.numel() < b.tensor.numel(); });
      name = largest->name;
      at::Tensor gradient = largest->tensor.grad();
      gradient.copy_(gradient.view(-1).roll(1, 0).view_as(gradient));
    };
    const auto report = run("dp_shard=2", "mlp", {stage}, options);
    EXPECT_FALSE(report.passed());
    EXPECT_EQ(report.gradients.worst().name, name) << stage;
    EXPECT_EQ(report.gradients.worst().rank, 1);
    for (const auto& each : report.gradients.each) EXPECT_EQ(each.value > report.gradients.bound, each.name == name) << each.name;
    EXPECT_THAT(to_string(report), HasSubstr("first that of " + name));
  }
}

/// A row-wise layer whose terms carry the bias already, which is added to their sum once more. It begins as zero, so its gradient is the first to show it.
TEST_F(Planted, ABiasThatEveryRankAddsIsNamed) {
  constexpr const char* kModule = "layers.1.feed_forward.w2";
  for (const std::vector<std::string>& sets : {std::vector<std::string>{}, {kSequence}}) {
    VerifyOptions options;
    options.plant.attach = [](Composition& run, int) {
      for (const auto& [path, module] : nn::interceptable_modules(*run.model, kModule)) dynamic_cast<nn::LinearImpl&>(*module).leave_bias_out(false);
      return Attachment();
    };
    const auto report = run("tp=3", "gpt2", sets, options);
    EXPECT_FALSE(report.passed());
    EXPECT_EQ(report.gradients.worst().name, std::string(kModule) + ".bias");
    ASSERT_TRUE(report.forward.first) << to_string(report);
    EXPECT_EQ(report.forward.first->module, kModule);
    EXPECT_EQ(report.forward.first->step, 2);
  }
}

TEST_F(Planted, GradientsOfPartsOfTheSequenceThatAreNotReducedAreNamed) {
  VerifyOptions options{.steps = 1};
  options.plant.network = wrong_network("all_reduce", "tensor_parallel.shared", [](int, const comm::Call&, const auto&) { return comm::completed_work(); });
  const auto report = run("tp=2", "gpt2", {kSequence}, options);
  EXPECT_FALSE(report.passed());
  EXPECT_FALSE(report.forward.first) << to_string(report);
  EXPECT_FALSE(report.backward.first) << to_string(report);
  for (const auto& each : report.gradients.each) {
    const auto is = [&](const char* part) { return each.name.find(part) != std::string::npos; };
    EXPECT_EQ(each.value > report.gradients.bound, is("norm") || is("wo.bias") || is("w2.bias") || is("embed_positions")) << each.name << ": " << each.value;
  }
}

TEST_F(Planted, ATermOfARowWiseLayerThatIsDroppedIsNamed) {
  constexpr const char* kModule = "layers.1.attention.wo";
  for (const bool sequence : {false, true}) {
    VerifyOptions options;
    options.plant.network = wrong_network(sequence ? "reduce_scatter" : "all_reduce", kModule, [](int rank, const comm::Call& call, const auto& forward) {
      if (rank == 1) at::Tensor(call.inputs[0]).zero_();
      return forward();
    });
    const auto report = run("tp=3", "llama", sequence ? std::vector<std::string>{kSequence} : std::vector<std::string>{}, options);
    EXPECT_FALSE(report.passed());
    ASSERT_TRUE(report.forward.first) << to_string(report);
    EXPECT_EQ(report.forward.first->module, kModule);
    EXPECT_EQ(report.forward.first->step, 1);
    EXPECT_THAT(to_string(report), HasSubstr(std::string("look at ") + kModule + " first"));
  }
}

/// Each rank takes its own part's largest logit for that of the whole vocabulary, so the sums of exponentials have different units.
TEST_F(Planted, AVocabularyPartsMaximumThatIsWrongIsNamed) {
  VerifyOptions options;
  options.plant.network = wrong_network("all_reduce", "head", [](int, const comm::Call& call, const auto& forward) {
    return call.reduction == comm::Op::Max ? comm::completed_work() : forward();
  });
  const auto report = run("tp=2", "llama", {}, options);
  EXPECT_FALSE(report.passed());
  ASSERT_TRUE(report.forward.first) << to_string(report);
  EXPECT_EQ(report.forward.first->module, "head");
  EXPECT_FALSE(report.losses.within());
}

/// Another id in the batch of one rank of a tensor-parallel group, of an entry that the last of two ranks holds.
struct OtherId : nn::Interceptor {
  nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
    const at::Tensor ids = inputs[0].toTensor().clone();
    ids[0][3] = 200;
    inputs[0] = ids;
    return next(std::move(inputs));
  }
};

TEST_F(Planted, OtherIdsOnARankAreNamedAndRefusedByCommCheck) {
  VerifyOptions options;
  options.plant.attach = [](Composition& run, int rank) {
    return rank == 1 ? nn::attach(*run.model, "embed_tokens", std::make_shared<OtherId>()) : Attachment();
  };
  const auto report = run("tp=2", "llama", {}, options);
  EXPECT_FALSE(report.passed());
  ASSERT_TRUE(report.forward.first) << to_string(report);
  EXPECT_EQ(report.forward.first->module, "embed_tokens");
  for (const char* mesh : {"tp=2", "tp=2,dp_replicate=2"}) {
    try {
      run(mesh, "llama", {"comm.check=true", kSequence}, options);
      FAIL() << "nothing was refused";
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), HasSubstr("argument 0 of 'embed_tokens' has to be the same on every rank of tp, and rank 1 was given another one"));
    }
  }
}

}  // namespace
}  // namespace tessera
