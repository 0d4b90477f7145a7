#include "tessera/checkpoint/checkpoint.h"

#include <bit>
#include <limits>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tessera/checkpoint/deal.h"
#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/save_steps.h"
#include "tessera/checkpoint/torch_optimizer.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/cut_parameter.h"
#include "tests/checkpoint/files.h"
#include "tests/checkpoint/layouts.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::ThrowsMessage;

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

/// Parts that lie in the place of others for a save, and a model that was named as a part of a larger one.
TEST(Checkpoint, AnAverageThatIsSwappedInIsSavedAsWhatItStandsFor) {
  const TemporaryFolder folder;
  fs::path saved;
  comm::run_ranks(2, [&](comm::World& world) {
    torch::nn::Sequential net(torch::nn::Linear(3, 4));
    torch::nn::Module whole("whole");
    whole.register_module("actor", net.ptr());
    nn::assign_paths(whole);
    const at::Tensor weight = net->parameters()[0], bias = net->parameters()[1];
    nn::cut_parameter(weight, 0, 2 * world.rank(), 2);
    std::vector<at::Tensor> kept;
    for (const at::Tensor& parameter : net->parameters()) {
      kept.push_back(parameter.data());
      parameter.set_data(at::full(parameter.sizes(), 1.0 + world.rank()));
    }
    bias.set_data(at::full({4}, 5.0));
    const auto written = save(folder.path(), 1, *net, world.group());
    for (size_t i = 0; i < kept.size(); ++i) net->parameters()[i].set_data(kept[i]);
    if (world.rank() == 0) saved = written;
  });
  torch::nn::Module fresh("fresh");
  fresh.register_module("actor", torch::nn::Sequential(torch::nn::Linear(3, 4)).ptr());
  load(saved, fresh);
  const at::Tensor rows = at::tensor({1.0f, 1.0f, 2.0f, 2.0f}).unsqueeze(1).expand({4, 3});
  EXPECT_TRUE(at::equal(fresh.named_parameters()["actor.0.weight"], rows));
  EXPECT_TRUE(at::equal(fresh.named_parameters()["actor.0.bias"], at::full({4}, 5.0f)));
}

/// As on file systems that cannot exchange two names, where a program that saves one step time and again has nobody who clears up.
TEST(Checkpoint, ReplacingInTwoStepsLeavesNothingInTheWayOfTheNext) {
  const TemporaryFolder folder;
  const auto step = folder / "step-00000001", temporary = folder / ".tmp-step-00000001", aside = folder / ".tmp-step-00000001.replaced";
  const auto write = [](const fs::path& dir, const std::string& text) {
    make_empty_directory(dir);
    write_file(dir / "manifest.json", text);
  };
  write(step, "0");
  for (const std::string text : {"1", "2", "3"}) {
    write(temporary, text);
    replace_in_two_steps(temporary, step);
    EXPECT_EQ(read_all(step / "manifest.json"), text);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);
  }
  write(aside, "of a save that was killed");
  write(temporary, "4");
  replace_in_two_steps(temporary, step);
  EXPECT_EQ(read_all(step / "manifest.json"), "4");
}

TEST(Checkpoint, RefusesProgressThatIsNoFiniteNumber) {
  const TemporaryFolder folder;
  auto state = state_of(Layout::Rows, 1, 0, 1);
  state.progress = {{"best", std::numeric_limits<double>::infinity()}};
  EXPECT_THAT([&] { save(folder.path(), state, comm::Group::self()); }, ThrowsMessage<Error>(HasSubstr("checkpoint: progress.best = inf cannot be saved")));
  EXPECT_TRUE(fs::is_empty(folder.path()));
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

TEST(Checkpoint, RefusesRanksThatSaveOtherSteps) {
  const TemporaryFolder folder;
  comm::run_ranks(3, [&](comm::World& world) {
    const auto state = state_of(Layout::Rows, 3, world.rank(), world.rank() == 2 ? 11 : 10);
    EXPECT_THAT([&] { save(folder.path(), state, world.group()); }, ThrowsMessage<ConfigError>(HasSubstr("all ranks save one step together")));
  });
  EXPECT_TRUE(fs::is_empty(folder.path())) << "nothing stays";
}

/// Progress of a program's own is rank 0's; what a Trainer says there differs by rank (paths, processors) where hosts do.
TEST(Checkpoint, TakesProgressThatDiffersByRank) {
  const TemporaryFolder folder;
  comm::run_ranks(2, [&](comm::World& world) {
    auto state = state_of(Layout::Rows, 2, world.rank(), 10);
    state.progress["threads"] = world.rank();
    EXPECT_NO_THROW(save(folder.path(), state, world.group()));
  });
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

/// As where ranks do not share the folder, or a file system lies about what it has.
TEST(Checkpoint, AFileOfAnotherRankThatIsNotWholeIsNoCheckpoint) {
  const std::string name = "rank-00001-of-00002.safetensors";
  for (const bool missing : {false, true}) {
    const TemporaryFolder folder;
    comm::run_ranks(2, [&](comm::World& world) {
      const auto state = state_of(Layout::Rows, 2, world.rank(), 1);
      const SavePlan plan = begin_save(folder.path(), state, world.group());
      const auto write = [&] {
        RankFile file(plan, world.rank());
        for (const size_t i : plan.dealt[world.rank()]) {
          const auto tensor = state.tensors[i].tensor.contiguous();
          file.write({static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()});
        }
        WrittenFile written = file.finish();
        if (world.rank() == 1 && missing) fs::remove(plan.temporary / name);
        if (world.rank() == 1 && !missing) fs::resize_file(plan.temporary / name, written.bytes - 1);
        return written;
      };
      EXPECT_THAT([&] { finish_save(plan, world.group(), write); },
                  ThrowsMessage<Error>(AllOf(HasSubstr(name), HasSubstr("written by another rank, but rank 0 does not see it whole"))));
    });
    EXPECT_TRUE(fs::is_empty(folder.path()));
  }
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
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("'scalar'"), HasSubstr("at offset"), HasSubstr("damaged"), HasSubstr("name another checkpoint"))));
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

