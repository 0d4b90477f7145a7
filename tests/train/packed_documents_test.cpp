// Packed documents in a run: attention, labels and positions end with each, in every layout.

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "tessera/data/sequential_loader.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/model.h"
#include "tessera/nn/meta.h"
#include "tessera/train/evaluate.h"
#include "tessera/train/inputs.h"
#include "tests/refusal.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using testing_support::difference;
using testing_support::kGradients;
using testing_support::kLosses;
using Sets = std::vector<std::string>;

class PackedDocuments : public testing_support::TrainFixture {
 protected:
  Config lines(const std::string& family, Sets sets = {}) const {
    sets.insert(sets.begin(), {write_lines(), "data.documents=lines", "data.seq_len=29", "batch.global_size=6", "run.steps=3"});
    return config(family, sets);
  }
  data::MicroBatch first_micro_batch(const Config& settings) const {
    data::Loader loader(corpus(settings),
                        {.seq_len = settings.data.seq_len, .global_size = settings.batch.global_size, .micro_size = settings.batch.micro_size});
    return loader.next().micro_batches.front();
  }
};

std::shared_ptr<LanguageModel> model_of(const Config& settings) {
  auto model = on_meta([&] { return make_model(settings.model); });
  materialize(*model, 3, at::kCPU);
  return model;
}

at::Tensor packed_loss(LanguageModel& model, const data::MicroBatch& micro) {
  return model.forward(micro.tokens, micro.labels, micro.places, micro.document_ids);
}

std::map<std::string, at::Tensor> gradients_of(LanguageModel& model) {
  std::map<std::string, at::Tensor> gradients;
  for (const auto& parameter : model.named_parameters()) {
    gradients[parameter.key()] = parameter.value().grad().clone();
    parameter.value().mutable_grad() = at::Tensor();
  }
  return gradients;
}

TEST_F(PackedDocuments, OfTheHeldOutTextThatAreTooLongAreNotThoseOfTheOther) {
  std::ofstream(folder_ / "held_out.txt") << std::string(70, 'a') << "\nb\n";
  const auto held_out = "data.validation_files=[\"" + (folder_ / "held_out.txt").string() + "\"]";
  EXPECT_THAT(testing_support::refusal([&] { open_inputs(lines("llama", {held_out})); }),
              testing::StartsWith("data.validation_files: data.seq_len = 29: a window holds whole documents, and 1 of 2 are longer"));
  EXPECT_THAT(testing_support::refusal([&] { open_inputs(lines("llama", {"data.seq_len=5"})); }), testing::StartsWith("data.seq_len = 5: "));
}

TEST_F(PackedDocuments, AreComputedAsIfEachWereAlone) {
  for (const char* family : {"llama", "gpt2"}) {
    const Config settings = lines(family);
    const auto model = model_of(settings);
    const data::MicroBatch micro = first_micro_batch(settings);
    const at::Tensor together = packed_loss(*model, micro);
    together.backward();
    const auto gradients = gradients_of(*model);
    double sum = 0;
    int documents = 0;
    for (int64_t begin = 0, end = 1; begin < micro.seq_len; begin = end++) {
      while (end < micro.seq_len && micro.places[end].item<int64_t>() > 0) ++end;
      const auto own = [&](const at::Tensor& x) { return x.narrow(1, begin, end - begin); };
      const at::Tensor loss = model->forward(own(micro.tokens), own(micro.labels));
      loss.backward();
      sum += loss.item<double>();
      documents += own(micro.labels).ne(data::ignored_label).any().item<bool>() ? 1 : 0;
    }
    EXPECT_GT(documents, 4) << "several in a window";
    EXPECT_NEAR(together.item<double>(), sum, kLosses * sum);
    EXPECT_LE(difference(gradients, gradients_of(*model)), kGradients) << family;
  }
}

TEST_F(PackedDocuments, ATokenOfOneChangesNoOutputOfAnother) {
  const at::Tensor ids = at::cat({at::zeros({1, 9}, at::kLong), at::full({1, 9}, 9, at::kLong)}, 1), places = at::arange(9).repeat({2});
  const at::Tensor document = at::randint(256, {1, 9}, at::kLong), tokens = document.repeat({1, 2});
  at::Tensor other = tokens.clone();
  other[0][4] = (other[0][4] + 1).remainder(256);
  for (const char* family : {"llama", "gpt2"}) {
    const auto model = model_of(lines(family));
    const at::NoGradGuard no_grad;
    const at::Tensor before = model->forward(tokens, {}, places, ids), after = model->forward(other, {}, places, ids);
    EXPECT_TRUE(at::equal(before.narrow(1, 9, 9), after.narrow(1, 9, 9)));
    EXPECT_FALSE(at::equal(before.narrow(1, 4, 5), after.narrow(1, 4, 5)));
    EXPECT_LE((before.narrow(1, 0, 9) - before.narrow(1, 9, 9)).abs().max().item<double>(), 1e-6) << "equal documents, wherever they lie";
  }
}

