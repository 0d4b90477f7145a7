// A model that was trained in any layout is read in any other: the same text is written, and the same loss found, whatever its layers are cut over.

#include <algorithm>
#include <condition_variable>
#include <fstream>
#include <mutex>

#include <gmock/gmock.h>

#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/meeting/disagreement.h"
#include "tessera/core/error.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/kv_cache.h"
#include "tessera/models/parallel_plans.h"
#include "tessera/nn/adapter_names.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/meta.h"
#include "tessera/train/evaluate.h"
#include "tessera/train/generate.h"
#include "tessera/train/load_model.h"
#include "tessera/train/reading.h"
#include "tessera/train/trainer.h"
#include "tests/comm/order_alone.h"
#include "tests/refusal.h"
#include "tests/test_device.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Sets = std::vector<std::string>;

const std::string kBySequence = "tensor.sequence_parallel=true";

class Reading : public testing_support::TrainFixture {
 protected:
  /// Trains on `ranks` ranks and leaves a checkpoint in checkpoints(), or a folder of that name.
  void train_and_save(const std::string& family, int ranks, Sets sets, const std::string& into = "checkpoints") const {
    sets.insert(sets.end(), {"checkpoint.dir=" + (folder_ / into).string(), "run.steps=20", "run.threads=1", "batch.global_size=4", "batch.micro_size=1"});
    const Config settings = config(family, sets);
    comm::run_ranks(ranks, [&](comm::World& world) {
      validate(settings, world.size());
      Trainer(settings, world, open_inputs(settings)).run();
    });
  }
  std::string checkpoints() const { return (folder_ / "checkpoints").string(); }
  FoundModel found(Sets sets = {}, const std::string& in = "checkpoints") const {
    sets.insert(sets.end(), {"run.threads=1", "data.cache_dir=" + (folder_ / "cache").string()});
    return find_model({.from_hf = {}, .checkpoint = folder_ / in}, sets);
  }

  struct Read {
    std::vector<std::vector<int64_t>> greedy, drawn;
    double loss = 0;
  };

  /// What `ranks` ranks together make of the checkpoint, in the order of its default mesh: 20 tokens after prompts of several lengths (more than max_seq_len,
  /// so that the context is cut), some of which a token ends, and the loss.
  Read read(int ranks, const Sets& sets, const std::string& backend = "auto") const {
    const FoundModel model = found(sets);
    const auto text = corpus(model.config);
    std::vector<Read> all(static_cast<size_t>(ranks));
    const auto body = [&](comm::World& world) {
      RankScope scope(model.config, world.local_size());
      const Mesh mesh(world, mesh_shape(model.config.mesh, 0, ranks));
      const MeshRoles roles = mesh_roles(model.config);
      const auto loaded = load_model(model, reading_groups(model.config, mesh));
      ForwardEngine engine(loaded);
      const auto write = [&](const std::vector<std::string>& prompts, const SampleOptions& sample, std::optional<int64_t> end = {}) {
        std::vector<TextRequest> texts;
        for (const std::string& prompt : prompts) {
          texts.push_back({.prompt = {prompt.begin(), prompt.end()}, .sample = sample});
          texts.back().sample.seed += texts.size();
        }
        return generate(engine, texts, {.max_new_tokens = 20, .end_of_text = end});
      };
      const SampleOptions drawn{.temperature = 1.5, .top_k = 40, .top_p = 0.99, .seed = 5};
      all[static_cast<size_t>(world.rank())] = {write({"the"}, {.temperature = 0}), write({"the", "a", "the thethe the thethe", "abc"}, drawn, 'g'),
                                                evaluate(engine, text, model.config.data.seq_len, 77, mesh[roles.batch]).loss};
    };
    comm::run_ranks(ranks, body, {.decorators = decorators_, .backend = backend});
    for (const Read& other : all) {
      EXPECT_EQ(other.greedy, all[0].greedy);
      EXPECT_EQ(other.drawn, all[0].drawn);
      EXPECT_EQ(other.loss, all[0].loss);
    }
    return all[0];
  }

  void expect_read_alike(const std::vector<std::pair<int, Sets>>& layouts) const {
    const Read one = read(1, {});
    EXPECT_NE(one.greedy.front(), one.drawn.front());
    for (const auto& [ranks, sets] : layouts) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks " + (sets.empty() ? "" : sets.front()));
      const Read many = read(ranks, sets);
      EXPECT_EQ(many.greedy, one.greedy);
      EXPECT_EQ(many.drawn, one.drawn);
      EXPECT_NEAR(many.loss, one.loss, 5e-6 * one.loss);
    }
  }
};

TEST_F(Reading, LlamaThatWasCutTwoWays) {
  train_and_save("llama", 4, {"model.kv_heads=2", "mesh.tp=2", "mesh.dp_shard=2", "zero.stage=3", kBySequence});
  expect_read_alike(
      {{3, {"mesh.tp=3"}}, {4, {"mesh.tp=4"}}, {2, {"mesh.tp=2", kBySequence, "tensor.overlap=true"}}});  // with 3 and 4 ranks some share their keys
}

