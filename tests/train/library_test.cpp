/// The code of docs/library.md, compiled and run: what stands between `//: name` and `//:` here is what the page shows.
#include <map>
#include <regex>
#include <set>

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/serialize.h>

#include "tessera/checkpoint/torch_optimizer.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/differentiable.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/mesh.h"
#include "tessera/nn/contrastive_loss.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/clip_grad_norm.h"
#include "tessera/recompute/recompute.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/checkpoint/files.h"
#include "tests/made_docs.h"
#include "tests/nn/net.h"

namespace {

using tessera::comm::run_ranks;
using tessera::comm::World;
using Batches = std::vector<std::pair<torch::Tensor, torch::Tensor>>;

//: model
struct Net : torch::nn::Module {
  Net() {
    register_module("encoder", encoder);
    register_module("norm", norm);
    register_module("head", head);
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(torch::relu(norm(encoder(x)))); }
  torch::nn::Linear encoder{6, 8};
  torch::nn::BatchNorm1d norm{8};
  torch::nn::Linear head{8, 2};
};
//:

Batches batches_of(World& world, int count = 4) {
  Batches batches;
  for (int step = 0; step < count; ++step) {
    const auto part = [&](const char* name, int64_t features) {
      return tessera::testing_support::random_tensor({8, features}, name + std::to_string(step)).narrow(0, world.rank() * 4, 4);
    };
    batches.emplace_back(part("x", 6), part("y", 2));
  }
  return batches;
}

/// Ranks draw from one generator of libtorch in turn, so they have to start from the same values.
void fill(torch::nn::Module& model) { tessera::testing_support::fill_parameters(model); }

uint64_t bits_of(const torch::nn::Module& model) {
  uint64_t sum = 0;
  for (const auto& parameter : model.parameters()) {
    const auto flat = parameter.detach().reshape({-1}).view(at::kInt).to(at::kLong);
    sum = sum * 31 + static_cast<uint64_t>((flat * at::arange(1, flat.numel() + 1)).sum().item<int64_t>());
  }
  return sum;
}

/// Runs `program` on two ranks, which return the same number.
void on_two_ranks(const std::function<uint64_t(World&)>& program) {
  std::vector<uint64_t> results(2);
  run_ranks(2, [&](World& world) { results[static_cast<size_t>(world.rank())] = program(world); });
  EXPECT_EQ(results[0], results[1]);
}

TEST(Library, ALoopUnderDdp) {
  on_two_ranks([](World& world) {
    const Batches batches = batches_of(world);
    //: loop
    Net model;  // any torch::nn::Module, on the stack or not
    tessera::DistributedDataParallel ddp(model, world.group(), {.average = true, .replicas = tessera::ReplicaStart::Broadcast});
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2));
    for (const auto& [x, y] : batches) {  // this rank's part of each batch
      optimizer.zero_grad();
      torch::mse_loss(model.forward(x), y).backward();  // when it returns, grad() is that of all ranks
      optimizer.step();
    }
    //:
    return bits_of(model);
  });
}

TEST(Library, ATiedTensorIsUpdatedOnce) {
  on_two_ranks([](World& world) {
    Net model;
    fill(model);
    model.register_parameter("again", model.head->weight);
    const tessera::DistributedDataParallel ddp(model, world.group(), {.average = true});
    EXPECT_EQ(model.parameters().size(), 7U);
    const torch::Tensor before = model.head->weight.detach().clone();
    //: tied
    std::vector<torch::Tensor> once;
    for (const auto& [name, tensor, aliases] : tessera::nn::unique_parameters(model)) once.push_back(tensor);
    torch::optim::AdamW optimizer(once, torch::optim::AdamWOptions(1e-2));
    //:
    const auto [x, y] = batches_of(world).front();
    torch::mse_loss(model.forward(x), y).backward();
    optimizer.step();
    EXPECT_LT((model.head->weight - before).abs().max().item<double>(), 1.05e-2) << "one step of Adam";
    return bits_of(model);
  });
}

