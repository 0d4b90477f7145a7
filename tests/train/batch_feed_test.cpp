// The batches of steps on their way to the device: the loader's, in its order, ahead of their use. On the simulated accelerator the detector sees to it that
// nobody reads a batch before its copy is done, nor fills pinned memory that is still being read.

#include "tessera/train/batch_feed.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include "tests/train/fixture.h"

namespace tessera {
namespace {

using testing_support::test_device;
using testing_support::TrainFixture;

class BatchFeeds : public TrainFixture {
 protected:
  data::Loader loader(const Config& config, ColumnShare columns = {}) const {
    return data::Loader(corpus(config), {.seq_len = config.data.seq_len,
                                         .global_size = config.batch.global_size,
                                         .micro_size = config.batch.micro_size,
                                         .seed = 5,
                                         .rank = 1,
                                         .ranks = 2,
                                         .reads = {.padding = true},
                                         .columns = columns});
  }

  static void expect_same(const data::StepBatch& got, const data::StepBatch& want) {
    EXPECT_EQ(got.step, want.step);
    EXPECT_EQ(got.global_valid_tokens, want.global_valid_tokens);
    ASSERT_EQ(got.micro_batches.size(), want.micro_batches.size());
    EXPECT_TRUE(lie_on(got.micro_batches, test_device()));
    for (size_t i = 0; i < got.micro_batches.size(); ++i) {
      const auto have = data::tensors_of(got.micro_batches[i]), expected = data::tensors_of(want.micro_batches[i]);
      ASSERT_EQ(have.size(), expected.size());
      for (size_t t = 0; t < have.size(); ++t) EXPECT_TRUE(at::equal(have[t]->cpu(), *expected[t])) << "micro-batch " << i << ", tensor " << t;
      EXPECT_EQ(got.micro_batches[i].index, want.micro_batches[i].index);
    }
  }
};

TEST_F(BatchFeeds, GivesWhatTheLoaderDoesWhetherOrNotItWasPrepared) {
  const ColumnShare part{.rule = &SequenceCut::head_tail, .rank = 1, .ranks = 3};
  const Config stream = config("llama"), packed = config("llama", {write_lines(), "data.documents=lines", "data.seq_len=29", "batch.global_size=6"});
  for (const auto& [config, columns] : {std::pair(stream, ColumnShare()), {stream, part}, {packed, ColumnShare()}, {packed, part}}) {
    data::Loader reference = loader(config, columns);
    BatchFeed feed(loader(config, columns), test_device());
    for (int step = 1; step <= 5; ++step) {
      const data::StepBatch want = reference.next();
      if (step % 2 == 0) feed.prepare(), feed.prepare();
      EXPECT_EQ(feed.cursor().step, step - 1) << "what lies ready is not taken yet";
      const data::StepBatch got = feed.next();
      EXPECT_EQ(feed.cursor(), reference.cursor());
      if (step % 3 == 0) feed.prepare();
      expect_same(got, want);
    }
  }
}

TEST_F(BatchFeeds, GoesOnWhereItIsSent) {
  const Config config = this->config("llama");
  data::Loader reference = loader(config);
  BatchFeed feed(loader(config), test_device());
  feed.next();
  feed.prepare();
  auto cursor = reference.cursor();
  cursor.step = 4;
  feed.seek(cursor);
  reference.seek(cursor);
  EXPECT_EQ(feed.cursor(), cursor);
  expect_same(feed.next(), reference.next());
}

// The detector's: the host learns nothing of when the step is done, and the copies' stream gets the memory of its batch back.
TEST_F(BatchFeeds, MemoryOfABatchIsGivenOutAgainBehindItsUse) {
  const Config config = this->config("llama");
  BatchFeed feed(loader(config), test_device());
  at::Tensor sum = at::zeros({}, at::kLong);
  for (int step = 1; step <= 4; ++step) {
    {
      const data::StepBatch batch = feed.next();
      for (const auto& micro : batch.micro_batches) sum.add_(micro.tokens.sum());
    }
    feed.prepare();
  }
  EXPECT_GT(sum.item<int64_t>(), 0);
}

TEST_F(BatchFeeds, WhatLiesElsewhereIsMovedAndWhatIsThereStays) {
  const Config config = this->config("llama");
  data::Loader reference = loader(config, {.rank = 1, .ranks = 2});
  const data::StepBatch host = reference.next();
  auto moved = host.micro_batches;
  move_to(moved, test_device());
  EXPECT_TRUE(lie_on(moved, test_device()));
  for (size_t i = 0; i < moved.size(); ++i) {
    EXPECT_TRUE(at::equal(moved[i].tokens.cpu(), host.micro_batches[i].tokens));
  }
  const auto before = moved;
  move_to(moved, test_device());
  EXPECT_TRUE(moved[0].tokens.is_same(before[0].tokens));
}

}  // namespace
}  // namespace tessera
