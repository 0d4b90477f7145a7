#include "tessera/plan/fit.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <gmock/gmock.h>

#include "tessera/config/settle_batch.h"
#include "tessera/core/format.h"
#include "tessera/nn/operators.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/out_of_memory.h"
#include "tessera/plan/presets.h"
#include "tessera/plan/settings.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAreArray;
using Sets = std::vector<std::string>;

class Fit : public testing_support::TrainFixture {
 protected:
  static int64_t peak_of(const Config& config, int world) { return total_of(plan::largest_class(plan::dry_run(config, world)).peak_bytes); }
};

TEST_F(Fit, CheapSettingsComeFirst) {
  const auto alone = plan::cheaper_settings(config("llama"), 1);
  const Sets on_host{"zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=host"};
  const auto and_also = [](Sets sets, const Sets& more) {
    sets.insert(sets.end(), more.begin(), more.end());
    return sets;
  };
  std::vector<Sets> expected{{"recompute.mode=selective"},
                             {"batch.micro_size=1"},
                             {"batch.micro_size=1", "recompute.mode=selective"},
                             {"recompute.mode=full"},
                             {"batch.micro_size=1", "recompute.mode=full"}};
  const Sets state{"offload.optimizer=host"}, streamed{"offload.gradients=host", "offload.optimizer=host"};
  EXPECT_EQ(std::vector(alone.begin(), alone.begin() + 4), std::vector(expected.begin(), expected.begin() + 4));
  EXPECT_EQ(alone[4], state);
  EXPECT_EQ(alone[5], streamed);
  EXPECT_EQ(alone[6], expected[4]);
  for (const Sets& away : {state, streamed, on_host}) {
    expected.push_back(away);
    for (size_t i = 0; i < 5; ++i) expected.push_back(and_also(away, expected[i]));
  }
  EXPECT_THAT(alone, UnorderedElementsAreArray(expected));
  const auto four = plan::cheaper_settings(config("llama"), 4);
  EXPECT_EQ(four.size(), 7u * 2 * 3 - 1);
  EXPECT_EQ(four[0], Sets{"zero.stage=1"});
  EXPECT_EQ(four[1], Sets{"zero.stage=2"});
  EXPECT_EQ(four.back(), and_also(on_host, {"batch.micro_size=1", "recompute.mode=full"}));
  EXPECT_THAT(four, Contains(Sets{"zero.stage=3", "batch.micro_size=1", "recompute.mode=full"}));
  const Sets smallest{"batch.micro_size=1", "recompute.mode=full"};
  EXPECT_THAT(plan::cheaper_settings(config("llama", smallest), 1), ElementsAre(state, streamed, on_host));
  EXPECT_THAT(plan::cheaper_settings(config("llama", and_also(on_host, smallest)), 1), IsEmpty());
  EXPECT_THAT(plan::cheaper_settings(config("llama", {"zero.stage=3"}), 2), Contains(Sets(on_host.begin() + 1, on_host.end())));
  EXPECT_THAT(plan::cheaper_settings(config("llama", {"zero.stage=2"}), 2), Not(Contains(Contains("zero.stage=1"))));
  EXPECT_THAT(plan::cheaper_settings(config("llama", {"zero.stage=2"}), 2), Not(Contains(Contains("zero.stage=2")))) << "which it is";
  EXPECT_THAT(plan::cheaper_settings(config("llama", {"mesh.dp_replicate=3"}), 3), Contains(Sets{"zero.stage=1", "mesh.dp_replicate=1", "mesh.dp_shard=3"}));
  EXPECT_THAT(plan::cheaper_settings(config("llama", {"recompute.mode=full", "recompute.every=2"}), 1),
              Contains(Sets{"recompute.every=1", "recompute.budget_bytes=0"}));
  EXPECT_THAT(plan::cheaper_settings(config("llama", {"recompute.mode=full", "recompute.budget_bytes=100000"}), 1),
              Contains(Sets{"recompute.every=1", "recompute.budget_bytes=0"}));
}