TEST_F(Reading, MixturesWhoseExpertsAreDealt) {
  train_and_save("mixtral", 4, {"model.experts=4", "model.shared_ffn_dim=24", "mesh.tp=2", "mesh.dp_shard=2", "mesh.ep=2", "mesh.expert_tp=2", "zero.stage=3"});
  expect_read_alike({{2, {"mesh.tp=2"}}, {2, {"mesh.tp=2", "mesh.ep=2", kBySequence}}, {4, {"mesh.tp=4", "mesh.ep=2", "mesh.expert_tp=2"}}});
}

TEST_F(Reading, Gpt2WithTiedEmbeddings) {
  train_and_save("gpt2", 3, {"model.tie_embeddings=true", "mesh.tp=3"});
  expect_read_alike({{2, {"mesh.tp=2"}}, {3, {"mesh.tp=3", kBySequence}}});
}

/// A prompt that is cut over ranks, of which each keeps the keys that it read; shorter than ranks, and longer than the model sees, too.
TEST_F(Reading, SequencesThatAreCut) {
  train_and_save("llama", 2, {"model.kv_heads=2", "mesh.cp=2"});
  expect_read_alike({{2, {"mesh.cp=2"}},
                     {4, {"mesh.cp=4", "context.method=all_gather", "context.balance=contiguous"}},
                     {5, {"mesh.cp=5", "context.method=all_gather"}},
                     {4, {"mesh.cp=2", "mesh.tp=2", kBySequence}},
                     {4, {"mesh.cp=2", "mesh.pp=2"}},
                     {4, {"mesh.cp=2", "mesh.dp_replicate=2"}}});
}

/// Keys that a window has passed are let go of, or, over ranks, not looked at.
TEST_F(Reading, Windows) {
  for (const char* window : {"model.sliding_window=1", "model.sliding_window=5"}) {
    train_and_save("llama", 2, {"model.kv_heads=2", "mesh.cp=2", window, "checkpoint.replace=true"});
    expect_read_alike({{2, {"mesh.cp=2"}},
                       {4, {"mesh.cp=4", "context.method=all_gather", "context.balance=head_tail"}},
                       {4, {"mesh.cp=2", "mesh.tp=2", kBySequence}},
                       {2, {"mesh.pp=2"}}});
  }
}

TEST_F(Reading, AMixtureThatWasShardedAndCutIntoStages) {
  train_and_save("mixtral", 4, {"model.kv_heads=2", "model.router=sigmoid", "mesh.pp=2", "mesh.dp_shard=2", "zero.stage=3"});
  expect_read_alike({{2, {"mesh.pp=2"}}, {3, {"mesh.pp=3"}}});
}

/// Stages compute what one device computes, in its order: the same bits, whoever is on the way beside.
TEST_F(Reading, StagesHaveTheBitsOfOneDevice) {
  train_and_save("llama", 2, {"model.layers=4", "model.kv_heads=2", "mesh.pp=2", "pipeline.schedule=interleaved", "pipeline.virtual_stages=2"});
  const Read one = read(1, {});
  const auto full = std::ranges::count_if(one.drawn, [](const auto& text) { return text.size() == 20; });
  EXPECT_TRUE(0 < full && full < std::ssize(one.drawn)) << "some texts end before others";
  const std::string looped = "pipeline.schedule=interleaved", v_shaped = "pipeline.schedule=zb_v", two = "pipeline.virtual_stages=2";
  const std::vector<std::pair<int, Sets>> layouts{{3, {"mesh.pp=3", "pipeline.split=[\"1\", \"4\", \"1\"]"}},
                                                  {5, {"mesh.pp=5"}},
                                                  {2, {"mesh.pp=2", looped, two}},
                                                  {3, {"mesh.pp=3", looped, two}},
                                                  {2, {"mesh.pp=2", v_shaped, two}}};
  for (const auto& [ranks, sets] : layouts) {
    SCOPED_TRACE(sets.front() + " " + sets.back());
    const Read many = read(ranks, sets);
    EXPECT_EQ(many.greedy, one.greedy);
    EXPECT_EQ(many.drawn, one.drawn);
    EXPECT_EQ(many.loss, one.loss);
  }
  EXPECT_EQ(read(3, {"mesh.pp=3"}, "gloo").drawn, one.drawn);
  decorators_ = {testing_support::order_alone()};  // tokens that were drawn do not meet the stream
  for (const auto& [ranks, sets] : layouts) {
    const Read many = read(ranks, sets);
    EXPECT_EQ(many.drawn, one.drawn) << sets.front() << " by order alone";
    EXPECT_EQ(many.loss, one.loss) << sets.front() << " by order alone";
  }
  read(2, {"mesh.pp=2"});
  read(4, {"mesh.pp=2", "mesh.cp=2"});
  read(4, {"mesh.pp=2", "mesh.tp=2", kBySequence, "tensor.overlap=true"});
}

