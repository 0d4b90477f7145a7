#include "tessera/checkpoint/checkpoint.h"

#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tests/checkpoint/files.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::ThrowsMessage;

/// A whole model's tensors: every element differs from every other.
const std::map<std::string, at::Tensor>& logical_tensors() {
  static const auto tensors = [] {
    std::map<std::string, at::Tensor> all;
    float first = 1;
    for (const auto& [name, shape] : std::map<std::string, std::vector<int64_t>>{
             {"big", {17, 6}}, {"bias", {5}}, {"scalar", {}}, {"empty", {0, 3}}, {"one", {1}}, {"cube", {4, 3, 2}}, {"long row", {1, 40}}}) {
      const auto numel = Box::whole(shape).numel();
      all[name] = at::arange(numel, at::kFloat).add(first).view(shape);
      first += static_cast<float>(numel);
    }
    all["half"] = at::arange(9).to(at::kBFloat16).view({3, 3});
    return all;
  }();
  return tensors;
}

enum class Layout { Replicated, Rows, Columns, ZigZag };

/// What `rank` of `ranks` holds of one tensor.
Slice slice_in(Layout layout, const std::string& name, const std::vector<int64_t>& shape, int ranks, int rank) {
  if (layout == Layout::Replicated || shape.empty()) return Slice::whole(name, shape);
  if (layout == Layout::ZigZag) {  // the rank's chunk from the front and its mirror image from the back
    Slice slice{name, shape, {}, {}};
    for (const int part : {rank, 2 * ranks - 1 - rank}) {
      const auto [begin, size] = chunk(shape[0], 2 * ranks, part);
      if (size > 0) slice.boxes.push_back(Slice::along(name, shape, 0, begin, size).boxes.at(0));
    }
    return slice;
  }
  const int64_t dim = layout == Layout::Rows ? 0 : static_cast<int64_t>(shape.size()) - 1;
  const auto [begin, size] = chunk(shape[dim], ranks, rank);
  return Slice::along(name, shape, dim, begin, size);
}

std::vector<SlicedTensor> local_tensors(Layout layout, int ranks, int rank, bool fill) {
  std::vector<SlicedTensor> local;
  for (const auto& [name, whole] : logical_tensors()) {
    const auto slice = slice_in(layout, name, whole.sizes().vec(), ranks, rank);
    const auto values = take(whole, slice).reshape(slice.local_shape()).clone();
    local.push_back({fill ? values : at::full_like(values, -1), slice});
  }
  return local;
}

CheckpointState state_of(Layout layout, int ranks, int rank, int64_t step = 10) {
  return {.step = step,
          .tensors = local_tensors(layout, ranks, rank, true),
          .optimizer = {{"kind", "adamw"}},
          .progress = {{"cursor", 42}, {"lr", 0.1}},
          .agreement = {{"model.dim", 8}}};
}

fs::path save_with(Layout layout, int ranks, const fs::path& dir, int64_t step = 10) {
  fs::path folder;
  comm::run_ranks(ranks, [&](comm::World& world) {
    const auto made = save(dir, state_of(layout, ranks, world.rank(), step), world.group());
    if (world.rank() == 0) folder = made;
  });
  return folder;
}

void expect_loads(const fs::path& folder, Layout layout, int ranks) {
  const Manifest manifest = read_manifest(folder);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto targets = local_tensors(layout, ranks, rank, false), expected = local_tensors(layout, ranks, rank, true);
    load(folder, manifest, targets);
    for (size_t i = 0; i < targets.size(); ++i) EXPECT_TRUE(at::equal(targets[i].tensor, expected[i].tensor)) << targets[i].slice.name << " on rank " << rank;
  }
}

TEST(Checkpoint, LoadsInEveryLayoutFromEveryLayout) {
  const TemporaryFolder folder;
  const std::vector<Layout> layouts{Layout::Replicated, Layout::Rows, Layout::Columns, Layout::ZigZag};
  for (const int saved_by : {1, 2, 3}) {
    for (const Layout from : layouts) {
      const auto checkpoint = save_with(from, saved_by, folder.path());
      EXPECT_EQ(checkpoint.filename(), "step-00000010");
      for (const int loaded_by : {1, 2, 3, 5, 8}) {
        for (const Layout to : layouts) expect_loads(checkpoint, to, loaded_by);
      }
    }
  }
}

