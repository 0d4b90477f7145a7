// Random training programs under every wrapper against one process, in double precision: passes with and without no_sync, zero_grad of all kinds, freezing,
// passes that fail, evaluation and gradients of inputs in between, several backward passes, clipping, loading, optimizers with state. Whatever order a program
// has them in, it has to get what one process gets. A seed that fails is a program: print it, and take operations out of it.

#include <filesystem>
#include <random>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include "tessera/checkpoint/torch_optimizer.h"
#include "tessera/comm/testing.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/mesh.h"
#include "tessera/optim/clip_grad_norm.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/nn/net.h"

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor values(at::IntArrayRef shape, const std::string& name) { return testing_support::random_tensor(shape, name).to(at::kDouble); }

/// Parameters of all kinds that its variant asks for: none elements, more columns than rows, tied, a scalar, and a layer that a pass may leave out.
struct RandomModel : torch::nn::Module {
  explicit RandomModel(int variant) : variant(variant) {
    if (variant & 1) empty = register_parameter("empty", at::zeros({0, 7}));
    first = register_module("first", torch::nn::Linear(5, 7));
    if (variant & 2) row = register_parameter("row", at::ones({1, 40}));
    middle = register_module("middle", torch::nn::Linear(7, 7));
    if (variant & 4) {
      tied = std::make_shared<torch::nn::Module>("Tied");
      tied->register_parameter("weight", middle->weight);
      register_module("tied", tied);
    }
    if (variant & 8) scalar = register_parameter("scalar", at::ones({}));
    optional = register_module("optional", torch::nn::Linear(7, 7));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})));
    last = register_module("last", torch::nn::Linear(7, 3));
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    for (auto& item : named_parameters()) item.value().copy_(values(item.value().sizes(), item.key()) * 0.5);
  }

  at::Tensor forward(const at::Tensor& x, bool uses_optional) {
    at::Tensor h = at::tanh(first(x));
    if (variant & 2) h = h * row.narrow(1, 0, 7) + row.sum() * 0.01;
    h = at::tanh(middle(h));
    if (variant & 4) h = h + at::linear(h, middle->weight.t());
    if (variant & 8) h = h * scalar;
    if (variant & 1) h = h + empty.sum();
    if (uses_optional) h = h + optional(h);
    return last(norm(h));
  }

  int variant;
  torch::nn::Linear first{nullptr}, middle{nullptr}, optional{nullptr}, last{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  std::shared_ptr<torch::nn::Module> tied;
  at::Tensor empty, row, scalar;
};

Tensors unique_of(const torch::nn::Module& module) {
  Tensors unique;
  for (const auto& parameter : nn::unique_parameters(module)) unique.push_back(parameter.tensor);
  return unique;
}

enum class Kind { Zero, Pass, TwoPasses, Retain, Penalty, Fail, Evaluate, InputGradient, Freeze, Clip, Step, Write, Resume };
constexpr const char* kNames = "zero pass two_passes retain penalty fail evaluate input_gradient freeze clip step write resume ";

struct Operation {
  Kind kind;
  int64_t choice = 0;
  bool flag = true;             ///< of a pass: it uses the optional layer; of freeze: what requires_grad becomes
  bool held = false;            ///< a pass under no_sync()
  std::vector<int64_t> rows{};  ///< of each rank
};

struct Program {
  int variant = 0, ranks = 1;
  std::string optimizer;
  bool unused = false;  ///< passes may leave the optional layer out
  std::vector<Operation> operations;

  std::string text() const {
    std::ostringstream out;
    out << "variant " << variant << ", " << optimizer << (unused ? ", unused" : "") << ":";
    for (const Operation& operation : operations) {
      std::istringstream names(kNames);
      std::string name;
      for (int i = 0; i <= static_cast<int>(operation.kind); ++i) names >> name;
      out << " " << name << "(" << operation.choice << (operation.flag ? "" : " false") << (operation.held ? " held" : "");
      for (const int64_t rows : operation.rows) out << " " << rows;
      out << ")";
    }
    return out.str();
  }
};