TEST_F(Reading, StagesOfLayersThatAreCutAndCopiesOfThem) {
  train_and_save("gpt2", 2, {"model.tie_embeddings=true", "mesh.pp=2"});
  expect_read_alike(
      {{2, {"mesh.pp=2"}}, {4, {"mesh.pp=2", "mesh.tp=2"}}, {6, {"mesh.pp=3", "mesh.tp=2", kBySequence}}, {4, {"mesh.pp=2", "mesh.dp_replicate=2"}}});
  expect_read_alike({{2, {"mesh.pp=2", "pipeline.schedule=zb_v", "pipeline.virtual_stages=2"}}});  // both ends on one rank
}

/// The last stage does not go on before the first has begun with what comes next: where ranks wait for each other's passes, nobody would.
class Overtaking : public nn::Interceptor {
 public:
  struct Shared {
    std::mutex mutex;
    std::condition_variable moved;
    int first = 0, last = 0, late = 0;  ///< calls that each has begun; how many of the last stage's had to go on alone
  };
  Overtaking(Shared& shared, bool is_last, int calls) : shared_(shared), is_last_(is_last), calls_(calls) {}

  nn::Values call(nn::Module& /*module*/, nn::Values inputs, const nn::Next& next) override {
    std::unique_lock lock(shared_.mutex);
    ++(is_last_ ? shared_.last : shared_.first);
    shared_.moved.notify_all();
    const auto ahead = [&] { return shared_.first > shared_.last || shared_.last == calls_; };
    if (is_last_ && !shared_.moved.wait_for(lock, std::chrono::seconds(shared_.late == 0 ? 5 : 0), ahead)) ++shared_.late;
    lock.unlock();
    return next(std::move(inputs));
  }

 private:
  Shared& shared_;
  bool is_last_;
  int calls_;
};

TEST_F(Reading, RanksOfAPipelineWorkOnDifferentMicroBatches) {
  train_and_save("llama", 1, {"run.steps=1"});
  const FoundModel model = found({"mesh.pp=2"});
  const auto text = corpus(model.config);
  constexpr int kTexts = 2, kTokens = 12, kWindows = 30;
  Overtaking::Shared of_text, of_validation;
  const auto body = [&](comm::World& world) {
    RankScope scope(model.config, world.local_size());
    const auto loaded = load_model(model, {.stages = world.group()});
    ForwardEngine engine(loaded);
    const std::string block = world.rank() == 0 ? "layers.0" : "layers.1";
    const auto watch = [&](Overtaking::Shared& shared, int calls) {
      return nn::attach(*loaded.model, block, std::make_shared<Overtaking>(shared, world.rank() == 1, calls));
    };
    {
      const Attachment watched = watch(of_text, kTexts * kTokens);
      generate(engine, {{.prompt = {1, 2, 3}}, {.prompt = {4}}}, {.max_new_tokens = kTokens});
    }
    const Attachment watched = watch(of_validation, kWindows);
    const int64_t micro_size = (text->windows(16) + kWindows - 1) / kWindows;
    evaluate(engine, text, 16, micro_size, comm::Group::self());
  };
  comm::run_ranks(2, body);
  EXPECT_EQ(of_text.late, 0);
  EXPECT_EQ(of_text.last, kTexts * kTokens);
  EXPECT_EQ(of_validation.late, 0);
  EXPECT_EQ(of_validation.last, kWindows);
}

TEST_F(Reading, TextsWaitForAPlaceWhereMoreAreAskedForThanRanks) {
  train_and_save("llama", 1, {"run.steps=1"});
  const FoundModel model = found({"mesh.pp=2"});
  std::vector<std::vector<size_t>> heard(2);
  std::vector<TextRequest> texts;
  for (int64_t i = 1; i <= 5; ++i) texts.push_back({.prompt = {i}, .sample = {.seed = static_cast<uint64_t>(i)}});
  comm::run_ranks(2, [&](comm::World& world) {
    RankScope scope(model.config, world.local_size());
    const auto loaded = load_model(model, {.stages = world.group()});
    ForwardEngine engine(loaded);
    std::map<size_t, int> tokens;
    auto& mine = heard[static_cast<size_t>(world.rank())];
    const auto on_token = [&](size_t number, int64_t) {
      mine.push_back(number);
      return ++tokens[number] <= static_cast<int>(number);  // text i stops behind token i + 1
    };
    const auto made = generate(engine, texts, {.max_new_tokens = 4, .on_token = on_token});
    for (size_t i = 0; i < made.size(); ++i) EXPECT_EQ(made[i].size(), std::min<size_t>(i + 1, 4));
  });
  EXPECT_EQ(heard[0], heard[1]);
  EXPECT_THAT(heard[0], testing::ElementsAre(0, 1, 1, 2, 2, 3, 2, 3, 3, 4, 3, 4, 4, 4)) << "two at once, and the next where one has ended";
}