TEST(Library, PartsOfDifferentSizes) {
  const auto whole_x = tessera::testing_support::random_tensor({8, 6}, "x"), whole_y = tessera::testing_support::random_tensor({8, 2}, "y");
  Net alone;
  fill(alone);
  alone.eval();  // BatchNorm by its running statistics, which do not depend on the part
  const torch::Tensor expected = torch::mse_loss(alone.forward(whole_x), whole_y, at::Reduction::Sum) / 8;
  expected.backward();
  on_two_ranks([&](World& world) {
    const int64_t begin = world.rank() == 0 ? 0 : 5, size = world.rank() == 0 ? 5 : 3;
    const auto x = whole_x.narrow(0, begin, size), y = whole_y.narrow(0, begin, size);
    Net model;
    fill(model);
    model.eval();
    //: parts
    tessera::DistributedDataParallel ddp(model, world.group());  // sums gradients
    const torch::Tensor samples = torch::tensor({static_cast<float>(x.size(0))});
    tessera::comm::all_reduce(world.group(), samples);
    const torch::Tensor loss = torch::mse_loss(model.forward(x), y, at::Reduction::Sum) / samples;
    loss.backward();
    const torch::Tensor of_all = loss.detach().clone();
    tessera::comm::all_reduce(world.group(), of_all);
    //:
    EXPECT_NEAR(of_all.item<double>(), expected.item<double>(), 5e-6);
    const auto gradient = alone.encoder->weight.grad();
    EXPECT_LT((model.encoder->weight.grad() - gradient).abs().max().item<double>(), 1e-5 * gradient.abs().max().item<double>());
    return bits_of(model);
  });
}

TEST(Library, ParameterGroupsUnderEveryWrapper) {
  std::map<std::string, torch::Tensor> heads;
  for (const std::string kind : {"ddp", "zero", "fully_shard"}) {
    on_two_ranks([&](World& world) {
      const Batches batches = batches_of(world);
      Net model;
      fill(model);
      std::unique_ptr<tessera::GradientSynchronizer> made;
      if (kind == "ddp") made = std::make_unique<tessera::DistributedDataParallel>(model, world.group(), tessera::DdpOptions{.average = true});
      if (kind == "zero") {
        made = std::make_unique<tessera::ShardedDataParallel>(model, tessera::ShardGroups{.shard = world.group()},
                                                              tessera::ZeroOptions{.stage = 2, .average = true});
      }
      if (kind == "fully_shard") made = tessera::fully_shard(model, world.group(), {.average = true});
      tessera::GradientSynchronizer& wrapper = *made;
      //: groups
      auto optimizer = tessera::zero_optimizer(wrapper, [](const std::vector<tessera::nn::NamedParameter>& parameters) {
        std::vector<torch::Tensor> matrices, others;
        for (const auto& [name, part, aliases] : parameters) (tessera::nn::slice_of(part).shape.size() > 1 ? matrices : others).push_back(part);
        std::vector<torch::optim::OptimizerParamGroup> groups;
        groups.emplace_back(matrices, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(1e-3).weight_decay(0.1)));
        groups.emplace_back(others, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(1e-3).weight_decay(0)));
        return std::make_unique<torch::optim::AdamW>(groups);
      });
      //:
      EXPECT_EQ(optimizer->param_groups()[0].params().size(), 2u);
      for (const auto& [x, y] : batches) {
        optimizer.zero_grad();
        torch::mse_loss(model.forward(x), y).backward();
        //: clip_value
        for (const auto& [name, part, aliases] : wrapper.updated()) {
          if (part.grad().defined()) part.grad().clamp_(-0.1, 0.1);  // as clip_grad_value_
        }
        //:
        optimizer.step();
      }
      if (kind == "fully_shard") tessera::unshard(model);
      if (world.rank() == 0) heads[kind] = model.head->weight.detach().clone();
      return bits_of(model);
    });
  }
  EXPECT_LT((heads["zero"] - heads["ddp"]).abs().max().item<double>(), 1e-5);
  EXPECT_LT((heads["fully_shard"] - heads["ddp"]).abs().max().item<double>(), 1e-5);
}

TEST(Library, ALoopUnderZero) {
  on_two_ranks([](World& world) {
    const Batches batches = batches_of(world);
    Net model;
    fill(model);
    //: zero
    tessera::ShardedDataParallel zero(model, {.shard = world.group()}, {.stage = 2, .average = true});
    auto optimizer = tessera::zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) { return std::make_unique<torch::optim::Adam>(parts, 1e-2); });
    for (const auto& [x, y] : batches) {
      optimizer.zero_grad();
      torch::mse_loss(model.forward(x), y).backward();
      optimizer.step();  // updates this rank's parts, and brings those of all ranks together
    }
    //:
    return bits_of(model);
  });
}