/// Fewer data ranks of as many sequences each would be another step.
TEST_F(Fit, AStepOfSoManySequencesARankIsTheSameOverFewer) {
  Config of_each = config("llama", {"batch.global_size=0", "batch.per_rank=16", "batch.micro_size=1"});
  settle_batch(of_each, 4);
  const auto all = plan::cheaper_settings(of_each, 4);
  ASSERT_THAT(all, Contains(Contains("mesh.pp=2")));
  for (const Sets& sets : all) {
    Sets line{"batch.global_size=0", "batch.per_rank=16", "batch.micro_size=1"};
    line.insert(line.end(), sets.begin(), sets.end());
    Config changed = config("llama", line);
    settle_batch(changed, 4);
    EXPECT_EQ(changed.batch.global_size, 64) << plan::flags_of(sets);
  }
  EXPECT_THAT(plan::cheaper_settings(config("llama", {"batch.global_size=64", "batch.micro_size=1"}), 4), Contains(Sets{"mesh.pp=2"}));
}

// What a router's terms are taken over, and what an asynchronous pipeline updates by, is part of what is trained.
TEST_F(Fit, AMicroBatchThatIsPartOfTheObjectiveStaysAsItIs) {
  const auto another_size = Contains(Contains(::testing::StartsWith("batch.micro_size")));
  const auto settings = [&](const std::string& family, Sets sets) { return plan::cheaper_settings(config(family, sets), 2); };
  const Sets no_terms{"moe.balance_loss=0", "moe.z_loss=0"};
  EXPECT_THAT(settings("mixtral", {}), AllOf(Not(IsEmpty()), Not(another_size)));
  EXPECT_THAT(settings("mixtral", no_terms), another_size);
  for (const std::string one : {"moe.balance_loss=0.01", "moe.z_loss=0.01", "moe.capacity_factor=1.25", "model.router=expert_choice"}) {
    EXPECT_THAT(settings("mixtral", {no_terms[0], no_terms[1], one}), Not(another_size)) << one;
  }
  const Sets piped{"mesh.pp=2", "model.layers=4", "optim.max_grad_norm=0"};
  const auto another_schedule = Contains(Contains(::testing::StartsWith("pipeline.schedule")));
  EXPECT_THAT(settings("llama", piped), AllOf(another_size, another_schedule));
  for (const std::string schedule : {"pipedream", "pipedream_2bw"}) {
    EXPECT_THAT(settings("llama", {piped[0], piped[1], piped[2], "pipeline.schedule=" + schedule}), AllOf(Not(another_size), Not(another_schedule)))
        << schedule;
  }
  const auto none = plan::find_fit(config("mixtral"), 1, 1000);
  ASSERT_FALSE(none.fits);
  EXPECT_THAT(plan::settings_text(none), HasSubstr("a smaller batch.micro_size needs less, and trains otherwise with moe.balance_loss, moe.z_loss"));
  EXPECT_THAT(plan::settings_text(plan::find_fit(config("mixtral", {"batch.micro_size=1"}), 1, 1000)), Not(HasSubstr("batch.micro_size")));
}

/// Of an accelerator what its allocator reserves has to fit: a setting whose tensors alone do is no way out.
TEST_F(Fit, WhatWouldFitFitsWithWhatAnAllocatorReserves) {
  const Config settings =
      plan::preset("1e8", {"model.layers=3", "data.seq_len=512", "model.max_seq_len=512", "batch.global_size=4", "batch.micro_size=4", "run.threads=1"})
          .value()
          .config;
  const auto allocator = [](int64_t limit) { return plan::DeviceAllocator{.within = limit}; };
  const int64_t peak = total_of(plan::find_fit(settings, 1, 1, std::chrono::seconds(0)).now.peak);
  const auto plain = plan::find_fit(settings, 1, peak), kept = plan::find_fit(settings, 1, peak, std::chrono::seconds(60), allocator(peak));
  EXPECT_EQ(plain.now.needed, peak);
  EXPECT_GT(kept.now.needed, peak);
  EXPECT_EQ(total_of(kept.now.peak), peak);
  ASSERT_TRUE(kept.fits);
  EXPECT_LE(kept.best()->needed, peak);
  EXPECT_GT(kept.best()->needed, total_of(kept.best()->peak));
}