TEST_F(Reading, OnlyTheLastPositionsLogitsAreGathered) {
  constexpr int kRanks = 2;
  constexpr int64_t kVocabulary = 260, kRows = 3;
  const Config settings = config("llama", {"model.vocab_size=260"});
  comm::run_ranks(kRanks, [&](comm::World& world) {
    const auto records = std::make_shared<comm::Recorder>();
    const comm::Group group({.name = "tp", .rank = world.rank(), .size = kRanks, .timeout = std::chrono::seconds(60)},
                            comm::make_record_engine(records, {.name = "tp", .rank = world.rank(), .size = kRanks}, world.group().engine()));
    auto model = on_meta([&] { return make_model(settings.model); });
    const auto tensor = parallelize_module(*model, group, parallel_plan(*model, /*sequence_parallel=*/false), {.watch_terms = false});
    materialize(*model, 1, testing_support::test_device());
    KvCache cache(*model);
    const at::NoGradGuard no_grad;
    for (int64_t begin = 0; const int64_t columns : {5, 1}) {
      const size_t before = records->records().size();
      const KvCache::Reading reading(cache, 0, begin, columns);
      begin += columns;
      const std::optional<at::Tensor> none;
      const at::Tensor logits = nn::call(*model, at::ones({kRows, columns}, at::kLong), none, reading.positions(at::kCPU), none, true);
      EXPECT_EQ(logits.sizes(), (at::IntArrayRef{kRows, 1, kVocabulary}));
      const auto& all = records->records();
      int64_t head = 0, layers = 0;
      for (size_t i = before; i < all.size(); ++i) (all[i].site.starts_with("head") ? head : layers) += all[i].sent_bytes / 4;
      EXPECT_EQ(head, kRows * kVocabulary * (kRanks - 1) / kRanks);
      // The embedding, and attention and feed-forward of every layer: an all-reduce of b s h each.
      EXPECT_EQ(layers, (1 + 2 * settings.model.layers) * 2 * (kRanks - 1) * kRows * columns * settings.model.dim / kRanks);
    }
  });
}

/// An interface, a folder of another user's, threads: on the reader's host there may be none such.
TEST_F(Reading, TheMachineThatTrainedIsNotTheReaders) {
  train_and_save("llama", 1,
                 {"comm.backend=gloo", "comm.algorithm=ring", "comm.table=" + (folder_ / "table.json").string(), "comm.interface=ib7", "comm.timeout_s=77",
                  "log.dir=" + (folder_ / "log").string(), "run.memory_limit_bytes=100000000000", "run.deterministic=true"});
  const auto read = [&](const Sets& sets) { return find_model({.from_hf = {}, .checkpoint = checkpoints()}, sets).config; };
  Config own;
  own.comm.timeout_s = 77;
  resolve(own);
  const Config config = read({});
  EXPECT_EQ(config.comm, own.comm);
  EXPECT_EQ(config.data.cache_dir, own.data.cache_dir);
  EXPECT_EQ(config.log.dir, own.log.dir);
  EXPECT_EQ(config.run.threads, own.run.threads);
  EXPECT_EQ(config.run.memory_limit_bytes, own.run.memory_limit_bytes);
  EXPECT_FALSE(config.run.deterministic);
  EXPECT_EQ(read({"comm.interface=lo"}).comm.interface, "lo");
}

/// Experts of a part of the sequence would choose other tokens, and the loss be another.
TEST_F(Reading, ExpertsThatChooseReadWholeSequences) {
  const auto layout = [&](Sets sets, int ranks) {
    sets.insert(sets.end(), {"model.router=expert_choice", "model.experts=4"});
    return reading_layout(config("mixtral", sets), ranks);
  };
  EXPECT_EQ(layout({"mesh.tp=2"}, 2).tensor_ranks, 2);
  EXPECT_EQ(layout({"mesh.tp=2"}, 4).copies, 2);
  const auto refused = [&](const Sets& sets) { return testing_support::refusal([&] { layout(sets, 2); }); };
  EXPECT_THAT(refused({"mesh.cp=2"}), AllOf(HasSubstr("model.router = expert_choice: experts choose among all tokens"), HasSubstr("; set mesh.cp = 1")));
  EXPECT_THAT(refused({"mesh.tp=2", kBySequence}), HasSubstr("; set tensor.sequence_parallel = false"));
}