TEST_F(PackedDocuments, TrainAsOnOneDeviceInEveryLayout) {
  struct Layout {
    int ranks;
    Sets sets;
  };
  const std::vector<Layout> layouts{
      {2, {"mesh.cp=2"}},
      {3, {"mesh.cp=3", "context.method=all_gather", "recompute.mode=full"}},
      {2, {"mesh.cp=2", "context.method=ulysses", "context.balance=contiguous"}},
      {2, {"mesh.dp_replicate=2", "run.deterministic=true"}},
      {4, {"mesh.dp_shard=2", "zero.stage=3", "mesh.cp=2"}},
      {4, {"mesh.tp=2", "tensor.sequence_parallel=true", "mesh.cp=2", "recompute.mode=full"}},
      {2, {"mesh.pp=2", "pipeline.schedule=1f1b"}},
      // Of several micro-batches in flight each is cut in its own way, which a recomputation has to find again.
      {4, {"mesh.pp=2", "mesh.cp=2", "pipeline.schedule=1f1b", "recompute.mode=full"}},
      {4, {"mesh.pp=2", "mesh.cp=2", "pipeline.schedule=zb_h1", "context.method=ring_full"}},
  };
  for (const char* family : {"llama", "gpt2"}) {
    const Sets common{"model.dropout=0.1"};
    const Trace one = train(lines(family, common), 1, {}, /*recorded_step=*/1);
    for (const auto& [ranks, sets] : layouts) {
      if (std::string(family) == "gpt2" && ranks == 2) continue;
      SCOPED_TRACE(testing::Message() << family << ' ' << testing::PrintToString(sets));
      Sets all = common;
      all.insert(all.end(), sets.begin(), sets.end());
      const Trace many = train(lines(family, all), ranks, {}, /*recorded_step=*/1);
      EXPECT_LE(difference(many.gradients, one.gradients), kGradients);
      for (size_t i = 0; i < one.steps.size(); ++i) {
        EXPECT_NEAR(many.steps[i].loss, one.steps[i].loss, kLosses * one.steps[i].loss) << "step " << i + 1;
      }
    }
  }
}

TEST_F(PackedDocuments, TheMicroSizeIsNotSeenInMasksAndLosses) {
  const auto of = [&](int64_t micro_size) {
    return train(lines("llama", {"model.dropout=0.2", "batch.micro_size=" + std::to_string(micro_size), "run.steps=2"}), 1, {}, 1);
  };
  const Trace one = of(1), three = of(3);
  EXPECT_LE(difference(three.gradients, one.gradients), kGradients);
  EXPECT_NEAR(three.steps[0].loss, one.steps[0].loss, kLosses * one.steps[0].loss);
}

TEST_F(PackedDocuments, EvaluateAlikeInEveryLayout) {
  const auto loss = [&](const Config& settings, int ranks) {
    Evaluation found;
    const auto text = corpus(settings);
    comm::run_ranks(ranks, [&](comm::World& world) {
      const Mesh mesh(world, mesh_shape(settings.mesh, settings.zero.stage, ranks));
      RankScope scope(settings, ranks);
      Stepper stepper(settings, mesh, at::kCPU, scope);
      const auto own = evaluate(stepper.forward_only(), text, 31, 4, mesh[mesh_roles(settings).batch]);
      if (world.rank() == ranks - 1) found = own;
    });
    return found;
  };
  const Evaluation one = loss(lines("llama"), 1);
  for (const auto& [ranks, sets] : std::vector<std::pair<int, Sets>>{{3, {"mesh.cp=3"}}, {4, {"mesh.cp=2", "mesh.pp=2"}}, {2, {"mesh.dp_replicate=2"}}}) {
    const Evaluation many = loss(lines("llama", sets), ranks);
    EXPECT_EQ(many.tokens, one.tokens);
    EXPECT_NEAR(many.loss, one.loss, 1e-5 * one.loss);
    EXPECT_NEAR(many.bits_per_byte, one.bits_per_byte, 1e-5 * one.bits_per_byte);
  }
}

/// What `eval --dump-logits` writes: of whole rows, each document as if it were alone.
TEST_F(PackedDocuments, GiveLogitsAlikeInEveryLayout) {
  const auto logits = [&](const Config& settings, int ranks) {
    at::Tensor found;
    const auto text = corpus(settings);
    comm::run_ranks(ranks, [&](comm::World& world) {
      const Mesh mesh(world, mesh_shape(settings.mesh, settings.zero.stage, ranks));
      RankScope scope(settings, ranks);
      Stepper stepper(settings, mesh, at::kCPU, scope);
      ForwardEngine& engine = stepper.forward_only();
      data::SequentialLoader loader(text, 29, 3, 0, 1, engine.reads(), engine.columns().share());
      const at::Tensor own = engine.logits(*loader.next());
      if (world.rank() == ranks - 1) found = own;
    });
    return found;
  };
  const at::Tensor one = logits(lines("llama"), 1);
  ASSERT_EQ(one.sizes(), at::IntArrayRef({1, 3 * 29, lines("llama").model.vocab_size}));
  const double bound = 1e-5 * one.abs().max().item<double>();
  for (const auto& [ranks, sets] : std::vector<std::pair<int, Sets>>{{3, {"mesh.cp=3"}}, {4, {"mesh.cp=2", "mesh.pp=2"}}, {2, {"mesh.tp=2"}}}) {
    EXPECT_LE((logits(lines("llama", sets), ranks) - one).abs().max().item<double>(), bound) << ::testing::PrintToString(sets);
  }
  data::SequentialLoader loader(corpus(lines("llama")), 29, 3);
  const data::MicroBatch micro = *loader.next();
  const Config settings = lines("llama");
  auto model = on_meta([&] { return make_model(settings.model); });
  materialize(*model, static_cast<uint64_t>(settings.run.seed), at::kCPU);
  const at::NoGradGuard no_grad;
  int64_t end = 1;
  while (micro.places[end].item<int64_t>() > 0) ++end;
  ASSERT_LT(end, 29);
  EXPECT_LE((model->forward(micro.tokens.narrow(1, 0, end)) - one.narrow(1, 0, end)).abs().max().item<double>(), bound);
}

}  // namespace
}  // namespace tessera
