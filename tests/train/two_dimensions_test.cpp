/// Tensor parallelism with sharded data parallelism in a program of one's own. The code of docs/2d.md: what stands between `//: name` and `//:` is what it
/// shows.
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include "tessera/comm/testing.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/mesh.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/sharing.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad_norm.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/made_docs.h"
#include "tests/refusal.h"

namespace {

using tessera::comm::run_ranks;
using tessera::comm::World;
using ::testing::HasSubstr;

//: model
struct FeedForwardImpl : tessera::nn::Module {
  FeedForwardImpl() {
    register_module("up", up);
    register_module("down", down);
  }
  torch::Tensor forward(const torch::Tensor& x) { return down(torch::gelu(up(x))); }
  tessera::nn::Linear up{10, 17}, down{17, 10};
};
TESSERA_MODULE(FeedForward);

struct NetImpl : tessera::nn::Module {
  NetImpl() {
    register_module("embed", embed);
    register_module("norm1", norm1);
    register_module("layer1", layer1);
    register_module("norm2", norm2);
    register_module("layer2", layer2);
    register_module("head", head);
  }
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& labels) {
    torch::Tensor x = embed(ids);
    x = x + layer1(norm1(x));
    x = x + layer2(norm2(x));
    return head(x, labels);  // the sum of the cross-entropies
  }
  tessera::nn::Embedding embed{tessera::nn::EmbeddingOptions(29, 10)};
  tessera::nn::LayerNorm norm1{std::vector<int64_t>{10}}, norm2{std::vector<int64_t>{10}};
  FeedForward layer1, layer2;
  tessera::nn::LanguageModelHead head{10, 29};
};
TESSERA_MODULE(Net);
//:

struct Batch {
  torch::Tensor ids, labels;
};

/// Step by step, of all ranks.
std::vector<Batch> batches(int count) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  std::vector<Batch> made;
  for (int i = 0; i < count; ++i) {
    const auto draw = [&] { return at::randint(0, 29, {4, 6}, generator, at::kLong); };
    made.push_back({draw(), draw()});
  }
  return made;
}

using Values = std::map<std::string, at::Tensor>;

Values values_of(const torch::nn::Module& model) {
  Values values;
  for (const auto& [name, tensor, aliases] : tessera::nn::unique_parameters(model)) values[name] = tensor.detach().clone();
  return values;
}

/// Of what this rank holds from the same part of the whole, relative to the largest entry of each tensor.
double difference(const std::vector<tessera::nn::NamedParameter>& held, const Values& whole, bool gradients) {
  double worst = 0;
  for (const auto& [name, tensor, aliases] : held) {
    const at::Tensor mine = gradients ? tensor.grad() : tensor.detach();
    if (!mine.defined()) return 1e30;
    const at::Tensor expected = tessera::take(whole.at(name), tessera::nn::slice_of(tensor)).reshape_as(mine);
    if (mine.numel() > 0) worst = std::max(worst, (mine - expected).abs().max().item<double>() / whole.at(name).abs().max().item<double>());
  }
  return worst;
}

struct Alone {
  std::vector<double> norms;
  Values values;
};

Alone train_alone(const std::vector<Batch>& steps) {
  Net model = tessera::on_meta([] { return Net(); });
  tessera::materialize(model, 1);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
  Alone alone;
  for (const auto& [ids, labels] : steps) {
    optimizer.zero_grad();
    (model(ids, labels) / static_cast<double>(ids.numel())).backward();
    alone.norms.push_back(tessera::clip_grad_norm(model, 0.5).item<double>());
    optimizer.step();
  }
  alone.values = values_of(*model);
  return alone;
}