/// A run with checkpoint.keep goes on while its newest checkpoint is read.
TEST_F(Reading, ACheckpointThatIsRemovedGivesWayToTheNewestOfThen) {
  train_and_save("llama", 1, {"model.kv_heads=2", "checkpoint.every=10"});
  const std::filesystem::path newest = checkpoints() + "/step-00000020", elsewhere = folder_ / "elsewhere";
  const auto step_of = [](const FoundModel& model) { return model.checkpoint->manifest.step; };
  const auto read_by = [&](int ranks, const std::function<FoundModel(int rank)>& chosen, const std::function<void()>& meanwhile) {
    comm::run_ranks(ranks, [&](comm::World& world) {
      FoundModel model = chosen(world.rank());
      choose_together(model, world.group());
      EXPECT_EQ(step_of(model), 20);
      comm::barrier(world.group());
      if (world.rank() == 0) meanwhile();
      comm::barrier(world.group());
      RankScope scope(model.config, world.local_size());
      const Mesh mesh(world, mesh_shape(model.config.mesh, 0, ranks));
      const auto loaded = load_newest(model, reading_groups(model.config, mesh), at::kCPU, world.group());
      EXPECT_EQ(step_of(model), 10);
      FoundModel named;
      named.checkpoint = *model.checkpoint;
      named.config = model.config;
      const auto other = load_model(named, reading_groups(model.config, mesh));
      const auto targets = checkpoint::model_targets(*loaded.model), theirs = checkpoint::model_targets(*other.model);
      for (size_t i = 0; i < targets.size(); ++i) EXPECT_TRUE(at::equal(targets[i].tensor, theirs[i].tensor));
    });
  };
  const auto take_away = [&] { std::filesystem::rename(newest, elsewhere); };
  read_by(1, [&](int) { return found(); }, take_away);
  const FoundModel older = found({"mesh.tp=2"});
  std::filesystem::rename(elsewhere, newest);
  ASSERT_EQ(step_of(older), 10);
  read_by(2, [&](int rank) { return rank == 0 ? found({"mesh.tp=2"}) : older; }, take_away);

  std::filesystem::rename(elsewhere, newest);
  FoundModel named = find_model({.from_hf = {}, .checkpoint = newest}, {"run.threads=1"});
  take_away();
  EXPECT_THAT(refusal([&] { load_newest(named, {}, at::kCPU, comm::Group::self()); }),
              AllOf(HasSubstr("--checkpoint " + newest.string()), HasSubstr("was removed while it was read"), HasSubstr("name one that stays")));
  FoundModel last = found();
  std::filesystem::remove_all(checkpoints());
  EXPECT_THAT(refusal([&] { load_newest(last, {}, at::kCPU, comm::Group::self()); }), HasSubstr("no valid checkpoint there"));
}

/// As a run that goes on does: the stored weights are a rounding of the masters.
TEST_F(Reading, WeightsAreWidenedFromTheirMasters) {
  train_and_save("llama", 2, {"model.kv_heads=2", "precision.params=bf16", "mesh.dp_shard=2", "zero.stage=2"});
  const FoundModel wide = found({"precision.params=fp32"}), as_stored = found();
  const auto& folder = wide.checkpoint->folder;
  const auto& manifest = wide.checkpoint->manifest;
  const auto of_state = [&](const checkpoint::SlicedTensor& held, const std::string& state) {
    const std::string name = state + std::string(checkpoint::parameter_of(held.slice.name));
    const at::ScalarType dtype = checkpoint::dtype_from_name(manifest.tensors.at(name).dtype);
    checkpoint::SlicedTensor stored{at::empty_like(held.tensor, held.tensor.options().dtype(dtype)), held.slice};
    stored.slice.name = name;
    checkpoint::load(folder, manifest, {stored}, {.ignore_prefixes = {"model.", "buffer.", "optimizer."}});
    return stored.tensor.to(held.tensor.scalar_type());
  };
  for (const auto& [ranks, sets] : std::vector<std::pair<int, Sets>>{{1, {}}, {2, {"mesh.tp=2"}}, {2, {"mesh.pp=2"}}}) {
    Sets all = sets;
    all.push_back("precision.params=fp32");
    const FoundModel model = found(all);
    comm::run_ranks(ranks, [&, ranks = ranks](comm::World& world) {
      RankScope scope(model.config, world.local_size());
      const Mesh mesh(world, mesh_shape(model.config.mesh, 0, ranks));
      const auto loaded = load_model(model, reading_groups(model.config, mesh));
      bool finer = false;
      for (const auto& held : checkpoint::model_targets(*loaded.model)) {
        EXPECT_TRUE(at::equal(held.tensor, of_state(held, "optimizer.master."))) << held.slice.name;
        finer |= !at::equal(held.tensor, of_state(held, "model."));
      }
      EXPECT_TRUE(finer);
    });
  }
  for (const auto& held : checkpoint::model_targets(*load_model(as_stored).model)) EXPECT_TRUE(at::equal(held.tensor, of_state(held, "model.")));
  // An element that was written behind the last update is what a run that goes on trains.
  const auto& slice = manifest.tensors.at("model.norm.weight").slices.front();
  const FoundModel unchecked = found({"precision.params=fp32", "checkpoint.verify=false"});
  const uint64_t place = checkpoint::SafetensorsFile(folder / slice.file).entry(slice.key).offset;
  std::fstream file(folder / slice.file, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(place)).write("\x40\x41", 2);  // 12 in bf16
  file.close();
  const auto model = load_model(unchecked).model;
  const auto targets = checkpoint::model_targets(*model);
  const auto held = std::ranges::find(targets, "model.norm.weight", [](const auto& target) { return target.slice.name; });
  ASSERT_NE(held, targets.end());
  at::Tensor expected = of_state(*held, "optimizer.master.");
  expected[0] = 12;
  EXPECT_TRUE(at::equal(held->tensor, expected)) << held->tensor;
}

