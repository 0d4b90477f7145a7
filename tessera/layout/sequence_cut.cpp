#include "tessera/layout/sequence_cut.h"

#include <numeric>

#include <ATen/ops/empty.h>

#include "tessera/layout/slice.h"

namespace tessera {

namespace {

/// Runs that follow each other become one.
void append(std::vector<ColumnRun>& runs, std::pair<int64_t, int64_t> part) {
  const auto [begin, size] = part;
  if (size == 0) return;
  if (!runs.empty() && runs.back().begin + runs.back().size == begin) {
    runs.back().size += size;
  } else {
    runs.push_back({begin, size});
  }
}

}  // namespace

int64_t SequenceCut::columns(int rank) const {
  int64_t count = 0;
  for (const ColumnRun& run : runs.at(static_cast<size_t>(rank))) count += run.size;
  return count;
}

at::Tensor SequenceCut::positions(int rank, at::Device device) const {
  at::Tensor places = at::empty({columns(rank)}, at::TensorOptions().dtype(at::kLong).device(at::kCPU));
  int64_t* next = places.mutable_data_ptr<int64_t>();
  for (const auto& [begin, size] : runs[static_cast<size_t>(rank)]) {
    std::iota(next, next + size, begin);
    next += size;
  }
  return places.to(device);
}

SequenceCut SequenceCut::contiguous(int64_t length, int ranks) {
  SequenceCut cut{.length = length, .runs = std::vector<std::vector<ColumnRun>>(static_cast<size_t>(ranks))};
  for (int rank = 0; rank < ranks; ++rank) append(cut.runs[static_cast<size_t>(rank)], chunk(length, ranks, rank));
  return cut;
}

SequenceCut SequenceCut::head_tail(int64_t length, int ranks) {
  SequenceCut cut{.length = length, .runs = std::vector<std::vector<ColumnRun>>(static_cast<size_t>(ranks))};
  const int parts = 2 * ranks;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<ColumnRun>& runs = cut.runs[static_cast<size_t>(rank)];
    append(runs, chunk(length, parts, rank));
    append(runs, chunk(length, parts, parts - 1 - rank));
  }
  return cut;
}

}  // namespace tessera
