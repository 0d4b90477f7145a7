#include "tessera/data/sequential_loader.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <tuple>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

namespace tessera::data {
namespace {

/// Calls `visit(first, count)` for each run of ids that are targets of a window.
void for_targets(const Corpus& corpus, int64_t seq_len, const std::function<void(int64_t, int64_t)>& visit) {
  const int64_t windows = corpus.windows(seq_len);
  if (corpus.documents() == Documents::None) return visit(1, windows * seq_len);
  for (int64_t window = 0; window < windows; ++window) {
    for (const Piece& piece : corpus.window(window, seq_len)) visit(piece.first + 1, piece.size);
  }
}

}  // namespace

SequentialLoader::SequentialLoader(std::shared_ptr<const Corpus> corpus, int64_t seq_len, int64_t micro_size, int rank, int ranks, Reads reads,
                                   ColumnShare columns)
    : corpus_(std::move(corpus)), seq_len_(seq_len), micro_size_(micro_size), windows_(corpus_->windows(seq_len)), reads_(reads), columns_(columns) {
  invariant(seq_len > 0 && micro_size > 0, "sequential loader of seq_len ", seq_len, ", micro_size ", micro_size);
  check_windows(*corpus_, seq_len, 1, "evaluation");
  const int64_t micro_batches = (windows_ + micro_size - 1) / micro_size;
  std::tie(begin_, size_) = chunk(micro_batches, ranks, rank);
  count_ = chunk(micro_batches, ranks, 0).second;
  std::vector<int64_t> all(static_cast<size_t>(windows_));
  std::iota(all.begin(), all.end(), 0);
  targets_ = targets_in(*corpus_, all, seq_len);
}

std::optional<MicroBatch> SequentialLoader::next() {
  if (position_ == count_) return std::nullopt;
  MicroBatch micro;
  std::vector<int64_t> windows(static_cast<size_t>(micro_size_), -1);
  if (position_ < size_) {
    micro.index = begin_ + position_;
    micro.first_sample = micro.index * micro_size_;
    for (int64_t row = 0; row < std::min(micro_size_, windows_ - micro.first_sample); ++row) windows[static_cast<size_t>(row)] = micro.first_sample + row;
  } else {
    micro.weight = 0;
  }
  fill_with(*corpus_, windows, seq_len_, reads_, columns_, micro);
  for (const int64_t window : windows) {
    if (window < 0 || !reads_.any() || window + micro_size_ >= windows_) continue;
    for (const Piece& piece : corpus_->window(window + micro_size_, seq_len_)) corpus_->read_ahead(piece.first, piece.size + 1);
  }
  ++position_;
  return micro;
}

double SequentialLoader::global_bytes() const {
  double bytes = 0;
  for_targets(*corpus_, seq_len_, [&](int64_t first, int64_t count) { bytes += corpus_->bytes(first, count); });
  return bytes;
}

UnknownIds unknown_among_targets(const Corpus& corpus, const Tokenizer& tokenizer, int64_t seq_len) {
  UnknownIds found;
  for_targets(corpus, seq_len, [&](int64_t first, int64_t count) {
    found.ids += count;
    if (tokenizer.unknown()) found.unknown += corpus.occurrences(*tokenizer.unknown(), first, count);
  });
  return found;
}

int64_t targets_left_out(const Corpus& corpus, int64_t seq_len) {
  if (corpus.documents() != Documents::None || corpus.tokens() == 0) return 0;
  return corpus.tokens() - 1 - corpus.windows(seq_len) * seq_len;
}

}  // namespace tessera::data