TEST(Checkpoint, ARunGoesFromOneRankToTwoToThree) {
  const TemporaryFolder folder;
  int64_t step = 1;
  for (const int ranks : {1, 2, 3}) {
    comm::run_ranks(ranks, [&](comm::World& world) {
      auto tensors = local_tensors(Layout::Rows, ranks, world.rank(), step == 1);
      if (step > 1) {
        const auto latest = find_latest(folder.path());
        ASSERT_TRUE(latest.folder);
        load(*latest.folder, read_manifest(*latest.folder), tensors);
      }
      auto state = state_of(Layout::Rows, ranks, world.rank(), step);
      state.tensors = tensors;
      save(folder.path(), state, world.group());
    });
    ++step;
  }
  expect_loads(folder / "step-00000003", Layout::Replicated, 1);
}

TEST(Checkpoint, CarriesEverythingBesideTensors) {
  const TemporaryFolder folder;
  const Manifest manifest = read_manifest(save_with(Layout::Rows, 2, folder.path(), 123));
  EXPECT_EQ(manifest.step, 123);
  EXPECT_EQ(manifest.optimizer, (nlohmann::json{{"kind", "adamw"}}));
  EXPECT_EQ(manifest.progress, (nlohmann::json{{"cursor", 42}, {"lr", 0.1}}));
  EXPECT_EQ(manifest.agreement, (nlohmann::json{{"model.dim", 8}}));
  EXPECT_EQ(manifest.files.size(), 2);
  EXPECT_TRUE(manifest.files.contains("rank-00001-of-00002.safetensors"));
}

TEST(Checkpoint, WritesReplicatedTensorsOnceAndSharesTheWork) {
  const TemporaryFolder folder;
  const auto checkpoint = save_with(Layout::Replicated, 3, folder.path());
  const Manifest manifest = read_manifest(checkpoint);
  std::map<std::string, int64_t> bytes;
  for (const auto& [name, tensor] : manifest.tensors) {
    EXPECT_EQ(tensor.slices.size(), logical_tensors().at(name).numel() == 0 ? 0 : 1) << name;
    for (const auto& slice : tensor.slices) bytes[slice.file] += static_cast<int64_t>(logical_tensors().at(name).nbytes());
  }
  EXPECT_EQ(bytes.size(), 3) << "every rank writes";
  int64_t most = 0;
  for (const auto& [file, written] : bytes) most = std::max(most, written);
  EXPECT_EQ(most, 17 * 6 * 4) << "nobody writes more than the largest tensor";
}

TEST(Checkpoint, MayBeMoved) {
  const TemporaryFolder folder;
  const auto checkpoint = save_with(Layout::ZigZag, 2, folder.path());
  fs::create_directories(folder / "elsewhere/deep");
  fs::copy(checkpoint, folder / "elsewhere/deep/mine");
  fs::remove_all(checkpoint);
  expect_loads(folder / "elsewhere/deep/mine", Layout::Rows, 2);
}

TEST(Checkpoint, ReplacesOneOfTheSameStep) {
  const TemporaryFolder folder;
  save_with(Layout::Rows, 3, folder.path());
  const auto checkpoint = save_with(Layout::Rows, 2, folder.path());
  EXPECT_EQ(read_manifest(checkpoint).files.size(), 2);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);
  expect_loads(checkpoint, Layout::Columns, 2);
}

TEST(Checkpoint, AFailingRankFailsAllAndLeavesTheLastGoodOne) {
  const TemporaryFolder folder;
  save_with(Layout::Rows, 2, folder.path(), 1);
  comm::run_ranks(2, [&](comm::World& world) {
    auto state = state_of(Layout::Rows, 2, world.rank(), 2);
    if (world.rank() == 1) state.tensors[1].slice = Slice::whole(state.tensors[1].slice.name, {3});
    EXPECT_THAT([&] { save(folder.path(), state, world.group()); }, ThrowsMessage<Error>(HasSubstr("rank 1: ")));
  });
  EXPECT_EQ(find_latest(folder.path()).folder->filename(), "step-00000001");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);
}