TEST(Load, RefusesMissingSlicesWithTheFullListBeforeTouchingAnything) {
  const TemporaryFolder folder;
  const auto checkpoint = save_with(Layout::Rows, 3, folder.path());
  Manifest manifest = read_manifest(checkpoint);
  std::erase_if(manifest.tensors.at("big").slices, [](const StoredSlice& slice) { return slice.file.starts_with("rank-00001"); });
  std::erase_if(manifest.tensors.at("cube").slices, [](const StoredSlice& slice) { return slice.file.starts_with("rank-00002"); });
  const auto targets = local_tensors(Layout::Replicated, 1, 0, false);
  EXPECT_THAT([&] { load(checkpoint, manifest, targets); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("tensor big: no source holds [6:12, 0:6] of [0:17, 0:6]"),
                                               HasSubstr("tensor cube: no source holds [3:4, "), Not(HasSubstr("half")))));
  for (const auto& target : targets) EXPECT_TRUE(target.tensor.eq(-1).all().item<bool>());
  auto held = local_tensors(Layout::Rows, 3, 0, false);
  load(checkpoint, manifest, held);  // whoever needs only what is there gets it
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

TEST(Load, ANumberBeyondTheFormatOfTheModelIsNoDamage) {
  const TemporaryFolder folder;
  CheckpointState state;
  const at::Tensor values = at::ones({4});
  values[3] = 1e6;
  state.tensors = {{values, Slice::whole("model.head.weight", {4})}};
  const auto checkpoint = save(folder.path(), state, comm::Group::self());
  const auto read = [&](at::ScalarType dtype, int64_t begin) {
    const Slice half = Slice::along("model.head.weight", {4}, 0, begin, 2);
    load(checkpoint, read_manifest(checkpoint), {{at::zeros({2}, dtype), half}}, {.convert = true});
  };
  EXPECT_THAT([&] { read(at::kHalf, 2); }, ThrowsMessage<ConfigError>(AllOf(HasSubstr("precision.params = fp16: head.weight of "), HasSubstr("holds 1e+06"),
                                                                            HasSubstr("set precision.params = bf16 or fp32"), Not(HasSubstr("damaged")))));
  read(at::kHalf, 0);  // whose half fits
  read(at::kBFloat16, 2);
}

TEST(Load, FillsABufferThatIsExpanded) {
  const TemporaryFolder folder;
  comm::run_ranks(1, [&](comm::World& world) {
    torch::nn::Module saved, expanded, another;
    saved.register_buffer("ids", at::arange(5).expand({3, 5}));
    expanded.register_buffer("ids", at::zeros({5}, at::kLong).expand({3, 5}));
    const auto checkpoint = save(folder.path(), 1, saved, world.group());
    load(checkpoint, expanded);
    const at::Tensor ids = expanded.named_buffers()["ids"];
    EXPECT_TRUE(at::equal(ids, at::arange(5).expand({3, 5})));
    EXPECT_EQ(ids.strides(), at::IntArrayRef({0, 1}));
    another.register_buffer("ids", at::zeros({3, 1}, at::kLong).expand({3, 5}));
    EXPECT_THAT([&] { load(checkpoint, another); }, ThrowsMessage<ConfigError>(HasSubstr("ids' is expanded, one element in place of several")));
  });
}

TEST(Save, NamesTheTensorThatHasNoDtypeInAFile) {
  const TemporaryFolder folder;
  comm::run_ranks(1, [&](comm::World& world) {
    torch::nn::Module module;
    module.register_buffer("phases", at::ones({3}, at::kComplexFloat));
    EXPECT_THAT([&] { save(folder.path(), 1, module, world.group()); },
                ThrowsMessage<Error>(HasSubstr("phases' cannot be saved: dtype ComplexFloat has no safetensors name")));
  });
}

TEST(FindLatest, BelievesNoFolderByItsName) {
  const TemporaryFolder folder;
  for (const int64_t step : {2, 4}) save_with(Layout::Rows, 2, folder.path(), step);
  fs::copy(folder / "step-00000002", folder / "step-00000050", fs::copy_options::recursive);
  const auto latest = find_latest(folder.path());
  EXPECT_EQ(latest.folder->filename(), "step-00000004");
  EXPECT_THAT(latest.skipped, testing::ElementsAre(AllOf(HasSubstr("step-00000050: holds step 2"), HasSubstr("rename it to step-00000002"))));
  EXPECT_FALSE(written_checkpoints(folder.path()).back().writer) << "nor does it count as one of the newest that are kept";
}

