// Every stage of sharding, with accumulation, recomputation and every number format, in every kind of layout; and tensor parallelism with each of them.

#include <array>

#include "tests/test_device.h"
#include "tests/verify/fixture.h"

namespace tessera {
namespace {

using Sets = std::vector<std::string>;

struct Choice {
  const char* name;
  Sets sets;
};

/// Ranks, and how a sharded stage lays them out; stage 0 has as many replicas.
struct Ranks {
  const char* name;
  int replicate, shard;
};

constexpr std::array kRanks{Ranks{"2", 1, 2},   Ranks{"3", 1, 3},   Ranks{"5", 1, 5},   Ranks{"8", 1, 8},   Ranks{"2x2", 2, 2}, Ranks{"3x2", 3, 2},
                            Ranks{"2x4", 2, 4}, Ranks{"4x2", 4, 2}, Ranks{"2x1", 2, 1}, Ranks{"3x1", 3, 1}, Ranks{"5x1", 5, 1}, Ranks{"8x1", 8, 1}};

/// A device refuses the last three by name: fp16 of a fused norm, fp8 of sizes such as these, updates by stochastic rounding.
const std::vector<Choice>& precisions() {
  static const std::vector<Choice> all = [] {
    std::vector<Choice> formats{
        {"fp32", {}},
        {"bf16", {"precision.compute=bf16"}},
        {"bf16 weights", {"precision.params=bf16", "precision.compute=bf16"}},
        {"fp16", {"precision.params=fp16", "precision.compute=fp16", "precision.loss_scale=1024"}},
        {"fp8", {"precision.compute=fp8"}},
        {"bf16 alone", {"precision.params=bf16", "precision.compute=bf16", "precision.master=bf16"}},
    };
    if (!testing_support::test_device().is_cpu()) formats.resize(3);
    return formats;
  }();
  return all;
}

const std::vector<Choice>& recomputations() {
  static const std::vector<Choice> all{{"none", {}},
                                       {"full", {"recompute.mode=full"}},
                                       {"selective", {"recompute.mode=selective"}},
                                       {"every second", {"recompute.mode=full", "recompute.every=2"}}};
  return all;
}

const std::vector<Choice>& models() {
  static const std::vector<Choice> all{
      {"llama", {"model.kv_heads=2", "model.tie_embeddings=true"}}, {"gpt2", {"model.dropout=0.1"}}, {"llama", {"model.sliding_window=5"}}};
  return all;
}

/// Layers cut over `tp` ranks, and what goes on beside it.
struct Cut {
  int tp, stage, replicate, shard;
};

constexpr std::array kCuts{Cut{2, 0, 1, 1}, Cut{3, 0, 1, 1}, Cut{4, 0, 1, 1}, Cut{8, 0, 1, 1}, Cut{2, 0, 2, 1}, Cut{2, 1, 1, 2},
                           Cut{3, 2, 1, 2}, Cut{2, 3, 1, 2}, Cut{2, 3, 1, 3}, Cut{3, 3, 1, 2}, Cut{2, 3, 2, 2}, Cut{2, 2, 1, 3}};

/// Uneven everywhere: 12 heads of 3 key-value heads (shared from 4 ranks on), 8 heads, 40 features over 3, a vocabulary of 259.
const std::vector<Choice>& cut_models() {
  static const std::vector<Choice> all{{"llama", {"model.dim=48", "model.heads=12", "model.kv_heads=3", "model.tie_embeddings=true"}},
                                       {"gpt2", {"model.heads=8", "model.dropout=0.1", "model.sliding_window=3"}},
                                       {"mlp", {"model.tie_embeddings=true"}}};
  return all;
}

std::string axis(const char* name, int size) { return std::string(name) + "=" + std::to_string(size); }

class VerifyMatrix : public testing_support::VerifyFixture, public ::testing::WithParamInterface<int> {
 protected:
  int stage() const { return GetParam(); }
  /// What is not sharded knows no hybrids.
  size_t layouts() const { return stage() == 0 ? 4 : kRanks.size(); }