/// Where `in_order`, each step has two passes, the first under no_sync(): what the fixed tree takes.
Program make_program(uint64_t seed, int ranks, bool in_order) {
  std::mt19937_64 engine(seed * 977 + 13);
  const auto draw = [&](int64_t n) { return static_cast<int64_t>(engine() % static_cast<uint64_t>(n)); };
  Program program{.variant = static_cast<int>(draw(16)), .ranks = ranks, .optimizer = {}, .unused = false, .operations = {}};
  program.optimizer = std::array{"sgd", "adam", "adamw", "adagrad"}[static_cast<size_t>(draw(4))];
  program.unused = draw(2) == 1;
  auto& operations = program.operations;
  const auto rows = [&](bool may_be_one_ranks) {
    std::vector<int64_t> each;
    const bool one = may_be_one_ranks && draw(5) == 0;
    const int64_t who = draw(ranks);
    for (int rank = 0; rank < ranks; ++rank) each.push_back(one ? (rank == who ? 5 : 0) : draw(4));
    return each;
  };
  const auto pass = [&](Kind kind, bool held) {
    operations.push_back({.kind = kind, .choice = draw(20), .flag = !program.unused || draw(2) == 1, .held = held, .rows = rows(/*may_be_one_ranks=*/true)});
  };
  const bool freezes = draw(2) == 1;
  for (int64_t step = 3 + draw(4); step > 0; --step) {
    if (freezes && draw(2)) operations.push_back({.kind = Kind::Freeze, .choice = draw(20), .flag = draw(2) == 1});
    if (draw(6) == 0) operations.push_back({.kind = Kind::Evaluate});
    if (draw(6) == 0 && !in_order) operations.push_back({.kind = Kind::Resume});
    operations.push_back({.kind = Kind::Zero, .choice = draw(4)});
    const int64_t passes = in_order ? 2 : 1 + draw(3);
    for (int64_t i = 0; i < passes; ++i) {
      pass(Kind::Pass, i + 1 < passes && (in_order || draw(3) > 0));
      if (draw(8) == 0) operations.push_back({.kind = Kind::Evaluate});
      if (draw(10) == 0) operations.push_back({.kind = Kind::InputGradient});
      if (i + 1 < passes && draw(14) == 0 && !in_order) operations.push_back({.kind = Kind::Zero, .choice = draw(4)});
    }
    if (draw(7) == 0) {
      operations.push_back({.kind = Kind::Fail, .choice = draw(2)});
      operations.push_back({.kind = Kind::Zero, .choice = draw(4)});
      if (in_order) pass(Kind::Pass, true);
      pass(Kind::Pass, false);
    }
    if (draw(3) == 0 && !in_order) pass(std::array{Kind::TwoPasses, Kind::Retain, Kind::Penalty}[static_cast<size_t>(draw(3))], false);
    if (draw(2)) operations.push_back({.kind = Kind::Clip});
    for (int64_t steps = draw(8) == 0 ? 0 : 1 + (draw(6) == 0 ? 1 : 0); steps > 0; --steps) operations.push_back({.kind = Kind::Step});
    if (draw(5) == 0) operations.push_back({.kind = Kind::Write, .choice = draw(20), .flag = draw(2) == 1});
  }
  return program;
}

struct RandomTechnique {
  std::string name;
  std::function<std::unique_ptr<GradientSynchronizer>(torch::nn::Module&, comm::World&, const Program&)> wrap;
  bool takes_parts = false;  ///< its optimizer is zero_optimizer's
  bool in_order = false;
  int ranks = 0;  ///< 0: of several sizes

  friend void PrintTo(const RandomTechnique& technique, std::ostream* out) { *out << technique.name; }
};

constexpr BucketSizes kSmall{.bucket_bytes = 300, .first_bucket_bytes = 64};

RandomTechnique zero_of(const std::string& name, int stage, int replicas) {
  const auto wrap = [stage, replicas](torch::nn::Module& module, comm::World& world, const Program& program) -> std::unique_ptr<GradientSynchronizer> {
    const Mesh mesh(world, {{"replicate", replicas}, {"shard", world.size() / replicas}});
    return std::make_unique<ShardedDataParallel>(module, ShardGroups{.shard = mesh["shard"], .replicate = mesh["replicate"]},
                                                 ZeroOptions{.stage = stage, .sizes = kSmall, .find_unused_parameters = program.unused});
  };
  return {.name = name, .wrap = wrap, .takes_parts = true, .ranks = replicas > 1 ? 4 : 0};
}