TEST(TwoDimensions, TheProgramOfThePageIsOneDevices) {
  const std::vector<Batch> of_all = batches(4);
  const Alone alone = train_alone(of_all);
  for (const double norm : alone.norms) EXPECT_GT(norm, 0.5) << "nothing is clipped";
  for (const auto& [ranks, tp] : {std::pair(4, 2), {6, 3}, {6, 2}, {2, 2}, {2, 1}}) {
    run_ranks(ranks, [&, ranks = ranks, tp = tp](World& world) {
      std::vector<double> norms;
      const auto mine = [&, dp = ranks / tp, row = world.rank() / tp] {
        std::vector<Batch> parts;
        const auto [begin, rows] = tessera::chunk(4, dp, row);
        for (const auto& [ids, labels] : of_all) parts.push_back({ids.narrow(0, begin, rows), labels.narrow(0, begin, rows)});
        return parts;
      }();
      const double tokens = static_cast<double>(of_all.front().ids.numel());
      //: program
      const tessera::Mesh mesh(world, {{"dp", world.size() / tp}, {"tp", tp}});  // neighbours cut layers together
      const tessera::comm::Group everyone = mesh[{"dp", "tp"}];
      Net model = tessera::on_meta([] { return Net(); });
      const auto sequence = tessera::TensorLayout::Sequence;
      const auto parallel = tessera::parallelize_module(model, mesh["tp"],
                                                        {{"embed", tessera::VocabParallelEmbedding{.output = sequence}},
                                                         {"norm*", tessera::SequenceParallel{}},
                                                         {"layer*.up", tessera::ColumnParallel{.input = sequence}},
                                                         {"layer*.down", tessera::RowParallel{.output = sequence}},
                                                         {"head", tessera::VocabParallelHead{.input = sequence}}});
      const auto sharded = tessera::fully_shard(model, mesh["dp"], {.wrap = "layer*"});  // what is left of each tensor, once more
      tessera::materialize(model, /*seed=*/1);                                           // this rank's slices of slices
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
      for (const auto& [ids, labels] : mine) {  // rows by mesh.rank("dp"); the ranks of a tp group take the same
        optimizer.zero_grad();
        (model(ids, labels) / tokens).backward();                                 // of the whole batch, for terms are summed: `average` stays false
        tessera::nn::sum_terms(parallel->group(), sharded->updated(), everyone);  // norms and biases, of which each tp rank has a term
        const torch::Tensor norm = tessera::clip_grad_norm(model, /*max_norm=*/0.5);
        optimizer.step();
        norms.push_back(norm.item<double>());
      }
      //:
      for (size_t i = 0; i < norms.size(); ++i) EXPECT_NEAR(norms[i], alone.norms[i], 2e-5 * alone.norms[i]) << tp << " of " << ranks << ", step " << i;
      EXPECT_LT(difference(tessera::nn::unique_parameters(*model), alone.values, /*gradients=*/false), 5e-5) << tp << " of " << ranks;
    });
  }
}

TEST(TwoDimensions, ThePageShowsWhatIsCompiled) { tessera::testing_support::expect_page_shows("2d.md", "tests/train/two_dimensions_test.cpp"); }

tessera::ParallelPlan net_plan() {
  const auto sequence = tessera::TensorLayout::Sequence;
  return {{"embed", tessera::VocabParallelEmbedding{.output = sequence}},
          {"norm*", tessera::SequenceParallel{}},
          {"layer*.up", tessera::ColumnParallel{.input = sequence}},
          {"layer*.down", tessera::RowParallel{.output = sequence}},
          {"head", tessera::VocabParallelHead{.input = sequence}}};
}