TEST_F(Fit, FindsTheFirstThatFits) {
  const Config settings = config("llama");
  const int64_t now = peak_of(settings, 2);
  const auto easy = plan::find_fit(settings, 2, now - 1);
  ASSERT_TRUE(easy.fits);
  EXPECT_EQ(total_of(easy.now.peak), now);
  EXPECT_EQ(plan::flags_of(easy.best()->sets), "--set zero.stage=1");
  const auto exact = plan::find_fit(settings, 2, peak_of(config("llama", {"zero.stage=1"}), 2));
  EXPECT_EQ(plan::flags_of(exact.best()->sets), "--set zero.stage=1") << "what is as large as the limit fits";
  const int64_t full = peak_of(config("llama", {"recompute.mode=full"}), 1);
  const auto alone = plan::find_fit(settings, 1, full);
  ASSERT_TRUE(alone.fits);
  EXPECT_LE(total_of(alone.best()->peak), full);
  const auto none = plan::find_fit(settings, 1, 1000);
  EXPECT_FALSE(none.fits);
  EXPECT_EQ(none.tried.size(), 23u);
  for (const auto& setting : none.tried) EXPECT_GE(total_of(setting.peak), total_of(none.best()->peak));
  const auto impatient = plan::find_fit(settings, 2, 1000, std::chrono::seconds(0));
  EXPECT_FALSE(impatient.complete);
  EXPECT_EQ(impatient.best(), nullptr);
  EXPECT_THAT(plan::settings_text(impatient), AllOf(HasSubstr("there was no time"), Not(HasSubstr("no setting left"))));
  const auto smallest = plan::find_fit(
      config("llama", {"zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=host", "batch.micro_size=1", "recompute.mode=full"}),
      1, 1000);
  EXPECT_THAT(plan::settings_text(smallest), HasSubstr("there is no setting left that needs less"));
}

TEST_F(Fit, PathsNeedNotBeUtf8) {
  Config settings = config("llama");
  settings.log.dir = "/runs/caf\xe9";
  EXPECT_EQ(plan::with_settings(settings, {"zero.stage=1"}).zero.stage, 1);
}

TEST_F(Fit, RunsAFewOfManyMicroBatches) {
  const auto flops_run = [&](int micro_batches) {
    const auto counter = std::make_shared<nn::FlopCounter>();
    const nn::OperatorScope counted(counter);
    plan::find_fit(config("llama", {"batch.micro_size=1", "batch.global_size=" + std::to_string(micro_batches)}), 1, 1000, std::chrono::seconds(0));
    return counter->flops();
  };
  EXPECT_GT(flops_run(8), 0);
  EXPECT_EQ(flops_run(64), flops_run(8));
}

TEST_F(Fit, AddsUpWhatAllRanksComputeAndSend) {
  const Config settings = config("llama");
  const auto now = plan::find_fit(settings, 7, 1000, std::chrono::seconds(0)).now;
  double flops = 0, sent = 0;  // of one class of seven ranks
  for (const auto& ranks : plan::dry_run(settings, 7).ranks) {
    flops += static_cast<double>(ranks.count) * ranks.hardware_flops;
    for (const auto& sum : ranks.collectives) sent += static_cast<double>(ranks.count * sum.sent_bytes);
  }
  EXPECT_EQ(now.flops, flops);
  EXPECT_EQ(now.sent_bytes, sent);
}