TEST(Checkpoint, ADirectoryThatCannotBeMadeIsNamed) {
  const TemporaryFolder folder;
  write_all(folder / "file", "");
  EXPECT_THAT([&] { save(folder / "file/checkpoints", state_of(Layout::Rows, 1, 0), comm::Group::self()); },
              ThrowsMessage<Error>(AllOf(HasSubstr("rank 0"), HasSubstr("file/checkpoints"))));
}

TEST(Checkpoint, SlicesThatDoNotMakeAWholeAreNotSaved) {
  const TemporaryFolder folder;
  auto state = state_of(Layout::Rows, 2, 0);
  EXPECT_THROW(save(folder.path(), state, comm::Group::self()), InternalError);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(Load, FindsEveryFlippedByte) {
  const TemporaryFolder folder;
  const auto checkpoint = save_with(Layout::Rows, 2, folder.path());
  const Manifest manifest = read_manifest(checkpoint);
  for (const auto& [name, size] : manifest.files) {
    const std::string good = read_all(checkpoint / name);
    for (size_t i = 0; i < good.size(); i += 23) {
      flip_byte(checkpoint / name, i);
      EXPECT_THAT([&] { load(checkpoint, manifest, local_tensors(Layout::Replicated, 1, 0, false)); }, ThrowsMessage<ConfigError>(HasSubstr(name))) << i;
      EXPECT_THAT(problem_with(checkpoint, Thoroughness::Hashes).value_or(""), HasSubstr(name)) << i;
      write_all(checkpoint / name, good);
    }
  }
  const std::string good = read_all(checkpoint / "manifest.json");
  for (size_t i = 0; i < good.size(); i += 41) {
    flip_byte(checkpoint / "manifest.json", i);
    EXPECT_THAT([&] { read_manifest(checkpoint); }, ThrowsMessage<ConfigError>(HasSubstr("manifest.json"))) << i;
    write_all(checkpoint / "manifest.json", good);
  }
  EXPECT_EQ(problem_with(checkpoint, Thoroughness::Hashes), std::nullopt);
}

TEST(Load, NamesTensorAndOffsetOfDamage) {
  const TemporaryFolder folder;
  const auto checkpoint = save_with(Layout::Replicated, 1, folder.path());
  const auto file = checkpoint / "rank-00000-of-00001.safetensors";
  flip_byte(file, fs::file_size(file) - 1);
  const auto targets = local_tensors(Layout::Replicated, 1, 0, false);
  EXPECT_THAT([&] { load(checkpoint, read_manifest(checkpoint), targets); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("'scalar'"), HasSubstr("at offset"), HasSubstr("damaged"))));
  load(checkpoint, read_manifest(checkpoint), targets, {.verify = false});
}

TEST(Load, ReadsOnlyWhatItNeeds) {
  const TemporaryFolder folder;
  const auto checkpoint = save_with(Layout::Rows, 2, folder.path());
  fs::remove(checkpoint / "rank-00001-of-00002.safetensors");
  auto targets = local_tensors(Layout::Rows, 2, 0, false);
  std::erase_if(targets, [](const auto& target) { return target.slice.shape.empty() || target.slice.name == "one" || target.slice.name == "long row"; });
  LoadOptions options;
  for (const auto& [name, tensor] : logical_tensors()) options.expected.push_back(name);
  load(checkpoint, read_manifest(checkpoint), targets, options);
  const auto big = std::find_if(targets.begin(), targets.end(), [](const auto& target) { return target.slice.name == "big"; });
  EXPECT_TRUE(at::equal(big->tensor, logical_tensors().at("big").narrow(0, 0, 9)));
}