RandomTechnique fully_sharded(const std::string& name, const std::string& pattern, bool each) {
  const auto wrap = [pattern, each](torch::nn::Module& module, comm::World& world, const Program& program) -> std::unique_ptr<GradientSynchronizer> {
    return fully_shard(module, world.group(), {.wrap = pattern, .reduce_each_micro_batch = each, .find_unused_parameters = program.unused});
  };
  return {.name = name, .wrap = wrap};
}

std::vector<RandomTechnique> random_techniques() {
  const auto ddp = [](torch::nn::Module& module, comm::World& world, const Program& program) -> std::unique_ptr<GradientSynchronizer> {
    return std::make_unique<DistributedDataParallel>(module, world.group(), DdpOptions{.sizes = kSmall, .find_unused_parameters = program.unused});
  };
  const auto tree = [](torch::nn::Module& module, comm::World& world, const Program& program) -> std::unique_ptr<GradientSynchronizer> {
    return std::make_unique<TreeReduction>(module, world.group(),
                                           TreeReductionOptions{.num_micro_batches = 2 * world.size(), .find_unused_parameters = program.unused});
  };
  return {{.name = "Ddp", .wrap = ddp},
          {.name = "Tree", .wrap = tree, .in_order = true},
          zero_of("Zero1", 1, 1),
          zero_of("Zero2", 2, 1),
          zero_of("Zero2Hybrid", 2, 2),
          fully_sharded("FullyShard", "", true),
          fully_sharded("FullyShardUnits", "middle", true),
          fully_sharded("FullyShardWhole", "last", false)};
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, const Tensors& parameters) {
  using namespace torch::optim;
  // A large eps: of a gradient that is zero in exact arithmetic Adam would make a step of full size, in the direction of its rounding.
  if (name == "sgd") return std::make_unique<SGD>(parameters, SGDOptions(0.05).momentum(0.9).weight_decay(0.1));
  if (name == "adam") return std::make_unique<Adam>(parameters, AdamOptions(1e-2).weight_decay(0.05).eps(1e-3));
  if (name == "adamw") return std::make_unique<AdamW>(parameters, AdamWOptions(1e-2).weight_decay(0.1).eps(1e-3));
  return std::make_unique<Adagrad>(parameters, AdagradOptions(1e-2).weight_decay(0.1).eps(1e-3));
}

/// What a program leaves.
struct Outcome {
  std::vector<double> losses;  ///< of this rank's rows
  std::vector<double> norms;
  Tensors seen;  ///< evaluations, gradients of inputs, and the weights in the end
};

/// A program as one process runs it (no world), or a rank.
class Runner {
 public:
  Runner(const Program& program, const RandomTechnique& technique, comm::World* world, std::filesystem::path folder)
      : program_(program), technique_(technique), world_(world), folder_(std::move(folder)) {
    build();
  }

  Outcome run() {
    for (const Operation& operation : program_.operations) {
      key_ = std::to_string(count_++);
      act(operation);
    }
    if (world_ && technique_.name.starts_with("FullyShard")) unshard(*model_);
    for (const auto& parameter : model_->parameters()) outcome_.seen.push_back(parameter.detach().clone());
    return std::move(outcome_);
  }

 private:
  void build() {
    model_ = std::make_shared<RandomModel>(program_.variant);
    const auto make = [this](const Tensors& parameters) { return make_optimizer(program_.optimizer, parameters); };
    if (world_) synchronizer_ = technique_.wrap(*model_, *world_, program_);
    if (world_ && technique_.takes_parts) {
      parts_ = std::make_unique<ZeroOptimizer<torch::optim::Optimizer>>(zero_optimizer(*synchronizer_, make));
    } else {
      optimizer_ = make(unique_of(*model_));
    }
  }

  at::Tensor loss_of(const at::Tensor& y, const at::Tensor& target) const { return (y - target).square().sum() / 4.0; }

  /// This rank's rows, or all.
  std::pair<at::Tensor, at::Tensor> data(const Operation& operation) const {
    int64_t before = 0, total = 0;
    for (size_t rank = 0; rank < operation.rows.size(); ++rank) {
      if (world_ && static_cast<int>(rank) < world_->rank()) before += operation.rows[rank];
      total += operation.rows[rank];
    }
    const at::Tensor x = values({total, 5}, "x" + key_), y = values({total, 3}, "y" + key_);
    if (!world_) return {x, y};
    const int64_t own = operation.rows[static_cast<size_t>(world_->rank())];
    return {x.narrow(0, before, own), y.narrow(0, before, own)};
  }

