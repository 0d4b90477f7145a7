#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/data/corpus.h"
#include "tessera/data/shuffle.h"
#include "tessera/layout/sequence_cut.h"

namespace tessera::data {

/// Label of a position that does not count.
inline constexpr int64_t ignored_label = -100;

/// What a rank reads of a text. Of a model that is cut into stages the first takes tokens, the last labels, and those between know shapes and counts alone.
struct Reads {
  bool tokens = true, labels = true;
  bool padding = false;  ///< where there is no text: for layers in which tokens compete with each other, on any stage

  bool any() const { return tokens || labels; }
};

/// What one forward takes. A padding micro-batch (weight 0) is there so that all ranks run the same number: tokens 0, labels all ignored, index -1.
///
/// A row is a sample. Where documents are packed, one row holds all samples of the micro-batch, one behind the other: attention ends with the document, so rows
/// would be only one boundary more, and one cut of the row over ranks deals each of its documents.
struct MicroBatch {
  at::Tensor tokens;                         ///< [rows, columns] int64; undefined where they are not read
  at::Tensor labels;                         ///< [rows, columns] int64: the next token of the sample, or ignored_label; undefined where they are not read
  at::Tensor positions{};                    ///< [columns] int64: where the columns lie in the row; undefined: they are all here, in order
  at::Tensor document_ids{};                 ///< [1, columns] int64: in which column of the row each column's document begins; undefined: a row is one document
  at::Tensor places{};                       ///< [columns] int64: where the columns lie in their documents; undefined as document_ids
  at::Tensor padding{};                      ///< [rows, columns] bool: which hold no text; undefined where nobody reads that; of a stream, where all or none do
  int64_t rows = 0, seq_len = 0;             ///< of whole rows; on every rank
  int64_t row_samples = 1;                   ///< samples in a row, of seq_len / row_samples columns each
  std::shared_ptr<const SequenceCut> cut{};  ///< of a row, over the ranks that share it; null: it is whole
  double weight = 1;                         ///< 0 = padding micro-batch
  int64_t index = -1;                        ///< of the micro-batch in the step's global batch, 0 .. global_size / micro_size - 1; -1 for padding
  int64_t first_sample = 0;  ///< of row 0, counted over the whole run from 0: sample s is row s % global_size of step s / global_size + 1, in every layout
  int64_t valid_tokens = 0;  ///< labels that count, of these columns
  /// Those of all ranks' micro-batches at this place in their runs, known without communication: what a gradient of these alone is normalised by.
  int64_t global_valid_tokens = 0;

  int64_t padding_size() const { return padding.defined() ? padding.numel() - valid_tokens : 0; }
  int64_t columns() const { return positions.defined() ? positions.size(0) : seq_len; }
  int64_t sample_columns() const { return seq_len / row_samples; }
};

/// The tensors that a micro-batch has: whoever brings it to another device asks here. Those that are not read are left out.
std::vector<at::Tensor*> tensors_of(MicroBatch& micro);
std::vector<const at::Tensor*> tensors_of(const MicroBatch& micro);

/// A rank's share of one optimizer step.
struct StepBatch {
  int64_t step = 0;                       ///< from 1
  std::vector<MicroBatch> micro_batches;  ///< this rank's run, in order of index; the same number on every rank
  int64_t global_valid_tokens = 0;        ///< over all ranks, known without communication: the loss is normalised by it
};

struct LoaderOptions {
  int64_t seq_len = 0;      ///< tokens per sample
  int64_t global_size = 0;  ///< samples per step, over all ranks
  int64_t micro_size = 1;   ///< samples per forward; divides global_size
  bool shuffle = true;      ///< a new order of all windows in every epoch
  uint64_t seed = 0;        ///< of the order
  int rank = 0, ranks = 1;  ///< of the data axes
  Reads reads{};            ///< of this rank
  ColumnShare columns{};    ///< of each row, where others of the same data rank read the rest (context parallelism)
  bool packed = false;      ///< windows hold documents; for dry_batch, which has no corpus to tell
  /// And how many of one length, and one of the rest: 1 shows what takes most memory, but under a window that slides; more, what shorter ones take.
  int64_t dry_documents = 1;
};

/// Where a run stands in its data, for checkpoints: `step` finished steps. The other fields say what the position means; carried() compares them.
struct Cursor {
  int64_t step = 0;
  int64_t global_size = 0;
  int64_t seq_len = 0;
  uint64_t seed = 0;
  bool shuffle = true;
  std::string content;  ///< Corpus::content()
  int64_t offset = 0;   ///< samples that the run has taken beyond step * global_size, where it was resumed with another global_size or seq_len
  bool operator==(const Cursor&) const = default;
};

/// Deals the corpus to data ranks. Which windows make up step k depends on seed and global_size alone; micro-batches are dealt over ranks in contiguous runs
/// that differ by at most one (layout's chunk()), and a rank with fewer gets one padding micro-batch at its end.
///
/// Sample s of the run is window s % windows of epoch s / windows: without shuffle that window itself, with it the window's image under that epoch's
/// permutation (shuffle.h). So an epoch may begin inside a step, and step k is found without stepping there.
///
/// Labels are those of the whole sample: the last column that a rank reads has the token behind it, wherever that is.
///
/// Of a corpus of documents a window is some of them (PackedWindows), and what is left of it padding: tokens 0 without a label, a document of its own. Every
/// rank knows which documents lie where, of micro-batches that it reads nothing of, too.
///
/// Memory: micro_batches * micro_size * columns * 8 bytes a step for tokens, where they are read, and as much for labels, for ids and places of documents; no
/// buffer of its own (the kernel reads the next step's pages ahead); for Reads::padding an eighth of it. One object, one thread.
class Loader {
 public:
  /// Throws ConfigError where global_size is no multiple of micro_size, has fewer micro-batches than ranks, or exceeds the windows of the corpus.
  Loader(std::shared_ptr<const Corpus> corpus, LoaderOptions options);

