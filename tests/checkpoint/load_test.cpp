#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/checkpoint/checkpoint.h"
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

/// What is read of a checkpoint, and what is refused: damage, other models, what is missing.
namespace tessera::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;
namespace fs = std::filesystem;

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

}  // namespace
}  // namespace tessera::checkpoint