TEST(Library, HybridShardingByAMesh) {
  std::vector<uint64_t> results(4);
  run_ranks(4, [&](World& world) {
    Net model;
    fill(model);
    //: hybrid
    const tessera::Mesh mesh(world, {{"replicate", 2}, {"shard", world.size() / 2}});
    tessera::ShardedDataParallel zero(model, {.shard = mesh["shard"], .replicate = mesh["replicate"]}, {.stage = 2, .average = true});
    //:
    auto optimizer = tessera::zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) { return std::make_unique<torch::optim::Adam>(parts, 1e-2); });
    const uint64_t before = bits_of(model);
    const auto x = tessera::testing_support::random_tensor({8, 6}, "x").narrow(0, world.rank() * 2, 2);
    model.forward(x).square().mean().backward();
    optimizer.step();
    EXPECT_EQ(mesh["shard"].size(), 2);
    EXPECT_NE(bits_of(model), before);
    results[static_cast<size_t>(world.rank())] = bits_of(model);
  });
  EXPECT_EQ(results, std::vector<uint64_t>(4, results.front()));
}

TEST(Library, ALoopUnderFullyShard) {
  const tessera::checkpoint::TemporaryFolder folder;
  const std::string path = folder / "model.pt";
  on_two_ranks([&](World& world) {
    const Batches batches = batches_of(world);
    //: fully_shard
    auto model = tessera::on_meta([] { return std::make_shared<Net>(); });  // shapes, no memory
    auto sharded = tessera::fully_shard(*model, world.group(), {.average = true});
    tessera::materialize(*model, /*seed=*/1);                                          // this rank's slices only; the same values in every layout
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2));  // state in slices, too
    for (const auto& [x, y] : batches) {
      optimizer.zero_grad();
      torch::mse_loss(model->forward(x), y).backward();
      optimizer.step();
    }
    //:
    //: unshard
    tessera::unshard(*model);  // the whole module, on every rank: to export it, or to wrap it anew in another layout
    if (world.rank() == 0) torch::save(model, path);
    tessera::DistributedDataParallel ddp(*model, world.group());
    //:
    EXPECT_EQ(model->head->weight.sizes(), (std::vector<int64_t>{2, 8}));
    return bits_of(*model);
  });
}

TEST(Library, AccumulateAndClip) {
  on_two_ranks([](World& world) {
    const Batches batches = batches_of(world);
    Net model;
    fill(model);
    tessera::DistributedDataParallel ddp(model, world.group(), {.average = true});
    torch::optim::AdamW optimizer(model.parameters());
    //: accumulate
    optimizer.zero_grad();
    for (size_t i = 0; i < batches.size(); ++i) {
      const auto held = i + 1 < batches.size() ? ddp.no_sync() : tessera::Attachment();  // gradients wait on this rank, but for the last
      const auto& [x, y] = batches[i];
      (torch::mse_loss(model.forward(x), y) / static_cast<double>(batches.size())).backward();
    }
    //:
    //: clip
    const torch::Tensor norm = tessera::clip_grad_norm(model, /*max_norm=*/1.0);  // the norm over all ranks, whatever wraps the model
    optimizer.step();
    //:
    EXPECT_GT(norm.item<double>(), 0);
    return bits_of(model);
  });
}

TEST(Library, EvaluateAndFreeze) {
  on_two_ranks([](World& world) {
    const Batches batches = batches_of(world);
    const auto [x, y] = batches[0];
    auto model = std::make_shared<Net>();
    fill(*model);
    const auto sharded = tessera::fully_shard(*model, world.group(), {.average = true});
    //: freeze
    for (auto& parameter : model->encoder->parameters()) parameter.requires_grad_(false);  // on every rank, between steps
    torch::optim::AdamW optimizer(model->parameters());
    //:
    const auto step = [&] {
      optimizer.zero_grad();
      torch::mse_loss(model->forward(x), y).backward();
      optimizer.step();
    };
    step();
    EXPECT_EQ(optimizer.state().size(), 4u);
    //: unfreeze
    for (auto& parameter : model->encoder->parameters()) parameter.requires_grad_(true);  // its optimizer state appears with the first update
    //:
    step();
    EXPECT_EQ(optimizer.state().size(), 6u);
    //: evaluate
    model->eval();
    {
      const torch::NoGradGuard no_grad;  // between steps; under every wrapper, on every rank
      const torch::Tensor predicted = model->forward(x);
    }
    model->train();
    //:
    step();
    tessera::unshard(*model);
    return bits_of(*model);
  });
}