/// By checkpoint.partial: adapters are those of lora.from_peft, weights those of model.from_hf, or drawn with the run's seed, in any layout.
TEST_F(Reading, WhatACheckpointLacksBeginsAsInARunThatGoesOn) {
  const std::string adapted = "lora.modules=layers.*.attention.*", lacks = "checkpoint.partial=[\"**.lora_a\", \"**.lora_b\", \"norm.weight\"]";
  const auto folder = [&](const char* name) { return (folder_ / name).string(); };
  train_and_save("llama", 1, {"model.kv_heads=2", "model.layers=3"});
  train_and_save("llama", 1, {"model.kv_heads=2", "model.layers=3", "optim.lr=1e-30", "optim.weight_decay=0"}, "drawn");
  train_and_save("llama", 1, {"model.kv_heads=2", "model.layers=3", adapted, "optim.lr=0.1"}, "adapted");
  const FoundModel of_adapter = found({}, "adapted");
  checkpoint::export_peft(of_adapter.checkpoint->folder, of_adapter.config.model, of_adapter.config.lora, folder("adapter"));
  const FoundModel base = found();
  checkpoint::export_hugging_face(base.checkpoint->folder, base.config.model, folder("hf"));

  const auto without = [](FoundModel model, const std::string& parameter) {
    model.checkpoint->manifest.tensors.erase("model." + parameter);
    return model;
  };
  const std::string w1 = "layers.1.feed_forward.w1.weight";
  const Sets beside{adapted, lacks, "lora.from_peft=" + folder("adapter")};
  for (const auto& [ranks, layout] : std::vector<std::pair<int, Sets>>{{1, {}}, {2, {"mesh.tp=2"}}, {3, {"mesh.pp=3"}}, {2, {"offload.params=host"}}}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks " + (layout.empty() ? "" : layout.front()));
    const auto in_layout = [&](Sets sets) {
      sets.insert(sets.end(), layout.begin(), layout.end());
      return sets;
    };
    Sets from_hf = beside;
    from_hf.push_back("model.from_hf=" + folder("hf"));
    const FoundModel all = found(in_layout(beside)), gone = without(found(in_layout(from_hf)), "norm.weight");
    const FoundModel trained = found(layout), adapters = found(layout, "adapted"), drawn = found(in_layout({"checkpoint.partial=[\"" + w1 + "\"]"}), "drawn");
    comm::run_ranks(ranks, [&](comm::World& world) {
      RankScope scope(all.config, world.local_size());
      const Mesh mesh(world, mesh_shape(all.config.mesh, 0, ranks));
      const auto tensors = [&](const FoundModel& model) {
        std::map<std::string, at::Tensor> named;
        for (auto& held : checkpoint::model_targets(*load_model(model, reading_groups(model.config, mesh)).model)) named[held.slice.name] = held.tensor;
        return named;
      };
      const auto weights = tensors(trained), of_peft = tensors(adapters);
      for (const FoundModel& model : {all, gone}) {
        for (const auto& [name, tensor] : tensors(model)) EXPECT_TRUE(at::equal(tensor, (nn::is_adapter(name) ? of_peft : weights).at(name))) << name;
      }
      for (const auto& [name, tensor] : tensors(without(drawn, w1))) EXPECT_TRUE(at::equal(tensor, tensors(drawn).at(name)));
    });
  }
  Sets nowhere = beside;
  nowhere.push_back("model.from_hf=/nowhere");
  EXPECT_NO_THROW(load_model(found(nowhere))) << "of which nothing is read";
  EXPECT_THAT(refusal([&] { load_model(without(found(nowhere), "norm.weight")); }), HasSubstr("model.from_hf = /nowhere"));
  EXPECT_THAT(refusal([&] { load_model(found({adapted, lacks, "lora.from_peft=/nowhere"})); }), HasSubstr("lora.from_peft = /nowhere"));
}

