#include <cmath>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/config/config.h"
#include "tessera/config/defaults.h"
#include "tessera/config/detail.h"
#include "tessera/config/expert_rules.h"
#include "tessera/core/error.h"
#include "tests/config/rules.h"
#include "tests/refusal.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

using config_rules::good;
using config_rules::refusal;

TEST(Resolve, FillsWhatDependsOnOtherFields) {
  auto config = good();
  EXPECT_EQ(config.model.kv_heads, 4);
  EXPECT_EQ(config.model.ffn_dim, 192) << "8/3 of 64 is 170.7, and 192 the next multiple of 64";
  EXPECT_EQ(config.model.max_seq_len, 16);
  EXPECT_EQ(config.model.vocab_size, 256);
  EXPECT_EQ(config.data.seed, config.run.seed);
  EXPECT_FALSE(config.data.cache_dir.empty());
  EXPECT_FALSE(config.mesh.dp_replicate.has_value()) << "depends on the world size";
  const auto once = config;
  resolve(config);
  EXPECT_EQ(config, once);
}

/// Which folder a relative one is depends on where a command is started, and, once it is saved, on where its file lies.
TEST(Resolve, TakesNoRelativeFolderForTheCache) {
  const char* const names[] = {"XDG_CACHE_HOME", "HOME", "TMPDIR"};
  std::map<std::string, std::string> before;
  for (const char* const name : names) {
    if (const char* const value = std::getenv(name)) before[name] = value;
  }
  const auto cache_dir = [&](const char* cache, const char* home) {
    setenv("XDG_CACHE_HOME", cache, 1);
    setenv("HOME", home, 1);
    return good().data.cache_dir;
  };
  setenv("TMPDIR", "/tmp", 1);
  EXPECT_EQ(cache_dir("/cache", "/home"), "/cache/tessera");
  EXPECT_EQ(cache_dir("cache", "/home"), "/home/.cache/tessera");
  EXPECT_EQ(cache_dir("", "/home"), "/home/.cache/tessera");
  EXPECT_EQ(cache_dir("cache", "home"), "/tmp/tessera");
  for (const char* const name : names) before.contains(name) ? setenv(name, before[name].c_str(), 1) : unsetenv(name);
}

TEST(Resolve, KeepsWhatIsGivenAndWaitsForHuggingFace) {
  Config config;
  config.run.seed = 3;
  config.data.seed = 4;
  config.model.from_hf = "/model";
  config.data.seq_len = 16;
  config.log.dir = "/logs";
  resolve(config);
  EXPECT_EQ(config.data.seed, 4);
  EXPECT_FALSE(config.model.max_seq_len.has_value());
  EXPECT_EQ(config.model.vocab_size, 0);
  EXPECT_EQ(config.log.dir, "/logs");
}