/// A hidden layer of 17 and a vocabulary of 29 leave the ranks of a tp group parts of other sizes, and so other cuts of norms and biases: without a word from
/// the program these meet at their places all the same.
TEST(TwoDimensions, TermsOfUnevenCutsMeetAtTheirPlaces) {
  const std::vector<Batch> passes = batches(2);  // accumulated
  Values expected;
  {
    Net model = tessera::on_meta([] { return Net(); });
    tessera::materialize(model, 1);
    for (const auto& [ids, labels] : passes) model(ids, labels).backward();
    for (const auto& [name, tensor, aliases] : tessera::nn::unique_parameters(*model)) expected[name] = tensor.grad();
  }
  enum class Kind { Zero1, Zero2, Whole, ByLayer, Apart };
  for (const auto& [ranks, tp] : {std::pair(4, 2), {6, 3}, {6, 2}}) {
    for (const Kind kind : {Kind::Zero1, Kind::Zero2, Kind::Whole, Kind::ByLayer, Kind::Apart}) {
      for (const bool told : {false, true}) {
        run_ranks(ranks, [&, ranks = ranks, tp = tp](World& world) {
          const tessera::Mesh mesh(world, {{"dp", ranks / tp}, {"tp", tp}});
          Net model = tessera::on_meta([] { return Net(); });
          const auto parallel = tessera::parallelize_module(model, mesh["tp"], net_plan());
          const bool zero = kind == Kind::Zero1 || kind == Kind::Zero2;
          std::vector<std::unique_ptr<tessera::GradientSynchronizer>> wrappers;
          if (kind == Kind::Apart) {
            wrappers.push_back(tessera::fully_shard(model->layer1, mesh["dp"]));
          } else if (!zero) {
            wrappers.push_back(tessera::fully_shard(model, mesh["dp"], {.wrap = kind == Kind::ByLayer ? "*" : ""}));
          }
          tessera::materialize(model, 1);
          if (zero) {
            wrappers.push_back(std::make_unique<tessera::ShardedDataParallel>(*model, tessera::ShardGroups{.shard = mesh["dp"]},
                                                                              tessera::ZeroOptions{.stage = kind == Kind::Zero1 ? 1 : 2}));
          }
          if (kind == Kind::Apart) {
            for (const auto& child : model->children()) {
              if (child != model->layer1.ptr()) wrappers.push_back(std::make_unique<tessera::DistributedDataParallel>(*child, mesh["dp"]));
            }
          }
          const auto [begin, rows] = tessera::chunk(4, ranks / tp, mesh.rank("dp"));
          for (const auto& [ids, labels] : passes) {
            std::vector<tessera::Attachment> held;
            for (const auto& wrapper : wrappers) {
              if (&ids != &passes.back().ids) held.push_back(wrapper->no_sync());
            }
            model(ids.narrow(0, begin, rows), labels.narrow(0, begin, rows)).backward();
          }
          const auto updated = zero ? wrappers.back()->updated() : tessera::nn::unique_parameters(*model);
          tessera::nn::sum_terms(parallel->group(), updated, told ? mesh[{"dp", "tp"}] : tessera::comm::Group());
          EXPECT_LT(difference(updated, expected, /*gradients=*/true), 1e-5)
              << tp << " of " << ranks << ", kind " << static_cast<int>(kind) << ", told " << told;
        });
      }
    }
  }
}

/// Rows that tensor parallelism has cut are not whole in a slice.
TEST(TwoDimensions, NormsOfRowsThatAreCutAreRefused) {
  const Batch batch = batches(1).front();
  Net whole = tessera::on_meta([] { return Net(); });
  tessera::materialize(whole, 1);
  whole(batch.ids, batch.labels).backward();
  for (const auto& [ranks, tp] : {std::pair(4, 2), {6, 3}}) {
    run_ranks(ranks, [&, ranks = ranks, tp = tp](World& world) {
      const tessera::Mesh mesh(world, {{"dp", ranks / tp}, {"tp", tp}});
      Net model = tessera::on_meta([] { return Net(); });
      const auto parallel = tessera::parallelize_module(model, mesh["tp"], net_plan());
      const auto sharded = tessera::fully_shard(model, mesh["dp"]);
      tessera::materialize(model, 1);
      const auto [begin, rows] = tessera::chunk(4, ranks / tp, mesh.rank("dp"));
      model(batch.ids.narrow(0, begin, rows), batch.labels.narrow(0, begin, rows)).backward();
      tessera::nn::sum_terms(parallel->group(), sharded->updated());
      const at::Tensor up = model->layer1->up->weight, down = model->layer1->down->weight;
      for (const int64_t dim : {1, -1}) {
        EXPECT_THAT(tessera::testing_support::refusal([&] { (void)down.grad().norm(2, dim, true); }), HasSubstr("a norm of slices"));
        const at::Tensor of_whole = tessera::take(whole->layer1->up->weight.grad(), tessera::nn::slice_of(up)).norm(2, dim, true);
        EXPECT_TRUE(at::allclose(up.grad().norm(2, dim, true), of_whole, 1e-4, 1e-6));
      }
    });
  }
}