/// Where nobody names them for the reading: the run may have been of another model than is read, and its folders may be gone by now.
TEST_F(Reading, WhatTheFoldersOfARunDoNotHoldIsDrawn) {
  const auto folder = [&](const char* name) { return (folder_ / name).string(); };
  const std::string from_hf = "model.from_hf=" + folder("hf"), from_peft = "lora.from_peft=" + folder("adapter");
  const std::string attention = "lora.modules=layers.*.attention.*", both = attention + ",layers.*.feed_forward.*";
  train_and_save("llama", 1, {"model.kv_heads=2"});
  train_and_save("llama", 1, {"model.kv_heads=2", attention}, "adapted");
  const FoundModel base = found(), adapted = found({}, "adapted");
  checkpoint::export_hugging_face(base.checkpoint->folder, base.config.model, folder("hf"));
  checkpoint::export_peft(adapted.checkpoint->folder, adapted.config.model, adapted.config.lora, folder("adapter"));
  train_and_save("llama", 1, {"model.kv_heads=2", from_hf, attention, from_peft}, "begun");

  const auto read = [&](Sets sets, const Sets& more = {}, const std::vector<std::string>& lacks = {}) {
    sets.insert(sets.end(), more.begin(), more.end());
    FoundModel model = found(sets, "begun");
    for (const auto& parameter : lacks) model.checkpoint->manifest.tensors.erase("model." + parameter);
    return model;
  };
  const auto remarks = [](const FoundModel& model) { return reading_remarks(model, model.checkpoint->sets); };
  const auto unread = [](const std::string& setting) { return ::testing::Contains(AllOf(HasSubstr(setting + ", of the run"), HasSubstr("is not read"))); };
  const auto expect_drawn = [&](const Sets& sets, const std::vector<std::string>& lacks = {}) {
    for (const auto& [ranks, layout] : std::vector<std::pair<int, Sets>>{{1, {}}, {2, {"mesh.tp=2"}}, {3, {"mesh.pp=3"}}}) {
      Sets none = layout;
      none.insert(none.end(), {"model.from_hf=", "lora.from_peft="});
      const FoundModel model = read(sets, layout, lacks), drawn = read(sets, none, lacks);
      comm::run_ranks(ranks, [&](comm::World& world) {
        RankScope scope(model.config, world.local_size());
        const Mesh mesh(world, mesh_shape(model.config.mesh, 0, ranks));
        const auto loaded = load_model(model, reading_groups(model.config, mesh)), expected = load_model(drawn, reading_groups(model.config, mesh));
        const auto targets = checkpoint::model_targets(*loaded.model), theirs = checkpoint::model_targets(*expected.model);
        ASSERT_EQ(targets.size(), theirs.size());
        for (size_t i = 0; i < targets.size(); ++i) EXPECT_TRUE(at::equal(targets[i].tensor, theirs[i].tensor)) << targets[i].slice.name;
      });
    }
  };
  const Sets deeper{"model.layers=3", "checkpoint.partial=[\"layers.2.**\"]"}, wider{both, "checkpoint.partial=[\"**.feed_forward.**.lora_*\"]"};
  expect_drawn(deeper);
  expect_drawn({"model.vocab_size=300", "checkpoint.partial=[\"embed_tokens.*\", \"head.*\"]"});
  expect_drawn(wider);
  EXPECT_THAT(remarks(read(deeper)), AllOf(unread(from_hf.substr(0, 13) + " = " + folder("hf")), unread("lora.from_peft = " + folder("adapter"))));
  EXPECT_THAT(remarks(read(wider)), AllOf(::testing::Not(unread("model.from_hf = " + folder("hf"))), unread("lora.from_peft = " + folder("adapter"))));
  EXPECT_THAT(refusal([&] { load_model(read(deeper, {from_hf})); }), HasSubstr("missing model.layers.2.")) << "by one who reads";
  EXPECT_THAT(refusal([&] { load_model(read(wider, {from_peft})); }), HasSubstr("does not fit lora.modules: missing "));
  const Sets fewer{"quantize.modules=layers.*.feed_forward.*", "quantize.block=8", "run.device=cpu"};
  EXPECT_NO_THROW(load_model(read(deeper, fewer)));

  train_and_save("mixtral", 1, {}, "mixture");
  FoundModel shared = found({"model.shared_ffn_dim=8", "checkpoint.partial=[\"**.shared.**\"]"}, "mixture");
  checkpoint::export_hugging_face(shared.checkpoint->folder, trained_config(*shared.checkpoint).model, folder("theirs"));
  shared.config.model.from_hf = folder("theirs");
  EXPECT_NO_THROW(load_model(shared)) << "Mixtral has no shared expert";

  const Sets norm{"checkpoint.partial=[\"norm.weight\"]"};
  const auto norm_of = [](const FoundModel& model) { return load_model(model).model->named_parameters()["norm.weight"]; };
  EXPECT_TRUE(at::equal(norm_of(read(norm, {}, {"norm.weight"})), norm_of(base))) << "which is held";
  const FoundTokenizer text = find_tokenizer(base, "");
  const Settings there = reading_settings(read(norm, {}, {"norm.weight"}), text);
  std::filesystem::remove_all(folder("hf"));
  EXPECT_THAT(comm::disagreement({there, reading_settings(read(norm, {}, {"norm.weight"}), text)}).value_or(""), HasSubstr("model.from_hf = content "));
  expect_drawn(norm, {"norm.weight"});
  reading_settings(read(deeper, fewer), text);
  EXPECT_NO_THROW(load_model(read(deeper, fewer)));
}