/// Saves one that records a loss which is no number; of `not_finite` false, one that is.
void save_lost(const fs::path& dir, int64_t step, bool not_finite = true) {
  auto state = state_of(Layout::Rows, 1, 0, step);
  state.progress["replay"] = {{"not_finite", not_finite}};
  save(dir, state, comm::Group::self());
}

TEST(FindLatest, PassesOverWhatMakesNoNumber) {
  const TemporaryFolder folder;
  save_lost(folder.path(), 2, false);
  save_lost(folder.path(), 4);
  for (const auto thoroughness : {Thoroughness::Sizes, Thoroughness::Hashes}) {
    const auto latest = find_latest(folder.path(), thoroughness);
    EXPECT_EQ(latest.folder->filename(), "step-00000002");
    EXPECT_THAT(latest.skipped, testing::ElementsAre(AllOf(HasSubstr("step-00000004: the loss that it recorded"), HasSubstr("is not finite"))));
  }
  EXPECT_EQ(problem_with(folder / "step-00000004", Thoroughness::Hashes), std::nullopt) << "it is whole";
  constexpr auto any_step = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(find_latest(folder.path(), Thoroughness::Sizes, any_step, /*verify=*/false).folder->filename(), "step-00000004") << "asked for";
  auto state = state_of(Layout::Rows, 1, 0, 5);
  state.progress["replay"] = {"of", "somebody's own"};
  save(folder.path(), state, comm::Group::self());
  EXPECT_EQ(find_latest(folder.path()).folder->filename(), "step-00000005");
  // Of builds that did not mark it.
  const auto loss = [](double value) { return nlohmann::json{{"index", 0}, {"bits", std::bit_cast<uint64_t>(value)}}; };
  const double none = std::numeric_limits<double>::quiet_NaN();
  auto older = state_of(Layout::Rows, 1, 0, 6);
  older.progress["replay"] = {{"losses", {loss(none), loss(1.5)}}};
  save(folder.path(), older, comm::Group::self());
  older = state_of(Layout::Rows, 1, 0, 7);
  older.progress["replay"] = {{"losses", {loss(none), loss(none)}}};
  save(folder.path(), older, comm::Group::self());
  EXPECT_EQ(find_latest(folder.path()).folder->filename(), "step-00000006");
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

TEST(FindLatest, LooksBelowAStep) {
  const TemporaryFolder folder;
  for (const int64_t step : {3, 7}) save_with(Layout::Rows, 1, folder.path(), step);
  EXPECT_EQ(find_latest(folder.path(), Thoroughness::Sizes, 8).folder->filename(), "step-00000007");
  EXPECT_EQ(find_latest(folder.path(), Thoroughness::Sizes, 7).folder->filename(), "step-00000003");
  EXPECT_FALSE(find_latest(folder.path(), Thoroughness::Sizes, 3).folder);
}

TEST(HashShare, EveryByteIsReadByExactlyOneOfThoseWhoShare) {
  const TemporaryFolder folder;
  const auto checkpoint = save_with(Layout::Rows, 3, folder.path());
  const Manifest manifest = read_manifest(checkpoint);
  for (const int parts : {1, 2, 3, 5, 8}) {
    std::map<int, uint64_t> bytes;
    uint64_t whole = 0;
    for (const auto& [name, tensor] : manifest.tensors) {
      for (const auto& slice : tensor.slices) {
        const TensorEntry entry = SafetensorsFile(checkpoint / slice.file).entry(slice.key);
        flip_byte(checkpoint / slice.file, entry.offset);
        std::vector<int> found;
        for (int index = 0; index < parts; ++index) {
          if (problem_with(checkpoint, Thoroughness::Hashes, {index, parts})) found.push_back(index);
        }
        flip_byte(checkpoint / slice.file, entry.offset);
        ASSERT_EQ(found.size(), 1) << name << " of " << parts;
        bytes[found.front()] += entry.bytes;
        whole += entry.bytes;
      }
    }
    const uint64_t largest = 9 * 6 * 4;  // a rank's rows of "big"
    for (const auto& [index, read] : bytes) EXPECT_LE(read, whole / static_cast<uint64_t>(parts) + largest) << index << " of " << parts;
  }
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
  const auto pruned = [&](int64_t keep, const PruneOptions& options = {}) {
    const auto gone = prune(folder.path(), keep, options).gone;
    remove_pruned(gone);
    return gone;
  };
  EXPECT_EQ(pruned(0).size(), 1);
  EXPECT_EQ(names().size(), 4) << "0 keeps all, and only leftovers go";
  EXPECT_EQ(pruned(2).size(), 2);
  EXPECT_EQ(names(), (std::set<std::string>{"step-00000003", "step-00000004"}));
  fs::remove(folder / "step-00000004/manifest.json");
  EXPECT_THAT(pruned(1), IsEmpty()) << "3 is the last good one";
  save_with(Layout::Rows, 1, folder.path(), 4);
  const auto written = folder / "step-00000004" / "rank-00000-of-00001.safetensors";
  flip_byte(written, fs::file_size(written) - 1);
  EXPECT_THAT(pruned(1), IsEmpty()) << "4 has its size, but not its bytes";
  save_with(Layout::Rows, 1, folder.path(), 5);
  pruned(1);
  EXPECT_EQ(names(), (std::set<std::string>{"step-00000005"}));
  EXPECT_THAT(prune(folder / "missing", 1).gone, IsEmpty());
}

TEST(Prune, LeavesFoldersThatHoldWhatNoSaveWrote) {
  const TemporaryFolder folder;
  for (const int64_t step : {1, 2, 3}) save_with(Layout::Rows, 1, folder.path(), step);
  write_all(folder / "step-00000002" / "mine.txt", "precious");
  fs::create_directories(folder / ".tmp-step-00000008" / "mine");
  const auto pruned = prune(folder.path(), 1);
  remove_pruned(pruned.gone);
  EXPECT_FALSE(fs::exists(folder / "step-00000001"));
  EXPECT_EQ(read_all(folder / "step-00000002" / "mine.txt"), "precious");
  EXPECT_TRUE(fs::exists(folder / ".tmp-step-00000008" / "mine"));
  EXPECT_THAT(pruned.kept, ElementsAre(HasSubstr(".tmp-step-00000008: holds mine, which"), HasSubstr("step-00000002: holds mine.txt, which")));
  EXPECT_THAT(foreign_leftover(folder.path()).value(), HasSubstr(".tmp-step-00000008: holds mine"));
  expect_loads(folder / "step-00000002", Layout::Replicated, 1);
}

TEST(Save, LeavesWhatNoSaveWrote) {
  const TemporaryFolder folder;
  fs::create_directories(folder / ".tmp-step-00000008");
  write_all(folder / ".tmp-step-00000008" / "mine.txt", "precious");
  EXPECT_THAT([&] { save_with(Layout::Rows, 2, folder.path(), 8); },
              ThrowsMessage<std::runtime_error>(HasSubstr(".tmp-step-00000008: holds what no save writes (mine.txt)")));
  EXPECT_EQ(read_all(folder / ".tmp-step-00000008" / "mine.txt"), "precious");
  fs::rename(folder / ".tmp-step-00000008", folder / "step-00000008");
  ::testing::internal::CaptureStderr();
  save_with(Layout::Rows, 2, folder.path(), 8);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("step-00000008: is not of the run that saves"), HasSubstr("set aside in"), HasSubstr("set-aside-1")));
  EXPECT_EQ(read_all(folder / "set-aside-1" / "step-00000008" / "mine.txt"), "precious") << "a step that takes its place sets it aside";
  expect_loads(folder / "step-00000008", Layout::Replicated, 1);
}

