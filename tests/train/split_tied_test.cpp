#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>

#include <gmock/gmock.h>
#include <torch/nn.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include "tessera/checkpoint/torch_optimizer.h"
#include "tessera/comm/testing.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/layout/slice.h"
#include "tessera/mesh/mesh.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"
#include "tessera/pipeline/executor.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/split/clip_grad_norm.h"
#include "tessera/pipeline/split/shared_gradients.h"
#include "tessera/pipeline/split/split.h"
#include "tessera/pipeline/split/traced_stage.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/refusal.h"

/// A weight that stages of a split model share while each stage is in a wrapper of its own: parts of it that lie at different offsets are terms of one
/// gradient.
namespace tessera {
namespace {

using pipeline::SplitPoint;
using ::testing::HasSubstr;
using testing_support::refusal;

constexpr int kTiedMicroBatches = 4, kTiedSteps = 2;
constexpr double kTiedNorm = 2.0;
constexpr int64_t kTiedWords = 23;  // 207 elements, which parts that are multiples of 32 cut here or there

/// The embedding is used by the first, the last and, halfway, by a layer in between; what else stages have differs, so that the same elements lie elsewhere.
struct ThriceTiedImpl : torch::nn::Module {
  ThriceTiedImpl() {
    register_module("a", a);
    register_module("emb", emb);
    register_module("b", b);
    register_module("c", c);
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = torch::tanh(a(emb(tokens)));
    x = x + torch::tanh(b(x));
    x = x + torch::matmul(torch::tanh(torch::nn::functional::linear(c(x), emb->weight)), emb->weight);
    return torch::nn::functional::linear(norm(x), emb->weight);
  }
  torch::nn::Linear a{9, 9}, b{9, 9}, c{9, 9};
  torch::nn::Embedding emb{kTiedWords, 9};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({9})};
};
TORCH_MODULE(ThriceTied);

at::Tensor tokens_of(int number) { return at::randint(kTiedWords, {2, 3}, at::detail::createCPUGenerator(30 + static_cast<uint64_t>(number)), at::kLong); }
at::Tensor loss_of_tokens(const at::Tensor& output, int number) {
  return (output * at::randn(output.sizes(), at::detail::createCPUGenerator(90 + static_cast<uint64_t>(number))).to(output.scalar_type())).sum();
}

const auto tied_sgd = [](const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.02).momentum(0.9).weight_decay(0.01));
};

struct TiedLayout {
  std::string how;  ///< the wrapper
  int shard = 2, replicas = 1, stages = 2;
  schedules::Schedule (*schedule)(int, int) = &schedules::one_f_one_b;
  at::ScalarType dtype = at::kFloat;
  int chunks = 1;
  bool frozen = false;                       ///< the shared weight
  bool alone = false;                        ///< the shared weight is all that is trained
  std::filesystem::path saves{}, resumes{};  ///< a folder, behind the first step, with which it ends; a checkpoint, in the place of the first step

  int data() const { return shard * replicas; }
  auto build() const {
    return [type = dtype, trained = !frozen, rest = !alone] {
      ThriceTied model;
      model->to(type);
      for (const at::Tensor& parameter : model->parameters()) parameter.set_requires_grad(rest);
      model->emb->weight.set_requires_grad(trained);
      return model;
    };
  }
  pipeline::SplitSpec splits() const {
    pipeline::SplitSpec all{{"norm", SplitPoint::Beginning}, {"c", SplitPoint::Beginning}, {"b", SplitPoint::Beginning}};
    all.resize(static_cast<size_t>(stages * chunks - 1));
    return all;
  }
};

struct TiedRun {
  std::map<std::string, at::Tensor> gradients, weights;  ///< of the first step, unclipped; after the last
  std::vector<double> norms;
};

bool brings_gradients(const schedules::Action& action) { return action.kind == schedules::Kind::Backward || action.kind == schedules::Kind::BackwardInput; }