  Attachment hold(bool held) const { return held && synchronizer_ ? synchronizer_->no_sync() : Attachment(); }

  void act(const Operation& operation) {
    switch (operation.kind) {
      case Kind::Zero:
        return zero(operation.choice);
      case Kind::Pass:
      case Kind::TwoPasses:
      case Kind::Retain:
      case Kind::Penalty:
        return pass(operation);
      case Kind::Fail:
        return fail(operation.choice == 0);
      case Kind::Evaluate: {
        const at::NoGradGuard no_grad;
        model_->eval();
        outcome_.seen.push_back(model_->forward(values({3, 5}, "e" + key_), true).clone());
        model_->train();
        return;
      }
      case Kind::InputGradient: {
        const at::Tensor x = values({3, 5}, "g" + key_).requires_grad_();
        outcome_.seen.push_back(torch::autograd::grad({model_->forward(x, true).square().sum()}, {x})[0].clone());
        return;
      }
      case Kind::Freeze: {
        const Tensors parameters = model_->parameters();
        parameters[static_cast<size_t>(operation.choice) % parameters.size()].requires_grad_(operation.flag);
        return;
      }
      case Kind::Clip:
        return clip();
      case Kind::Step:
        parts_ ? (void)parts_->step() : (void)optimizer_->step();
        return;
      case Kind::Write: {
        const at::NoGradGuard no_grad;
        const Tensors parameters = unique_of(*model_);
        at::Tensor parameter = parameters[static_cast<size_t>(operation.choice) % parameters.size()];
        operation.flag ? (void)parameter.mul_(0.9) : parameter.set_data(parameter.detach() * 0.9);
        return;
      }
      case Kind::Resume:
        return resume();
    }
  }

  void zero(int64_t choice) {
    if (choice == 0) return parts_ ? parts_->zero_grad() : optimizer_->zero_grad();
    if (choice == 1 && parts_) return (*parts_)->zero_grad(false);
    choice == 2 ? model_->zero_grad(true) : choice == 3 ? model_->zero_grad(false) : optimizer_ ? optimizer_->zero_grad(false) : void();
  }

  void pass(const Operation& operation) {
    const Attachment local = hold(operation.held);
    const auto [x, y] = data(operation);
    if (operation.kind == Kind::Penalty) {
      const at::Tensor input = x.clone().requires_grad_();
      const at::Tensor out = model_->forward(input, true);
      const at::Tensor slope = torch::autograd::grad({out.sum()}, {input}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      return (loss_of(out, y) + slope.square().sum()).backward();
    }
    const bool uses = operation.flag || operation.kind != Kind::Pass;
    const at::Tensor loss = loss_of(model_->forward(x, uses), y);
    outcome_.losses.push_back(loss.item<double>());
    if (operation.kind == Kind::TwoPasses) {
      const at::Tensor other = loss_of(model_->forward(x * 0.5, operation.choice % 2 == 1 || !program_.unused), y);
      if (operation.choice % 3 == 0) return (loss + other).backward();
      other.backward();
    }
    if (operation.kind == Kind::Retain) {
      const Attachment first = hold(operation.choice % 2 == 1);
      loss.backward({}, /*retain_graph=*/true);
    }
    loss.backward();
  }

  /// In a forward, or in a backward.
  void fail(bool forward) {
    try {
      const at::Tensor y = model_->forward(values({2, 5}, "f" + key_), true);
      if (forward) throw std::runtime_error("planned");
      y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
      y.sum().backward();
    } catch (const std::exception& error) {
      if (std::string(error.what()).find("planned") == std::string::npos) throw;
    }
  }

  void clip() {
    if (world_) return outcome_.norms.push_back(clip_grad_norm(*model_, 0.3).item<double>());
    const Tensors parameters = unique_of(*model_);
    const bool any = std::ranges::any_of(parameters, [](const at::Tensor& parameter) { return parameter.grad().defined(); });
    outcome_.norms.push_back(any ? torch::nn::utils::clip_grad_norm_(parameters, 0.3) : 0);
  }

  /// Everything is made anew, and read; gradients are not kept.
  void resume() {
    if (!world_) {
      for (const auto& parameter : model_->parameters()) parameter.mutable_grad() = at::Tensor();
      return;
    }
    std::vector<bool> trained;
    for (const auto& parameter : model_->parameters()) trained.push_back(parameter.requires_grad());
    const auto saved = checkpoint::save(folder_ / key_, 1, *model_, parts_ ? parts_->inner() : *optimizer_, world_->group());
    parts_.reset();
    optimizer_.reset();
    synchronizer_.reset();
    build();
    checkpoint::load(saved, *model_, parts_ ? parts_->inner() : *optimizer_);
    size_t i = 0;
    for (const auto& parameter : model_->parameters()) parameter.requires_grad_(trained[i++]);
  }

  const Program& program_;
  const RandomTechnique& technique_;
  comm::World* world_;
  std::filesystem::path folder_;
  std::string key_;
  int count_ = 0;
  std::shared_ptr<RandomModel> model_;
  std::unique_ptr<GradientSynchronizer> synchronizer_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<ZeroOptimizer<torch::optim::Optimizer>> parts_;
  Outcome outcome_;
};

/// Programs that take what passes under no_sync() alone have left are refused; that is tested elsewhere.
bool is_lawful(const Program& program) {
  bool held = false;
  for (const Operation& operation : program.operations) {
    if (operation.kind == Kind::Pass) held = operation.held;
    const bool takes = operation.kind == Kind::Step || operation.kind == Kind::Clip || operation.kind == Kind::Resume || operation.kind == Kind::Write;
    if (takes && held) return false;
  }
  return true;
}

class RandomPrograms : public ::testing::TestWithParam<RandomTechnique> {
 protected:
  static constexpr double kBound = 1e-8;  // of a tensor's largest entry; double precision

