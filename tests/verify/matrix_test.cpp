// Every stage of sharding, with accumulation, recomputation and every number format, in every kind of layout.

#include <array>

#include "tests/verify/fixture.h"

namespace tessera {
namespace {

using Settings = std::vector<std::string>;

struct Choice {
  const char* name;
  Settings sets;
};

/// Ranks, and how a sharded stage lays them out; stage 0 has as many replicas.
struct Ranks {
  const char* name;
  int replicate, shard;
};

constexpr std::array kRanks{Ranks{"2", 1, 2},   Ranks{"3", 1, 3},   Ranks{"5", 1, 5},   Ranks{"8", 1, 8},   Ranks{"2x2", 2, 2}, Ranks{"3x2", 3, 2},
                            Ranks{"2x4", 2, 4}, Ranks{"4x2", 4, 2}, Ranks{"2x1", 2, 1}, Ranks{"3x1", 3, 1}, Ranks{"5x1", 5, 1}, Ranks{"8x1", 8, 1}};

const std::vector<Choice>& precisions() {
  static const std::vector<Choice> all{
      {"fp32", {}},
      {"bf16", {"precision.compute=bf16"}},
      {"bf16 weights", {"precision.params=bf16", "precision.compute=bf16"}},
      {"fp16", {"precision.params=fp16", "precision.compute=fp16", "precision.loss_scale=1024"}},
      {"fp8", {"precision.compute=fp8"}},
      {"bf16 alone", {"precision.params=bf16", "precision.compute=bf16", "precision.master=bf16"}},
  };
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
  static const std::vector<Choice> all{{"llama", {"model.kv_heads=2", "model.tie_embeddings=true"}}, {"gpt2", {"model.dropout=0.1"}}, {"llama", {}}};
  return all;
}

class VerifyMatrix : public testing::VerifyFixture, public ::testing::WithParamInterface<int> {
 protected:
  int stage() const { return GetParam(); }
  /// What is not sharded knows no hybrids.
  size_t layouts() const { return stage() == 0 ? 4 : kRanks.size(); }

  /// Each entry counts modulo the number of choices.
  void expect_cell(size_t ranks, size_t precision, size_t recompute, size_t family) const {
    const Ranks& layout = kRanks[ranks];
    const Choice& model = models()[family % models().size()];
    // 10 micro-batches: more than one to each rank but a few of eight, and unevenly dealt where they can be.
    Settings sets{"batch.global_size=10", "batch.micro_size=1", "run.steps=2", "zero.stage=" + std::to_string(stage()), "zero.bucket_bytes=8000"};
    for (const Settings& more : {precisions()[precision % precisions().size()].sets, recomputations()[recompute % recomputations().size()].sets, model.sets}) {
      sets.insert(sets.end(), more.begin(), more.end());
    }
    if (stage() == 2 && recompute % 2 == 1) sets.emplace_back("zero.accumulate=whole");
    if (stage() == 3 && recompute % 2 == 1) sets.emplace_back("zero.prefetch=0");
    const auto axis = [](const char* name, int size) { return std::string(name) + "=" + std::to_string(size); };
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

INSTANTIATE_TEST_SUITE_P(Stages, VerifyMatrix, ::testing::Range(0, 4), [](const auto& info) { return "Stage" + std::to_string(info.param); });

}  // namespace
}  // namespace tessera