/// One call, whatever wraps the model, or nothing: each element counts once, and every rank clips by the same norm.
TEST(TwoDimensions, ClippingIsOneDevicesUnderEveryWrapper) {
  const Batch batch = batches(1).front();
  Net whole = tessera::on_meta([] { return Net(); });
  tessera::materialize(whole, 1);
  whole(batch.ids, batch.labels).backward();
  const double expected = tessera::clip_grad_norm(whole, 0.5).item<double>();
  Values clipped;
  for (const auto& [name, tensor, aliases] : tessera::nn::unique_parameters(*whole)) clipped[name] = tensor.grad();
  const std::vector<std::pair<int, int>> sizes{{4, 2}, {6, 3}, {2, 2}};
  for (const std::string technique : {"none", "ddp", "zero1", "zero2", "fsdp"}) {
    for (const auto& [ranks, tp] : sizes) {
      run_ranks(ranks, [&, ranks = ranks, tp = tp](World& world) {
        const tessera::Mesh mesh(world, {{"dp", ranks / tp}, {"tp", tp}});
        Net model = tessera::on_meta([] { return Net(); });
        const auto parallel = tessera::parallelize_module(model, mesh["tp"], net_plan());
        std::unique_ptr<tessera::GradientSynchronizer> wrapper;
        if (technique == "fsdp") wrapper = tessera::fully_shard(model, mesh["dp"]);
        tessera::materialize(model, 1);
        if (technique == "ddp") wrapper = std::make_unique<tessera::DistributedDataParallel>(*model, mesh["dp"]);
        if (technique.starts_with("zero")) {
          wrapper = std::make_unique<tessera::ShardedDataParallel>(*model, tessera::ShardGroups{.shard = mesh["dp"]},
                                                                   tessera::ZeroOptions{.stage = technique == "zero1" ? 1 : 2});
        }
        const auto [begin, rows] = wrapper ? tessera::chunk(4, ranks / tp, mesh.rank("dp")) : std::pair<int64_t, int64_t>(0, 4);
        model(batch.ids.narrow(0, begin, rows), batch.labels.narrow(0, begin, rows)).backward();
        EXPECT_THAT(tessera::testing_support::refusal([&] { tessera::clip_grad_norm(model, 0.5); }),
                    ::testing::AllOf(HasSubstr("'tp'"), HasSubstr("never summed"), HasSubstr("nn::sum_terms(parallel->group()")));
        const auto updated = wrapper ? wrapper->updated() : tessera::nn::unique_parameters(*model);
        tessera::nn::sum_terms(parallel->group(), updated);
        const double norm = (wrapper && world.size() == 6 ? tessera::clip_grad_norm(*wrapper, 0.5) : tessera::clip_grad_norm(model, 0.5)).item<double>();
        EXPECT_NEAR(norm, expected, 2e-5 * expected) << technique << ", " << tp << " of " << ranks;
        EXPECT_LT(difference(updated, clipped, /*gradients=*/true), 5e-5) << technique << ", " << tp << " of " << ranks;
      });
    }
  }
}

/// A program that forgets the sum is told so by whoever clips, updates, or computes next, whichever comes first.
TEST(TwoDimensions, TermsThatWereNeverSummedAreNoticed) {
  const Batch batch = batches(1).front();
  const auto told = ::testing::AllOf(HasSubstr("'tp'"), HasSubstr("never summed"));
  run_ranks(4, [&](World& world) {
    const tessera::Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
    const auto made = [&](auto&& use) {
      Net model = tessera::on_meta([] { return Net(); });
      const auto parallel = tessera::parallelize_module(model, mesh["tp"], net_plan());
      tessera::materialize(model, 1);
      use(model, *parallel);
    };
    made([&](Net& model, auto&) {
      model(batch.ids, batch.labels).backward();
      tessera::optim::AdamW adamw(tessera::optim::decay_groups(tessera::nn::unique_parameters(*model), "all", 0));
      EXPECT_THAT(tessera::testing_support::refusal([&] { adamw.step(1e-2); }), told);
    });
    made([&](Net& model, auto&) {
      tessera::ShardedDataParallel zero(*model, tessera::ShardGroups{.shard = mesh["dp"]}, {.stage = 2});
      auto sgd = tessera::zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) { return std::make_unique<torch::optim::SGD>(parts, 0.1); });
      model(batch.ids, batch.labels).backward();
      EXPECT_THAT(tessera::testing_support::refusal([&] { sgd.step(); }), told);
    });
    made([&](Net& model, auto& parallel) {
      const auto sharded = tessera::fully_shard(model, mesh["dp"], {.wrap = "layer*", .reduce_each_micro_batch = false});
      {
        const auto held = sharded->no_sync();
        model(batch.ids, batch.labels).backward();
      }
      EXPECT_NO_THROW(model(batch.ids, batch.labels).backward()) << "whole gradients wait, and are asked for by nobody";
      tessera::nn::sum_terms(parallel.group(), sharded->updated());
      EXPECT_NO_THROW(tessera::clip_grad_norm(model, 1.0));
    });
    for (const bool summed : {false, true}) {
      made([&](Net& model, auto& parallel) {
        torch::optim::SGD sgd(model->parameters(), 0.1);
        model(batch.ids, batch.labels).backward();
        EXPECT_NO_THROW(model(batch.ids, batch.labels).backward()) << "accumulated, and nothing was updated";
        if (summed) tessera::nn::sum_terms(parallel.group(), tessera::nn::unique_parameters(*model));
        sgd.step();
        if (summed) {
          EXPECT_NO_THROW(model(batch.ids, batch.labels));
        } else {
          EXPECT_THAT(tessera::testing_support::refusal([&] { model(batch.ids, batch.labels); }),
                      ::testing::AllOf(HasSubstr("'norm1.weight' was updated"), told));
        }
      });
    }
  });
}