TEST_F(Fit, PassesOverWhatTheRulesRefuse) {
  const auto search = plan::find_fit(config("llama", {"run.deterministic=true"}), 2, 1000);
  for (const auto& setting : search.tried) EXPECT_THAT(plan::flags_of(setting.sets), Not(HasSubstr("zero.stage")));
  EXPECT_EQ(search.tried.size(), 11u);
}

// What is predicted is what a run needs, to the byte: at that limit it trains, a byte below it does not.
TEST_F(Fit, ALimitIsHeldToTheByte) {
  const Sets few{"run.steps=2", "batch.global_size=4", "run.threads=1"};
  const auto limited = [&](Sets sets, int64_t limit) {
    sets.insert(sets.end(), few.begin(), few.end());
    sets.push_back("run.memory_limit_bytes=" + std::to_string(limit));
    return config("llama", sets);
  };
  for (const auto& sets : std::vector<Sets>{{}, {"recompute.mode=full", "batch.micro_size=1"}}) {
    const int64_t peak = peak_of(limited(sets, 1), 1);
    EXPECT_NO_THROW(train(limited(sets, peak), 1));
    EXPECT_THAT([&] { train(limited(sets, peak - 1), 1); }, ::testing::ThrowsMessage<std::runtime_error>(HasSubstr("out of memory")));
  }
}

TEST_F(Fit, PlanSaysWhetherItFits) {
  const int64_t peak = peak_of(config("llama"), 1);
  const auto fits = plan::dry_run(config("llama", {"run.memory_limit_bytes=" + std::to_string(peak)}), 1);
  const auto does_not = plan::dry_run(config("llama", {"run.memory_limit_bytes=" + std::to_string(peak - 1)}), 1);
  EXPECT_TRUE(plan::to_json(fits).at("fits").get<bool>());
  EXPECT_FALSE(plan::to_json(does_not).at("fits").get<bool>());
  EXPECT_THAT(plan::to_string(does_not), HasSubstr("does not fit run.memory_limit_bytes"));
  EXPECT_FALSE(plan::to_json(plan::dry_run(config("llama"), 1)).contains("fits"));
  EXPECT_THAT(plan::to_string(plan::dry_run(config("llama", {"batch.global_size=1", "batch.micro_size=1"}), 1)), HasSubstr("a step: 1 sequence, "));
}

TEST_F(Fit, AnOutOfMemoryIsExplained) {
  const Config settings = config("llama");
  MemoryRefusal refusal{
      .requested = 1 << 20, .limit = peak_of(settings, 2) - 1, .category = MemoryCategory::Activations, .module = "layers.1.attention", .phase = "forward"};
  refusal.in_use[static_cast<size_t>(MemoryCategory::Parameters)] = 3 << 20;
  refusal.largest = {{.bytes = 3 << 20, .category = MemoryCategory::Parameters, .module = {}, .name = "head.weight", .shape = {}}};
  const auto report = plan::explain(settings, {.rank = 1, .world = 2, .refusal = refusal});
  EXPECT_THAT(report.sentence, AllOf(HasSubstr("rank 1 is out of memory in forward of layers.1.attention: 1.00 MiB more (activations)"),
                                     HasSubstr("run.memory_limit_bytes = "), HasSubstr("3.00 MiB in use"), HasSubstr("--set zero.stage=1 (peak ")));
  EXPECT_THAT(report.sentence, Not(HasSubstr("\n")));
  EXPECT_THAT(report.tables,
              AllOf(::testing::StartsWith("the memory of rank 1 when it ran out\n"), Not(HasSubstr("is out of memory")), Not(HasSubstr("that would fit"))))
      << "the sentence follows";
  EXPECT_THAT(report.tables, AllOf(HasSubstr("in use"), HasSubstr("predicted peak"), HasSubstr("head.weight"), HasSubstr("(w, g, k) = (4, 4, 8)"),
                                   HasSubstr("zero.stage = 0 over 1 rank"), HasSubstr("as it is")));
  // Of a device there is no limit to name, and nobody watched: what a dry run knows stands in.
  refusal.limit = 0;
  refusal.in_use[static_cast<size_t>(MemoryCategory::Parameters)] = 300 << 10;
  refusal.largest.clear();
  const auto device = plan::explain(settings, {.rank = 0, .world = 1, .refusal = refusal});
  EXPECT_THAT(device.sentence, HasSubstr("could not be had beside the 300 KiB in use"));
  EXPECT_THAT(device.tables, AllOf(HasSubstr("of a dry run"), HasSubstr("exp_avg"), HasSubstr("for a peak of 300 KiB at most")));
}