  /// Each entry counts modulo the number of choices.
  void expect_cell(size_t ranks, size_t precision, size_t recompute, size_t family) const {
    const Ranks& layout = kRanks[ranks];
    const Choice& model = models()[family % models().size()];
    // 10 micro-batches: more than one to each rank but a few of eight, and unevenly dealt where they can be.
    Sets sets{"batch.global_size=10", "batch.micro_size=1", "run.steps=2", "zero.stage=" + std::to_string(stage()), "zero.bucket_bytes=8000"};
    for (const Sets& more : {precisions()[precision % precisions().size()].sets, recomputations()[recompute % recomputations().size()].sets, model.sets}) {
      sets.insert(sets.end(), more.begin(), more.end());
    }
    if (stage() == 2 && recompute % 2 == 1) sets.emplace_back("zero.accumulate=whole");
    if (stage() == 3 && recompute % 2 == 1) sets.emplace_back("zero.prefetch=0");
    expect_passes(
        stage() == 0 ? axis("dp_replicate", layout.replicate * layout.shard) : axis("dp_replicate", layout.replicate) + "," + axis("dp_shard", layout.shard),
        model.name, sets);
  }
};

/// Every stage meets every layout, every number format and every form of recomputation; 2 to 8 ranks as threads.
TEST_P(VerifyMatrix, EveryLayoutAndEveryFormat) {
  const auto s = static_cast<size_t>(stage());
  for (size_t i = 0; i < layouts(); ++i) expect_cell(i, i + s, i + i / 4 + s, i + s);
  for (size_t i = layouts(); i < precisions().size(); ++i) expect_cell(i % layouts(), i + s, i, i);
}

/// All combinations: `make soak`.
TEST_P(VerifyMatrix, DISABLED_Everything) {
  for (size_t ranks = 0; ranks < layouts(); ++ranks) {
    for (size_t precision = 0; precision < precisions().size(); ++precision) {
      for (size_t recompute = 0; recompute < recomputations().size(); ++recompute) expect_cell(ranks, precision, recompute, ranks + precision + recompute);
    }
  }
}

/// Without and with sequence parallelism.
class TensorVerifyMatrix : public testing_support::VerifyFixture, public ::testing::WithParamInterface<bool> {
 protected:
  /// Each entry counts modulo the number of choices.
  void expect_cell(size_t cut, size_t precision, size_t recompute, size_t family) const {
    const Cut& layout = kCuts[cut % kCuts.size()];
    const Choice& model = cut_models()[family % cut_models().size()];
    const Choice& format = precisions()[precision % precisions().size()];
    const Choice& again = recomputations()[recompute % recomputations().size()];
    // 5 micro-batches: several to most ranks, and unevenly dealt. The learning rate leaves attention soft: where it saturates, a query's gradient is the small
    // difference of large numbers, and one device in fp32 is as far from itself in fp64 as a module may be off.
    Sets sets{"batch.global_size=5", "batch.micro_size=1", "run.steps=2", "optim.lr=1e-3", axis("zero.stage", layout.stage), "zero.bucket_bytes=8000"};
    for (const Sets& more : {format.sets, again.sets, model.sets}) sets.insert(sets.end(), more.begin(), more.end());
    const auto set_if = [&](bool condition, const char* set) {
      if (condition) sets.emplace_back(set);
    };
    set_if(GetParam(), "tensor.sequence_parallel=true");
    set_if(GetParam() && family % 2 == 1, "tensor.keep_gathered=true");
    set_if((cut + family) % 2 == 0 && !is(format, "fp8"), "tensor.overlap=true");  // which fp8 refuses
    set_if(layout.stage >= 2 && family % 2 == 0, "zero.accumulate=whole");
    set_if(recompute % 2 == 1, "comm.check=true");
    if (is(model, "mlp") && is(again, "selective")) sets.insert(sets.end(), {"recompute.mode=full", "recompute.modules=layers.*.feed_forward"});
    expect_passes(axis("tp", layout.tp) + "," + axis("dp_replicate", layout.replicate) + "," + axis("dp_shard", layout.shard), model.name, sets);
  }

