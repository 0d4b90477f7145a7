#include "tessera/layout/sequence_cut.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

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

SequenceCut SequenceCut::head_tail(const std::vector<int64_t>& documents, int ranks) {
  if (documents.size() == 1) return head_tail(documents.front(), ranks);
  struct Pair {
    int64_t work;
    std::pair<int64_t, int64_t> head, tail;
  };
  std::vector<Pair> pairs;
  const int64_t longest = documents.empty() ? 0 : std::ranges::max(documents);
  int64_t begin = 0;
  for (const int64_t document : documents) {
    for (int part = 0; part < ranks; ++part) {
      auto head = chunk(document, 2 * ranks, part), tail = chunk(document, 2 * ranks, 2 * ranks - 1 - part);
      int64_t work = 0;
      for (auto* run : {&head, &tail}) {
        work += run->second * (run->first + longest) + run->second * (run->second + 1) / 2;
        run->first += begin;
      }
      pairs.push_back({work, head, tail});
    }
    begin += document;
  }
  std::ranges::stable_sort(pairs, std::greater<>(), &Pair::work);
  SequenceCut cut{.length = begin, .runs = {}};
  std::vector<int64_t> work(static_cast<size_t>(ranks), 0);
  std::vector<std::vector<std::pair<int64_t, int64_t>>> parts(static_cast<size_t>(ranks));
  for (const Pair& pair : pairs) {
    const auto least = static_cast<size_t>(std::ranges::min_element(work) - work.begin());
    work[least] += pair.work;
    parts[least].insert(parts[least].end(), {pair.head, pair.tail});
  }
  for (auto& own : parts) {
    std::ranges::sort(own);
    cut.runs.emplace_back();
    for (const auto& part : own) append(cut.runs.back(), part);
  }
  return cut;
}

SequenceCut SequenceCut::contiguous(const std::vector<int64_t>& documents, int ranks) {
  return contiguous(std::accumulate(documents.begin(), documents.end(), int64_t{0}), ranks);
}

}  // namespace tessera