TEST(Library, SaveAndLoad) {
  const tessera::checkpoint::TemporaryFolder folder;
  std::filesystem::path saved;
  std::map<int, torch::Tensor> heads;
  run_ranks(2, [&](World& world) {
    const Batches batches = batches_of(world);
    auto model = tessera::on_meta([] { return std::make_shared<Net>(); });
    auto sharded = tessera::fully_shard(*model, world.group());
    tessera::materialize(*model, 1);
    torch::optim::AdamW optimizer(model->parameters());
    torch::mse_loss(model->forward(batches[0].first), batches[0].second).backward();
    optimizer.step();
    const int64_t step = 1, epoch = 3;
    //: save
    const auto written = tessera::checkpoint::save(folder.path(), step, *model, optimizer, world.group(), {{"epoch", epoch}});
    //:
    if (world.rank() == 0) saved = written;
    tessera::unshard(*model);
    if (world.rank() == 0) heads[2] = model->head->weight.detach().clone();
  });
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [&](World& world) {
      const auto folder = saved;
      //: load
      auto model = tessera::on_meta([] { return std::make_shared<Net>(); });
      auto sharded = tessera::fully_shard(*model, world.group());  // in any layout, on any number of ranks
      tessera::materialize(*model, /*seed=*/1);
      torch::optim::AdamW optimizer(model->parameters());
      const auto resumed = tessera::checkpoint::load(folder, *model, optimizer);  // weights, buffers, optimizer state by name
      const int64_t epoch = resumed.progress.at("epoch");
      //:
      EXPECT_EQ(resumed.step, 1);
      EXPECT_EQ(epoch, 3);
      EXPECT_EQ(optimizer.state().size(), 6u);
      tessera::unshard(*model);
      EXPECT_TRUE(at::equal(model->head->weight, heads.at(2)));
      Net alone;
      //: load_model
      tessera::checkpoint::load(folder, alone);  // the model without its optimizer
      //:
      EXPECT_TRUE(at::equal(alone.head->weight, heads.at(2)));
    });
  }
}

TEST(Library, GoesOnFromPlainLibtorch) {
  const tessera::checkpoint::TemporaryFolder folder;
  const auto model_file = std::filesystem::path(folder.path()) / "model.pt", optimizer_file = std::filesystem::path(folder.path()) / "optimizer.pt";
  const auto imported = std::filesystem::path(folder.path()) / "imported";
  const auto x = tessera::testing_support::random_tensor({4, 6}, "x"),
             y = tessera::testing_support::random_tensor({4, 2}, "y");  // BatchNorm's batch is a rank's
  torch::Tensor expected;
  {
    auto model = std::make_shared<Net>();
    fill(*model);
    torch::optim::AdamW optimizer(model->parameters());
    const auto train = [&] {
      optimizer.zero_grad();
      torch::mse_loss(model->forward(x), y).backward();
      optimizer.step();
    };
    train();
    torch::save(model, model_file.string());
    torch::save(optimizer, optimizer_file.string());
    train();
    expected = model->head->weight.detach().clone();
  }
  {
    const int64_t step = 1;
    //: from_libtorch
    auto model = std::make_shared<Net>();  // in one process, once
    torch::optim::AdamW optimizer(model->parameters());
    torch::load(model, model_file.string());
    torch::load(optimizer, optimizer_file.string());
    tessera::checkpoint::save(imported, step, *model, optimizer, tessera::comm::Group::self());
    //:
  }
  on_two_ranks([&](World& world) {
    auto model = tessera::on_meta([] { return std::make_shared<Net>(); });
    auto sharded = tessera::fully_shard(*model, world.group(), {.average = true});
    tessera::materialize(*model, 1);
    torch::optim::AdamW optimizer(model->parameters());
    tessera::checkpoint::load(*tessera::checkpoint::find_latest(imported).folder, *model, optimizer);
    optimizer.zero_grad();
    torch::mse_loss(model->forward(x), y).backward();
    optimizer.step();
    tessera::unshard(*model);
    EXPECT_TRUE(at::allclose(model->head->weight, expected, 1e-5, 1e-6));
    return bits_of(*model);
  });
}