/// What a plan cannot know may take more than it says: then a setting has to free as much, and one that frees nothing is no way out.
TEST_F(Fit, WhatWentBeyondItsPlanHasToBeFreed) {
  const Config plain = config("llama", {"optim.name=sgd", "optim.momentum=0"});
  const auto report_of = [&](const Config& settings, int world, int64_t beyond, int64_t margin = 512) {
    const int64_t peak = peak_of(settings, world);
    MemoryRefusal refusal{.requested = beyond, .limit = peak + margin, .phase = "forward"};
    refusal.in_use[static_cast<size_t>(MemoryCategory::Parameters)] = peak;
    return plan::explain(settings, {.rank = 0, .world = world, .refusal = refusal});
  };
  const int64_t peak = peak_of(plain, 1);
  const auto little = report_of(plain, 1, 1024);
  EXPECT_THAT(little.sentence, AllOf(HasSubstr("its plan, by a dry run, is " + format_bytes(peak) + ", and the run went beyond it by 1.00 KiB; the cheapest"),
                                     HasSubstr("would fit with as much beyond its plan: --set "), Not(HasSubstr("offload.optimizer=host (peak"))));
  EXPECT_THAT(little.tables, HasSubstr("for a peak of " + format_bytes(peak - 512) + " at most, which leaves free what this run took beyond its plan"));
  const auto search = plan::find_fit(plain, 1, peak + 512, plan::kFitPatience, std::nullopt, peak + 1024);
  ASSERT_TRUE(search.fits);
  EXPECT_LE(search.best()->needed, peak - 512);
  EXPECT_THAT(report_of(plain, 1, 4 * peak).sentence,
              AllOf(HasSubstr("settings tried would fit with as much beyond its plan; use more ranks"), Not(HasSubstr("--set"))));
  EXPECT_EQ(plan::find_fit(plain, 1, peak - 1, plan::kFitPatience, std::nullopt, peak).beyond, 0) << "which its plan said";
  const Config dealt = config("mixtral", {"model.experts=4", "mesh.ep=2", "zero.stage=1", "batch.micro_size=1"});
  EXPECT_THAT(report_of(dealt, 2, 1024).sentence,
              AllOf(HasSubstr("by 1.00 KiB; not known before it runs is which experts routers choose"), HasSubstr(" needs "), Not(HasSubstr("\n"))));
  const plan::FitSearch idle{.now = {.needed = 100}, .tried = {{.sets = {"offload.optimizer=host"}, .needed = 100}}};
  EXPECT_THAT(plan::settings_text(idle), AllOf(HasSubstr("none of 1 settings tried needs less; use more ranks"), Not(HasSubstr("that of --set"))));
}

