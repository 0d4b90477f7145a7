#include <filesystem>
#include <map>
#include <memory>

#include <gmock/gmock.h>
#include <torch/nn.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/torch_optimizer.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/mesh.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/sync_batch_norm.h"
#include "tessera/pipeline/executor.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/split/clip_grad_norm.h"
#include "tessera/pipeline/split/split.h"
#include "tessera/pipeline/split/traced_stage.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/refusal.h"
#include "tests/test_device.h"

/// Stages of a split model, each in a wrapper of its own over the ranks that hold the same stage: two data ranks times two stages, against one process.
namespace tessera {
namespace {

using pipeline::SplitPoint;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_support::refusal;

constexpr int kOfEachRank = 4, kDataRanks = 2, kSteps = 2;
constexpr double kMaxNorm = 0.5;

template <class Linear, class Base>
struct FourLayersImpl : Base {
  FourLayersImpl() {
    this->register_module("a", a);
    this->register_module("b", b);
    this->register_module("c", c);
    this->register_module("d", d);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = torch::tanh(b(torch::tanh(a(x))));
    return d(torch::tanh(c(h)) + h);
  }
  Linear a{4, 5}, b{5, 4}, c{4, 4}, d{4, 3};
};
using PlainFourImpl = FourLayersImpl<torch::nn::Linear, torch::nn::Module>;
TORCH_MODULE(PlainFour);
using OwnFourImpl = FourLayersImpl<nn::Linear, nn::Module>;
TESSERA_MODULE(OwnFour);

at::Tensor sample(int number) { return at::randn({3, 4}, at::detail::createCPUGenerator(30 + static_cast<uint64_t>(number))); }
at::Tensor loss_of_sample(const at::Tensor& output, int number) {
  return (output * at::randn(output.sizes(), at::detail::createCPUGenerator(90 + static_cast<uint64_t>(number)))).sum();
}

const auto make_sgd = [](const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
};

using Weights = std::map<std::string, at::Tensor>;

template <class Model>
std::pair<Weights, std::vector<double>> split_on_one_process() {
  auto model = on_meta([] { return Model(); });
  materialize(*model, 5, testing_support::test_device());
  const auto optimizer = make_sgd(model->parameters());
  std::vector<double> norms;
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    for (int i = 0; i < kOfEachRank * kDataRanks; ++i) loss_of_sample(model(sample(i)), i).backward();
    norms.push_back(torch::nn::utils::clip_grad_norm_(model->parameters(), kMaxNorm));
    optimizer->step();
  }
  Weights weights;
  for (const auto& item : model->named_parameters()) weights[item.key()] = item.value().detach().clone();
  return {weights, norms};
}

/// As docs/pipeline-modules.md has it.
pipeline::Around tell(GradientSynchronizer& wrapper, int micro_batches) {
  return [&wrapper, micro_batches](const schedules::Action& action, const std::function<void()>& body) {
    using schedules::Kind;
    const bool weights = action.kind == Kind::BackwardWeight, forward = action.kind == Kind::Forward;
    const ActionKind kind = forward ? ActionKind::Forward : weights ? ActionKind::Weights : ActionKind::Backward;
    const MicroBatchPosition position{
        .index = action.micro_batch, .last = action.micro_batch + 1 == micro_batches, .weights_later = action.kind == Kind::BackwardInput};
    wrapper.before(kind, position);
    body();
    wrapper.after(kind, position);
  };
}

/// `how`: of the wrapper. `told`: of the schedule's actions.
template <class Model>
void train_wrapped(const std::string& how, schedules::Schedule (*schedule)(int, int), bool told) {
  const auto [expected, norms] = split_on_one_process<Model>();
  comm::run_ranks(2 * kDataRanks,
                  [&, &expected = expected, &norms = norms](comm::World& world) {
                    const Mesh mesh(world, {{"dp", kDataRanks}, {"pp", 2}});
                    const auto data = mesh["dp"], pipe = mesh["pp"];
                    const auto number = [&](int micro_batch) { return micro_batch * kDataRanks + data.rank(); };
                    auto model = on_meta([] { return Model(); });
                    const auto split = pipeline::split(model, {sample(0)}, {{"c", SplitPoint::Beginning}});
                    const auto own = split.module(pipe.rank());
                    std::unique_ptr<GradientSynchronizer> wrapper;
                    if (how == "fully_shard") wrapper = fully_shard(*own, data, {});
                    materialize(*own, 5, testing_support::test_device());
                    if (how == "ddp") wrapper = std::make_unique<DistributedDataParallel>(*own, data, DdpOptions{});
                    if (how == "zero 2") wrapper = std::make_unique<ShardedDataParallel>(*own, ShardGroups{.shard = data}, ZeroOptions{.stage = 2});
                    auto optimizer = zero_optimizer(*wrapper, make_sgd);
                    pipeline::TracedStage stage(
                        split, pipe.rank(), [&](int i) { return std::vector<at::Tensor>{sample(number(i))}; },
                        [&](int i, const std::vector<at::Tensor>& outputs) { return loss_of_sample(outputs[0], number(i)); });
                    const auto plan = schedule(2, kOfEachRank);
                    pipeline::Executor executor(plan, split.crossings(), {{pipe.rank(), &stage}},
                                                {.ranks = pipe, .around = told ? tell(*wrapper, kOfEachRank) : pipeline::Around()});
                    for (int step = 0; step < kSteps; ++step) {
                      told ? wrapper->begin_step() : optimizer.zero_grad();
                      executor.run();
                      if (told) wrapper->finish();
                      EXPECT_NEAR(pipeline::clip_grad_norm(split, plan, pipe, kMaxNorm).template item<double>(), norms[step], 1e-4 * norms[step]) << how;
                      optimizer.step();
                    }
                    if (how == "fully_shard") unshard(*own);
                    for (const auto& item : own->named_parameters()) {
                      EXPECT_LT((item.value() - expected.at(item.key())).abs().max().template item<double>(), 1e-5) << how << " " << item.key();
                    }
                  },
                  {.timeout = std::chrono::seconds(30)});
}

TEST(SplitWrapped, EachStageInAWrapperOfItsOwnAndOneNormOverAll) {
  for (const std::string how : {"ddp", "zero 2", "fully_shard"}) train_wrapped<PlainFour>(how, &schedules::one_f_one_b, /*told=*/false);
}

TEST(SplitWrapped, BackwardsInTwoHalvesAreToldToTheWrapper) {
  for (const std::string how : {"ddp", "zero 2", "fully_shard"}) train_wrapped<OwnFour>(how, &schedules::zb_h1, /*told=*/true);
  EXPECT_THAT(refusal([] { train_wrapped<OwnFour>("ddp", &schedules::zb_h1, /*told=*/false); }), HasSubstr("pipeline::ExecutorOptions::around"));
  EXPECT_THAT(refusal([] { train_wrapped<OwnFour>("zero 2", &schedules::zb_h1, /*told=*/false); }), HasSubstr("pipeline::ExecutorOptions::around"));
}

/// A stage whose gradients all come in actions of their own: no backward pass ever brings the wrapper one.
TEST(SplitWrapped, StagesOfNothingButLinearLayersInTwoHalves) {
  const auto expected = split_on_one_process<OwnFour>().first;
  comm::run_ranks(
      2 * kDataRanks,
      [&](comm::World& world) {
        const Mesh mesh(world, {{"dp", kDataRanks}, {"pp", 2}});
        const auto data = mesh["dp"], pipe = mesh["pp"];
        const auto number = [&](int micro_batch) { return micro_batch * kDataRanks + data.rank(); };
        auto model = on_meta([] { return OwnFour(); });
        const auto split = pipeline::split(model, {sample(0)}, {{"b", SplitPoint::Beginning}, {"c", SplitPoint::Beginning}, {"d", SplitPoint::Beginning}});
        const auto plan = schedules::zb_v(2, kOfEachRank);
        std::map<int, std::shared_ptr<torch::nn::Module>> modules;
        std::map<int, std::unique_ptr<GradientSynchronizer>> wrappers;
        std::map<int, std::unique_ptr<pipeline::TracedStage>> stages;
        std::map<int, pipeline::Stage*> by_number;
        std::map<int, pipeline::Around> told;
        std::vector<at::Tensor> trained;
        for (const int stage : plan.stages_of(pipe.rank())) {
          const auto own = modules[stage] = split.module(stage);
          materialize(*own, 5, testing_support::test_device());
          wrappers[stage] = std::make_unique<DistributedDataParallel>(*own, data, DdpOptions{.sizes = {.bucket_bytes = 40, .first_bucket_bytes = 40}});
          stages[stage] = std::make_unique<pipeline::TracedStage>(
              split, stage, [&](int i) { return std::vector<at::Tensor>{sample(number(i))}; },
              [&](int i, const std::vector<at::Tensor>& outputs) { return loss_of_sample(outputs[0], number(i)); });
          by_number[stage] = stages[stage].get();
          told[stage] = tell(*wrappers[stage], kOfEachRank);
          for (const at::Tensor& parameter : own->parameters()) trained.push_back(parameter);
        }
        const auto around = [&](const schedules::Action& action, const std::function<void()>& body) { told.at(action.stage)(action, body); };
        pipeline::Executor executor(plan, split.crossings(), by_number, {.ranks = pipe, .around = around});
        const auto optimizer = make_sgd(trained);
        for (int step = 0; step < kSteps; ++step) {
          for (auto& [stage, wrapper] : wrappers) wrapper->begin_step();
          executor.run();
          for (auto& [stage, wrapper] : wrappers) wrapper->finish();
          pipeline::clip_grad_norm(split, plan, pipe, kMaxNorm);
          optimizer->step();
        }
        for (const auto& [stage, own] : modules) {
          for (const auto& item : own->named_parameters()) {
            EXPECT_LT((item.value() - expected.at(item.key())).abs().max().item<double>(), 1e-5) << item.key();
          }
        }
      },
      {.timeout = std::chrono::seconds(30)});
}

struct TwoBlocksImpl : nn::Module {
  TwoBlocksImpl() {
    register_module("up0", up0);
    register_module("down0", down0);
    register_module("up1", up1);
    register_module("down1", down1);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = down0(torch::tanh(up0(x))) + x;
    return down1(torch::tanh(up1(h))) + h;
  }
  nn::Linear up0{4, 6}, down0{6, 4}, up1{4, 5}, down1{5, 4};
};
TESSERA_MODULE(TwoBlocks);

/// Stages whose layers are cut over ranks of their own: the passes that are recorded on meta go through collectives.
TEST(SplitWrapped, StagesOfLayersThatAreCut) {
  const auto expected = split_on_one_process<TwoBlocks>().first;
  for (const bool cut_first : {true, false}) {
    for (const bool wrapped : {false, true}) {
      const int data_ranks = wrapped ? kDataRanks : 1;
      comm::run_ranks(4 * data_ranks,
                      [&](comm::World& world) {
                        const Mesh mesh(world, {{"dp", data_ranks}, {"pp", 2}, {"tp", 2}});
                        const auto data = mesh["dp"], pipe = mesh["pp"], tensor = mesh["tp"];
                        const int micro_batches = kOfEachRank * kDataRanks / data_ranks;
                        const auto number = [&](int micro_batch) { return micro_batch * data_ranks + data.rank(); };
                        auto model = on_meta([] { return TwoBlocks(); });
                        const auto cut = [&] {
                          return parallelize_module(model, tensor,
                                                    {{"up0", ColumnParallel{}}, {"down0", RowParallel{}}, {"up1", ColumnParallel{}}, {"down1", RowParallel{}}});
                        };
                        std::shared_ptr<TensorParallel> parallel;
                        if (cut_first) parallel = cut();
                        const auto split = pipeline::split(model, {sample(0)}, {{"up1", SplitPoint::Beginning}});
                        if (!cut_first) parallel = cut();
                        const auto own = split.module(pipe.rank());
                        materialize(*own, 5, testing_support::test_device());
                        std::unique_ptr<GradientSynchronizer> wrapper;
                        if (wrapped) wrapper = std::make_unique<DistributedDataParallel>(*own, data, DdpOptions{});
                        const auto optimizer = make_sgd(own->parameters());
                        pipeline::TracedStage stage(
                            split, pipe.rank(), [&](int i) { return std::vector<at::Tensor>{sample(number(i))}; },
                            [&](int i, const std::vector<at::Tensor>& outputs) { return loss_of_sample(outputs[0], number(i)); });
                        const auto plan = schedules::one_f_one_b(2, micro_batches);
                        pipeline::Executor executor(plan, split.crossings(), {{pipe.rank(), &stage}}, {.ranks = pipe});
                        if (!cut_first) {  // the first stage looks before anything is sent
                          if (pipe.rank() == 0)
                            EXPECT_THAT(refusal([&] { executor.run(); }), HasSubstr("by parallelize_module after pipeline::split had recorded"));
                          return;
                        }
                        for (int step = 0; step < kSteps; ++step) {
                          optimizer->zero_grad();
                          executor.run();
                          pipeline::clip_grad_norm(split, plan, pipe, kMaxNorm);
                          optimizer->step();
                        }
                        for (const auto& item : own->named_parameters()) {
                          const at::Tensor want = take(expected.at(item.key()), nn::slice_of(item.value()));
                          EXPECT_LT((item.value() - want).abs().max().item<double>(), 1e-5) << item.key() << (wrapped ? " wrapped" : "");
                        }
                      },
                      {.timeout = std::chrono::seconds(30)});
    }
  }
}

struct AveragingImpl : torch::nn::Module {
  explicit AveragingImpl(comm::Group of) : group(std::move(of)) {
    register_module("first", first);
    register_module("last", last);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = first(x).detach();
    comm::all_reduce(group, h);
    return last(h);
  }
  comm::Group group;
  torch::nn::Linear first{4, 4}, last{4, 3};
};
TORCH_MODULE(Averaging);

/// A record has operators and calls of modules that announce them: a collective between them would not be made again.
TEST(SplitWrapped, ACollectiveBetweenLayersIsRefused) {
  comm::run_ranks(2, [](comm::World& world) {
    auto net = on_meta([&] { return Averaging(world.group()); });
    EXPECT_THAT(refusal([&] { (void)pipeline::split(net, {sample(0)}, {{"last", SplitPoint::Beginning}}); }), HasSubstr("declared with TESSERA_MODULE"));
  });
}

/// Statistics of all ranks, of a pass that only one of them records at a time.
TEST(SplitWrapped, SynchronizedNormsAreRecorded) {
  comm::run_ranks(2, [](comm::World& world) {
    auto net = on_meta([] { return torch::nn::Sequential(torch::nn::Linear(4, 4), nn::SyncBatchNorm(4), torch::nn::Linear(4, 3)); });
    EXPECT_EQ(nn::synchronize_batch_norms(*net, world.group()), 1);
    if (world.rank() == 1) return;
    EXPECT_EQ(pipeline::split(net, {sample(0)}, {{"2", SplitPoint::Beginning}}).stages(), 2);
  });
}

/// Over slices nothing can be recorded: a pass of another kind was recorded before, or is refused alike on every rank.
TEST(SplitWrapped, PassesOfAnotherKindUnderFullyShardAreRecordedBefore) {
  for (const bool before : {true, false}) {
    comm::run_ranks(2, [&](comm::World& world) {
      auto model = on_meta([] { return OwnFour(); });
      const auto split = pipeline::split(model, {sample(0)}, {{"c", SplitPoint::Beginning}});
      const auto own = split.module({0, 1});
      const c10::NoGradGuard no_grad;
      if (before) split.recording();
      const auto sharded = fully_shard(*own, world.group(), {});
      materialize(*own, 5, testing_support::test_device());
      if (before) {
        EXPECT_NO_THROW(split.recording()) << world.rank();
      } else {
        EXPECT_THAT(refusal([&] { split.recording(); }),
                    AllOf(HasSubstr("was recorded before fully_shard cut the stage"), HasSubstr("is a slice of"), HasSubstr("before wrapping")));
      }
    });
  }
}

/// A stage loads its part of a checkpoint of the whole.
TEST(SplitWrapped, AStageLoadsFromACheckpointOfTheWholeModel) {
  const auto folder = std::filesystem::temp_directory_path() / ("tessera-split-" + std::to_string(getpid()));
  PlainFour whole;
  comm::run_ranks(1, [&](comm::World& world) {
    const auto saved = checkpoint::save(folder, 1, *whole, world.group());
    auto model = on_meta([] { return PlainFour(); });
    const auto split = pipeline::split(model, {sample(0)}, {{"c", SplitPoint::Beginning}});
    const auto own = split.module(1);
    materialize(*own, 5, testing_support::test_device());
    EXPECT_THAT(refusal([&] { checkpoint::load(saved, *own); }), HasSubstr("extra model.a.weight"));
    checkpoint::LoadOptions options;
    for (const auto& [name, stored] : checkpoint::read_manifest(saved).tensors) options.expected.push_back(name);
    checkpoint::load(saved, *own, options);
    EXPECT_TRUE(at::equal(model->c->weight, whole->c->weight));
    EXPECT_TRUE(model->a->weight.is_meta());
  });
  std::filesystem::remove_all(folder);
}

struct PartsOfSequenceImpl : nn::Module {
  struct BlockImpl : nn::Module {
    BlockImpl() {
      register_module("norm", norm);
      register_module("up", up);
      register_module("down", down);
    }
    at::Tensor forward(const at::Tensor& x) { return x + down(torch::tanh(up(norm(x)))); }
    nn::RMSNorm norm{4, 1e-5};
    nn::Linear up{4, 6}, down{6, 4};
  };
  using Block = nn::ModuleHolder<BlockImpl>;