TiedRun tied_on_one(const TiedLayout& layout) {
  auto model = on_meta(layout.build());
  materialize(*model, 5);
  const auto optimizer = tied_sgd(model->parameters());
  TiedRun run;
  for (int step = 0; step < kTiedSteps; ++step) {
    optimizer->zero_grad();
    for (int i = 0; i < kTiedMicroBatches * layout.data(); ++i) loss_of_tokens(model(tokens_of(i)), i).backward();
    for (const auto& item : model->named_parameters()) {
      if (item.value().requires_grad()) run.gradients.try_emplace(item.key(), item.value().grad().clone());
    }
    run.norms.push_back(torch::nn::utils::clip_grad_norm_(model->parameters(), kTiedNorm));
    optimizer->step();
  }
  for (const auto& item : model->named_parameters()) run.weights[item.key()] = item.value().detach();
  return run;
}

void expect_part(const at::Tensor& part, const at::Tensor& value, const at::Tensor& whole, double bound, const std::string& what) {
  const Slice& slice = nn::slice_of(part);
  if (slice.numel() == 0) return;
  const at::Tensor want = take(whole, slice).reshape({-1}).to(at::kDouble);
  EXPECT_LE((value.reshape({-1}).to(at::kDouble) - want).abs().max().item<double>(), bound * whole.abs().max().item<double>()) << what << " of " << slice.name;
}

/// The checkpoint, if one was to be made.
std::filesystem::path expect_tied_alike(const TiedLayout& layout) {
  SCOPED_TRACE(testing::Message() << layout.how << ", " << layout.stages << " ranks of a pipeline, " << layout.shard << " x " << layout.replicas
                                  << " data ranks, " << layout.dtype);
  const TiedRun want = tied_on_one(layout);
  // Of bf16, sums of 8 terms and more that are rounded one after the other, here and there in another order.
  const double bound = layout.dtype == at::kFloat ? 1e-5 : 3e-2;
  std::filesystem::path checkpoint;
  comm::run_ranks(layout.stages * layout.data(),
                  [&](comm::World& world) {
                    const Mesh mesh(world, {{"replicate", layout.replicas}, {"dp", layout.shard}, {"pp", layout.stages}});
                    const auto shard = mesh["dp"], pipe = mesh["pp"], replicate = mesh["replicate"];
                    const int place = replicate.rank() * layout.shard + shard.rank();
                    const auto number = [&](int micro_batch) { return micro_batch * layout.data() + place; };
                    auto model = on_meta(layout.build());
                    const auto split = pipeline::split(model, {tokens_of(0)}, layout.splits());
                    const auto plan = layout.schedule(layout.stages, kTiedMicroBatches);
                    const auto own = split.module(plan.stages_of(pipe.rank()));
                    std::unique_ptr<GradientSynchronizer> wrapper;
                    if (layout.how == "fully_shard") wrapper = fully_shard(*own, shard, {.replicate = replicate});
                    materialize(*own, 5);
                    if (layout.how == "ddp")
                      wrapper = std::make_unique<DistributedDataParallel>(*own, mesh[{"replicate", "dp"}], DdpOptions{.find_unused_parameters = true});
                    for (const int stage : {1, 2}) {
                      if (layout.how != "zero " + std::to_string(stage)) continue;
                      wrapper = std::make_unique<ShardedDataParallel>(*own, ShardGroups{.shard = shard, .replicate = replicate},
                                                                      ZeroOptions{.stage = stage, .find_unused_parameters = true});
                    }
                    auto optimizer = zero_optimizer(*wrapper, tied_sgd);
                    std::map<int, std::unique_ptr<pipeline::TracedStage>> stages;
                    std::map<int, pipeline::Stage*> by_number;
                    for (const int stage : plan.stages_of(pipe.rank())) {
                      stages[stage] = std::make_unique<pipeline::TracedStage>(
                          split, stage, [&](int i) { return std::vector<at::Tensor>{tokens_of(number(i))}; },
                          [&](int i, const std::vector<at::Tensor>& outputs) { return loss_of_tokens(outputs[0], number(i)); });
                      by_number[stage] = stages[stage].get();
                    }
                    // A wrapper of several stages is told which backward is the last of all.
                    const auto& actions = plan.actions[static_cast<size_t>(pipe.rank())];
                    const auto last = std::find_if(actions.rbegin(), actions.rend(), [](const schedules::Action& action) { return brings_gradients(action); });
                    const auto around = [&, last = *last](const schedules::Action& action, const std::function<void()>& body) {
                      const bool waits = brings_gradients(action) && !(action == last);
                      const Attachment held = waits ? wrapper->no_sync() : Attachment();
                      body();
                    };
                    pipeline::Executor executor(plan, split.crossings(), by_number,
                                                {.ranks = pipe, .around = layout.chunks > 1 ? pipeline::Around(around) : pipeline::Around()});
                    if (!layout.resumes.empty()) {
                      checkpoint::LoadOptions others;
                      for (const auto& [name, stored] : checkpoint::read_manifest(layout.resumes).tensors) others.expected.push_back(name);
                      checkpoint::load(layout.resumes, *own, optimizer.inner(), others);
                    }
                    for (int step = layout.resumes.empty() ? 0 : 1; step < kTiedSteps; ++step) {
                      optimizer.zero_grad();
                      executor.run();
                      pipeline::sum_shared_gradients(split, plan, pipe, layout.how == "ddp" ? comm::Group() : mesh[{"dp", "pp"}]);
                      if (step == 0) {
                        for (const auto& [name, tensor, aliases] : wrapper->updated()) {
                          const auto gradient = want.gradients.find(nn::slice_of(tensor).name);
                          EXPECT_EQ(tensor.grad().defined() && tensor.numel() > 0, gradient != want.gradients.end() && tensor.numel() > 0) << name;
                          if (gradient != want.gradients.end()) expect_part(tensor, tensor.grad(), gradient->second, bound, "gradient");
                        }
                      }
                      EXPECT_NEAR(pipeline::clip_grad_norm(split, plan, pipe, kTiedNorm).item<double>(), want.norms[static_cast<size_t>(step)],
                                  bound * want.norms[static_cast<size_t>(step)]);
                      optimizer.step();
                      if (layout.saves.empty()) continue;
                      const auto saved = checkpoint::save(layout.saves, 1, *own, optimizer.inner(), world.group());
                      if (world.rank() == 0) checkpoint = saved;
                      return;
                    }
                    for (const auto& [name, tensor, aliases] : wrapper->updated())
                      expect_part(tensor, tensor.detach(), want.weights.at(nn::slice_of(tensor).name), bound, "weight");
                  },
                  {.timeout = std::chrono::seconds(30)});
  return checkpoint;
}