TEST(Library, ACopyOfTheModel) {
  const tessera::checkpoint::TemporaryFolder folder;
  const auto copies = std::filesystem::path(folder.path()) / "copies";
  torch::Tensor expected;
  {
    Net model;
    fill(model);
    expected = model.head->weight.detach().clone();
  }
  on_two_ranks([&](World& world) {
    auto model = std::make_shared<Net>(), copy = std::make_shared<Net>();
    fill(*model);
    fill(*copy);
    for (auto& net : {model, copy}) net->register_parameter("tied", net->head->weight);  // averaged once
    for (auto& parameter : model->encoder->parameters()) parameter.requires_grad_(false);
    auto sharded = tessera::fully_shard(*model, world.group());
    //: copy
    auto copied = copy->parameters();  // what is frozen when it is wrapped lies apart, so the copy is wrapped with the same layers frozen
    for (size_t i = 0; i < copied.size(); ++i) copied[i].requires_grad_(model->parameters()[i].requires_grad());
    auto around_copy = tessera::fully_shard(*copy, world.group());
    for (auto& parameter : copied) parameter.requires_grad_(false);
    const auto follow = [&](double decay) {                      // 0 copies
      const torch::NoGradGuard no_grad;                          // between steps
      const auto from = tessera::nn::unique_parameters(*model);  // each tensor once: parameters() lists a tied one twice
      auto to = tessera::nn::unique_parameters(*copy);
      for (size_t i = 0; i < to.size(); ++i) to[i].tensor.mul_(decay).add_(from[i].tensor, 1 - decay);
      const auto buffers = model->buffers(), of_copy = copy->buffers();  // BatchNorm's statistics: whole on every rank, and copied as they are
      for (size_t i = 0; i < buffers.size(); ++i) of_copy[i].copy_(buffers[i]);
    };
    //:
    {
      const torch::NoGradGuard no_grad;
      for (auto& [name, parameter, aliases] : tessera::nn::unique_parameters(*model)) parameter.mul_(2);
      model->norm->running_mean.fill_(3);
    }
    follow(0.75);
    EXPECT_TRUE(at::equal(copy->norm->running_mean, model->norm->running_mean));
    const int64_t step = 1;
    //: save_copy
    tessera::checkpoint::save(copies, step, *copy, world.group());
    //:
    follow(0);
    tessera::unshard(*copy);
    EXPECT_TRUE(at::allclose(copy->head->weight, expected * 2));
    //: load_copy
    if (const auto newest = tessera::checkpoint::find_latest(copies).folder) tessera::checkpoint::load(*newest, *copy);
    //:
    EXPECT_TRUE(at::allclose(copy->head->weight, expected * 1.25));
    return bits_of(*copy);
  });
}

//: pairs
struct Pairs : torch::nn::Module {
  Pairs() {
    register_module("left", left);
    register_module("right", right);
    scale = register_parameter("scale", torch::ones({}));
  }
  std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> forward(const torch::Tensor& x, const torch::Tensor& y) {
    return {torch::nn::functional::normalize(left(x)), torch::nn::functional::normalize(right(y)), scale.exp()};
  }
  torch::nn::Linear left{6, 4}, right{2, 4};
  torch::Tensor scale;
};
//:

/// Both ways, of the rows of `a` and `b`, which begin at row `first` of the whole batch, summed.
torch::Tensor entropies(const torch::Tensor& a, const torch::Tensor& b, const torch::Tensor& all_a, const torch::Tensor& all_b, const torch::Tensor& scale,
                        int64_t first) {
  const torch::Tensor partner = torch::arange(first, first + a.size(0));
  const auto entropy = [&](const torch::Tensor& own, const torch::Tensor& all) {
    return at::cross_entropy_loss(scale * own.matmul(all.t()), partner, {}, at::Reduction::Sum);
  };
  return entropy(a, all_b) + entropy(b, all_a);
}

