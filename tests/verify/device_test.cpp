// Layouts on the simulated accelerator (docs/testing.md), where its detector sees streams: those in which several techniques' collectives, copies and
// recomputation are under way at once. On the CPU the other suites have them, so there they are left out.

#include "tests/verify/fixture.h"

namespace tessera {
namespace {

class VerifyOnDevice : public testing_support::VerifyFixture {
 protected:
  static constexpr const char *kFull = "recompute.mode=full", *kSelective = "recompute.mode=selective", *kBySequence = "tensor.sequence_parallel=true",
                              *kOverlap = "tensor.overlap=true", *kTied = "model.tie_embeddings=true", *kBf16 = "precision.compute=bf16";

  void SetUp() override {
    if (testing_support::test_device().is_cpu()) GTEST_SKIP() << "the other suites verify layouts on the CPU";
    VerifyFixture::SetUp();
  }
  void expect(const std::string& mesh, const std::string& family, std::vector<std::string> sets) const {
    sets.insert(sets.end(), {"batch.global_size=4", "batch.micro_size=1", "run.steps=2", "optim.lr=1e-3", "zero.bucket_bytes=8000"});
    expect_passes(mesh, family, sets);
  }
};

TEST_F(VerifyOnDevice, CutLayersBesideSharding) {
  expect("tp=2,dp_shard=2", "llama", {"zero.stage=3", kBySequence, kOverlap, kFull, kTied});
  expect("tp=3,dp_shard=2", "gpt2", {"zero.stage=2", kOverlap, "model.dropout=0.1", "model.dim=48", "model.heads=6"});
  expect("tp=2,dp_shard=2,dp_replicate=2", "llama", {"zero.stage=3", kBySequence, kSelective, kBf16});
}

TEST_F(VerifyOnDevice, StagesBesideSharding) {
  expect("pp=2,dp_shard=2", "llama", {"zero.stage=2", "pipeline.schedule=zb_h1", kSelective, kTied});
  expect("pp=2,tp=2", "llama", {"pipeline.schedule=interleaved", "pipeline.virtual_stages=2", kBySequence, kOverlap});
  expect("pp=2,dp_shard=2", "gpt2", {"zero.stage=3", "pipeline.schedule=v_half", "pipeline.virtual_stages=2", "model.dropout=0.1", kFull});
  expect("pp=3", "llama", {"pipeline.schedule=1f1b", "pipeline.post_validate=true", kBf16});
}

TEST_F(VerifyOnDevice, CutSequencesBesideSharding) {
  expect("cp=2,dp_shard=2", "llama", {"zero.stage=3", "data.seq_len=13", kFull});
  expect("cp=3", "gpt2", {"data.seq_len=13", "context.method=ring_full", kSelective, kTied});
  expect("cp=2,tp=2", "llama", {"data.seq_len=13", "context.method=ulysses", kBySequence, kOverlap});
  expect("cp=2,pp=2", "llama", {"data.seq_len=13", "context.method=ulysses_ring", "pipeline.schedule=zb_h1"});
}

TEST_F(VerifyOnDevice, ExpertsOverRanks) {
  expect("dp_shard=4,ep=2", "mixtral", {"zero.stage=3", "model.experts=4", kFull});
  expect("tp=2,ep=2,dp_shard=2", "mixtral", {"zero.stage=1", "model.experts=4", kBySequence, "model.shared_ffn_dim=20", "model.shared_gate=true"});
  expect("dp_shard=2,pp=2,cp=2,ep=2", "mixtral", {"zero.stage=3", "model.experts=4", "data.seq_len=15"});
}

TEST_F(VerifyOnDevice, SlicesOnTheHost) {
  const std::vector<std::string> host{"zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=host"};
  const auto beside = [&](std::vector<std::string> more) {
    more.insert(more.end(), host.begin(), host.end());
    return more;
  };
  expect("dp_shard=2,dp_replicate=2", "llama", beside({kFull, kTied}));
  expect("dp_shard=2,tp=2", "gpt2", beside({"model.dropout=0.1", kSelective}));
  expect("dp_shard=2,pp=2", "llama", beside({"zero.prefetch=0"}));
}

}  // namespace
}  // namespace tessera