TEST(Prune, WhatMakesNoNumberPushesNothingOut) {
  const TemporaryFolder folder;
  const auto left = [&](int64_t keep) {
    remove_pruned(prune(folder.path(), keep, {}).gone);
    std::set<int64_t> steps;
    for (const auto& [step, path] : checkpoint_folders(folder.path())) steps.insert(step);
    return steps;
  };
  for (const int64_t step : {1, 2}) save_with(Layout::Rows, 1, folder.path(), step);
  for (const int64_t step : {3, 4, 5}) save_lost(folder.path(), step);
  EXPECT_EQ(left(2), (std::set<int64_t>{1, 2, 5})) << "of those that make none, the newest stays beside";
  EXPECT_EQ(left(1), (std::set<int64_t>{2, 5}));
  save_with(Layout::Rows, 1, folder.path(), 6);
  EXPECT_EQ(left(1), (std::set<int64_t>{6}));
}

TEST(Prune, CountsAndTakesOnlyWhatLiesOnTheRunsLine) {
  const TemporaryFolder folder;
  const auto first = RunIdentity::fresh(), second = first.continued(2), other = RunIdentity::fresh();
  const auto write = [&](int64_t step, const RunIdentity& run) {
    auto state = state_of(Layout::Rows, 1, 0, step);
    state.run = run;
    save(folder.path(), state, comm::Group::self());
  };
  for (const int64_t step : {1, 2}) write(step, first);
  write(3, first);  // abandoned: the second start went back behind it
  for (const int64_t step : {4, 5}) write(step, second);
  for (const int64_t step : {6, 7}) write(step, other);
  std::set<std::string> left;
  remove_pruned(prune(folder.path(), 2, {.run = second, .known = {5}}).gone);
  for (const auto& entry : fs::directory_iterator(folder.path())) left.insert(entry.path().filename());
  EXPECT_EQ(left, (std::set<std::string>{"step-00000003", "step-00000004", "step-00000005", "step-00000006", "step-00000007"}));
}

TEST(RunIdentity, KnowsItsLineFromThoseBesideIt) {
  const auto first = RunIdentity::fresh(), second = first.continued(10), third = second.continued(20), beside = first.continued(10);
  EXPECT_TRUE(first.holds(first, 99));
  EXPECT_TRUE(third.holds(first, 10));
  EXPECT_FALSE(third.holds(first, 15)) << "left behind when the second went back to 10";
  EXPECT_TRUE(third.holds(second, 20));
  EXPECT_FALSE(third.holds(beside, 12));
  EXPECT_FALSE(third.holds(RunIdentity::fresh(), 5));
  EXPECT_TRUE(third.descends_from(first, 10));
  EXPECT_FALSE(first.descends_from(first, 10));
  EXPECT_EQ(run_identity_from(to_json(third)), third);
  const auto launched = RunIdentity::fresh("one job").continued(10, "another");
  EXPECT_EQ(launched.job, "another") << "of whoever wrote it";
  EXPECT_EQ(run_identity_from(to_json(launched)), launched);
  auto older = to_json(launched);
  older.erase("job");
  EXPECT_EQ(run_identity_from(older).job, "") << "older versions wrote none";
  EXPECT_TRUE(RunIdentity().holds(RunIdentity(), 5)) << "older versions wrote none";
}

