#include <gtest/gtest.h>

#include "tessera/context_parallel/ring_plan.h"
#include "tessera/layout/sequence_cut.h"
#include "tests/made_docs.h"

namespace tessera::context {
namespace {

/// docs/long-context.md, drawn from the plan that runs.
TEST(RingPicture, ThePageShowsThePlanThatRuns) {
  for (const auto& [name, cut] : {std::pair{"head_tail", SequenceCut::head_tail(32, 4)}, {"contiguous", SequenceCut::contiguous(32, 4)}}) {
    std::vector<nn::AttentionColumns> columns;
    for (int rank = 0; rank < cut.ranks(); ++rank) {
      const at::Tensor positions = cut.positions(rank, at::kCPU);
      columns.push_back(nn::AttentionColumns::of({positions.const_data_ptr<int64_t>(), static_cast<size_t>(positions.numel())}));
    }
    testing_support::expect_picture_in_docs(std::string("ring-") + name + ".svg", ring_picture(columns, true, std::string("ring attention, 4 ranks, ") + name),
                                            "long-context.md");
  }
}

}  // namespace
}  // namespace tessera::context
