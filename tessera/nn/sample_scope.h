#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/nn/noted.h"

namespace tessera::nn {

/// Which tokens of the whole run a rank is working on. Random masks are functions of it, not of a generator's state, so that they are the same in any
/// layout and when a block is computed again.
struct SampleContext {
  uint64_t seed = 0;         ///< of the run
  int64_t step = 0;          ///< optimizer step, from 1; 0: nobody stated one, and each call draws a mask of its own (MaskKeys)
  int64_t first_sample = 0;  ///< of the micro-batch's first row, counted over the whole run from 0, as the loader counts
  at::Tensor positions{};    ///< int64 [columns]: where those of the micro-batch lie in the sequence (context parallelism); undefined: in order
  int64_t first_column = 0;  ///< of the tensor at hand, among those (sequence parallelism)
  std::optional<int64_t> columns = std::nullopt;  ///< that the tensor at hand has from there on, where it is a part; nothing: all
  int64_t seq_len = 0;                            ///< of whole sequences; 0: what the tensor has
  /// What a region of a part of the sequence (sequence parallelism) has changed, which one within it is not to change again.
  struct Part {
    int64_t begin;    ///< by which first_column was moved
    int64_t seq_len;  ///< before
    int64_t of;       ///< the whole sequence's length
    bool operator==(const Part&) const = default;
  };
  std::optional<Part> part = std::nullopt;
  int64_t first_feature = 0, features = 0;  ///< of a tensor cut along its last dimension, which of how many it holds; 0, 0: all
  double expected_gradient = 1;  ///< what backward will be called with for the summed loss, 1 / valid tokens of the step: saves the fused loss a pass
  std::optional<int64_t> valid_tokens = std::nullopt;  ///< of the micro-batch, by which terms beside the loss are weighed; nothing: nobody said
  at::Tensor padding{};                                ///< bool [rows, columns] of the micro-batch: true where a column holds no token; undefined: all do
  std::optional<int64_t> padding_size = std::nullopt;  ///< how many those are, for who knows it on the host; nothing: the device counts

  bool operator==(const SampleContext& other) const;
};

/// Sets this thread's context while alive; scopes nest. Ranks are threads, so the context is per rank. Whoever computes later, or on another thread,
/// what was begun here (recompute) takes `current()` along and sets it again.
class SampleScope {
 public:
  explicit SampleScope(const SampleContext& context);
  ~SampleScope();
  SampleScope(const SampleScope&) = delete;
  SampleScope& operator=(const SampleScope&) = delete;

  /// The innermost context of this thread; a default one (seed 0, step 0) outside every scope.
  static const SampleContext& current();

  /// The global row, sample * seq_len + position, of every token of a local [batch, columns] piece: int64 [batch * columns] on `device`. Made once
  /// per scope and shared by all who ask.
  static at::Tensor token_rows(int64_t batch, int64_t columns, at::Device device);

  /// Which of a call's rows are no tokens, where it has every token of the micro-batch as a row, or those of a part of the columns (sequence parallelism).
  struct Padding {
    at::Tensor rows{};            ///< bool [tokens]; undefined: nobody said that there are any
    std::optional<int64_t> size;  ///< nothing: of a part, or nobody said it, and only the device can count
    bool part = false;            ///< of the columns
    bool any() const { return rows.defined(); }

    /// The size for `who`, which has to know it on the host; of a part 0. Throws ConfigError where nobody said it.
    int64_t on_host(const char* who) const;
  };
  /// Throws ConfigError where `tokens` are neither all of the micro-batch that the padding is of nor the part that SampleContext::columns says.
  static Padding padding(int64_t tokens);

 private:
  SampleContext context_;
  at::Tensor rows_;
  int64_t columns_ = 0;
  SampleScope* outer_;
};

/// What masks are functions of where no step is stated, as in a loop that opens no SampleScope: a number from libtorch's default generator for each call, so
/// they differ from call to call and are the same after torch::manual_seed. What is computed again sees the numbers of the first time, whoever has drawn since.
class MaskKeys : public Noted<uint64_t> {
 public:
  static uint64_t next();
};

}  // namespace tessera::nn