/// They are those of one folder, also for who reads them in full precision.
TEST_F(Reading, WhatWasInFewerBitsIsOfWhatTheRunWasTrainedBeside) {
  const auto folder = [&](const char* name) { return (folder_ / name).string(); };
  for (const char* lr : {"0.01", "0.02"}) {
    train_and_save("llama", 1, {"model.kv_heads=2", std::string("optim.lr=") + lr}, std::string("of") + lr);
    const FoundModel base = found({}, std::string("of") + lr);
    checkpoint::export_hugging_face(base.checkpoint->folder, base.config.model, folder(lr));
  }
  train_and_save("llama", 1,
                 {"model.kv_heads=2", "model.from_hf=" + folder("0.01"), "lora.modules=layers.*.attention.*", "quantize.modules=layers.*.attention.*",
                  "quantize.block=8", "run.device=cpu"});
  const Sets full{"quantize.modules=", "checkpoint.partial=[\"layers.*.attention.*.weight\"]"};
  Sets elsewhere = full, deeper = full;
  elsewhere.push_back("model.from_hf=" + folder("0.02"));
  deeper.insert(deeper.end(), {"model.layers=3", "checkpoint.partial=[\"layers.*.attention.*.weight\", \"layers.2.**\"]"});
  const auto query = [](const FoundModel& model) { return load_model(model).model->named_parameters()["layers.0.attention.wq.weight"]; };
  EXPECT_TRUE(at::equal(query(found(full)), query(found({}, "of0.01"))));
  const std::string others = "was trained beside other weights than are there now";
  EXPECT_THAT(refusal([&] { load_model(found(elsewhere)); }), AllOf(HasSubstr(folder("0.02")), HasSubstr(others)));
  EXPECT_THAT(refusal([&] { load_model(found(deeper)); }), HasSubstr("missing model.layers.2.")) << "some would be drawn in the place of those";
  std::filesystem::rename(folder("0.01"), folder("aside"));
  EXPECT_THAT(refusal([&] { load_model(found(full)); }), HasSubstr("there is no such folder"));
  std::filesystem::rename(folder("0.02"), folder("0.01"));
  EXPECT_THAT(refusal([&] { load_model(found(full)); }), HasSubstr(others));
}

/// As from a folder that `convert --dtype fp32` writes.
TEST_F(Reading, FewerBitsAreOfTheMasters) {
  train_and_save("llama", 1, {"model.kv_heads=2", "precision.params=bf16"});
  const FoundModel stored = found();
  const auto hf = folder_ / "hf";
  checkpoint::export_hugging_face(stored.checkpoint->folder, stored.config.model, hf, {.dtype = at::kFloat});
  const auto loss = [&](const ModelSource& source) {
    const FoundModel model = find_model(source, {"run.threads=1", "data.cache_dir=" + (folder_ / "cache").string(), "run.device=cpu", "precision.params=fp32",
                                                 "quantize.modules=layers.*.feed_forward.*", "quantize.block=8"});
    const auto loaded = load_model(model);
    ForwardEngine engine(loaded);
    return evaluate(engine, corpus(stored.config), 16, 7, comm::Group::self()).loss;
  };
  EXPECT_EQ(loss({.from_hf = {}, .checkpoint = stored.checkpoint->folder}), loss({.from_hf = hf, .checkpoint = {}}));
}

TEST_F(Reading, WhatReadingHasNoUseForIsRefused) {
  train_and_save("llama", 2, {"model.kv_heads=2", "mesh.dp_shard=2", "zero.stage=2"});
  const auto refusal = [&](const Sets& sets, int ranks) -> std::string {
    try {
      reading_layout(found(sets).config, ranks);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "(accepted)";
  };
  EXPECT_EQ(refusal({}, 1), "(accepted)") << "the layout of the run that trained it is not the reader's";
  const auto layout = reading_layout(found({"mesh.tp=2"}).config, 6);
  EXPECT_EQ(layout.copies, 3);
  EXPECT_EQ(layout.tensor_ranks, 2);
  EXPECT_THAT(refusal({"zero.stage=3"}, 2), AllOf(HasSubstr("zero.stage = 3: shards what training keeps"), HasSubstr("leave it out")));
  EXPECT_THAT(refusal({"mesh.dp_shard=2"}, 2), HasSubstr("mesh.dp_shard = 2"));
  EXPECT_THAT(refusal({"mesh.pp=5"}, 5), HasSubstr("= 5 stages: the model is a chain of 4 links"));
  EXPECT_THAT(refusal({"mesh.pp=2", "pipeline.split=[\"2\", \"1\"]"}, 2), HasSubstr("adds up to 3 links, and the model has 4"));
  EXPECT_THAT(refusal({"mesh.pp=2", "pipeline.virtual_stages=2"}, 2), HasSubstr("set pipeline.virtual_stages = 1, or pipeline.schedule = interleaved"));
  EXPECT_THAT(refusal({"mesh.pp=2"}, 3), HasSubstr("mesh"));
  EXPECT_THAT(refusal({kBySequence}, 2), HasSubstr("tensor.sequence_parallel = true: cuts the sequence between layers that mesh.tp cuts, and mesh.tp is 1"));
  EXPECT_THAT(refusal({"mesh.tp=5"}, 5), HasSubstr("heads"));
  EXPECT_THAT(refusal({"mesh.tp=2"}, 3), HasSubstr("mesh"));
}

}  // namespace
}  // namespace tessera
