// V-Min and V-Half (arXiv:2405.15362). A schedule is a block, what one micro-batch does on all ranks, repeated every 6 units of time: F, I, W of two chunks,
// each of one unit. What a rank holds is how long the block keeps activations there, over 6; so the block's forwards and backwards pass the ranks as fast as
// they can without meeting those of other micro-batches. With two chunks, down and up, a rank that holds the one for long holds the other shortly: all hold the
// same.

#include <algorithm>
#include <array>
#include <optional>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/list_builder.h"

namespace tessera::schedules {
namespace {

constexpr int kPeriod = 6;

/// Time from a rank to the next one, of each of the four ways of a micro-batch through the ranks.
struct Slopes {
  int forward_down, forward_up, backward_down, backward_up;
};

/// When one micro-batch does what on one rank, counted from its first forward.
struct Block {
  std::array<int, 2> forward{}, backward{}, weights{};  // of the chunk on the way down, and of that on the way up
};

bool same_slot(int a, int b) { return (a - b) % kPeriod == 0; }

/// Gradients of weights take the two slots that are left, each the one that comes first after its backward, with the least waiting together.
void place_weights(Block& block) {
  std::vector<int> free;
  for (int slot = 0; slot < kPeriod; ++slot) {
    const auto taken = [&](int time) { return same_slot(time, slot); };
    if (std::ranges::none_of(block.forward, taken) && std::ranges::none_of(block.backward, taken)) free.push_back(slot);
  }
  invariant(free.size() == 2, "a block of a V schedule leaves ", free.size(), " slots for its weights");
  const auto after = [](int time, int slot) { return time + 1 + ((slot - time - 1) % kPeriod + kPeriod) % kPeriod; };
  const std::array<int, 2> straight{after(block.backward[0], free[0]), after(block.backward[1], free[1])};
  const std::array<int, 2> crossed{after(block.backward[0], free[1]), after(block.backward[1], free[0])};
  block.weights = straight[0] + straight[1] <= crossed[0] + crossed[1] ? straight : crossed;
}

/// The block of every rank with `gaps` where a micro-batch turns; nothing where two of its actions would meet on some rank.
std::optional<std::vector<Block>> blocks_of(int ranks, const Slopes& slopes, const std::array<int, 3>& gaps) {
  std::vector<Block> blocks(ranks);
  const int last = ranks - 1;
  const int up = last * slopes.forward_down + 1 + gaps[0];
  const int backward_down = up + last * slopes.forward_up + 1 + gaps[1];
  const int backward_up = backward_down + last * slopes.backward_down + 1 + gaps[2];
  for (int rank = 0; rank < ranks; ++rank) {
    Block& block = blocks[rank];
    block.forward = {rank * slopes.forward_down, up + (last - rank) * slopes.forward_up};
    block.backward = {backward_up + (last - rank) * slopes.backward_up, backward_down + rank * slopes.backward_down};
    const std::array<int, 4> times{block.forward[0], block.forward[1], block.backward[0], block.backward[1]};
    for (size_t a = 0; a < times.size(); ++a) {
      for (size_t b = 0; b < a; ++b) {
        if (same_slot(times[a], times[b])) return std::nullopt;
      }
    }
    place_weights(block);
  }
  return blocks;
}

int floor_of(int a, int b) { return a / b - (a % b < 0 ? 1 : 0); }

/// Chunks that a rank holds at once where its block is repeated for ever.
int held_at_most(const Block& block) {
  int most = 0;
  for (int slot = 0; slot < kPeriod; ++slot) {
    int held = 0;  // micro-batches whose forward has begun by this slot, without those whose gradients of weights ended before it
    for (size_t chunk = 0; chunk < 2; ++chunk) held += floor_of(slot - block.forward[chunk], kPeriod) - floor_of(slot - block.weights[chunk] - 1, kPeriod);
    most = std::max(most, held);
  }
  return most;
}

/// The blocks that hold least, with the least waiting at the turns among those.
std::vector<Block> best_blocks(int ranks, const Slopes& slopes) {
  std::vector<Block> best;
  std::pair<int, int> lowest;
  for (int gaps = 0; gaps < kPeriod * kPeriod * kPeriod; ++gaps) {
    const std::array<int, 3> each{gaps % kPeriod, gaps / kPeriod % kPeriod, gaps / kPeriod / kPeriod};
    const auto blocks = blocks_of(ranks, slopes, each);
    if (!blocks) continue;
    int most = 0;
    for (const Block& block : *blocks) most = std::max(most, held_at_most(block));
    const std::pair price(most, each[0] + each[1] + each[2]);
    if (!best.empty() && price >= lowest) continue;
    best = *blocks;
    lowest = price;
  }
  invariant(!best.empty(), "no block of a V schedule for ", ranks, " ranks");
  return best;
}

Schedule repeated(const char* name, int ranks, int micro_batches, const Slopes& slopes) {
  detail::check_counts(name, ranks, micro_batches, 2);
  Schedule schedule{.name = name, .micro_batches = micro_batches, .rank_of = v_placement(ranks, 2), .actions = {}};
  const auto blocks = best_blocks(ranks, slopes);
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::pair<int64_t, Action>> timed;
    const std::array<int, 2> stages{rank, 2 * ranks - 1 - rank};
    for (int micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
      for (size_t chunk = 0; chunk < 2; ++chunk) {
        const auto add = [&](Kind kind, int time) {
          timed.emplace_back(int64_t{kPeriod} * micro_batch + time, Action{.kind = kind, .stage = stages[chunk], .micro_batch = micro_batch});
        };
        add(Kind::Forward, blocks[rank].forward[chunk]);
        add(Kind::BackwardInput, blocks[rank].backward[chunk]);
        add(Kind::BackwardWeight, blocks[rank].weights[chunk]);
      }
    }
    std::ranges::sort(timed, {}, &std::pair<int64_t, Action>::first);
    RankActions actions;
    for (const auto& [time, action] : timed) actions.push_back(action);
    schedule.actions.push_back(actions);
  }
  return schedule;
}

}  // namespace

Schedule v_min(int ranks, int micro_batches) { return repeated("v_min", ranks, micro_batches, {1, 1, 1, 1}); }
Schedule v_half(int ranks, int micro_batches) { return repeated("v_half", ranks, micro_batches, {2, 1, 2, 1}); }

}  // namespace tessera::schedules
