#include "tessera/data/sequential_loader.h"

#include <algorithm>
#include <tuple>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

namespace tessera::data {

SequentialLoader::SequentialLoader(std::shared_ptr<const Corpus> corpus, int64_t seq_len, int64_t micro_size, int rank, int ranks, Reads reads,
                                   std::vector<ColumnRun> columns)
    : corpus_(std::move(corpus)), seq_len_(seq_len), micro_size_(micro_size), windows_(corpus_->windows(seq_len)), reads_(reads), columns_(std::move(columns)) {
  invariant(seq_len > 0 && micro_size > 0, "sequential loader of seq_len ", seq_len, ", micro_size ", micro_size);
  check_windows(*corpus_, seq_len, 1, "evaluation");
  const int64_t micro_batches = (windows_ + micro_size - 1) / micro_size;
  std::tie(begin_, size_) = chunk(micro_batches, ranks, rank);
  count_ = chunk(micro_batches, ranks, 0).second;
}

std::optional<MicroBatch> SequentialLoader::next() {
  if (position_ == count_) return std::nullopt;
  MicroBatch micro;
  micro.rows = micro_size_;
  micro.seq_len = seq_len_;
  const int64_t columns = count_columns(columns_, seq_len_);
  if (!columns_.empty()) fill_positions(columns_, micro.positions = at::empty({columns}, at::device(at::kCPU).dtype(at::kLong)));
  if (reads_.tokens) micro.tokens = at::zeros({micro_size_, columns}, at::device(at::kCPU).dtype(at::kLong));
  if (reads_.labels) micro.labels = at::full({micro_size_, columns}, ignored_label, at::device(at::kCPU).dtype(at::kLong));
  if (position_ < size_) {
    micro.index = begin_ + position_;
    micro.first_sample = micro.index * micro_size_;
    const int64_t rows = std::min(micro_size_, windows_ - micro.first_sample);
    const int64_t first = micro.first_sample * seq_len_, count = rows * seq_len_;
    const auto read = [&](int64_t from, const at::Tensor& into) {
      for (int64_t row = 0; into.defined() && row < rows; ++row) {
        read_sample(*corpus_, from + row * seq_len_, seq_len_, columns_, into.mutable_data_ptr<int64_t>() + row * columns);
      }
    };
    read(first, micro.tokens);
    read(first + 1, micro.labels);
    micro.valid_tokens = rows * columns;
    if (reads_.any()) corpus_->read_ahead(first + count, std::min(count, corpus_->tokens() - first - count));
  } else {
    micro.weight = 0;
  }
  ++position_;
  return micro;
}

double SequentialLoader::global_bytes() const { return corpus_->bytes(1, windows_ * seq_len_); }

}  // namespace tessera::data
