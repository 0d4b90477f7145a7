#include <algorithm>

#include <gtest/gtest.h>

#include "support.h"
#include "tessera/comm/backends/record.h"

namespace tessera {
namespace {

using namespace testing_support;

/// Cores one after the other are given the ids of one micro-batch: they are gathered once, and again only where they, or who has which of them, have changed.
TEST(PackedDocumentIds, AreGatheredOnceForAllCoresOfAPass) {
  comm::run_ranks(2, [](comm::World& world) {
    const auto records = std::make_shared<comm::Recorder>();
    const comm::GroupInfo info{.name = "cp", .rank = world.rank(), .size = 2, .ranks = {}, .timeout = std::chrono::seconds(60)};
    const comm::Group group(info, comm::make_record_engine(records, info, world.group().engine()));
    Attending model;
    const auto context = context_parallel(model, group, {.method = ContextMethod::AllGather}, "core");
    const auto gathers = [&] {
      const auto seen = records->records();
      const auto ids = std::ranges::count_if(seen, [](const auto& record) { return record.dtype == at::kLong; });
      records->clear();
      return ids;
    };
    const at::Tensor q = at::ones({1, 6, 2, 4});
    const auto call = [&](const at::Tensor& ids) { return model(q, q, q, ids); };
    context->set_cut(SequenceCut::head_tail(12, 2));
    at::Tensor ids = at::zeros({1, 6}, at::kLong);
    call(ids);
    EXPECT_EQ(gathers(), 1);
    call(ids);
    call(ids.detach());
    EXPECT_EQ(gathers(), 0);
    ids.select(1, 5).fill_(1);
    call(ids);
    EXPECT_EQ(gathers(), 1) << "written since";
    context->set_cut(SequenceCut::contiguous(12, 2));
    call(ids);
    EXPECT_EQ(gathers(), 1) << "other columns";
    call(ids.clone());
    EXPECT_EQ(gathers(), 1) << "of another micro-batch";
  });
}

}  // namespace
}  // namespace tessera