TEST(RunIdentity, ACheckpointOfAnotherRunGivesWayWhole) {
  const TemporaryFolder folder;
  auto state = state_of(Layout::Rows, 1, 0, 4);
  state.run = RunIdentity::fresh();
  save(folder.path(), state, comm::Group::self());
  const auto before = read_all(folder / "step-00000004" / "manifest.json");
  state.run = RunIdentity::fresh();
  save(folder.path(), state, comm::Group::self());
  EXPECT_EQ(read_all(folder / "set-aside-1" / "step-00000004" / "manifest.json"), before);
  EXPECT_EQ(read_manifest(folder / "step-00000004").run, state.run);
}

/// For want of permission, or of a disk that answers: it may be anybody's.
TEST(RunIdentity, ACheckpointWhoseManifestCannotBeReachedStays) {
  const TemporaryFolder folder;
  const auto state = state_of(Layout::Rows, 1, 0, 4);
  save(folder.path(), state, comm::Group::self());
  const auto manifest = folder / "step-00000004" / "manifest.json", kept = folder / "step-00000004" / "kept.json";
  fs::rename(manifest, kept);
  const auto before = read_all(kept);
  fs::create_symlink("manifest.json", manifest);  // a link to itself, which nobody can open
  EXPECT_THAT([&] { save(folder.path(), state, comm::Group::self()); }, ThrowsMessage<std::runtime_error>(HasSubstr("symbolic links")));
  EXPECT_EQ(read_all(kept), before);
}

TEST(Deal, BuffersAreAllOfTheFirstRankThatHoldsThem) {
  std::vector<std::vector<HeldSlice>> held(3);
  for (size_t rank = 0; rank < 3; ++rank) {
    for (int i = 0; i < 6; ++i) held[rank].push_back({Slice::whole("model.w" + std::to_string(i), {8}), "F32", 32});
    for (int i = 0; i < 6; ++i) held[rank].push_back({Slice::whole("buffer.b" + std::to_string(i), {8}), "F32", 32});
    if (rank > 0) held[rank].push_back({Slice::whole("buffer.later", {8}), "F32", 32});
  }
  const auto dealt = deal(held);
  std::vector<std::set<std::string>> buffers(3);
  for (size_t rank = 0; rank < 3; ++rank) {
    for (const size_t i : dealt[rank]) {
      if (held[rank][i].slice.name.starts_with("buffer.")) buffers[rank].insert(held[rank][i].slice.name);
    }
  }
  EXPECT_EQ(buffers[0].size(), 6);
  EXPECT_EQ(buffers[1], std::set<std::string>{"buffer.later"});
  EXPECT_THAT(buffers[2], IsEmpty());
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

/// Ranks of which each has a part of the model: how often a part was updated is known on its rank alone.
TEST(TrainingTensors, OfStagesAreThoseOfTheWholeAndBack) {
  const TemporaryFolder folder;
  struct Part : torch::nn::Module {
    explicit Part(const std::vector<std::string>& names) {
      for (const auto& name : names) register_module(name, torch::nn::Linear(3, 3));
    }
  };
  const auto step = [](const torch::nn::Module& model, optim::Optimizer& optimizer) {
    for (const auto& parameter : nn::unique_parameters(model)) at::Tensor(parameter.tensor).mutable_grad() = at::ones_like(parameter.tensor);
    optimizer.step(0.1);
  };
  const std::vector<std::string> names{"first", "second"};
  comm::run_ranks(2, [&](comm::World& world) {
    const Part part({names[static_cast<size_t>(world.rank())]});
    const auto optimizer = optim::make_optimizer(OptimConfig(), nn::unique_parameters(part));
    step(part, *optimizer);
    save(folder.path(), 1, part, *optimizer, world.group());
  });
  const auto saved = *find_latest(folder.path()).folder;
  const Part whole(names);
  const auto optimizer = optim::make_optimizer(OptimConfig(), nn::unique_parameters(whole));
  load(saved, whole, *optimizer);
  for (const auto& [name, count] : optimizer->update_counts()) EXPECT_EQ(count, 1) << name;

  const Part second({"second"});
  const auto of_second = optim::make_optimizer(OptimConfig(), nn::unique_parameters(second));
  EXPECT_THAT([&] { load(saved, second, *of_second); }, ThrowsMessage<ConfigError>(HasSubstr("extra model.first.weight")));
  LoadOptions options;
  for (const auto& [name, stored] : read_manifest(saved).tensors) options.expected.push_back(name);
  load(saved, second, *of_second, options);
  EXPECT_EQ(of_second->update_counts(), (std::map<std::string, int64_t>{{"second.bias", 1}, {"second.weight", 1}}));
  EXPECT_TRUE(at::equal(second.named_parameters()["second.weight"], whole.named_parameters()["second.weight"]));

  const Part more({"first", "second", "third"});
  const auto of_more = optim::make_optimizer(OptimConfig(), nn::unique_parameters(more));
  const at::Tensor before = more.named_parameters()["first.weight"].detach().clone();
  EXPECT_THAT([&] { load(saved, more, *of_more); }, ThrowsMessage<ConfigError>(HasSubstr("third.weight")));
  EXPECT_TRUE(at::equal(more.named_parameters()["first.weight"], before));
}

/// Of a model that lies in stages rank 0 holds the first alone.
TEST(Save, RefusesAnotherModelThatDiffersOnALaterRank) {
  const TemporaryFolder folder;
  const auto held = [&](const comm::World& world, const std::string& name, int64_t size) {
    const std::string parameter = world.rank() == 0 ? "model.first" : "model." + name;
    CheckpointState state;
    state.step = 1;
    state.tensors.push_back({at::ones({size}), Slice::whole(parameter, {size})});
    return state;
  };
  comm::run_ranks(2, [&](comm::World& world) {
    const auto write = [&](const std::string& name, int64_t size = 3) { save(folder.path(), held(world, name, size), world.group()); };
    write("second");
    EXPECT_THAT([&] { write("other"); }, ThrowsMessage<Error>(HasSubstr("which has no 'model.other'")));
    EXPECT_THAT([&] { write("first"); }, ThrowsMessage<Error>(HasSubstr("which has 'model.second', where this save has none")));
    EXPECT_NO_THROW(write("second"));
  });
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1) << "nothing stays of what was refused";
}

