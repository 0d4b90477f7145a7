#include <gtest/gtest.h>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/context_parallel/ring_plan.h"
#include "tessera/layout/sequence_cut.h"
#include "tests/made_docs.h"
#include "tests/test_device.h"

namespace tessera::context {
namespace {

std::vector<nn::AttentionColumns> drawn_columns(const SequenceCut& cut) {
  std::vector<nn::AttentionColumns> columns;
  for (int rank = 0; rank < cut.ranks(); ++rank) {
    const at::Tensor positions = cut.positions(rank, at::kCPU);
    columns.push_back(nn::AttentionColumns::of({positions.const_data_ptr<int64_t>(), static_cast<size_t>(positions.numel())}));
  }
  return columns;
}

/// docs/long-context.md, drawn from the plan that runs.
TEST(RingPicture, ThePageShowsThePlanThatRuns) {
  const auto expect = [](const std::string& name, const SequenceCut& cut, const nn::AttentionReach& reach) {
    testing_support::expect_picture_in_docs("ring-" + name + ".svg", ring_picture(drawn_columns(cut), reach, "ring attention, 4 ranks, " + name),
                                            "long-context.md");
  };
  expect("head_tail", SequenceCut::head_tail(32, 4), {});
  expect("contiguous", SequenceCut::contiguous(32, 4), {});
  expect("window", SequenceCut::contiguous(32, 4), {.window = 5});
}

/// Each arrow of it is a message that the recorder sees, in its order: blocks have other numbers of columns, so that their sizes tell them apart.
TEST(RingPicture, ItsArrowsAreTheMessagesThatTheRecorderSees) {
  constexpr int kRanks = 4;
  const SequenceCut cut = SequenceCut::head_tail(4 * kRanks + 5, kRanks);
  const testing_support::AttentionCase c{.batch = 1, .length = cut.length, .heads = 4, .kv_heads = 2, .features = 8};
  const auto whole = testing_support::on_one_device(c, at::kBFloat16);
  comm::run_ranks(kRanks, [&](comm::World& world) {
    const auto records = std::make_shared<comm::Recorder>();
    const comm::GroupInfo info{.name = "cp", .rank = world.rank(), .size = kRanks, .ranks = {}, .timeout = std::chrono::seconds(60)};
    const comm::Group group(info, comm::make_record_engine(records, info, world.group().engine()));
    testing_support::Attending model;
    const auto context = context_parallel(model, group, {}, "core");
    context->set_cut(cut);
    std::vector<at::Tensor> own;
    for (const at::Tensor& tensor : whole.in) own.push_back(tensor.index_select(1, cut.positions(world.rank(), testing_support::test_device())));
    testing_support::pass(model, own);
    std::vector<int64_t> blocks, sums, drawn_blocks, drawn_sums;  // elements
    for (const auto& record : records->records()) {
      const int64_t sent = record.sent_bytes / static_cast<int64_t>(c10::elementSize(record.dtype));
      if (sent > 0) (record.dtype == at::kFloat ? sums : blocks).push_back(sent);
    }
    for (const bool backward : {false, true}) {
      for (const RingStep& step : ring_plan(drawn_columns(cut), world.rank(), {})) {
        const int64_t elements = 2 * cut.columns(step.block) * c.kv_heads * c.features;
        if (step.keys_go_on) drawn_blocks.push_back(elements);
        if (backward && step.sum_goes_on) drawn_sums.push_back(elements);
      }
    }
    EXPECT_EQ(blocks, drawn_blocks) << "rank " << world.rank();
    EXPECT_EQ(sums, drawn_sums) << "rank " << world.rank();
  });
}

}  // namespace
}  // namespace tessera::context
