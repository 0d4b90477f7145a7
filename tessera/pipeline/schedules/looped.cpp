// Schedules whose stages are dealt in a loop: rank i holds stages i, p + i, 2p + i, ... Every rank meets the same sequence of (micro-batch, chunk) forwards,
// and the mirrored one of backwards; how many forwards run ahead is all that differs between them.

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/list_builder.h"

namespace tessera::schedules {
namespace {

/// The chunks that a rank runs forward, one after the other: `group` micro-batches pass one before the next follows. The last round may be shorter.
std::vector<int> chunk_sequence(int micro_batches, int chunks, int group) {
  std::vector<int> sequence;
  for (int begin = 0; begin < micro_batches; begin += group) {
    for (int chunk = 0; chunk < chunks; ++chunk) sequence.insert(sequence.end(), std::min(group, micro_batches - begin), chunk);
  }
  return sequence;
}

Schedule looped(const char* name, int ranks, int micro_batches, int chunks, int group, auto&& ahead) {
  Schedule schedule{.name = name, .micro_batches = micro_batches, .rank_of = loop_placement(ranks, chunks), .actions = {}};
  const auto sequence = chunk_sequence(micro_batches, chunks, group);
  for (int rank = 0; rank < ranks; ++rank) {
    detail::ListBuilder list(micro_batches);
    size_t forwards = 0;
    for (size_t backward = 0; backward < sequence.size(); ++backward) {
      for (; forwards < std::min(backward + ahead(rank) + 1, sequence.size()); ++forwards) list.forward(sequence[forwards] * ranks + rank);
      list.backward((chunks - 1 - sequence[backward]) * ranks + rank);
    }
    schedule.actions.push_back(list.actions());
  }
  return schedule;
}

int pytorch_rounds(int ranks, int micro_batches) { return std::max(1, micro_batches / ranks); }

int next_of_whole_rounds(int ranks, int micro_batches) {
  do ++micro_batches;
  while (micro_batches % pytorch_rounds(ranks, micro_batches) != 0);
  return micro_batches;
}

}  // namespace

Schedule interleaved(int ranks, int micro_batches, int chunks, int group) {
  detail::check_counts("interleaved", ranks, micro_batches, chunks);
  if (group == 0) {
    const int rounds = pytorch_rounds(ranks, micro_batches);
    require_of("micro_batches", micro_batches % rounds == 0, "interleaved: micro_batches = ", micro_batches, " over ", ranks,
               " stages: must be a multiple of max(1, micro_batches / ", ranks, ") = ", rounds,
               "; the next that is: ", next_of_whole_rounds(ranks, micro_batches));
    group = micro_batches / rounds;
  } else {
    require_of("group", group >= ranks, "interleaved: group = ", group, " over ", ranks, " stages: must be at least ", ranks);
    const int left = micro_batches % group;
    require_of("micro_batches", left == 0 || left >= ranks, "interleaved: micro_batches = ", micro_batches, " in groups of ", group, ": the last group holds ",
               left, ", and must be full or hold at least ", ranks, ", one for each stage; the next that does: ", micro_batches + ranks - left);
  }
  return looped("interleaved", ranks, micro_batches, chunks, group, [&](int rank) { return (chunks - 1) * group + 2 * (ranks - 1 - rank); });
}

Schedule breadth_first(int ranks, int micro_batches, int chunks) {
  detail::check_counts("breadth_first", ranks, micro_batches, chunks);
  return looped("breadth_first", ranks, micro_batches, chunks, micro_batches, [&](int) { return chunks * micro_batches - 1; });
}

}  // namespace tessera::schedules