 private:
  static bool is(const Choice& choice, std::string_view name) { return choice.name == name; }
};

/// Every layout in fp32, the forms of recomputation in turn, and every other number format.
TEST_P(TensorVerifyMatrix, EveryLayoutAndEveryFormat) {
  const size_t s = GetParam() ? 1 : 0;
  for (size_t i = 0; i < kCuts.size(); ++i) expect_cell(i, 0, i + i / 4 + s, i + i / 3 + s);
  for (size_t i = 1; i < precisions().size(); ++i) expect_cell(2 * i + 5 * s, i, i + s, i + s);
}

/// All combinations: `make soak`.
TEST_P(TensorVerifyMatrix, DISABLED_Everything) {
  for (size_t cut = 0; cut < kCuts.size(); ++cut) {
    for (size_t precision = 0; precision < precisions().size(); ++precision) {
      for (size_t recompute = 0; recompute < recomputations().size(); ++recompute) expect_cell(cut, precision, recompute, cut + precision + recompute);
    }
  }
}

/// Stages: mesh, schedule and chunks.
struct StageCut {
  const char* mesh;
  Sets sets;
};

const std::vector<StageCut>& stage_cuts() {
  static const std::vector<StageCut> all{
      {"pp=2", {}},
      {"pp=3,dp_replicate=2", {"pipeline.schedule=gpipe"}},
      {"pp=2,tp=2", {"pipeline.schedule=interleaved", "pipeline.virtual_stages=2", "tensor.sequence_parallel=true"}},
      {"pp=2,dp_shard=3", {"zero.stage=1", "pipeline.schedule=zb_h1"}},
      {"pp=2,dp_shard=2", {"zero.stage=2", "pipeline.schedule=breadth_first", "pipeline.virtual_stages=2"}},
      {"pp=2,dp_shard=2,tp=2", {"zero.stage=3", "pipeline.schedule=v_half", "pipeline.virtual_stages=2"}},
      {"pp=4,dp_shard=2", {"zero.stage=3", "pipeline.schedule=zb_h1"}},
      {"pp=2,dp_shard=2,dp_replicate=2", {"zero.stage=3", "pipeline.schedule=gpipe"}},
  };
  return all;
}

class PipelineVerifyMatrix : public testing_support::VerifyFixture {
 protected:
  void expect_cell(size_t cut, size_t precision, size_t recompute, size_t family) const {
    const StageCut& layout = stage_cuts()[cut % stage_cuts().size()];
    const Choice& model = cut_models()[family % cut_models().size()];
    Sets sets{"batch.global_size=8", "batch.micro_size=1", "run.steps=2", "optim.lr=1e-3", "zero.bucket_bytes=8000"};
    for (const Sets& more :
         {layout.sets, precisions()[precision % precisions().size()].sets, recomputations()[recompute % recomputations().size()].sets, model.sets}) {
      sets.insert(sets.end(), more.begin(), more.end());
    }
    const bool none_to_keep =
        std::string_view(model.name) == "mlp" && std::string_view(recomputations()[recompute % recomputations().size()].name) == "selective";
    if (none_to_keep) sets.insert(sets.end(), {"recompute.mode=full", "recompute.modules=layers.*.feed_forward"});
    expect_passes(layout.mesh, model.name, sets);
  }
};

/// Every layout in fp32, the forms of recomputation in turn, and every other number format.
TEST_F(PipelineVerifyMatrix, EveryLayoutAndEveryFormat) {
  for (size_t i = 0; i < stage_cuts().size(); ++i) expect_cell(i, 0, 0, i);
  for (size_t i = 1; i < precisions().size(); ++i) expect_cell(3 * i, i, i, i);
}

INSTANTIATE_TEST_SUITE_P(Sequence, TensorVerifyMatrix, ::testing::Bool(), [](const auto& info) { return info.param ? "Cut" : "Whole"; });

INSTANTIATE_TEST_SUITE_P(Stages, VerifyMatrix, ::testing::Range(0, 4), [](const auto& info) { return "Stage" + std::to_string(info.param); });

}  // namespace
}  // namespace tessera