TEST(SplitTied, PartsOfASharedWeightMeetWhereverTheyLie) {
  for (const std::string how : {"ddp", "zero 1", "zero 2", "fully_shard"}) {
    expect_tied_alike({.how = how});
    expect_tied_alike({.how = how, .shard = 3, .stages = 3});
  }
}

/// No rank has a term of it, and none moves.
TEST(SplitTied, FrozenSharedWeightsStay) {
  for (const std::string how : {"ddp", "zero 1", "zero 2", "fully_shard"}) expect_tied_alike({.how = how, .shard = 2, .stages = 3, .frozen = true});
  expect_tied_alike({.how = "zero 2", .schedule = &schedules::zb_v, .chunks = 2, .frozen = true});
}

/// A stage's gradients are those of the shared weight, which are put together for a message in pieces.
TEST(SplitTied, ASharedWeightMayBeAllThatIsTrained) {
  for (const std::string how : {"ddp", "zero 2", "fully_shard"}) {
    expect_tied_alike({.how = how, .alone = true});
    expect_tied_alike({.how = how, .shard = 3, .stages = 3, .alone = true});
  }
}

/// Saved by one split under one wrapper, taken up by others, whose stages are cut elsewhere and whose parts of the shared weight are others.
TEST(SplitTied, ACheckpointIsTakenUpInAnotherSplit) {
  const auto folder = std::filesystem::temp_directory_path() / ("tessera-tied-" + std::to_string(getpid()));
  for (const std::string how : {"ddp", "zero 2", "fully_shard"}) {
    const auto saved = expect_tied_alike({.how = how, .stages = 2, .saves = folder / how});
    for (const std::string then : {"ddp", "zero 1", "fully_shard"}) {
      SCOPED_TRACE(how + ", then " + then);
      expect_tied_alike({.how = then, .stages = 3, .resumes = saved});
    }
  }
  std::filesystem::remove_all(folder);
}

TEST(SplitTied, ReplicasOfParts) {
  for (const std::string how : {"zero 2", "fully_shard"}) expect_tied_alike({.how = how, .shard = 2, .replicas = 2, .stages = 2});
}

TEST(SplitTied, SixteenBits) {
  for (const std::string how : {"ddp", "zero 2", "fully_shard"}) expect_tied_alike({.how = how, .shard = 2, .stages = 3, .dtype = at::kBFloat16});
}