/// By the page's rows of the loss; by the whole loss on each rank, which is averaged; and by the function. With fewer pairs than ranks, too: a forward on no
/// rows counts as use.
TEST(Library, ALossThatSeesAllRanksSamples) {
  namespace differentiable = tessera::comm::differentiable;
  enum class How { Rows, Whole, Replicated, Function };
  using Wrap = std::function<std::unique_ptr<tessera::GradientSynchronizer>(torch::nn::Module&, World&, bool average)>;
  const std::vector<Wrap> wraps{[](auto& module, World& world, bool average) {
                                  return std::make_unique<tessera::DistributedDataParallel>(module, world.group(), tessera::DdpOptions{.average = average});
                                },
                                [](auto& module, World& world, bool average) {
                                  return std::make_unique<tessera::ShardedDataParallel>(module, tessera::ShardGroups{.shard = world.group()},
                                                                                        tessera::ZeroOptions{.stage = 2, .average = average});
                                },
                                [](auto& module, World& world, bool average) { return tessera::fully_shard(module, world.group(), {.average = average}); }};
  const auto made = [] {
    auto model = std::make_unique<Pairs>();
    fill(*model);
    model->to(torch::kDouble);
    return model;
  };
  for (const int64_t pairs : {7, 2}) {
    const torch::Tensor x = tessera::testing_support::random_tensor({pairs, 6}, "x").to(torch::kDouble);
    const torch::Tensor y = tessera::testing_support::random_tensor({pairs, 2}, "y").to(torch::kDouble);
    const auto alone = made();
    {
      const auto [a, b, scale] = alone->forward(x, y);
      (entropies(a, b, a, b, scale, 0) / (2.0 * pairs)).backward();
    }
    for (const int ranks : {1, 2, 3}) {
      for (const Wrap& wrap : wraps) {
        for (const How how : {How::Rows, How::Whole, How::Replicated, How::Function}) {
          run_ranks(ranks, [&](World& world) {
            const auto held = made();
            Pairs& model = *held;
            const auto wrapper = wrap(model, world, how == How::Whole);
            if (how == How::Rows) {
              //: all_ranks_samples
              const auto [first, count] = tessera::chunk(pairs, world.size(), world.rank());  // this rank's pairs; none where there are fewer than ranks
              const auto [a, b, scale] = model.forward(x.narrow(0, first, count), y.narrow(0, first, count));
              const torch::Tensor all_a = tessera::comm::differentiable::all_gather(world.group(), a, /*dim=*/0, /*total=*/pairs);
              const torch::Tensor all_b = tessera::comm::differentiable::all_gather(world.group(), b, /*dim=*/0, /*total=*/pairs);
              const torch::Tensor partner = torch::arange(first, first + count);  // row i belongs to column first + i
              const torch::Tensor loss = at::cross_entropy_loss(scale * a.matmul(all_b.t()), partner, {}, at::Reduction::Sum) +
                                         at::cross_entropy_loss(scale * b.matmul(all_a.t()), partner, {}, at::Reduction::Sum);
              (loss / (2.0 * pairs)).backward();  // under a wrapper that sums: ranks have other terms of one loss
              //:
            } else {
              const auto [first, count] = tessera::chunk(pairs, world.size(), world.rank());
              const auto [a, b, scale] = model.forward(x.narrow(0, first, count), y.narrow(0, first, count));
              if (how != How::Function) {
                const auto backward = how == How::Whole ? differentiable::Gradient::Partial : differentiable::Gradient::Replicated;
                const torch::Tensor all_a = differentiable::all_gather(world.group(), a, 0, pairs, backward);
                const torch::Tensor all_b = differentiable::all_gather(world.group(), b, 0, pairs, backward);
                (entropies(all_a, all_b, all_a, all_b, scale, 0) / (2.0 * pairs)).backward();
              } else {
                (tessera::nn::contrastive_loss_sum(world.group(), a, b, scale, pairs) / static_cast<double>(pairs)).backward();
              }
            }
            std::map<std::string, torch::Tensor> expected;
            for (const auto& parameter : alone->named_parameters()) expected[parameter.key()] = parameter.value().grad();
            for (const auto& [name, part, aliases] : wrapper->updated()) {
              if (part.numel() == 0) continue;
              torch::Tensor own = tessera::take(expected.at(name), tessera::nn::slice_of(part));
              if (how == How::Replicated && name == "scale") own = own * ranks;  // what lies behind the gathers is whole on each rank, and summed
              EXPECT_TRUE(at::allclose(part.grad(), own, 1e-12, 1e-14)) << name << " of " << pairs << " pairs on " << ranks << ", " << static_cast<int>(how);
            }
          });
        }
      }
    }
  }
}