  PartsOfSequenceImpl() {
    register_module("a", a.ptr());
    register_module("b", b.ptr());
  }
  at::Tensor forward(const at::Tensor& x) { return b(a(x)); }
  Block a{std::make_shared<BlockImpl>()}, b{std::make_shared<BlockImpl>()};
};
TESSERA_MODULE(PartsOfSequence);

/// Trains by `plan`, in stages that are cut at 'b', of which `apart` ranks hold one each or one rank both: each step's micro-batches have these lengths.
void expect_parts_of_sequences(int apart, const ParallelPlan& plan, bool whole_input, const std::vector<std::vector<int64_t>>& steps) {
  const auto input = [](int64_t length) { return at::arange(2 * length * 4, at::kFloat).view({2, length, 4}).sin(); };
  PartsOfSequence whole = on_meta([] { return PartsOfSequence(); });
  materialize(*whole, 5, testing_support::test_device());
  std::map<int64_t, at::Tensor> expected;
  for (const int64_t length : {6, 7, 8}) expected[length] = whole(input(length)).detach();
  comm::run_ranks(2 * apart, [&](comm::World& world) {
    const Mesh mesh(world, {{"pp", apart}, {"tp", 2}});
    const comm::Group pipe = mesh["pp"];
    const auto mine = [&](const at::Tensor& x) { return whole_input ? x : x.tensor_split(2, 1)[static_cast<size_t>(mesh["tp"].rank())].contiguous(); };
    PartsOfSequence model = on_meta([] { return PartsOfSequence(); });
    const auto tensor = parallelize_module(model, mesh["tp"], plan, {.watch_terms = false});
    if (!whole_input) tensor->set_sequence(8);
    const auto split = pipeline::split(model, {mine(input(8))}, {{"b", SplitPoint::Beginning}});
    const auto schedule = apart == 1 ? schedules::breadth_first(1, 2, 2) : schedules::gpipe(2, 2);
    materialize(*split.module(schedule.stages_of(pipe.rank())), 5, testing_support::test_device());
    for (const std::vector<int64_t>& lengths : steps) {
      if (!whole_input) tensor->set_sequence(lengths[0]);
      std::vector<std::unique_ptr<pipeline::TracedStage>> stages;
      std::map<int, pipeline::Stage*> by_number;
      for (int i = 0; i < 2; ++i) split.expect({mine(input(lengths[i]))}, i);
      for (const int number : schedule.stages_of(pipe.rank())) {
        stages.push_back(std::make_unique<pipeline::TracedStage>(
            split, number, [&](int i) { return std::vector<at::Tensor>{mine(input(lengths[i]))}; },
            [&](int i, const std::vector<at::Tensor>& outputs) {
              EXPECT_LT((outputs[0] - mine(expected.at(lengths[i]))).abs().max().item<double>(), 1e-5) << "length " << lengths[i];
              return outputs[0].square().sum();
            }));
        by_number[number] = stages.back().get();
      }
      pipeline::Executor(schedule, split.crossings(), by_number, {.ranks = pipe, .device = testing_support::test_device()}).run();
    }
  });
}

const ParallelPlan kOfParts{
    {"*.norm", SequenceParallel{}}, {"*.up", ColumnParallel{.input = TensorLayout::Sequence}}, {"*.down", RowParallel{.output = TensorLayout::Sequence}}};

/// Micro-batches of several lengths in a step, and steps of lengths that were recorded before: the last stage is given parts alone.
TEST(SplitWrapped, APartOfASequenceIsOfTheLengthOfItsMicroBatch) {
  ParallelPlan plan = kOfParts;
  plan.emplace_back("a", PrepareInput{.from = TensorLayout::Replicated, .to = TensorLayout::Sequence});
  plan.emplace_back("b", PrepareOutput{.from = TensorLayout::Sequence, .to = TensorLayout::Replicated});
  for (const int apart : {1, 2}) expect_parts_of_sequences(apart, plan, /*whole_input=*/true, {{8, 8}, {6, 7}, {8, 6}});
}

/// Of 7 positions and of 8 the first rank has as many, so it would go by what was recorded.
TEST(SplitWrapped, AProgramThatSaysTheLengthIsBelieved) { expect_parts_of_sequences(/*apart=*/1, kOfParts, /*whole_input=*/false, {{8, 8}, {7, 7}, {8, 8}}); }

/// Without stages: what fully_shard holds is not whole.
TEST(SplitWrapped, AWrapperOverSlicesIsRefusedByThatName) {
  comm::run_ranks(2, [](comm::World& world) {
    auto model = on_meta([] { return PlainFour(); });
    const auto sharded = fully_shard(*model, world.group(), {});
    materialize(*model, 5, testing_support::test_device());
    EXPECT_THAT(refusal([&] { (void)DistributedDataParallel(*model, world.group()); }), HasSubstr("'a.weight' is a slice, of a module that fully_shard holds"));
  });
}

}  // namespace
}  // namespace tessera