/// A parameter that was frozen has no state in the checkpoint, and had none to go on with.
TEST(TrainingTensors, GoBackToBeforeAParameterWasTrained) {
  const TemporaryFolder folder;
  const auto step = [](const Model& model, optim::Optimizer& optimizer, int number) {
    for (const auto& parameter : nn::unique_parameters(model)) {
      if (parameter.tensor.requires_grad()) at::Tensor(parameter.tensor).mutable_grad() = at::full_like(parameter.tensor, number);
    }
    optimizer.step(0.1);
  };
  const auto freeze = [](const Model& model, bool frozen) {
    for (const auto& parameter : nn::unique_parameters(model)) {
      if (parameter.name.starts_with("norm")) at::Tensor(parameter.tensor).requires_grad_(!frozen).mutable_grad() = at::Tensor();
    }
  };
  Model model;
  freeze(model, true);
  const auto optimizer = optim::make_optimizer({}, nn::unique_parameters(model));
  step(model, *optimizer, 1);
  const auto saved = save(folder.path(), 1, model, *optimizer, comm::Group::self());
  freeze(model, false);
  step(model, *optimizer, 2);
  std::vector<at::Tensor> once;
  for (const auto& parameter : nn::unique_parameters(model)) once.push_back(parameter.tensor.detach().clone());
  step(model, *optimizer, 3);
  load(saved, model, *optimizer);
  EXPECT_EQ(optimizer->update_counts().at("norm.bias"), 0);
  step(model, *optimizer, 2);
  size_t i = 0;
  for (const auto& parameter : nn::unique_parameters(model)) EXPECT_TRUE(at::equal(parameter.tensor, once[i++])) << parameter.name;

  Model fresh;  // whose optimizer is made before it freezes
  const auto other = optim::make_optimizer({}, nn::unique_parameters(fresh));
  load(saved, fresh, *other);
  EXPECT_EQ(other->update_counts().at("norm.bias"), 0);
}

/// libtorch's parameters() lists a tied one by each of its names.
TEST(TorchOptimizer, TiedParametersAreSavedOnce) {
  const TemporaryFolder folder;
  const Model model;
  ASSERT_EQ(model.parameters().size(), nn::unique_parameters(model).size() + 1);
  torch::optim::Adam optimizer(model.parameters()), resumed(model.parameters());
  for (const auto& parameter : model.parameters()) at::Tensor(parameter).mutable_grad() = at::ones_like(parameter);
  optimizer.step();
  const auto saved = save(folder.path(), 1, model, optimizer, comm::Group::self());
  load(saved, model, resumed);
  EXPECT_EQ(resumed.state().size(), nn::unique_parameters(model).size());
}