struct ActorCritic : torch::nn::Module {
  ActorCritic() {
    register_module("actor", actor);
    register_module("critic", critic);
  }
  torch::nn::Linear actor{6, 2}, critic{6, 1};
};

/// Each brings its own together at its step, and clears its own.
TEST(Library, TwoOptimizersOverOneWrapper) {
  const auto x = tessera::testing_support::random_tensor({8, 6}, "x");
  ActorCritic alone;
  fill(alone);
  torch::optim::Adam actor(alone.actor->parameters(), 1e-2), critic(alone.critic->parameters(), 1e-3);
  for (int step = 0; step < 3; ++step) {
    actor.zero_grad();
    critic.zero_grad();
    (alone.actor(x).square().sum() + alone.critic(x).square().sum()).backward();
    actor.step();
    actor.zero_grad();
    critic.step();
  }
  for (const bool sharded : {false, true}) {
    on_two_ranks([&](World& world) {
      ActorCritic model;
      fill(model);
      std::unique_ptr<tessera::GradientSynchronizer> held;
      if (sharded) {
        held = tessera::fully_shard(model, world.group());
      } else {
        held = std::make_unique<tessera::ShardedDataParallel>(model, tessera::ShardGroups{.shard = world.group()}, tessera::ZeroOptions{.stage = 2});
      }
      tessera::GradientSynchronizer& wrapper = *held;
      const torch::Tensor mine = x.narrow(0, 4 * world.rank(), 4);
      //: two_optimizers
      const auto adam_of = [&](const std::string& of, double rate) {
        return tessera::zero_optimizer(wrapper, [&](const std::vector<tessera::nn::NamedParameter>& all) {
          std::vector<torch::Tensor> own;
          for (const auto& [name, part, aliases] : all) {
            if (name.starts_with(of)) own.push_back(part);
          }
          return std::make_unique<torch::optim::Adam>(own, torch::optim::AdamOptions(rate));
        });
      };
      auto of_actor = adam_of("actor.", 1e-2), of_critic = adam_of("critic.", 1e-3);
      //:
      for (int step = 0; step < 3; ++step) {
        of_actor.zero_grad();
        of_critic.zero_grad();
        (model.actor(mine).square().sum() + model.critic(mine).square().sum()).backward();
        of_actor.step();
        of_actor.zero_grad();
        of_critic.step();
      }
      if (sharded) tessera::unshard(model);
      EXPECT_TRUE(at::allclose(model.actor->weight, alone.actor->weight, 1e-5, 1e-6));
      EXPECT_TRUE(at::allclose(model.critic->weight, alone.critic->weight, 1e-5, 1e-6));
      return bits_of(model);
    });
  }
}

TEST(Library, Adversaries) {
  on_two_ranks([](World& world) {
    const auto real = batches_of(world)[0].first, noise = batches_of(world)[0].second;
    torch::nn::Sequential generator(torch::nn::Linear(2, 8), torch::nn::ReLU(), torch::nn::Linear(8, 6));
    torch::nn::Sequential critic(torch::nn::Linear(6, 8), torch::nn::ReLU(), torch::nn::Linear(8, 1), torch::nn::Sigmoid());
    fill(*generator);
    fill(*critic);
    const auto ones = torch::ones({4, 1}), zeros = torch::zeros({4, 1});
    //: gan
    tessera::DistributedDataParallel around_generator(*generator, world.group(), {.average = true}), around_critic(*critic, world.group(), {.average = true});
    torch::optim::Adam of_generator(generator->parameters(), 1e-2), of_critic(critic->parameters(), 1e-2);
    for (int step = 0; step < 2; ++step) {
      const auto fake = generator->forward(noise);
      of_critic.zero_grad();
      torch::binary_cross_entropy(critic->forward(real), ones).backward();
      torch::binary_cross_entropy(critic->forward(fake.detach()), zeros).backward();  // adds to what is there
      of_critic.step();

      of_generator.zero_grad();
      torch::binary_cross_entropy(critic->forward(fake), ones).backward();
      of_generator.step();
    }
    //:
    return bits_of(*generator) * 31 + bits_of(*critic);
  });
}

//: hand_written
struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(int64_t dim) {
    weight = register_parameter("weight", torch::ones({dim}));
    positions = register_buffer("positions", torch::arange(dim, torch::kFloat) / static_cast<double>(dim));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x * weight + positions; }
  torch::Tensor weight, positions;
};
TORCH_MODULE(Scale);
//:

