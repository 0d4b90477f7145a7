#include "tessera/checkpoint/checkpoint.h"

#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

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

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;
namespace fs = std::filesystem;

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

TEST(Save, NamesTheTensorThatHasNoDtypeInAFile) {
  const TemporaryFolder folder;
  comm::run_ranks(1, [&](comm::World& world) {
    torch::nn::Module module;
    module.register_buffer("phases", at::ones({3}, at::kComplexFloat));
    EXPECT_THAT([&] { save(folder.path(), 1, module, world.group()); },
                ThrowsMessage<Error>(HasSubstr("phases' cannot be saved: dtype ComplexFloat has no safetensors name")));
  });
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

}  // namespace
}  // namespace tessera::checkpoint