/// Gradients of reduce_dtype = kFloat.
TEST(TorchOptimizer, AMomentumThatIsWiderThanItsParameterComesBack) {
  const TemporaryFolder folder;
  torch::nn::Linear model(3, 2);
  model->to(at::kBFloat16);
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  torch::optim::SGD optimizer(model->parameters(), options), resumed(model->parameters(), options);
  for (const auto& parameter : model->parameters()) {
    auto state = std::make_unique<torch::optim::SGDParamState>();
    state->momentum_buffer(at::full(parameter.sizes(), 1 + 1e-6, at::kFloat));
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
  load(save(folder.path(), 1, *model, optimizer, comm::Group::self()), *model, resumed);
  for (const auto& parameter : model->parameters()) {
    const auto& state = static_cast<torch::optim::SGDParamState&>(*resumed.state().at(parameter.unsafeGetTensorImpl()));
    EXPECT_TRUE(at::equal(state.momentum_buffer(), at::full(parameter.sizes(), 1 + 1e-6, at::kFloat)));
  }
}

/// As optim.state_dtype = bf16 keeps it: in bf16 what libtorch's AdamW multiplies by 0.999 stays as it is.
TEST(TorchOptimizer, StateThatIsNarrowerThanItsParameterIsWidened) {
  const TemporaryFolder folder;
  torch::nn::Linear model(3, 2);
  torch::optim::AdamW optimizer(model->parameters()), resumed(model->parameters());
  for (const auto& parameter : model->parameters()) {
    auto state = std::make_unique<torch::optim::AdamWParamState>();
    state->step(3);
    state->exp_avg(at::full(parameter.sizes(), 0.75, at::kBFloat16));
    state->exp_avg_sq(at::full(parameter.sizes(), 0.5, at::kBFloat16));
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
  const auto report = load(save(folder.path(), 1, *model, optimizer, comm::Group::self()), *model, resumed).report;
  EXPECT_EQ(report.converted.at("optimizer.exp_avg_sq.weight"), "BF16 -> F32");
  for (const auto& parameter : model->parameters()) at::Tensor(parameter).mutable_grad() = at::zeros_like(parameter);
  resumed.step();
  for (const auto& parameter : model->parameters()) {
    const auto& state = static_cast<torch::optim::AdamWParamState&>(*resumed.state().at(parameter.unsafeGetTensorImpl()));
    EXPECT_TRUE(at::allclose(state.exp_avg_sq(), at::full(parameter.sizes(), 0.5 * 0.999))) << state.exp_avg_sq();
    EXPECT_TRUE(at::allclose(state.exp_avg(), at::full(parameter.sizes(), 0.75 * 0.9)));
  }
}

/// Muon's buffer has the name of SGD's.
TEST(TorchOptimizer, StateOfAnotherKindIsNeverTaken) {
  const TemporaryFolder folder;
  const torch::nn::Linear model(3, 2);
  OptimConfig config;
  config.name = "sgd";
  config.momentum = 0.9;
  config.groups = {"weight: name = muon"};
  const auto ours = optim::make_optimizer(config, nn::unique_parameters(*model), optim::whole_model(*model));
  for (const auto& parameter : model->parameters()) at::Tensor(parameter).mutable_grad() = at::ones_like(parameter);
  ours->step(0.1);
  const auto saved = save(folder.path(), 1, *model, *ours, comm::Group::self());
  torch::optim::SGD theirs(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  EXPECT_THAT([&] { load(saved, *model, theirs); }, ThrowsMessage<ConfigError>(HasSubstr("'weight' was updated by muon, and here it is by sgd")));
  load(saved, *model, theirs, {.partial = {"weight"}});
  EXPECT_EQ(theirs.state().count(model->weight.unsafeGetTensorImpl()), 0U);
  EXPECT_EQ(theirs.state().count(model->bias.unsafeGetTensorImpl()), 1U);
  theirs.step();
  ASSERT_EQ(theirs.state().count(model->weight.unsafeGetTensorImpl()), 1U);
  load(saved, *model, theirs, {.partial = {"weight"}});
  EXPECT_EQ(theirs.state().count(model->weight.unsafeGetTensorImpl()), 0U) << "begins anew, also where it has stepped here";
}

/// libtorch keeps nothing of a parameter that was frozen, nor of any with SGD without momentum.
TEST(TorchOptimizer, WhatNothingIsKeptOfCountsFromZeroInOurs) {
  const TemporaryFolder folder;
  const torch::nn::Linear model(3, 2), fresh(3, 2);
  model->bias.requires_grad_(false);
  for (const std::string name : {"adamw", "sgd"}) {
    std::unique_ptr<torch::optim::Optimizer> theirs;
    if (name == "adamw") theirs = std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(0.1));
    if (name == "sgd") theirs = std::make_unique<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.1));
    at::Tensor(model->weight).mutable_grad() = at::ones_like(model->weight);
    theirs->step();
    OptimConfig config;
    config.name = name;
    const auto ours = optim::make_optimizer(config, nn::unique_parameters(*fresh));
    for (const auto& parameter : fresh->parameters()) at::Tensor(parameter).mutable_grad() = at::ones_like(parameter);
    ours->step(0.1);
    load(save(folder / name, 1, *model, *theirs, comm::Group::self()), *fresh, *ours);
    EXPECT_EQ(ours->update_counts().at("weight"), name == "adamw" ? 1 : 0);
    EXPECT_EQ(ours->update_counts().at("bias"), 0);
    EXPECT_TRUE(at::equal(fresh->weight, model->weight));
    for (const auto& held : ours->state())
      EXPECT_EQ(held.tensor.count_nonzero().item<int64_t>() > 0, held.parameter == "weight") << held.parameter << held.state;
  }
}