struct KeysImpl : tessera::nn::Module {
  KeysImpl() {
    register_module("query", query);
    register_module("key", key);
    register_module("out", out);
  }
  torch::Tensor forward(const torch::Tensor& x) {  // each of 4 heads of queries is scaled by its one of 2 heads of keys
    const int64_t rows = x.size(0);
    const auto q = query(x).view({rows, -1, 3}), k = key(x).view({rows, -1, 3});
    return out((q * torch::tanh(k).repeat_interleave(q.size(1) / k.size(1), 1)).flatten(1));
  }
  tessera::nn::Linear query{5, 12}, key{5, 6}, out{12, 5};
};
TESSERA_MODULE(Keys);

/// Keys that several ranks of a cut share count on the first of them.
TEST(TwoDimensions, SharedKeysCountOnce) {
  const auto made = [] {
    Keys model = tessera::on_meta([] { return Keys(); });
    tessera::materialize(model, 3);
    return model;
  };
  const at::Tensor x = at::arange(30, at::kFloat).sin().view({6, 5});
  Keys whole = made();
  whole(x).square().sum().backward();
  const double expected = tessera::clip_grad_norm(whole, 0.5).item<double>();
  EXPECT_GT(expected, 0.6) << "nothing is clipped";
  Values clipped;
  for (const auto& [name, tensor, aliases] : tessera::nn::unique_parameters(*whole)) clipped[name] = tensor.grad();
  const auto queries = tessera::FeatureCut::query_heads(4, 2), keys = tessera::FeatureCut::key_value_heads(4, 2);
  run_ranks(4, [&](World& world) {
    Keys model = made();
    const auto parallel = tessera::parallelize_module(
        model, world.group(),
        {{"query", tessera::ColumnParallel{.cut = queries}}, {"key", tessera::ColumnParallel{.cut = keys}}, {"out", tessera::RowParallel{.cut = queries}}});
    model(x).square().sum().backward();
    tessera::nn::sum_terms(parallel->group(), tessera::nn::unique_parameters(*model));
    EXPECT_NEAR(tessera::clip_grad_norm(model, 0.5).item<double>(), expected, 1e-5 * expected);
    EXPECT_LT(difference(tessera::nn::unique_parameters(*model), clipped, /*gradients=*/true), 1e-5);
  });
}

/// A wrapper over ranks that hold other parts of the same parameters would add up what does not belong together.
TEST(TwoDimensions, WrappersOverTheRanksOfTheCutAreRefusedByName) {
  run_ranks(2, [](World& world) {
    const auto refused = [&](const auto& wrap) {
      const tessera::Mesh mesh(world, {{"dp", 1}, {"tp", 2}});
      Net model = tessera::on_meta([] { return Net(); });
      const auto parallel = tessera::parallelize_module(model, mesh["tp"], net_plan());
      tessera::materialize(model, 1);
      EXPECT_THAT(tessera::testing_support::refusal([&] { wrap(model); }),
                  ::testing::AllOf(HasSubstr("is dealt over tp by parallelize_module"), HasSubstr("mesh[\"dp\"]")));
    };
    const auto group = world.group();
    refused([&](Net& model) { (void)tessera::fully_shard(model, group); });
    refused([&](Net& model) { (void)tessera::fully_shard(model, tessera::comm::Group::self(), {.replicate = group}); });
    for (const auto start : {tessera::ReplicaStart::Check, tessera::ReplicaStart::Broadcast}) {
      refused([&](Net& model) { const tessera::DistributedDataParallel wrapped(*model, group, {.replicas = start}); });
      refused([&](Net& model) { const tessera::ShardedDataParallel wrapped(*model, tessera::ShardGroups{.shard = group}, {.stage = 2, .replicas = start}); });
    }
  });
}

}  // namespace
