#include <utility>

#include "tessera/comm/flight_record/reader.h"
#include "tessera/comm/flight_record/verdict.h"
#include "tests/fuzz/target.h"

/// A rank's record, alone and beside a copy of it that says it is of another rank: whatever they hold, there is a verdict.
TESSERA_FUZZ_TARGET(flight_record) {
  using namespace tessera;
  namespace flight = comm::flight;
  const auto file = fuzz::scratch_file("rank_0.bin", input);
  flight::Records records;
  if (!fuzz::accepts(file.string(), [&] { records.ranks.push_back(flight::read_record(file)); })) return;
  auto& first = records.ranks.front();
  constexpr int most_ranks = 64;  // a line each, below
  if (first.world_size > most_ranks) return;
  if (first.world_size > 1) {
    auto other = first;
    other.rank = (first.rank + 1) % first.world_size;
    if (!other.calls.empty()) other.calls.pop_back();
    records.ranks.push_back(std::move(other));
  }
  records.world_size = records.ranks.front().world_size;
  std::ranges::sort(records.ranks, {}, &flight::RankRecord::rank);
  for (int rank = 0; rank < records.world_size; ++rank) {
    if (std::ranges::find(records.ranks, rank, &flight::RankRecord::rank) == records.ranks.end()) records.missing.push_back(rank);
  }
  const flight::Merge merge(records);
  fuzz::expect(!flight::explain(merge).sentence.empty(), "a verdict without a sentence");
  const auto standings = flight::standings(merge);
  fuzz::expect(static_cast<int>(standings.size()) == records.world_size, "standings of ", standings.size(), " ranks of ", records.world_size);
  flight::table(standings);
}