/// The other way round: what ours has not updated is no state that libtorch's needs, and Adagrad's own begins as it does.
TEST(TorchOptimizer, WhatHadNoUpdateIsNotMissed) {
  const TemporaryFolder folder;
  const torch::nn::Linear model(3, 2);
  model->bias.requires_grad_(false);
  OptimConfig config;
  config.name = "sgd";
  config.momentum = 0.9;
  const auto ours = optim::make_optimizer(config, nn::unique_parameters(*model));
  at::Tensor(model->weight).mutable_grad() = at::ones_like(model->weight);
  ours->step(0.1);
  torch::optim::SGD theirs(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  load(save(folder / "ours", 1, *model, *ours, comm::Group::self()), *model, theirs);
  EXPECT_EQ(theirs.state().count(model->weight.unsafeGetTensorImpl()), 1U);
  EXPECT_EQ(theirs.state().count(model->bias.unsafeGetTensorImpl()), 0U);

  const torch::nn::Linear other(2, 1);
  const torch::nn::Sequential both(model, other);
  torch::optim::Adagrad first({model->weight}), wider({model->weight, model->bias});
  torch::optim::AdamW second({model->bias, other->weight}), narrower({other->weight});
  load(save(folder / "both", 1, *both, Optimizers{first, second}, comm::Group::self()), *both, Optimizers{wider, narrower});
  EXPECT_EQ(wider.state().count(model->bias.unsafeGetTensorImpl()), 1U) << "which its next step reads";
}

/// A rate is of the optimizer that had it: a parameter that has moved to another keeps that one's.
TEST(TorchOptimizer, TakesNoRateOfAnotherKind) {
  const TemporaryFolder folder;
  const torch::nn::Linear first(3, 2), second(2, 1);
  const torch::nn::Sequential model(first, second);
  torch::optim::SGD biases({first->bias, second->bias}, torch::optim::SGDOptions(0.1));
  torch::optim::AdamW weights({first->weight, second->weight}, torch::optim::AdamWOptions(0.02));
  const auto saved = save(folder.path(), 1, *model, Optimizers{biases, weights}, comm::Group::self());
  torch::optim::SGD one({second->bias}, torch::optim::SGDOptions(0.3));
  torch::optim::AdamW others({first->bias, first->weight, second->weight}, torch::optim::AdamWOptions(0.5));
  load(saved, *model, Optimizers{one, others});
  EXPECT_EQ(one.param_groups()[0].options().get_lr(), 0.1);
  EXPECT_EQ(others.param_groups()[0].options().get_lr(), 0.02);
}

/// What was trained is the masters; what a program wrote since the last update is as it wrote it, for whoever takes the weights in another type.
TEST(TrainingTensors, OfAnotherTypeFollowWhatWasWrittenSinceTheLastUpdate) {
  const TemporaryFolder folder;
  const at::Tensor master = at::full({2, 3}, 0.3F), written = master.to(at::kHalf);
  written[1].fill_(0.2998F);
  at::Tensor expected = master.clone();
  expected[1].copy_(written[1]);
  ASSERT_FALSE(at::equal(expected, master));
  CheckpointState state;
  state.tensors = {{written, Slice::whole("model.weight", {2, 3})}, {master, Slice::whole("optimizer.master.weight", {2, 3})}};
  state.optimizer = {{"kind", "sgd"}, {"update_counts", {{"weight", 3}}}};
  const auto saved = save(folder.path(), state, comm::Group::self());
  const LoadOptions options{.convert = true};
  OptimConfig config;
  config.name = "sgd";
  torch::nn::Linear wide(torch::nn::LinearOptions(3, 2).bias(false)), alone(torch::nn::LinearOptions(3, 2).bias(false));
  const auto optimizer = optim::make_optimizer(config, nn::unique_parameters(*wide));
  load(saved, *wide, *optimizer, options);
  EXPECT_TRUE(at::equal(wide->weight, expected)) << wide->weight;
  load(saved, *alone, options);
  EXPECT_TRUE(at::equal(alone->weight, expected)) << "a model alone takes the same";

  at::Tensor(wide->weight).data().fill_(7);
  EXPECT_TRUE(load(saved, *wide, *optimizer, {.partial = {"weight"}}).report.fresh.contains("model.weight"));
  EXPECT_TRUE(at::equal(wide->weight, at::full({2, 3}, 7.F))) << "what stays as it was takes nothing of its master";
}

/// A run that compressed its gradients saves what it left behind; whoever wants weights and optimizer state does not have to know of it.
TEST(TrainingTensors, OfARunWithACommunicationHookAreRead) {
  const TemporaryFolder folder;
  const Model model;
  const auto optimizer = optim::make_optimizer(OptimConfig{}, nn::unique_parameters(model));
  for (const auto& parameter : nn::unique_parameters(model)) at::Tensor(parameter.tensor).mutable_grad() = at::ones_like(parameter.tensor);
  optimizer->step(0.1);
  CheckpointState state{.step = 1, .optimizer = optimizer_json(*optimizer)};
  add_training_tensors(state, model, *optimizer);
  state.tensors.push_back({at::ones({2, 3}), Slice::whole("hook.powersgd.error.linear.weight", {2, 3})});
  const auto saved = save(folder.path(), state, comm::Group::self());
  const auto expect_read = [&](const auto& load_into) {
    const Model other;
    load_into(other);
    EXPECT_TRUE(at::equal(other.named_parameters()["linear.weight"], model.named_parameters()["linear.weight"]));
  };
  expect_read([&](const Model& other) { load(saved, other); });
  expect_read([&](const Model& other) { load(saved, other, *optim::make_optimizer(OptimConfig{}, nn::unique_parameters(other))); });
  expect_read([&](const Model& other) {
    torch::optim::AdamW theirs(other.parameters());
    load(saved, other, theirs);
  });
}

}  // namespace
}  // namespace tessera::checkpoint
