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

/// How many samples of options.seq_len end where `samples` of `length` tokens do.
int64_t samples_of_length(int64_t samples, int64_t length, const Corpus& corpus, const LoaderOptions& options) {
  const int64_t windows = corpus.windows(length);
  const int64_t epochs = samples / windows, tokens = samples % windows * length;
  const auto keep = detail::concat("; set data.seq_len = ", length, ", or start anew with checkpoint.resume = \"\"");
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
  for (Tensor* tensor : {&micro.tokens, &micro.labels, &micro.positions}) {
    if (tensor->defined()) tensors.push_back(tensor);
  }
  return tensors;
}

}  // namespace

std::vector<at::Tensor*> tensors_of(MicroBatch& micro) { return defined_of<at::Tensor>(micro); }
std::vector<const at::Tensor*> tensors_of(const MicroBatch& micro) { return defined_of<const at::Tensor>(micro); }

StepBatch dry_batch(const LoaderOptions& options, int64_t step, at::Device device) {
  check(options);
  const int64_t count = options.global_size / options.micro_size;
  const auto [begin, size] = chunk(count, options.ranks, options.rank);
  const int64_t most = chunk(count, options.ranks, 0).second;
  const auto placed = at::TensorOptions().dtype(at::kLong).device(device);
  const int64_t columns = count_columns(options.columns, options.seq_len);
  const at::Tensor positions = options.columns.empty() ? at::Tensor() : at::empty({columns}, placed);
  StepBatch batch{.step = step, .micro_batches = {}, .global_valid_tokens = options.global_size * options.seq_len};
  batch.micro_batches.reserve(static_cast<size_t>(most));
  for (int64_t i = 0; i < most; ++i) {
    MicroBatch micro;
    micro.rows = options.micro_size;
    micro.seq_len = options.seq_len;
    micro.positions = positions;
    if (options.reads.tokens) micro.tokens = at::empty({micro.rows, columns}, placed);
    if (options.reads.labels) micro.labels = at::empty({micro.rows, columns}, placed);
    micro.first_sample = (step - 1) * options.global_size;
    if (i < size) {
      micro.index = begin + i;
      micro.first_sample += micro.index * options.micro_size;
      micro.valid_tokens = options.micro_size * columns;
    } else {
      micro.weight = 0;
    }
    for (int rank = 0; rank < options.ranks; ++rank) {
      if (i < chunk(count, options.ranks, rank).second) micro.global_valid_tokens += options.micro_size * options.seq_len;
    }
    batch.micro_batches.push_back(std::move(micro));
  }
  return batch;
}

void read_sample(const Corpus& corpus, int64_t first, int64_t seq_len, const std::vector<ColumnRun>& columns, int64_t* into) {
  if (columns.empty()) return corpus.read(first, seq_len, into);
  for (const auto& [begin, size] : columns) {
    corpus.read(first + begin, size, into);
    into += size;
  }
}

int64_t count_columns(const std::vector<ColumnRun>& columns, int64_t seq_len) {
  if (columns.empty()) return seq_len;
  return std::accumulate(columns.begin(), columns.end(), int64_t{0}, [](int64_t sum, const ColumnRun& run) { return sum + run.size; });
}

void fill_positions(const std::vector<ColumnRun>& columns, const at::Tensor& positions) {
  int64_t* next = positions.mutable_data_ptr<int64_t>();
  for (const auto& [begin, size] : columns) {
    std::iota(next, next + size, begin);
    next += size;
  }
}

void check_windows(const Corpus& corpus, int64_t seq_len, int64_t needed, const std::string& knob, const std::string& seq_len_knob) {
  require(corpus.windows(seq_len) >= needed, seq_len_knob, " = ", seq_len, ": the text holds ", corpus.tokens(), " tokens and gives ", corpus.windows(seq_len),
          " windows of ", seq_len, " + 1; ", knob, " needs ", needed, "; give more text, or a smaller ", seq_len_knob);
}

Loader::Loader(std::shared_ptr<const Corpus> corpus, LoaderOptions options)
    : corpus_(std::move(corpus)), options_(options), windows_(corpus_->windows(options.seq_len)) {
  check(options_);
  require(options_.global_size / options_.micro_size >= options_.ranks, "batch.global_size = ", options_.global_size, ": gives ",
          options_.global_size / options_.micro_size, " micro-batches of batch.micro_size = ", options_.micro_size, " to ", options_.ranks,
          " data ranks, and each needs one; set it to ", options_.ranks * options_.micro_size, " or more");
  check_windows(*corpus_, options_.seq_len, options_.global_size, "batch.global_size = " + std::to_string(options_.global_size));
}

int64_t Loader::window_of(int64_t sample) const {
  const int64_t taken = sample + offset_, epoch = taken / windows_, position = taken % windows_;
  return options_.shuffle ? Permutation(windows_, options_.seed, static_cast<uint64_t>(epoch))(position) : position;
}

StepBatch Loader::next() {
  StepBatch batch = dry_batch(options_, ++step_, at::kCPU);
  if (!options_.columns.empty()) fill_positions(options_.columns, batch.micro_batches.front().positions);
  for (MicroBatch& micro : batch.micro_batches) {
    if (micro.index >= 0) {
      fill(micro);
    } else {
      if (micro.tokens.defined()) micro.tokens.zero_();
      if (micro.labels.defined()) micro.labels.fill_(ignored_label);
    }
  }
  if (!options_.reads.any()) return batch;
  for (const MicroBatch& micro : batch.micro_batches) {
    for (int64_t row = 0; micro.index >= 0 && row < options_.micro_size; ++row) {
      const int64_t first = window_of(micro.first_sample + options_.global_size + row) * options_.seq_len;
      for (const auto& [begin, size] : options_.columns.empty() ? std::vector{ColumnRun{0, options_.seq_len}} : options_.columns) {
        corpus_->read_ahead(first + begin, size + 1);
      }
    }
  }
  return batch;
}

void Loader::fill(MicroBatch& micro) const {
  for (int64_t row = 0; row < options_.micro_size; ++row) {
    const int64_t first = window_of(micro.first_sample + row) * options_.seq_len;
    const auto read = [&](int64_t from, const at::Tensor& into) {
      if (into.defined()) read_sample(*corpus_, from, options_.seq_len, options_.columns, into.mutable_data_ptr<int64_t>() + row * micro.columns());
    };
    read(first, micro.tokens);
    read(first + 1, micro.labels);
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
