// ZB-V and DualPipeV: rank i holds stage i on the way down and stage 2p - 1 - i on the way up, so that a micro-batch turns on the last rank without a message
// and its backward begins on rank 0. Both are a few phases, each a pattern that a rank repeats as often as its place demands; written for enough micro-batches
// to fill the pipeline, of which ZB-V leaves out those that do not exist.

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/list_builder.h"

namespace tessera::schedules {
namespace {

void repeat(int times, auto&& pattern) {
  for (int i = 0; i < times; ++i) pattern(i);
}

Schedule down_and_up(const char* name, int ranks, int micro_batches, auto&& fill) {
  Schedule schedule{.name = name, .micro_batches = micro_batches, .rank_of = v_placement(ranks, 2), .actions = {}};
  for (int rank = 0; rank < ranks; ++rank) {
    detail::ListBuilder list(micro_batches);
    fill(list, rank, /*down=*/rank, /*up=*/2 * ranks - 1 - rank);
    schedule.actions.push_back(list.actions());
  }
  return schedule;
}

}  // namespace

Schedule zb_v(int ranks, int micro_batches) {
  detail::check_counts("zb_v", ranks, micro_batches, 2);
  const int filling = std::max(micro_batches, 2 * ranks - 1);
  return down_and_up("zb_v", ranks, micro_batches, [&](detail::ListBuilder& list, int rank, int down, int up) {
    const int behind = ranks - rank;  // ranks from here to the turn, this one included
    const auto backward = [&](int stage) {
      list.backward_input(stage);
      list.weights(stage);
    };
    repeat(2 * behind - 1, [&](int) { list.forward(down); });
    repeat(rank, [&](int) {
      list.forward(up);
      list.forward(down);
    });
    repeat(behind, [&](int) {
      list.forward(up);
      backward(up);
    });
    while (list.forwards(up) < filling) {
      if (list.forwards(down) < filling) list.forward(down);
      backward(down);
      list.forward(up);
      backward(up);
    }
    // Nothing is left to run forward: gradients of inputs hurry to the other ranks, those of weights fill what is left of the time.
    repeat(rank, [&](int) {
      list.backward_input(down);
      list.backward_input(up);
    });
    repeat(behind, [&](int) {
      list.backward_input(down);
      list.weights(down);
    });
    repeat(rank, [&](int) { list.weights(up); });
    list.all_weights();
  });
}

Schedule dualpipev(int ranks, int micro_batches) {
  detail::check_counts("dualpipev", ranks, micro_batches, 2);
  require_of("micro_batches", micro_batches >= 2 * ranks, "dualpipev: micro_batches = ", micro_batches, " over ", ranks,
             " stages: must be at least twice as many; the next that are: ", 2 * ranks);
  return down_and_up("dualpipev", ranks, micro_batches, [&](detail::ListBuilder& list, int rank, int down, int up) {
    const int behind = ranks - 1 - rank;
    const bool turns = behind == 0;
    repeat(2 * behind, [&](int) { list.forward(down); });
    repeat(rank + 1, [&](int) {
      list.forward(down);
      list.forward(up);
    });
    repeat(behind, [&](int) {
      list.backward_input(up);
      list.weights();
      list.forward(up);
    });
    repeat(micro_batches - 2 * ranks + rank + 1, [&](int i) {
      // The rank of the turn starts its steady state with its two halves apart: the ranks before it wait for the backward.
      if (turns && i == 0) {
        list.forward(down);
        list.backward(up);
      } else {
        list.overlap(down, up);
      }
      list.overlap(up, down);
    });
    repeat(behind, [&](int) {
      list.backward(up);
      list.overlap(up, down);
    });
    // After as many whole backwards as it has ranks before it and itself, weights wait: the others are in need of the inputs' gradients, and there is time at
    // the end.
    int backwards = 0;
    const auto backward = [&](int stage) { backwards++ <= rank ? list.backward(stage) : list.backward_input(stage); };
    repeat(rank + 1, [&](int) {
      backward(up);
      backward(down);
    });
    repeat(behind, [&](int) {
      list.weights();
      backward(down);
    });
    list.all_weights();
  });
}

}  // namespace tessera::schedules