TEST(Load, RefusesAnotherModelWithTheFullListBeforeTouchingAnything) {
  const TemporaryFolder folder;
  const auto checkpoint = save_with(Layout::Replicated, 1, folder.path());
  auto targets = local_tensors(Layout::Replicated, 1, 0, false);
  targets[0] = {at::full({6, 17}, -1.0f), Slice::whole("big", {6, 17})};
  targets[1].slice.name = "renamed";
  targets[2] = {targets[2].tensor.to(at::kDouble), targets[2].slice};
  EXPECT_THAT([&] { load(checkpoint, read_manifest(checkpoint), targets); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("another model"), HasSubstr("shape of big: [17, 6] in the checkpoint, [6, 17] in the model"),
                                               HasSubstr("missing renamed"), HasSubstr("extra bias"),
                                               HasSubstr("dtype of cube: F32 in the checkpoint, F64 in the model"), Not(HasSubstr("\n")))));
  for (const auto& target : targets) EXPECT_TRUE(target.tensor.eq(-1).all().item<bool>());
}

TEST(Load, LeavesOutWhatIsIgnored) {
  const TemporaryFolder folder;
  CheckpointState state;
  state.tensors = {{at::ones({2}), Slice::whole("model.w", {2})}, {at::ones({2}), Slice::whole("optimizer.exp_avg.w", {2})}};
  const auto checkpoint = save(folder.path(), state, comm::Group::self());
  const std::vector<SlicedTensor> weights{{at::zeros({2}), Slice::whole("model.w", {2})}};
  EXPECT_THAT([&] { load(checkpoint, read_manifest(checkpoint), weights); }, ThrowsMessage<ConfigError>(HasSubstr("extra optimizer.exp_avg.w")));
  load(checkpoint, read_manifest(checkpoint), weights, {.ignore_prefixes = {"optimizer."}});
  EXPECT_TRUE(at::equal(weights[0].tensor, at::ones({2})));
}

TEST(FindLatest, TakesTheNewestValidOneAndSaysWhatItSkipped) {
  const TemporaryFolder folder;
  EXPECT_FALSE(find_latest(folder / "missing").folder);
  EXPECT_FALSE(find_latest(folder.path()).folder);
  for (const int64_t step : {2, 10, 9, 100}) save_with(Layout::Rows, 2, folder.path(), step);
  EXPECT_EQ(find_latest(folder.path()).folder->filename(), "step-00000100");
  EXPECT_THAT(find_latest(folder.path()).skipped, IsEmpty());

  const auto newest = folder / "step-00000100" / "rank-00000-of-00002.safetensors";
  const std::string good = read_all(newest);
  write_all(newest, good.substr(0, good.size() - 1));
  auto latest = find_latest(folder.path(), Thoroughness::Sizes);
  EXPECT_EQ(latest.folder->filename(), "step-00000010");
  EXPECT_THAT(latest.skipped, testing::ElementsAre(AllOf(HasSubstr("step-00000100"), HasSubstr("bytes, the manifest says"))));

  fs::remove(folder / "step-00000010" / "rank-00001-of-00002.safetensors");
  latest = find_latest(folder.path());
  EXPECT_EQ(latest.folder->filename(), "step-00000009");
  EXPECT_THAT(latest.skipped, testing::ElementsAre(HasSubstr("step-00000100"), AllOf(HasSubstr("rank-00001"), HasSubstr("is missing"))));

  flip_byte(folder / "step-00000009" / "rank-00001-of-00002.safetensors", fs::file_size(folder / "step-00000009" / "rank-00001-of-00002.safetensors") - 3);
  EXPECT_EQ(find_latest(folder.path(), Thoroughness::Sizes).folder->filename(), "step-00000009");
  EXPECT_EQ(find_latest(folder.path(), Thoroughness::Hashes).folder->filename(), "step-00000002");
}

TEST(FindLatest, OverlooksWhatAKilledSaveLeft) {
  const TemporaryFolder folder;
  save_with(Layout::Rows, 2, folder.path(), 5);
  fs::copy(folder / "step-00000005", folder / ".tmp-step-00000006");
  fs::remove(folder / ".tmp-step-00000006" / "manifest.json");
  fs::create_directory(folder / "step-00000007");  // a folder without manifest
  fs::create_directory(folder / "step-8");         // not ours
  write_all(folder / "step-00000009", "a file");
  const auto latest = find_latest(folder.path());
  EXPECT_EQ(latest.folder->filename(), "step-00000005");
  EXPECT_EQ(latest.skipped.size(), 2);
  save_with(Layout::Rows, 2, folder.path(), 6);
  expect_loads(folder / "step-00000006", Layout::Replicated, 1);
}