  StepBatch next();

  /// After next() returned step k, its `step` is k.
  Cursor cursor() const;

  /// Continues after `cursor.step` steps, at the window that carried() says. Throws ConfigError as it does.
  void seek(const Cursor& cursor);

  const LoaderOptions& options() const { return options_; }
  const Corpus& corpus() const { return *corpus_; }
  int64_t windows() const { return windows_; }

  /// The window that sample `sample` of the run reads, counted as MicroBatch::first_sample is.
  int64_t window_of(int64_t sample) const;

 private:
  std::vector<int64_t> windows_of(const MicroBatch& micro, int64_t first_sample) const;
  void read_ahead(const StepBatch& batch) const;

  std::shared_ptr<const Corpus> corpus_;
  LoaderOptions options_;
  std::shared_ptr<const PackedWindows> packed_;  ///< null: windows of a stream
  int64_t windows_;
  int64_t step_ = 0;
  int64_t offset_ = 0;  ///< Cursor::offset
};

/// The same place in the data for a loader of `options`. The batch may be any: what is counted is samples. Windows of another length hold the same place where
/// one begins there: at the end of an epoch, or, unshuffled, at a multiple of both. Throws ConfigError by name, with the reason, where the cursor belongs to
/// other data or another order, or no window begins at its place.
Cursor carried(const Cursor& cursor, const Corpus& corpus, const LoaderOptions& options);

/// The same micro-batches as Loader::next() would give at `step`, in shapes, order, indices and counts, with unset contents on `device` (meta for a dry run)
/// and no corpus; packed windows as if each were one document, all of it read, and of as many columns on each rank as any documents could bring it
/// (LoaderOptions::dry_documents: or as few). With fewer micro-batches than ranks, which Loader refuses, ranks beyond them get a padding micro-batch alone.
StepBatch dry_batch(const LoaderOptions& options, int64_t step, at::Device device);

/// Lengths of the documents of its rows, one for each window. Where head and tail of packed documents are dealt over ranks, a rank may have a column more than
/// its even share: so the last is so much longer that every rank has at least that, and at most three. With several of a window, the longest is so much
/// shorter.
std::vector<int64_t> dry_documents(const LoaderOptions& options);

/// Fills a micro-batch with windows of `seq_len` tokens; -1 stands for one of padding. Sets all but its place in the batch.
void fill_with(const Corpus& corpus, const std::vector<int64_t>& windows, int64_t seq_len, Reads reads, const ColumnShare& columns, MicroBatch& micro);

/// Labels that count in these windows, of all ranks that share them.
int64_t targets_in(const Corpus& corpus, const std::vector<int64_t>& windows, int64_t seq_len);

/// Throws ConfigError unless the corpus gives `needed` windows of seq_len tokens; says how many it gives. `knob` names the setting that needs them,
/// `seq_len_knob` what gave seq_len.
void check_windows(const Corpus& corpus, int64_t seq_len, int64_t needed, const std::string& knob, const std::string& seq_len_knob = "data.seq_len");

}  // namespace tessera::data