/// The formula is of what a rank holds, and so near what it keeps.
TEST_F(Fit, TheFormulaIsOfTheRanksShareOfTheModel) {
  const Sets experts{"model.experts=4", "model.ffn_dim=160"};
  const auto kept_bytes = [](const Config& settings, int world) {
    const plan::DryRun run = plan::dry_run(settings, world);
    const plan::RankClass& most = plan::largest_class(run);
    int64_t kept = 0;
    for (const auto category : {MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer})
      kept += most.peak_bytes[static_cast<size_t>(category)];
    return std::pair(static_cast<double>(kept), most.parameters);
  };
  const auto expect_near = [&](const std::string& family, const Sets& sets, int world) {
    SCOPED_TRACE(family + " " + ::testing::PrintToString(sets));
    const Config settings = config(family, sets);
    const auto [kept, held] = kept_bytes(settings, world);
    const std::string text = plan::formula_text(settings, world, held);
    double by_formula = 0;
    for (double factor = 0.9; factor <= 1.1; factor += 0.001) {
      if (text.find(": " + format_bytes(static_cast<int64_t>(factor * kept)) + " for ") != std::string::npos) by_formula = factor;
    }
    EXPECT_NEAR(by_formula, 1, 0.1) << format_bytes(static_cast<int64_t>(kept)) << " are kept; " << text;
    return text;
  };
  EXPECT_THAT(expect_near("llama", {}, 1), Not(HasSubstr("share of the model")));
  EXPECT_THAT(expect_near("llama", {"mesh.tp=2"}, 2), HasSubstr("a rank's share of the model"));
  expect_near("llama", {"mesh.pp=2"}, 2);
  expect_near("llama", {"zero.stage=3"}, 3);
  expect_near("llama", {"lora.modules=layers.*.attention.*"}, 1);
  expect_near("mixtral", {experts[0], experts[1], "mesh.ep=2", "zero.stage=1"}, 2);
  expect_near("mixtral", {experts[0], experts[1], "mesh.ep=2", "zero.stage=3"}, 2);
  expect_near("mixtral", {experts[0], experts[1], "mesh.tp=2", "mesh.expert_tp=2"}, 2);
  EXPECT_THAT(plan::explain(config("llama", {"mesh.tp=2"}), {.rank = 0, .world = 2, .refusal = {.requested = 1, .limit = 1}}).tables,
              HasSubstr("a rank's share of the model"));
}

// On the CPU the tracker refuses what would be alive beyond the limit, on a device its allocator what it would have reserved.
TEST_F(Fit, ARefusalInARunIsExplained) {
  const Sets few{"batch.global_size=2", "batch.micro_size=2", "run.threads=1"};
  const int64_t limit = peak_of(config("llama", few), 1) * 3 / 4;
  const Config settings = config("llama", {few[0], few[1], few[2], "run.memory_limit_bytes=" + std::to_string(limit)});
  const at::Device device = testing_support::test_device();
  if (!device.is_cpu()) c10::getDeviceAllocator(device.type())->emptyCache();  // what tests before have left there need not be asked for
  plan::OutOfMemory failure;
  comm::run_ranks(1, [&](comm::World& ranks) {
    const Mesh mesh(ranks, mesh_shape(settings.mesh, settings.zero.stage, ranks.size()));
    RankScope scope(settings, ranks.local_size());
    scope.compute_on(device);
    const at::Tensor on_the_host = device.is_cpu() ? at::Tensor() : at::empty({2 * limit}, at::TensorOptions(at::kCPU).dtype(at::kByte));
    EXPECT_THROW(
        {
          Stepper stepper(settings, mesh, device, scope);
          data::Loader loader(corpus(settings), loader_options(settings, mesh));
          stepper.step(loader.next());
        },
        c10::OutOfMemoryError);
    ASSERT_TRUE(scope.memory().refusal().has_value());
    failure.refusal = *scope.memory().refusal();
  });
  const int64_t in_use = total_of(failure.refusal.in_use);
  EXPECT_GT(in_use, 0);
  EXPECT_LE(in_use, limit);
  EXPECT_FALSE(failure.refusal.largest.empty());
  const std::string sentence = plan::explain(settings, failure).sentence;
  EXPECT_THAT(sentence, AllOf(HasSubstr("rank 0 is out of memory"), HasSubstr(" more ("), HasSubstr("run.memory_limit_bytes = " + std::to_string(limit)),
                              HasSubstr("; "), HasSubstr("--set ")));
  EXPECT_EQ(sentence.find("of what its allocator reserves") != std::string::npos, !device.is_cpu()) << sentence;
}

}  // namespace
}  // namespace tessera
