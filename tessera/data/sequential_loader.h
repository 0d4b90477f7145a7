#pragma once

#include <memory>
#include <optional>

#include "tessera/data/loader.h"

namespace tessera::data {

/// Every window of a corpus once, in order, for validation and evaluation. Micro-batches of micro_size windows are dealt over ranks as in Loader; rows
/// beyond the last window have ignored labels, and ranks with fewer micro-batches get one padding micro-batch, so that shapes and counts are the same on all.
class SequentialLoader {
 public:
  /// Throws ConfigError where the corpus gives no window. `columns`: see LoaderOptions.
  SequentialLoader(std::shared_ptr<const Corpus> corpus, int64_t seq_len, int64_t micro_size, int rank = 0, int ranks = 1, Reads reads = {},
                   ColumnShare columns = {});

  /// The next micro-batch of this rank; nothing at the end. `first_sample` is the window of row 0.
  std::optional<MicroBatch> next();
  void rewind() { position_ = 0; }

  int64_t micro_batches() const { return count_; }          ///< calls of next() that give one: the same on every rank
  int64_t global_valid_tokens() const { return targets_; }  ///< over all ranks
  double global_bytes() const;                              ///< bytes of text those targets stand for, for bits_per_byte()

 private:
  std::shared_ptr<const Corpus> corpus_;
  int64_t seq_len_, micro_size_, windows_, targets_;
  Reads reads_;
  ColumnShare columns_;
  int64_t begin_ = 0, size_ = 0, count_ = 0, position_ = 0;  // this rank's run of micro-batches, calls of next(), calls made
};

/// Of the targets of all its windows.
UnknownIds unknown_among_targets(const Corpus& corpus, const Tokenizer& tokenizer, int64_t seq_len);

/// Targets at the end of a text that make no whole window, and are in none; windows of documents are filled up, and leave none out.
int64_t targets_left_out(const Corpus& corpus, int64_t seq_len);

}  // namespace tessera::data