TEST(Resolve, RefusesSizesWhoseProductsLeave64Bits) {
  const auto refused = [](const auto& change) -> std::string {
    Config config = good();
    change(config);
    try {
      resolve(config);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "(accepted)";
  };
  EXPECT_EQ(refused([](Config& c) { c.model.dim = 1'000'000'000; }), "(accepted)");
  EXPECT_THAT(refused([](Config& c) { c.model.dim = 1'000'000'001; }), StartsWith("model.dim = 1000000001: expected at most 1000000000"));
  EXPECT_THAT(refused([](Config& c) { c.model.ffn_dim = INT64_MAX; }), StartsWith("model.ffn_dim = "));
  EXPECT_THAT(refused([](Config& c) { c.model.dim = INT64_MIN; }), StartsWith("model.dim = "));
  EXPECT_THAT(refused([](Config& c) { c.model.layers = -2'000'000'000; }), StartsWith("model.layers = -2000000000: expected at least -1000000000"));
  EXPECT_THAT(refused([](Config& c) { c.batch.global_size = INT64_MAX; }), StartsWith("batch.global_size = "));
}

/// The refusal of a text that nobody completed, as a user wrote it.
std::string refusal_of(const std::vector<std::string>& sets) {
  std::vector<std::string> all{"model.family=llama", "model.dim=64",        "model.layers=2", "model.heads=4", "data.files=[\"/text.txt\"]",
                               "data.seq_len=16",    "batch.global_size=8", "optim.lr=1e-3",  "run.steps=10"};
  all.insert(all.end(), sets.begin(), sets.end());
  try {
    Config config = parse_config("", "/", all);
    resolve(config);
    validate(config, 1);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "(accepted)";
}

TEST(Validate, BlamesTheKeyThatADefaultFollows) {
  EXPECT_EQ(refusal_of({}), "(accepted)");
  EXPECT_THAT(refusal_of({"data.seq_len=0"}), StartsWith("data.seq_len = 0: expected at least 1; set data.seq_len"));
  EXPECT_THAT(refusal_of({"data.seq_len=-3"}), StartsWith("data.seq_len = -3"));
  EXPECT_THAT(refusal_of({"data.seq_len=2000000000"}), StartsWith("data.seq_len = 2000000000"));
  EXPECT_THAT(refusal_of({"model.max_seq_len=0"}), StartsWith("model.max_seq_len = 0"));
  EXPECT_THAT(refusal_of({"run.seed=-1"}), StartsWith("run.seed = -1"));
  EXPECT_EQ(refusal_of({"run.seed=9223372036854775808"}), "run.seed = 9223372036854775808 (--set): expected an integer of at most 9223372036854775807");
  EXPECT_EQ(refusal_of({"run.seed=-9223372036854775809"}), "run.seed = -9223372036854775809 (--set): expected an integer of at least -9223372036854775808");
  EXPECT_EQ(refusal_of({"run.threads=2147483648"}), "run.threads = 2147483648 (--set): expected an integer of at most 2147483647");
  EXPECT_THAT(refusal_of({"data.seed=-1"}), StartsWith("data.seed = -1"));
  EXPECT_THAT(refusal_of({"model.heads=-2"}), StartsWith("model.heads = -2"));
}

TEST(FollowedDefaults, AreTheKeysThatNobodyGave) {
  using Keys = std::map<std::string, std::string>;
  EXPECT_EQ(followed_defaults(good()), (Keys{{"model.max_seq_len", "data.seq_len"}, {"model.kv_heads", "model.heads"}, {"data.seed", "run.seed"}}));
  Config given = good();
  given.given = {"data.seed"};
  given.model.kv_heads = 2;
  EXPECT_EQ(followed_defaults(given), (Keys{{"model.max_seq_len", "data.seq_len"}}));
}

TEST(Validate, AcceptsTheGood) {
  for (const int world : {1, 2, 3, 5, 8}) EXPECT_NO_THROW(validate(good(), world)) << world;
  EXPECT_EQ(refusal([](Config& c) { c.precision.compute = "bf16"; }), "(accepted)");
  EXPECT_EQ(refusal([](Config& c) { c.data.files.clear(); }, 1, Purpose::Plan), "(accepted)");
}

TEST(Validate, Batch) {
  EXPECT_EQ(refusal([](Config& c) { c.batch.micro_size = 3; }),
            "batch.global_size = 8: a step is a whole number of forward passes of batch.micro_size = 3 sequences each, and 8 leave a last one of 2 (ranks that "
            "get fewer passes than others are no problem; a smaller pass would be another arithmetic); set batch.global_size to 6 or 9, or batch.micro_size to "
            "a divisor of it");
  EXPECT_THAT(refusal([](Config& c) { c.batch.micro_size = 9; }), HasSubstr("set batch.global_size to 9, or"));
  EXPECT_THAT(refusal([](Config& c) { c.batch.micro_size = 4; }, 3),
              AllOf(StartsWith("batch.global_size = 8"), HasSubstr("3 data ranks"), HasSubstr("at least 12")));
  EXPECT_THAT(refusal([](Config& c) { c.batch.global_size = 0; }), StartsWith("batch.global_size = 0"));
  EXPECT_THAT(refusal([](Config& c) { c.batch.micro_size = 0; }), StartsWith("batch.micro_size = 0"));
}

TEST(Validate, Mesh) {
  EXPECT_THAT(refusal([](Config& c) { c.mesh.dp_replicate = 3; }, 2),
              AllOf(HasSubstr("dp_replicate 3 x dp_shard 1 x pp 1 x cp 1 x tp 1 = 3"), HasSubstr("2 ranks")));
  EXPECT_THAT(refusal([](Config& c) { c.mesh.tp = 3; }, 4), AllOf(HasSubstr("tp 3"), HasSubstr("4")));
  EXPECT_THAT(refusal([](Config& c) { c.mesh.dp_shard = 2; }, 2), AllOf(StartsWith("mesh.dp_shard = 2"), HasSubstr("zero.stage")));
  EXPECT_THAT(refusal([](Config& c) { c.mesh.dp_shard = -1; }, 2), StartsWith("mesh.dp_shard = 2"));
  EXPECT_EQ(refusal([](Config& c) { c.mesh.dp_shard = -1; }, 1), "(accepted)");
  EXPECT_THAT(refusal([](Config& c) { c.mesh.tp = 0; }), StartsWith("mesh.tp = 0"));
  EXPECT_THAT(refusal([](Config& c) { c.mesh.tp = c.mesh.pp = -1; }), AllOf(HasSubstr("mesh.pp = -1"), HasSubstr("mesh.tp = -1")));
  EXPECT_THAT(refusal([](Config& c) { c.mesh.order = {"dp_replicate", "dp_shard", "pp", "cp"}; }), HasSubstr("lacks tp"));
  EXPECT_THAT(refusal([](Config& c) { c.mesh.order.push_back("tp"); }), HasSubstr("tp twice"));
  EXPECT_THAT(refusal([](Config& c) { c.mesh.order.back() = "tpx"; }), AllOf(HasSubstr("tpx"), HasSubstr("did you mean tp?")));
  EXPECT_THAT(refusal([](Config& c) { c.mesh.ep = 2; }), AllOf(StartsWith("mesh.ep = 2"), HasSubstr("has no experts")));
}

TEST(Validate, ExpertsOverRanks) {
  const auto refused = [](const std::function<void(Config&)>& set, int ranks) {
    return refusal(
        [&](Config& c) {
          c.model.family = "mixtral";
          c.model.experts = 6;
          c.model.experts_per_token = 2;
          c.model.ffn_dim = 10;
          set(c);
        },
        ranks);
  };
  EXPECT_THAT(refused([](Config& c) { c.mesh.ep = 2; }, 2),
              AllOf(StartsWith("mesh.ep = 2"), HasSubstr("mesh.tp = 1 (with zero.stage = 0"), HasSubstr("zero.stage = 1")));
  EXPECT_THAT(testing_support::refusal([] {
                Config reads;
                reads.model.experts = 6;
                reads.mesh.ep = 2;
                validate_experts_over_ranks(reads, 1, /*over_replicas=*/false, /*reads=*/true);
              }),
              AllOf(HasSubstr("set a mesh.tp that makes it so"), Not(HasSubstr("zero.stage")), Not(HasSubstr("dp_shard"))));
  EXPECT_THAT(refused([](Config& c) { c.mesh.ep = 3, c.zero.stage = 1; }, 4), AllOf(StartsWith("mesh.ep = 3"), HasSubstr("dp_shard x cp x tp = 4")));
  EXPECT_THAT(refused([](Config& c) { c.mesh.ep = 4, c.zero.stage = 1; }, 4), HasSubstr("cannot deal model.experts = 6"));
  EXPECT_THAT(refused([](Config& c) { c.mesh.expert_tp = 3, c.zero.stage = 1; }, 3),
              AllOf(StartsWith("mesh.expert_tp = 3"), HasSubstr("model.ffn_dim = 10"), HasSubstr("divisor")));
  EXPECT_THAT(refused([](Config& c) { c.mesh.ep = c.mesh.expert_tp = 2, c.zero.stage = 1; }, 2),
              StartsWith("mesh.ep = 2, mesh.expert_tp = 2: deals experts over 4"));
  EXPECT_THAT(refused([](Config& c) { c.mesh.expert_tp = 0; }, 1), StartsWith("mesh.expert_tp = 0"));
  EXPECT_EQ(refused([](Config& c) { c.mesh.ep = c.mesh.expert_tp = 2, c.zero.stage = 1; }, 4), "(accepted)");
  EXPECT_EQ(refused([](Config& c) { c.mesh.ep = c.mesh.tp = 2; }, 2), "(accepted)");
  const auto in_parts = [](Config& c) {
    c.mesh.tp = 2;
    c.tensor.sequence_parallel = true;
  };
  EXPECT_THAT(refused([&](Config& c) { in_parts(c), c.moe.capacity_factor = 2; }, 2), HasSubstr("tensor.sequence_parallel gives a rank a part"));
  EXPECT_THAT(refused([&](Config& c) { in_parts(c), c.model.router = "expert_choice"; }, 2), HasSubstr("tensor.sequence_parallel = false"));
  const auto by_element = [&](const std::string& optimizer, const std::vector<std::string>& groups) {
    return refused([&](Config& c) { c.run.deterministic = true, c.mesh.ep = 2, c.optim.name = optimizer, c.optim.groups = groups; }, 2);
  };
  EXPECT_THAT(by_element("muon", {}), AllOf(StartsWith("optim.name = muon"), HasSubstr("than each element")));
  for (const char* pattern : {"layers.*.feed_forward.experts", "layers.1", "**.w3"}) {
    EXPECT_THAT(by_element("adamw", {std::string(pattern) + ": name = adafactor"}),
                StartsWith("optim.groups = " + std::string(pattern) + ": name = adafactor"));
  }
  EXPECT_THAT(by_element("muon", {"layers.*: lr_factor = 0.5"}), StartsWith("optim.name = muon"));
  EXPECT_EQ(by_element("adamw", {"layers.*.attention: name = muon"}), "(accepted)");
  EXPECT_EQ(by_element("muon", {"**.experts: name = sgd", "layers.*: name = adam8bit"}), "(accepted)");
}

TEST(ResolveMesh, UnsetAndMinusOneTakeWhatIsLeft) {
  using Axes = std::vector<std::pair<std::string, int>>;
  MeshConfig mesh;
  EXPECT_EQ(resolve_mesh(mesh, 0, 6), (Axes{{"dp_replicate", 6}, {"dp_shard", 1}, {"pp", 1}, {"cp", 1}, {"tp", 1}}));
  EXPECT_EQ(resolve_mesh(mesh, 2, 6), (Axes{{"dp_replicate", 1}, {"dp_shard", 6}, {"pp", 1}, {"cp", 1}, {"tp", 1}}));
  mesh.tp = 2;
  mesh.order = {"tp", "dp_replicate", "dp_shard", "pp", "cp"};
  EXPECT_EQ(resolve_mesh(mesh, 0, 6).front(), (std::pair<std::string, int>{"tp", 2}));
  EXPECT_EQ(resolve_mesh(mesh, 0, 6)[1].second, 3);
  mesh.pp = -1;
  EXPECT_EQ(resolve_mesh(mesh, 0, 6)[3].second, 3) << "-1 elsewhere leaves the unset data axis at 1";
  mesh.pp = 1;
  mesh.dp_replicate = 2;
  mesh.dp_shard = -1;
  EXPECT_EQ(resolve_mesh(mesh, 1, 12)[2].second, 3);
  EXPECT_THROW(resolve_mesh(mesh, 1, 6), ConfigError);
  mesh.dp_shard.reset();
  EXPECT_EQ(resolve_mesh(mesh, 3, 8)[2].second, 2) << "hybrid: shard what replication leaves";
  mesh.pp = mesh.cp = mesh.tp = 2000000000;
  EXPECT_THROW(resolve_mesh(mesh, 0, 8), ConfigError) << "no overflow";
}

TEST(Validate, Model) {
  EXPECT_THAT(refusal([](Config& c) { c.model.family.clear(); }), StartsWith("model.family"));
  EXPECT_THAT(refusal([](Config& c) { c.model.dim = 0; }), StartsWith("model.dim = 0"));
  EXPECT_THAT(refusal([](Config& c) { c.model.layers = 0; }), StartsWith("model.layers = 0"));
  EXPECT_THAT(refusal([](Config& c) { c.model.heads = 5; }), AllOf(StartsWith("model.heads = 5"), HasSubstr("model.dim = 64")));
  EXPECT_THAT(refusal([](Config& c) { c.model.kv_heads = 3; }), AllOf(StartsWith("model.kv_heads = 3"), HasSubstr("model.heads = 4")));
  EXPECT_THAT(refusal([](Config& c) { c.model.heads = 64, c.model.kv_heads = 64; }), HasSubstr("even head size"));
  EXPECT_THAT(refusal([](Config& c) { c.model.family = "gpt2", c.model.kv_heads = 2; }), StartsWith("model.kv_heads = 2"));
  EXPECT_THAT(refusal([](Config& c) { c.model.sliding_window = -1; }), StartsWith("model.sliding_window = -1: expected at least 0"));
  EXPECT_THAT(refusal([](Config& c) { c.model.family = "mlp", c.model.sliding_window = 4; }),
              AllOf(StartsWith("model.sliding_window = 4"), HasSubstr("model.family = mlp"), HasSubstr("leave model.sliding_window out")));
  EXPECT_THAT(refusal([](Config& c) { c.model.dropout = 1; }), StartsWith("model.dropout = 1"));
  EXPECT_THAT(refusal([](Config& c) { c.model.norm_eps = 0; }), StartsWith("model.norm_eps"));
  EXPECT_THAT(refusal([](Config& c) { c.optim.eps = 1e-300; }), StartsWith("optim.eps = 1e-300: is beyond what fp32 holds"));
  EXPECT_THAT(refusal([](Config& c) { c.model.rope_theta = 1e-300; }), StartsWith("model.rope_theta = 1e-300: is beyond"));
  EXPECT_THAT(refusal([](Config& c) { c.optim.max_grad_norm = INFINITY; }), StartsWith("optim.max_grad_norm = inf: is beyond"));
  EXPECT_THAT(refusal([](Config& c) { c.optim.lr = 0.5, c.optim.weight_decay = 2.5; }), HasSubstr("set a weight_decay of at most 2"));
  EXPECT_THAT(refusal([](Config& c) { c.model.experts = 8; }), HasSubstr("of a mixture of experts"));
  EXPECT_THAT(refusal([](Config& c) { c.model.vocab_size = 255; }), AllOf(StartsWith("model.vocab_size = 255"), HasSubstr("256")));
  EXPECT_THAT(refusal([](Config& c) { c.data.seq_len = 17; }), AllOf(StartsWith("data.seq_len = 17"), HasSubstr("model.max_seq_len = 16")));
  EXPECT_EQ(refusal([](Config& c) { c.model.family = "mlp", c.model.heads = 0; }), "(accepted)");
}

TEST(Validate, TheRest) {
  EXPECT_THAT(refusal([](Config& c) { c.data.files.clear(); }), StartsWith("data.files"));
  EXPECT_THAT(refusal([](Config& c) { c.data.files = {""}; }), StartsWith("data.files"));
  EXPECT_THAT(refusal([](Config& c) { c.run.validate_every = 5; }), AllOf(StartsWith("run.validate_every = 5"), HasSubstr("data.validation_files")));
  EXPECT_THAT(refusal([](Config& c) { c.run.steps = 0; }), StartsWith("run.steps = 0"));
  EXPECT_THAT(refusal([](Config& c) { c.log.peak_tflops = -1; }), AllOf(StartsWith("log.peak_tflops = -1"), HasSubstr("set 0")));
  EXPECT_THAT(refusal([](Config& c) { c.log.straggler_ratio = 0.8; }), AllOf(StartsWith("log.straggler_ratio = 0.8"), HasSubstr("1.2")));
  EXPECT_EQ(refusal([](Config& c) { c.log.straggler_ratio = 0; }), "(accepted)");
  EXPECT_THAT(refusal([](Config& c) { c.run.seed = -1; }), StartsWith("run.seed = -1"));
  EXPECT_THAT(refusal([](Config& c) { c.model.layers = 1'000'000'000; }), StartsWith("model.layers = 1000000000: expected at most 100000"));
  EXPECT_THAT(refusal([](Config& c) { c.model.dim = 400'000'000; }),
              AllOf(StartsWith("model.dim = 400000000: with model.layers = "), HasSubstr("bytes are counted of")));
  EXPECT_THAT(refusal([](Config& c) { c.batch.global_size = 64'000'000; }), HasSubstr("sequences each; at most 4194304"));
  EXPECT_THAT(refusal([](Config& c) { c.run.threads = 0; }), StartsWith("run.threads = 0"));
  EXPECT_THAT(refusal([](Config& c) { c.run.threads = 100000; }), StartsWith("run.threads = 100000: expected at most 1024 threads"));
  EXPECT_THAT(refusal([](Config& c) { c.optim.lr = 0; }), StartsWith("optim.lr = 0"));
  EXPECT_THAT(refusal([](Config& c) { c.optim.betas[1] = 1; }), StartsWith("optim.betas = [0.9, 1.0]"));
  EXPECT_THAT(refusal([](Config& c) { c.optim.warmup_steps = 11; }), AllOf(StartsWith("optim.warmup_steps = 11"), HasSubstr("or run.steps to more")));
  for (const double alpha : {0.0, -1.0}) {
    EXPECT_THAT(refusal([&](Config& c) {
                  c.lora.modules = "layers.**";
                  c.lora.alpha = alpha;
                }),
                AllOf(StartsWith("lora.alpha = "), HasSubstr("nothing would be learnt")));
  }
  EXPECT_THAT(refusal([](Config& c) { c.optim.min_lr = 1; }), StartsWith("optim.min_lr = 1"));
  EXPECT_THAT(refusal([](Config& c) { c.optim.momentum = -1; }), StartsWith("optim.momentum"));
  EXPECT_THAT(refusal([](Config& c) { c.optim.max_grad_norm = -1; }), StartsWith("optim.max_grad_norm"));
  EXPECT_THAT(refusal([](Config& c) { c.zero.stage = 4; }), StartsWith("zero.stage = 4"));
  EXPECT_THAT(refusal([](Config& c) { c.comm.timeout_s = 0; }), StartsWith("comm.timeout_s"));
  EXPECT_THAT(refusal([](Config& c) { c.comm.timeout_s = 1e30; }), AllOf(StartsWith("comm.timeout_s = 1e+30"), HasSubstr("at most 1000000 (11 days)")));
  EXPECT_EQ(refusal([](Config& c) { c.comm.timeout_s = 1e6; }), "(accepted)");
  EXPECT_THAT(refusal([](Config& c) { c.checkpoint.resume = "latest"; }), HasSubstr("checkpoint.dir"));
}

TEST(Validate, Loss) {
  EXPECT_THAT(refusal([](Config& c) { c.loss.label_smoothing = 1; }), StartsWith("loss.label_smoothing = 1: the share of a target"));
  EXPECT_THAT(refusal([](Config& c) { c.loss.label_smoothing = -0.1; }), AllOf(HasSubstr("loss.label_smoothing = -0.1"), HasSubstr("expected 0 to below 1")));
  EXPECT_THAT(refusal([](Config& c) { c.loss.z_loss = -1; }), StartsWith("loss.z_loss = -1: expected 0 or a positive weight"));
  EXPECT_THAT(refusal([](Config& c) { c.loss.z_loss = INFINITY; }), HasSubstr("loss.z_loss = inf"));
  EXPECT_EQ(refusal([](Config& c) { c.loss = {.label_smoothing = 0.1, .z_loss = 1e-4}; }), "(accepted)");
}

TEST(Validate, Compression) {
  EXPECT_THAT(refusal([](Config& c) { c.comm.powersgd_rank = 0; }), StartsWith("comm.powersgd_rank = 0"));
  EXPECT_THAT(refusal([](Config& c) { c.comm.powersgd_start = -1; }), StartsWith("comm.powersgd_start = -1"));
  for (const std::string compression : {"bf16", "fp16", "powersgd"}) {
    EXPECT_EQ(refusal([&](Config& c) { c.comm.compression = compression; }), "(accepted)") << "one rank compresses nothing";
    EXPECT_THAT(refusal([&](Config& c) { c.comm.compression = compression, c.run.deterministic = true; }, 2),
                AllOf(StartsWith("comm.compression = " + compression), HasSubstr("run.deterministic = false")));
  }
}

TEST(Validate, Recompute) {
  for (const std::string mode : {"full", "selective"}) EXPECT_EQ(refusal([&](Config& c) { c.recompute.mode = mode; }), "(accepted)");
  EXPECT_EQ(refusal([](Config& c) { c.recompute.mode = "full", c.recompute.budget_bytes = 1; }), "(accepted)") << "whether it can be met is seen when measured";
  EXPECT_EQ(refusal([](Config& c) { c.recompute.mode = "selective", c.recompute.keep = {"mm"}; }), "(accepted)");
  EXPECT_THAT(refusal([](Config& c) { c.recompute.every = 0; }), StartsWith("recompute.every = 0"));
  EXPECT_THAT(refusal([](Config& c) { c.recompute.mode = "full", c.recompute.budget_bytes = -1; }), StartsWith("recompute.budget_bytes = -1"));
  EXPECT_THAT(refusal([](Config& c) { c.recompute.budget_bytes = 1; }), HasSubstr("set recompute.mode = full"));
  EXPECT_EQ(refusal([](Config& c) { c.recompute.ffn_tile = 512; }), "(accepted)");
  EXPECT_THAT(refusal([](Config& c) { c.recompute.ffn_tile = -1; }), StartsWith("recompute.ffn_tile = -1"));
  EXPECT_THAT(refusal([](Config& c) { c.recompute.mode = "full", c.recompute.every = 2, c.recompute.budget_bytes = 1; }), HasSubstr("recompute.every = 1"));
  EXPECT_THAT(refusal([](Config& c) { c.recompute.mode = "full", c.recompute.keep = {"mm"}; }), HasSubstr("set recompute.mode = selective"));
  EXPECT_THAT(refusal([](Config& c) { c.model.family = "mlp", c.recompute.mode = "selective"; }), HasSubstr("mlp has no attention"));
}

TEST(Validate, Sharding) {
  for (const int stage : {1, 2}) {
    EXPECT_EQ(refusal([&](Config& c) { c.zero.stage = stage; }, 2), "(accepted)");
    EXPECT_EQ(refusal([&](Config& c) { c.zero.stage = stage, c.mesh.dp_replicate = 2; }, 4), "(accepted)");
    EXPECT_THAT(refusal([&](Config& c) { c.zero.stage = stage, c.run.deterministic = true; }, 2),
                AllOf(StartsWith("run.deterministic = true"), HasSubstr("set zero.stage = 0")));
    for (const std::string compression : {"bf16", "fp16"}) {
      EXPECT_EQ(refusal([&](Config& c) { c.zero.stage = stage, c.comm.compression = compression; }, 2), "(accepted)");
      EXPECT_EQ(refusal([&](Config& c) { c.zero.stage = stage, c.comm.compression = c.precision.reduce = compression; }, 2), "(accepted)");
    }
    EXPECT_THAT(refusal([&](Config& c) { c.zero.stage = stage, c.comm.compression = "powersgd"; }, 2),
                HasSubstr("set comm.compression to none, bf16 or fp16, or zero.stage = 0"));
    EXPECT_EQ(refusal([&](Config& c) { c.zero.stage = stage, c.precision.reduce = "bf16"; }, 2), "(accepted)");
  }
  EXPECT_THAT(refusal([](Config& c) { c.zero.bucket_bytes = 0; }), StartsWith("zero.bucket_bytes = 0"));
  EXPECT_THAT(refusal([](Config& c) { c.zero.prefetch = -1; }), StartsWith("zero.prefetch = -1"));
}

TEST(Validate, DeterministicDataRanksMayCutTheirLayers) {
  EXPECT_EQ(refusal([](Config& c) { c.mesh.tp = 2, c.run.deterministic = true; }, 4), "(accepted)");
}

TEST(Validate, SegmentsAreOfModulesThatAreAllRecomputed) {
  const auto segment = [](Config& c, const char* mode) { c.recompute.segment = 2, c.recompute.mode = mode; };
  EXPECT_EQ(refusal([&](Config& c) { segment(c, "full"); }), "(accepted)");
  EXPECT_THAT(refusal([&](Config& c) { segment(c, "selective"); }), AllOf(StartsWith("recompute.segment = 2"), HasSubstr("recompute.mode = full")));
  EXPECT_THAT(refusal([&](Config& c) { segment(c, "full"), c.recompute.every = 2; }), HasSubstr("recompute.every = 1"));
  EXPECT_THAT(refusal([&](Config& c) { segment(c, "full"), c.zero.stage = 3; }), AllOf(StartsWith("recompute.segment = 2"), HasSubstr("zero.stage to 2")));
  EXPECT_THAT(refusal([](Config& c) { c.recompute.segment = -1; }), StartsWith("recompute.segment = -1"));
}

/// What is listed works, and what is merely known by name is refused as what it is.
TEST(Validate, ListedValuesAreThoseOfThisBuild) {
  const std::map<std::string, std::vector<std::string>> beside = {
      {"precision.params=fp16", {"precision.compute=fp16", "precision.loss_scale=dynamic"}},
      {"precision.reduce=fp16", {"precision.loss_scale=dynamic"}},
      {"precision.master=bf16", {"precision.params=bf16"}},
      {"offload.params=host", {"offload.gradients=host", "offload.optimizer=host", "zero.stage=3"}},
      {"offload.gradients=host", {"offload.params=host", "offload.optimizer=host", "zero.stage=3"}},
      {"offload.optimizer=host", {"offload.params=host", "offload.gradients=host", "zero.stage=3"}},
      {"offload.params=disk", {"offload.gradients=disk", "offload.optimizer=disk", "zero.stage=3"}},
      {"offload.gradients=disk", {"offload.params=disk", "offload.optimizer=host", "zero.stage=3"}},
      {"comm.compression=fp16", {}},
      {"model.family=mixtral", {"model.experts=4", "model.experts_per_token=2"}},
      {"model.router=sigmoid", {"model.family=mixtral", "model.experts=4", "model.experts_per_token=2"}},
      {"model.router=expert_choice", {"model.family=mixtral", "model.experts=4", "model.experts_per_token=2"}},
  };
  const auto refused = [&](const std::string& set) -> std::string {
    std::vector<std::string> sets{"model.family=llama", "model.dim=64",        "model.layers=2", "model.heads=4", "data.files=/text.txt",
                                  "data.seq_len=16",    "batch.global_size=8", "optim.lr=1e-3",  "run.steps=10"};
    if (const auto more = beside.find(set); more != beside.end()) sets.insert(sets.end(), more->second.begin(), more->second.end());
    sets.push_back(set);
    try {
      Config config = parse_config("", "/", sets);
      resolve(config);
      validate(config, 1);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  int listed = 0, known = 0;
  const Config defaults;
  Config::for_each_section(defaults, [&](const char* section, const auto& fields, std::string_view) {
    std::decay_t<decltype(fields)>::for_each_field(fields, [&](const char* name, const auto&, const FieldRule& rule, std::string_view) {
      const std::string key = std::string(section) + "." + name;
      if (rule.path || section == std::string("context")) return;
      for (const auto& value : detail::split_choices(rule.choices)) {
        if (key == "precision.loss_scale" && value == "dynamic") continue;  // beside fp16, above
        EXPECT_EQ(refused(key + "=" + value), "") << key;
        ++listed;
      }
      for (const auto& value : detail::split_choices(rule.refused)) {
        EXPECT_THAT(refused(key + "=" + value), AllOf(StartsWith(key + " = " + value + ": "), HasSubstr("; set "))) << "with its reason and a way out";
        ++known;
      }
    });
  });
  EXPECT_GT(listed, 25);
  EXPECT_GT(known, 6);
  EXPECT_THAT(refused("optim.name=adamv"), AllOf(HasSubstr("expected one of adamw, sgd, lion, adafactor, adam8bit, muon; did you mean adamw?")));
}

/// What trains besides, masters and gradients, is nothing to a reader.
TEST(Validate, FormatsOfAModelThatIsOnlyReadAreThoseThatTrain) {
  const auto read = [](const char* params, const char* compute, const char* master = "fp32") -> std::string {
    Config config = good();
    config.precision.params = params, config.precision.compute = compute, config.precision.master = master;
    try {
      validate_reading(config);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "(accepted)";
  };
  EXPECT_THAT(read("bf16", "fp16"), AllOf(StartsWith("precision.compute = fp16: precision.params = bf16 would be rounded twice"), HasSubstr("set ")));
  EXPECT_THAT(read("fp16", "fp8"), StartsWith("precision.compute = fp8"));
  EXPECT_THAT(read("fp16", "auto"), StartsWith("precision.compute = auto"));
  EXPECT_THAT(read("fp8", "fp32"), StartsWith("precision.params = fp8"));
  EXPECT_EQ(read("fp32", "bf16", "bf16"), "(accepted)");
}

TEST(Validate, AutomaticProductsKeepTheOtherRules) {
  EXPECT_EQ(refusal([](Config& c) { c.precision.compute = "auto"; }), "(accepted)");
  EXPECT_EQ(refusal([](Config& c) { c.precision.compute = "auto", c.precision.params = "bf16"; }), "(accepted)");
  EXPECT_THAT(refusal([](Config& c) { c.precision.compute = "auto", c.precision.params = "fp16"; }),
              AllOf(StartsWith("precision.compute = auto: becomes bf16 or fp32"), HasSubstr("set precision.compute = fp16")));
}

TEST(Settings, WithoutEffectAreNamedWithTheReason) {
  const auto said = [](const std::vector<std::string>& sets, int world_size = 1) {
    Config config = parse_config("[optim]\nname = \"adamw\"\nmomentum = 0.9\n", "/", sets);
    return settings_without_effect(config, world_size);
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(said({}), ElementsAre("optim.momentum = 0.9: has no effect with optim.name = adamw"));
  EXPECT_THAT(said({"optim.name=sgd", "optim.betas=[0.8, 0.9]", "optim.eps=1e-8"}),
              ElementsAre("optim.betas = [0.8, 0.9]: has no effect with optim.name = sgd"));
  EXPECT_THAT(said({"optim.groups=[\"norm: name = sgd\"]"}), ::testing::IsEmpty()) << "a group has momentum";
  EXPECT_THAT(said({"optim.name=sgd", "optim.ns_steps=4"}), ElementsAre("optim.ns_steps = 4: has no effect with optim.name = sgd"));
  EXPECT_THAT(said({"optim.name=sgd", "checkpoint.keep=2", "checkpoint.async=true", "recompute.every=3", "zero.accumulate=whole", "zero.wrap=head"}),
              ElementsAre("checkpoint.keep = 2: has no effect without checkpoint.dir", "checkpoint.async = true: has no effect without checkpoint.dir",
                          "recompute.every = 3: has no effect with recompute.mode = none", "zero.wrap = \"head\": has no effect with zero.stage = 0",
                          "zero.accumulate = \"whole\": has no effect with zero.stage = 0"));
  EXPECT_THAT(said({"optim.name=sgd", "comm.algorithm=ring"}), ElementsAre("comm.algorithm = \"ring\": has no effect on one rank, which has no peers"));
  EXPECT_THAT(said({"optim.name=sgd", "comm.algorithm=ring", "context.method=ulysses"}, 2), ElementsAre(HasSubstr("context.method")));
  EXPECT_THAT(said({"optim.name=sgd", "mesh.cp=2", "context.ulysses=2", "context.balance=contiguous"}, 2),
              ElementsAre("context.ulysses = 2: has no effect with context.method = ring"));
  EXPECT_THAT(said({"optim.name=sgd", "checkpoint.dir=a", "checkpoint.keep=2", "zero.stage=3", "zero.wrap=head"}), ::testing::IsEmpty());
  EXPECT_THAT(said({"optim.name=sgd", "zero.stage=3", "zero.bucket_bytes=9", "precision.max_skips=3", "data.seed=5", "data.shuffle=false"}),
              ElementsAre("zero.bucket_bytes = 9: has no effect with zero.stage = 3", "precision.max_skips = 3: has no effect with precision.loss_scale = none",
                          "data.seed = 5: has no effect without data.shuffle"));
  EXPECT_THAT(said({"optim.name=sgd", "model.family=mlp", "model.heads=4", "model.kv_heads=2"}),
              ElementsAre("model.heads = 4: has no effect with model.family = mlp", "model.kv_heads = 2: has no effect with model.family = mlp"));
  EXPECT_THAT(said({"optim.name=sgd", "optim.weight_decay=0", "optim.decay_on=matrices"}),
              ElementsAre("optim.decay_on = \"matrices\": has no effect with optim.weight_decay = 0"));
}

TEST(Settings, WithoutEffectOnBiasesOfFrozenRouters) {
  const auto said = [](const std::vector<std::string>& sets) {
    std::vector<std::string> all{"model.family=mixtral", "model.layers=2", "model.router=sigmoid", "moe.bias_rate=0.1", "lora.modules=**.wq"};
    all.insert(all.end(), sets.begin(), sets.end());
    return settings_without_effect(parse_config("", "/", all), 1);
  };
  using ::testing::ElementsAre;
  using ::testing::IsEmpty;
  EXPECT_THAT(said({}), ElementsAre(HasSubstr("moe.bias_rate = 0.1: has no effect beside frozen routers")));
  EXPECT_THAT(said({"lora.modules="}), IsEmpty());
  EXPECT_THAT(said({"lora.trained=layers.1.feed_forward.router.weight"}), IsEmpty()) << "one learns";
}

TEST(Settings, WithoutEffectOnGradientsThatNothingSums) {
  const auto said = [](const std::vector<std::string>& sets, int world_size) {
    std::vector<std::string> all{"precision.reduce=bf16"};
    all.insert(all.end(), sets.begin(), sets.end());
    return settings_without_effect(parse_config("", "/", all), world_size);
  };
  using ::testing::ElementsAre;
  using ::testing::IsEmpty;
  for (const auto& sets : {std::vector<std::string>{"mesh.tp=2"}, {"mesh.pp=2", "zero.stage=2"}}) {
    EXPECT_THAT(said(sets, 2), ElementsAre("precision.reduce = \"bf16\": has no effect on one data rank, which reduces nothing"));
    EXPECT_THAT(said(sets, 4), IsEmpty());
  }
  EXPECT_THAT(said({"mesh.cp=2"}, 2), IsEmpty());
  EXPECT_THAT(said({"mesh.tp=2", "precision.params=bf16"}, 2), IsEmpty()) << "gradients are kept in it";
  EXPECT_THAT(said({"mesh.tp=2", "zero.stage=1", "model.experts=4"}, 2), IsEmpty()) << "whose ranks sum the experts' gradients";
}

/// Head and tail, until a window is as short as a part.
TEST(Context, OnePartWhereAWindowMakesWorkEven) {
  Config config = good();  // 16 tokens
  for (const auto& [window, balance, cp, one] : {std::tuple{0, "auto", 4, false},
                                                 {4, "auto", 4, true},
                                                 {5, "auto", 4, false},
                                                 {5, "auto", 3, true},
                                                 {0, "contiguous", 4, true},
                                                 {4, "head_tail", 4, false}}) {
    config.model.sliding_window = window;
    config.context.balance = balance;
    EXPECT_EQ(holds_one_part(config, cp), one) << window << " " << balance << " " << cp;
  }
}

TEST(Validate, KernelsAreChosenByNamesThatThereAre) {
  EXPECT_EQ(refusal([](Config& c) { c.run.kernels = "reference"; }), "(accepted)");
  EXPECT_EQ(refusal([](Config& c) { c.run.kernels.by_pattern = {{"rms_norm", "reference"}, {"swiglu", "auto"}, {"*", "reference"}}; }), "(accepted)");
  EXPECT_THAT(refusal([](Config& c) { c.run.kernels.by_pattern = {{"rmsnorm", "reference"}}; }),
              AllOf(StartsWith("run.kernels: 'rmsnorm' = reference: there is no kernel of this name; did you mean rms_norm?"), HasSubstr("attention, ")));
}

TEST(Validate, SequencesThatCannotBeCutAreRefused) {
  const auto cut = [](int cp, const std::string& method, int ulysses = 0, int tp = 1) {
    return refusal(
        [=](Config& c) {
          c.mesh.cp = cp, c.mesh.tp = tp, c.context.method = method, c.context.ulysses = ulysses;
          c.model.dim = 48, c.model.heads = 6, c.model.kv_heads = 3;
        },
        cp * tp);
  };
  for (const char* method : {"ring", "ulysses_ring", "ring_full", "all_gather"}) EXPECT_EQ(cut(8, method), "(accepted)") << method;
  EXPECT_EQ(cut(6, "ulysses"), "(accepted)");
  EXPECT_THAT(cut(8, "ulysses"), AllOf(StartsWith("mesh.cp = 8: context.method = ulysses"), HasSubstr("the model has 6"), HasSubstr("at most 6")));
  EXPECT_EQ(cut(2, "ulysses", 0, 3), "(accepted)");
  EXPECT_THAT(cut(3, "ulysses", 0, 3), AllOf(HasSubstr("with mesh.tp = 3 a rank has 2"), HasSubstr("context.method = ring")));
  EXPECT_THAT(cut(8, "ulysses", 0, 4), HasSubstr("with mesh.tp = 4 a rank has 1"));  // two of the four share a key's two queries
  EXPECT_EQ(cut(8, "ulysses_ring", 4), "(accepted)");
  EXPECT_THAT(cut(8, "ulysses_ring", 3), AllOf(StartsWith("context.ulysses = 3"), HasSubstr("does not divide mesh.cp = 8")));
  EXPECT_THAT(cut(8, "ulysses_ring", 8), AllOf(StartsWith("context.ulysses = 8"), HasSubstr("at most 6")));
  EXPECT_THAT(cut(2, "ring", -1), StartsWith("context.ulysses = -1"));
  EXPECT_THAT(refusal([](Config& c) { c.mesh.cp = 8, c.data.seq_len = 7; }, 8), AllOf(StartsWith("data.seq_len = 7"), HasSubstr("mesh.cp is 8")));
  EXPECT_THAT(refusal([](Config& c) { c.mesh.cp = 2, c.model.family = "mlp"; }, 2), AllOf(StartsWith("mesh.cp = 2: model.family = mlp"), HasSubstr("mesh.dp")));
}

TEST(Validate, UlyssesTakesTheLargestGroupThatHasHeads) {
  const auto ranks = [](const std::string& method, int cp, int heads, int tp = 1, int asked = 0) {
    Config config;
    config.model.heads = heads;
    config.context.method = method;
    config.context.ulysses = asked;
    return ulysses_ranks(config, cp, tp);
  };
  EXPECT_EQ(ranks("ring", 8, 8), 1);
  EXPECT_EQ(ranks("ulysses", 8, 8), 8);
  EXPECT_EQ(ranks("ulysses_ring", 8, 8), 4);  // below all of them: a ring of two is left
  EXPECT_EQ(ranks("ulysses_ring", 8, 3), 2);
  EXPECT_EQ(ranks("ulysses_ring", 12, 8, 2), 4);
  EXPECT_EQ(ranks("ulysses_ring", 5, 8), 1);
  EXPECT_EQ(ranks("ulysses_ring", 8, 8, 1, 2), 2);
}

TEST(Validate, MissingTechniquesAreRefusedByName) {
  EXPECT_THAT(refusal([](Config& c) { c.tensor.overlap = true; }, 2), AllOf(StartsWith("tensor.overlap = true"), HasSubstr("mesh.tp is 1")));
  EXPECT_THAT(refusal([](Config& c) { c.tensor.overlap = true, c.mesh.tp = 2, c.precision.compute = "fp8"; }, 2),
              AllOf(StartsWith("tensor.overlap = true"), HasSubstr("precision.compute = bf16")));
  EXPECT_THAT(refusal([](Config& c) { c.tensor.sequence_parallel = true; }, 2), StartsWith("tensor.sequence_parallel = true"));
  EXPECT_THAT(refusal([](Config& c) { c.mesh.tp = 2, c.tensor.keep_gathered = true; }, 2), StartsWith("tensor.keep_gathered = true"));
  EXPECT_EQ(refusal([](Config& c) { c.mesh.pp = -1; }, 2), "(accepted)");
  EXPECT_THAT(refusal([](Config& c) { c.optim.name = "muon", c.optim.state_dtype = "bf16"; }),
              AllOf(StartsWith("optim.state_dtype = bf16: optim.name = muon"), HasSubstr("set optim.state_dtype = fp32")));
  EXPECT_THAT(refusal([](Config& c) { c.optim.ns_steps = 0; }), StartsWith("optim.ns_steps = 0"));
  EXPECT_THAT(refusal([](Config& c) { c.precision.loss_scale = "dynamic"; }), StartsWith("precision.loss_scale = dynamic"));
}

TEST(Validate, Mixtures) {
  const auto mixture = [](auto&& change, int world = 1) {
    return refusal(
        [&](Config& c) {
          c.model.family = "mixtral", c.model.experts = 4, c.model.experts_per_token = 2;
          change(c);
        },
        world);
  };
  EXPECT_EQ(mixture([](Config&) {}), "(accepted)");
  EXPECT_THAT(mixture([](Config& c) { c.model.experts = 0; }), AllOf(StartsWith("model.experts = 0"), HasSubstr("model.family = llama for none")));
  EXPECT_THAT(mixture([](Config& c) { c.model.experts_per_token = 5; }), AllOf(StartsWith("model.experts_per_token = 5"), HasSubstr("model.experts = 4")));
  EXPECT_THAT(mixture([](Config& c) { c.model.experts_per_token = 0; }), StartsWith("model.experts_per_token = 0"));
  EXPECT_THAT(mixture([](Config& c) { c.model.experts_per_token = 1; }), HasSubstr("set model.router = softmax with model.norm_topk = false"));
  EXPECT_THAT(mixture([](Config& c) { c.model.router = "sigmoid", c.model.norm_topk = false, c.model.experts_per_token = 1; }), HasSubstr("always one"));
  // A frozen router needs no gradient; one whose kind a folder has said is not to be changed.
  const auto one_of_a_folder = [](Config& c) { c.model.from_hf = "folder", c.model.experts_per_token = 1; };
  EXPECT_THAT(mixture(one_of_a_folder), HasSubstr("lora.modules names what has adapters"));
  EXPECT_EQ(mixture([&](Config& c) { one_of_a_folder(c), c.lora.modules = "layers.*.attention.*"; }), "(accepted)");
  EXPECT_THAT(mixture([&](Config& c) { one_of_a_folder(c), c.lora.modules = "layers.*.attention.*", c.lora.trained = {"layers.0.**"}; }),
              HasSubstr("always one"));
  EXPECT_THAT(mixture([](Config& c) { c.model.shared_gate = true; }), StartsWith("model.shared_gate = true"));
  EXPECT_THAT(mixture([](Config& c) { c.model.shared_ffn_dim = -1; }), StartsWith("model.shared_ffn_dim = -1"));
  EXPECT_THAT(mixture([](Config& c) { c.moe.capacity_factor = 1e-6; }),
              AllOf(StartsWith("moe.capacity_factor = "), HasSubstr("set moe.capacity_factor to at least")));
  EXPECT_THAT(mixture([](Config& c) { c.moe.capacity_factor = -1; }), StartsWith("moe.capacity_factor = -1"));
  EXPECT_THAT(mixture([](Config& c) { c.moe.balance_loss = -1; }), StartsWith("moe.balance_loss = -1"));
  EXPECT_THAT(mixture([](Config& c) { c.moe.z_loss = INFINITY; }), StartsWith("moe.z_loss = inf"));
  EXPECT_THAT(mixture([](Config& c) { c.moe.bias_rate = -1; }), StartsWith("moe.bias_rate = -1"));
  EXPECT_EQ(mixture([](Config& c) { c.mesh.tp = 2; }, 2), "(accepted)");
  EXPECT_THAT(refusal([](Config& c) { c.model.router = "sigmoid"; }), HasSubstr("of a mixture of experts"));
  EXPECT_THAT(refusal([](Config& c) { c.model.shared_ffn_dim = 8; }), HasSubstr("of a mixture of experts"));
}

}  // namespace
}  // namespace tessera