/// Both ends on rank 0, and a use of it on rank 1.
TEST(SplitTied, BothEndsOnOneRank) {
  for (const std::string how : {"ddp", "zero 2", "fully_shard"}) {
    for (const auto schedule : {&schedules::zb_v, &schedules::v_half}) expect_tied_alike({.how = how, .schedule = schedule, .chunks = 2});
  }
}

TEST(SplitTied, PartsWithoutTheRanksThatHaveTheOthersAreRefusedOnAll) {
  const TiedLayout layout{.how = "zero 2"};
  comm::run_ranks(4, [&](comm::World& world) {
    const Mesh mesh(world, {{"dp", 2}, {"pp", 2}});
    auto model = on_meta(layout.build());
    const auto split = pipeline::split(model, {tokens_of(0)}, layout.splits());
    const auto own = split.module(mesh["pp"].rank());
    materialize(*own, 5);
    const auto plan = schedules::one_f_one_b(2, kTiedMicroBatches);
    const auto whole = std::make_unique<DistributedDataParallel>(*own, mesh["dp"], DdpOptions{});
    for (const at::Tensor& parameter : own->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
    EXPECT_THAT(refusal([&] { pipeline::sum_shared_gradients(split, plan, mesh["pp"], mesh[{"dp", "pp"}]); }),
                AllOf(HasSubstr("sum_shared_gradients(split, schedule, mesh[\"pp\"]), and"), HasSubstr("no replicas"), Not(HasSubstr("{\"dp\", \"pp\"}"))))
        << "each whole copy is there twice";
  });
  comm::run_ranks(4, [&](comm::World& world) {
    const Mesh mesh(world, {{"dp", 2}, {"pp", 2}});
    auto model = on_meta(layout.build());
    const auto split = pipeline::split(model, {tokens_of(0)}, layout.splits());
    const auto own = split.module(mesh["pp"].rank());
    materialize(*own, 5);
    const auto plan = schedules::one_f_one_b(2, kTiedMicroBatches);
    ShardedDataParallel parts(*own, ShardGroups{.shard = mesh["dp"]}, ZeroOptions{.stage = 2});
    for (const auto& part : parts.shards()) part.tensor.mutable_grad() = at::ones_like(part.tensor);
    EXPECT_THAT(refusal([&] { pipeline::sum_shared_gradients(split, plan, mesh["pp"]); }),
                AllOf(HasSubstr("'emb.weight' is shared by stages on several ranks"), HasSubstr("mesh[{\"dp\", \"pp\"}]")));
  });
}

/// DDP sets aside what a parameter has before a pass, and adds it again behind it: the sum of before is in there as anywhere.
TEST(SplitTied, AddingToASharedWeightsSumUnderDdpIsRefused) {
  comm::run_ranks(4,
                  [](comm::World& world) {
                    const Mesh mesh(world, {{"dp", 2}, {"pp", 2}});
                    const auto data = mesh["dp"], pipe = mesh["pp"];
                    const TiedLayout layout{.how = "ddp"};
                    auto model = on_meta(layout.build());
                    const auto split = pipeline::split(model, {tokens_of(0)}, layout.splits());
                    const auto plan = schedules::one_f_one_b(2, kTiedMicroBatches);
                    const auto own = split.module(pipe.rank());
                    materialize(*own, 5);
                    const DistributedDataParallel ddp(*own, data, DdpOptions{.find_unused_parameters = true});
                    pipeline::TracedStage stage(
                        split, pipe.rank(), [&](int i) { return std::vector<at::Tensor>{tokens_of(2 * i + data.rank())}; },
                        [&](int i, const std::vector<at::Tensor>& outputs) { return loss_of_tokens(outputs[0], 2 * i + data.rank()); });
                    pipeline::Executor executor(plan, split.crossings(), {{pipe.rank(), &stage}}, {.ranks = pipe});
                    executor.run();
                    pipeline::sum_shared_gradients(split, plan, pipe);
                    executor.run();
                    EXPECT_THAT(testing_support::refusal([&] { pipeline::sum_shared_gradients(split, plan, pipe); }),
                                ::testing::HasSubstr("has had more from backward passes since"));
                  },
                  {.timeout = std::chrono::seconds(30)});
}

}  // namespace
}  // namespace tessera