TEST(Prune, KeepsTheNewestAndNeverLosesTheLastGoodOne) {
  const TemporaryFolder folder;
  const auto names = [&] {
    std::set<std::string> left;
    for (const auto& entry : fs::directory_iterator(folder.path())) left.insert(entry.path().filename());
    return left;
  };
  for (const int64_t step : {1, 2, 3, 4}) save_with(Layout::Rows, 1, folder.path(), step);
  fs::create_directory(folder / ".tmp-step-00000009");
  EXPECT_THAT(prune(folder.path(), 0), IsEmpty());
  EXPECT_EQ(names().size(), 4) << "0 keeps all, and only leftovers go";
  EXPECT_EQ(prune(folder.path(), 2).size(), 2);
  EXPECT_EQ(names(), (std::set<std::string>{"step-00000003", "step-00000004"}));
  fs::remove(folder / "step-00000004/manifest.json");
  EXPECT_THAT(prune(folder.path(), 1), IsEmpty()) << "3 is the last good one";
  save_with(Layout::Rows, 1, folder.path(), 5);
  prune(folder.path(), 1);
  EXPECT_EQ(names(), (std::set<std::string>{"step-00000005"}));
  EXPECT_THAT(prune(folder / "missing", 1), IsEmpty());
}

struct TiedHead : torch::nn::Module {
  explicit TiedHead(const at::Tensor& weight) { register_parameter("weight", weight); }
};

struct Model : torch::nn::Module {
  Model() {
    const auto linear = register_module("linear", torch::nn::Linear(3, 2));
    register_module("norm", torch::nn::BatchNorm1d(2));
    register_module("tied", std::make_shared<TiedHead>(linear->weight));
  }
};

TEST(TrainingTensors, AreParametersOnceBuffersAndOptimizerState) {
  const Model model;
  OptimConfig config;
  const auto optimizer = optim::make_optimizer(config, nn::unique_parameters(model));
  std::set<std::string> names;
  for (const auto& held : training_tensors(model, optimizer.get())) names.insert(held.slice.name);
  EXPECT_EQ(names.count("model.linear.weight"), 1);
  EXPECT_EQ(names.count("model.tied.weight"), 0);
  EXPECT_EQ(names.count("buffer.norm.running_mean"), 1);
  EXPECT_EQ(names.count("optimizer.exp_avg.linear.weight"), 1);
  EXPECT_EQ(names.count("optimizer.exp_avg_sq.norm.bias"), 1);
  EXPECT_EQ(names.size(), 4 + 3 + 2 * 4);
  EXPECT_EQ(training_tensors(model, nullptr).size(), 4 + 3);
}

TEST(TrainingTensors, OptimizerComesBack) {
  const Model model;
  OptimConfig config;
  const auto saved = optim::make_optimizer(config, nn::unique_parameters(model)), loaded = optim::make_optimizer(config, nn::unique_parameters(model));
  for (const auto& parameter : nn::unique_parameters(model)) at::Tensor(parameter.tensor).mutable_grad() = at::ones_like(parameter.tensor);
  saved->step(0.1);
  restore_optimizer(optimizer_json(*saved), *loaded);
  EXPECT_EQ(loaded->update_counts(), saved->update_counts());
  config.name = "sgd";
  EXPECT_THAT([&] { restore_optimizer(optimizer_json(*saved), *optim::make_optimizer(config, nn::unique_parameters(model))); },
              ThrowsMessage<ConfigError>(HasSubstr("optim.name = sgd: the checkpoint's optimizer is adamw")));
  EXPECT_THROW(restore_optimizer(nlohmann::json(3), *loaded), ConfigError);
}

}  // namespace
}  // namespace tessera::checkpoint