  void expect_equal(const Program& program) const {
    SCOPED_TRACE(program.text());
    const RandomTechnique& technique = GetParam();
    const Outcome one = Runner(program, technique, nullptr, {}).run();
    const auto folder = std::filesystem::temp_directory_path() / ("tessera-programs-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder);
    std::vector<Outcome> all(static_cast<size_t>(program.ranks));
    try {
      comm::run_ranks(program.ranks, [&](comm::World& world) { all[static_cast<size_t>(world.rank())] = Runner(program, technique, &world, folder).run(); },
                      {.timeout = std::chrono::seconds(20)});
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    std::filesystem::remove_all(folder);
    if (::testing::Test::HasFailure()) return;
    for (const Outcome& rank : all) {
      ASSERT_EQ(rank.seen.size(), one.seen.size());
      for (size_t i = 0; i < one.seen.size(); ++i) {
        if (one.seen[i].numel() == 0) continue;
        const double largest = std::max(1e-12, one.seen[i].abs().max().item<double>());
        EXPECT_LT((rank.seen[i] - one.seen[i]).abs().max().item<double>(), kBound * largest) << "what is seen, number " << i;
      }
      for (size_t i = 0; i < one.norms.size(); ++i) EXPECT_NEAR(rank.norms[i], one.norms[i], kBound * std::max(1.0, one.norms[i])) << "norm " << i;
    }
    for (size_t i = 0; i < one.losses.size(); ++i) {
      double sum = 0;
      for (const Outcome& rank : all) sum += rank.losses[i];
      EXPECT_NEAR(sum, one.losses[i], kBound * std::max(1.0, one.losses[i])) << "loss " << i;
    }
  }

  void run_seeds(uint64_t begin, uint64_t end) const {
    for (uint64_t seed = begin; seed < end && !HasFailure(); ++seed) {
      const int ranks = GetParam().ranks > 0 ? GetParam().ranks : std::array{1, 2, 3, 5}[seed % 4];
      const Program program = make_program(seed, ranks, GetParam().in_order);
      SCOPED_TRACE("seed " + std::to_string(seed));
      if (is_lawful(program)) expect_equal(program);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Wrappers, RandomPrograms, ::testing::ValuesIn(random_techniques()), [](const auto& info) { return info.param.name; });

TEST_P(RandomPrograms, AreWhatOneProcessMakesOfThem) { run_seeds(0, 10); }
TEST_P(RandomPrograms, DISABLED_Many) { run_seeds(10, 600); }

}  // namespace
}  // namespace tessera
