#include "tessera/data/loader.h"

#include <algorithm>
#include <numeric>

#include <ATen/ops/empty.h>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

// A position in the data is one number, the samples taken so far: which windows make up a step follows from it by arithmetic, since a shuffled order is a
// function of the place and not a list. So there is no queue to save, a step is found without making those before it, and another number of ranks deals the
// same samples in another way. Where a resumed run counts in other units, of batches or of windows, the difference stays with the cursor.

namespace tessera::data {
namespace {

void check(const LoaderOptions& o) {
  invariant(o.seq_len > 0 && o.micro_size > 0 && o.ranks > 0 && o.rank >= 0 && o.rank < o.ranks, "loader of seq_len ", o.seq_len, ", micro_size ", o.micro_size,
            ", rank ", o.rank, " of ", o.ranks);
  require(o.global_size > 0 && o.global_size % o.micro_size == 0, "batch.global_size = ", o.global_size,
          ": must be a positive multiple of batch.micro_size = ", o.micro_size, "; the next is ",
          std::max<int64_t>(1, (o.global_size + o.micro_size - 1) / o.micro_size) * o.micro_size);
}

/// Rows, and who has which of their columns. `lengths`: of the samples, or, where they are packed, of the documents of the one row, which holds `samples`.
void shape(MicroBatch& micro, const std::vector<int64_t>& lengths, bool packed, int64_t samples, int64_t seq_len, const ColumnShare& columns) {
  const int64_t all = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  micro.rows = packed ? 1 : static_cast<int64_t>(lengths.size());
  micro.seq_len = packed ? all : seq_len;
  micro.row_samples = packed ? samples : 1;
  if (columns.cut()) micro.cut = std::make_shared<SequenceCut>(columns.rule(packed ? lengths : std::vector{seq_len}, columns.ranks));
}

int64_t columns_of(const MicroBatch& micro, const ColumnShare& columns) { return columns.cut() ? micro.cut->columns(columns.rank) : micro.seq_len; }

/// Memory for a rank's columns. `padded`: some of them may hold no text.
void allocate(MicroBatch& micro, bool packed, bool padded, Reads reads, const ColumnShare& share, at::Device device) {
  const auto placed = at::TensorOptions().dtype(at::kLong).device(device);
  const int64_t columns = columns_of(micro, share);
  if (share.cut()) micro.positions = at::empty({columns}, placed);
  if (packed) micro.document_ids = at::empty({1, columns}, placed);
  if (packed) micro.places = at::empty({columns}, placed);
  if (reads.tokens) micro.tokens = at::empty({micro.rows, columns}, placed);
  if (reads.labels) micro.labels = at::empty({micro.rows, columns}, placed);
  if (reads.padding && padded) micro.padding = at::empty({micro.rows, columns}, placed.dtype(at::kBool));
}

/// Ids and places of the documents, of these lengths, that the columns in `runs` belong to.
void write_documents(const std::vector<int64_t>& lengths, const std::vector<ColumnRun>& runs, const MicroBatch& micro) {
  int64_t* id = micro.document_ids.mutable_data_ptr<int64_t>();
  int64_t* place = micro.places.mutable_data_ptr<int64_t>();
  auto length = lengths.begin();
  int64_t begin = 0;
  for (const ColumnRun& run : runs) {
    for (int64_t column = run.begin; column < run.begin + run.size; ++column) {
      while (column >= begin + *length) begin += *length++;
      *id++ = begin;
      *place++ = column - begin;
    }
  }
}

/// Which text lies in `size` columns from `begin`: visit(first token, its column behind `begin`, tokens).
template <class Visit>
void for_each_overlap(const std::vector<Piece>& pieces, int64_t begin, int64_t size, const Visit& visit) {
  auto piece = std::ranges::partition_point(pieces, [&](const Piece& p) { return p.column + p.size <= begin; });
  for (; piece != pieces.end() && piece->column < begin + size; ++piece) {
    const int64_t from = std::max(begin, piece->column), to = std::min(begin + size, piece->column + piece->size);
    visit(piece->first + from - piece->column, from - begin, to - from);
  }
}

/// How many samples of options.seq_len end where `samples` of `length` tokens do.
int64_t samples_of_length(int64_t samples, int64_t length, const Corpus& corpus, const LoaderOptions& options) {
  const int64_t windows = corpus.windows(length);
  const int64_t epochs = samples / windows, tokens = samples % windows * length;
  const auto keep = detail::concat("; set data.seq_len = ", length, ", or start anew with checkpoint.resume = \"\"");
  require(tokens == 0 || corpus.documents() == Documents::None, "data.seq_len = ", options.seq_len,
          ": the checkpoint stands inside an epoch of windows that were packed into ", length, " tokens, and windows of another length hold other documents",
          keep);
  require(tokens == 0 || !options.shuffle, "data.seq_len = ", options.seq_len, ": the checkpoint stands inside an epoch of shuffled windows of ", length,
          " tokens, and what they have covered is no set of windows of ", options.seq_len, keep);
  require(tokens % options.seq_len == 0, "data.seq_len = ", options.seq_len, ": the checkpoint stands at token ", tokens, " of the text, where no window of ",
          options.seq_len, " tokens begins", keep);
  return epochs * corpus.windows(options.seq_len) + tokens / options.seq_len;
}

/// Of a MicroBatch or a const one.
template <class Tensor, class Micro>
std::vector<Tensor*> defined_of(Micro& micro) {
  std::vector<Tensor*> tensors;
  for (Tensor* tensor : {&micro.tokens, &micro.labels, &micro.positions, &micro.document_ids, &micro.places, &micro.padding}) {
    if (tensor->defined()) tensors.push_back(tensor);
  }
  return tensors;
}

/// The micro-batches of this rank's run in step `step`, without contents; `targets` tells how many labels a micro-batch has, by its index in the batch.
template <class Targets>
StepBatch numbered(const LoaderOptions& options, int64_t step, const Targets& targets) {
  check(options);
  const int64_t count = options.global_size / options.micro_size;
  const auto [begin, size] = chunk(count, options.ranks, options.rank);
  StepBatch batch{.step = step, .micro_batches = {}, .global_valid_tokens = 0};
  for (int64_t index = 0; index < count; ++index) batch.global_valid_tokens += targets(index);
  for (int64_t i = 0; i < chunk(count, options.ranks, 0).second; ++i) {
    MicroBatch micro;
    micro.first_sample = (step - 1) * options.global_size;
    if (i < size) {
      micro.index = begin + i;
      micro.first_sample += micro.index * options.micro_size;
    } else {
      micro.weight = 0;
    }
    for (int rank = 0; rank < options.ranks; ++rank) {
      const auto [their_begin, their_size] = chunk(count, options.ranks, rank);
      if (i < their_size) micro.global_valid_tokens += targets(their_begin + i);
    }
    batch.micro_batches.push_back(std::move(micro));
  }
  return batch;
}

}  // namespace

std::vector<at::Tensor*> tensors_of(MicroBatch& micro) { return defined_of<at::Tensor>(micro); }
std::vector<const at::Tensor*> tensors_of(const MicroBatch& micro) { return defined_of<const at::Tensor>(micro); }

std::vector<int64_t> dry_documents(const LoaderOptions& options) {
  std::vector<int64_t> lengths(static_cast<size_t>(options.micro_size), options.seq_len);
  if (!options.packed) return lengths;
  const bool even = options.columns.rule == static_cast<CutRule>(&SequenceCut::contiguous);
  const int64_t beyond = options.columns.cut() && !even ? 2 * options.columns.ranks : 0;
  const int64_t documents = std::min(options.dry_documents, options.seq_len);
  if (documents == 1) {
    lengths.back() += beyond;
    return lengths;
  }
  std::vector<int64_t> shorter;
  for (int64_t window = 0; window < options.micro_size; ++window) {
    shorter.insert(shorter.end(), static_cast<size_t>(documents), options.seq_len / documents);
    if (const int64_t rest = options.seq_len % documents; rest > 0) shorter.push_back(rest);
  }
  shorter.front() = std::max<int64_t>(1, shorter.front() - beyond);
  return shorter;
}

StepBatch dry_batch(const LoaderOptions& options, int64_t step, at::Device device) {
  const int64_t of_one = options.micro_size * options.seq_len;
  StepBatch batch = numbered(options, step, [&](int64_t) { return of_one; });
  const std::vector<int64_t> lengths = dry_documents(options);
  for (MicroBatch& micro : batch.micro_batches) {
    shape(micro, lengths, options.packed, options.micro_size, options.seq_len, options.columns);
    allocate(micro, options.packed, /*padded=*/options.packed, options.reads, options.columns, device);
    if (micro.index >= 0) micro.valid_tokens = micro.rows * columns_of(micro, options.columns);
  }
  return batch;
}

int64_t targets_in(const Corpus& corpus, const std::vector<int64_t>& windows, int64_t seq_len) {
  const bool packed = corpus.documents() != Documents::None;
  const auto all = packed ? corpus.packed(seq_len) : nullptr;
  int64_t sum = 0;
  for (const int64_t window : windows) sum += window < 0 ? 0 : packed ? all->targets(window) : seq_len;
  return sum;
}

void fill_with(const Corpus& corpus, const std::vector<int64_t>& windows, int64_t seq_len, Reads reads, const ColumnShare& columns, MicroBatch& micro) {
  const bool packed = corpus.documents() != Documents::None;
  std::vector<std::vector<Piece>> rows;  // of text
  std::vector<int64_t> documents;        // lengths of all that the one row of packed windows holds, padding included
  for (const int64_t window : windows) {
    std::vector<Piece> pieces = window < 0 ? std::vector<Piece>() : corpus.window(window, seq_len);
    if (!packed || rows.empty()) rows.emplace_back();
    const int64_t before = packed ? std::accumulate(documents.begin(), documents.end(), int64_t{0}) : 0;
    int64_t used = 0;
    for (Piece& piece : pieces) {
      used += piece.size;
      if (packed) documents.push_back(piece.size);
      piece.column += before;
      rows.back().push_back(piece);
    }
    if (packed && used < seq_len) documents.push_back(seq_len - used);
  }
  shape(micro, packed ? documents : std::vector<int64_t>(windows.size(), seq_len), packed, std::ssize(windows), seq_len, columns);
  // A micro-batch that is all padding has no token that could meet it. Packed windows have a mask whether or not they are full, as a plan counts it.
  const auto empty = std::ranges::count_if(windows, [](int64_t window) { return window < 0; });
  allocate(micro, packed, packed || (empty > 0 && empty < std::ssize(windows)), reads, columns, at::kCPU);
  const auto runs = columns.cut() ? micro.cut->runs[static_cast<size_t>(columns.rank)] : std::vector<ColumnRun>{{0, micro.seq_len}};
  if (columns.cut()) micro.positions.copy_(micro.cut->positions(columns.rank, at::kCPU));
  if (packed) write_documents(documents, runs, micro);
  if (micro.tokens.defined()) micro.tokens.zero_();
  if (micro.labels.defined()) micro.labels.fill_(ignored_label);
  if (micro.padding.defined()) micro.padding.fill_(true);
  micro.valid_tokens = 0;
  for (size_t row = 0; row < rows.size(); ++row) {
    int64_t next = static_cast<int64_t>(row) * micro.columns();
    for (const auto& [begin, size] : runs) {
      for_each_overlap(rows[row], begin, size, [&](int64_t first, int64_t column, int64_t count) {
        if (micro.tokens.defined()) corpus.read(first, count, micro.tokens.mutable_data_ptr<int64_t>() + next + column);
        if (micro.labels.defined()) corpus.read(first + 1, count, micro.labels.mutable_data_ptr<int64_t>() + next + column);
        if (micro.padding.defined()) std::fill_n(micro.padding.mutable_data_ptr<bool>() + next + column, count, false);
        micro.valid_tokens += count;
      });
      next += size;
    }
  }
}

void check_windows(const Corpus& corpus, int64_t seq_len, int64_t needed, const std::string& knob, const std::string& seq_len_knob) {
  const int64_t windows = corpus.windows(seq_len, seq_len_knob);
  require(windows >= needed, seq_len_knob, " = ", seq_len, ": the text holds ", corpus.tokens(), " tokens and gives ", windows, " windows of ", seq_len,
          " + 1; ", knob, " needs ", needed, "; give more text, or a smaller ", seq_len_knob);
}

Loader::Loader(std::shared_ptr<const Corpus> corpus, LoaderOptions options)
    : corpus_(std::move(corpus)), options_(options), windows_(corpus_->windows(options.seq_len)) {
  check(options_);
  options_.packed = corpus_->documents() != Documents::None;
  if (options_.packed) packed_ = corpus_->packed(options_.seq_len);
  require(options_.global_size / options_.micro_size >= options_.ranks, "batch.global_size = ", options_.global_size, ": gives ",
          options_.global_size / options_.micro_size, " micro-batches of batch.micro_size = ", options_.micro_size, " to ", options_.ranks,
          " data ranks, and each needs one; set it to ", options_.ranks * options_.micro_size, " or more");
  check_windows(*corpus_, options_.seq_len, options_.global_size, "batch.global_size = " + std::to_string(options_.global_size));
}

int64_t Loader::window_of(int64_t sample) const {
  const int64_t taken = sample + offset_, epoch = taken / windows_, position = taken % windows_;
  return options_.shuffle ? Permutation(windows_, options_.seed, static_cast<uint64_t>(epoch))(position) : position;
}

/// Of the samples of a micro-batch whose first one is `first_sample`; padding without end where it is one of padding.
std::vector<int64_t> Loader::windows_of(const MicroBatch& micro, int64_t first_sample) const {
  std::vector<int64_t> windows(static_cast<size_t>(options_.micro_size), -1);
  for (int64_t row = 0; micro.index >= 0 && row < options_.micro_size; ++row) windows[static_cast<size_t>(row)] = window_of(first_sample + row);
  return windows;
}

StepBatch Loader::next() {
  const int64_t first = step_ * options_.global_size;
  StepBatch batch = numbered(options_, ++step_, [&](int64_t index) {
    int64_t targets = options_.micro_size * options_.seq_len;
    if (!packed_) return targets;
    targets = 0;
    for (int64_t row = 0; row < options_.micro_size; ++row) targets += packed_->targets(window_of(first + index * options_.micro_size + row));
    return targets;
  });
  for (MicroBatch& micro : batch.micro_batches) {
    fill_with(*corpus_, windows_of(micro, micro.first_sample), options_.seq_len, options_.reads, options_.columns, micro);
  }
  if (options_.reads.any()) read_ahead(batch);
  return batch;
}

void Loader::read_ahead(const StepBatch& batch) const {
  for (const MicroBatch& micro : batch.micro_batches) {
    for (const int64_t window : windows_of(micro, micro.first_sample + options_.global_size)) {
      if (window < 0) continue;
      for (const Piece& piece : corpus_->window(window, options_.seq_len)) {
        for (const auto& [begin, size] :
             micro.cut && !packed_ ? micro.cut->runs[static_cast<size_t>(options_.columns.rank)] : std::vector{ColumnRun{0, piece.size}}) {
          corpus_->read_ahead(piece.first + begin, size + 1);
        }
      }
    }
  }
}

Cursor Loader::cursor() const { return {step_, options_.global_size, options_.seq_len, options_.seed, options_.shuffle, corpus_->content(), offset_}; }

void Loader::seek(const Cursor& cursor) {
  const Cursor here = carried(cursor, *corpus_, options_);
  step_ = here.step;
  offset_ = here.offset;
}

Cursor carried(const Cursor& cursor, const Corpus& corpus, const LoaderOptions& options) {
  require(cursor.content == corpus.content(), "data.files: the checkpoint was made with other data (", cursor.content, ") than these files hold (",
          corpus.content(), "); name the same texts and tokenizer");
  const auto agree = [](const char* knob, auto then, auto now) {
    require(then == now, knob, " = ", now, ": the checkpoint's data position was counted with ", then, "; set it to that");
  };
  const auto text = [](bool on) { return std::string(on ? "true" : "false"); };
  agree("data.shuffle", text(cursor.shuffle), text(options.shuffle));
  if (options.shuffle) agree("data.seed", cursor.seed, options.seed);
  require(cursor.step >= 0, "checkpoint: its data position is step ", cursor.step, "; it must be 0 or more");
  require(cursor.global_size > 0 && cursor.seq_len > 0 && cursor.step * cursor.global_size + cursor.offset >= 0, "checkpoint: its data position is step ",
          cursor.step, " of ", cursor.global_size, " samples of ", cursor.seq_len, " tokens, less ", -cursor.offset, "; it must be 0 or more");
  int64_t samples = cursor.step * cursor.global_size + cursor.offset;
  if (options.seq_len != cursor.seq_len) samples = samples_of_length(samples, cursor.seq_len, corpus, options);
  return {cursor.step, options.global_size, options.seq_len, options.seed, options.shuffle, cursor.content, samples - cursor.step * options.global_size};
}

}  // namespace tessera::data