TEST(Library, OnMeta) {
  //: on_meta
  auto model = tessera::on_meta(
      [] {
        torch::nn::TransformerEncoderLayer layer(torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16));
        return torch::nn::Sequential(torch::nn::TransformerEncoder(layer, 2), torch::nn::LSTM(8, 8), torch::nn::BatchNorm1d(8), Scale(8));
      },
      [](torch::nn::Module& module) {  // optional: called for each module, as PyTorch's model.apply(init_weights)
        if (auto* linear = module.as<torch::nn::Linear>()) torch::nn::init::normal_(linear->weight, 0.0, 0.02);
      });
  tessera::materialize(*model, /*seed=*/1);
  //:
  for (const auto& parameter : model->parameters()) EXPECT_FALSE(at::isnan(parameter).any().item<bool>());
  const auto parameters = model->named_parameters();
  EXPECT_NEAR(parameters["0.layers.0.linear1.weight"].std().item<double>(), 0.02, 0.01);
  EXPECT_TRUE(at::equal(model->named_buffers()["3.positions"], at::arange(8, at::kFloat) / 8));
}

//: scaled
struct Scaled : torch::nn::Module {
  Scaled() {
    register_module("encoder", encoder);
    weight = register_parameter("weight", torch::randn({5, 8}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor h = torch::relu(encoder(x));           // an operator on the input comes first
    const torch::Tensor scale = weight.abs().mean().detach();  // of the whole weight; weight.detach().abs().mean() may be of a slice
    return torch::matmul(h, torch::tanh(weight / scale).t()) * scale;
  }
  torch::nn::Linear encoder{6, 8};
  torch::Tensor weight;
};
//:

TEST(Library, AReductionOverAWeightIsOfTheWhole) {
  const auto x = tessera::testing_support::random_tensor({4, 6}, "x");
  Scaled alone;
  fill(alone);
  const torch::Tensor expected = alone.forward(x);
  on_two_ranks([&](World& world) {
    Scaled model;
    fill(model);
    const auto sharded = tessera::fully_shard(model, world.group());
    EXPECT_TRUE(at::allclose(model.forward(x), expected));
    model.forward(x).sum().backward();
    model.eval();
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(at::allclose(model.forward(x), expected));
    return 0;
  });
}

TEST(Library, ThePageShowsWhatIsCompiled) { tessera::testing_support::expect_page_shows("library.md", "tests/train/library_test.cpp"); }

/// All that `#include <tessera/tessera.h>` brings, without comments.
std::string umbrella() {
  std::string code;
  std::set<std::string> files{"tessera/tessera.h"};
  const std::regex include("#include \"(tessera/[^\"]+)\".*");
  for (std::vector<std::string> left(files.begin(), files.end()); !left.empty();) {
    std::ifstream file(std::filesystem::path(TESSERA_SOURCE_DIR) / left.back());
    left.pop_back();
    for (std::string line; std::getline(file, line);) {
      std::smatch match;
      if (std::regex_match(line, match, include) && files.insert(match[1]).second) left.push_back(match[1]);
      code += line.substr(0, line.find("//")) + "\n";
    }
  }
  return code;
}

std::set<std::string> found_in(const std::string& text, const std::string& pattern, size_t group) {
  const std::regex regex(pattern);
  std::set<std::string> found;
  for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match) found.insert((*match)[group]);
  return found;
}

TEST(Library, TheHeaderHasEveryNameInTheCodeOfThePages) {
  const std::set<std::string> known = found_in(umbrella(), "\\w+", 0);
  EXPECT_GT(known.count("fully_shard"), 0u);
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(TESSERA_SOURCE_DIR) / "docs")) {
    if (entry.path().extension() != ".md") continue;
    const std::string page = entry.path().filename(), text = tessera::testing_support::text_of_docs(page);
    std::string shown = page == "library.md" ? text : "";  // with what stands between its blocks
    for (const std::string& block : tessera::testing_support::code_of(text)) shown += block;
    for (const std::string& name : found_in(shown, "\\btessera::(\\w+::)*(\\w+)", 2)) EXPECT_TRUE(known.contains(name)) << page << " shows " << name;
  }
}

}  // namespace
