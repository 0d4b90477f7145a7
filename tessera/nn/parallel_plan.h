#pragma once

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/layout/feature_cut.h"

/// What a tensor-parallel plan says, as plain values: models bring theirs, and tensor_parallel/parallelize.h carries it out.
namespace tessera {

/// How a tensor that goes from one module to another lives on the ranks of the group.
enum class TensorLayout {
  Replicated,  ///< whole on every rank, and so is its gradient
  Copied,      ///< whole on every rank, each of which uses it for its own part of what follows: gradients are terms of a sum
  Features,    ///< cut along the last dimension
  Sequence,    ///< cut along the sequence, by layout's rule: dimension 1 of [B, S, D] and of ids [B, S], dimension 0 of [S, D] and of ids [S]
  Partial,     ///< every rank holds a term of the sum
};
const char* to_string(TensorLayout layout);  ///< "replicated", "copied", "sharded on features", "sharded on sequence", "a partial sum"

/// A linear layer that computes some of its output features: weight [O/t, I], bias [O/t].
struct ColumnParallel {
  TensorLayout input = TensorLayout::Replicated;  ///< or Copied, Sequence
  TensorLayout output = TensorLayout::Features;   ///< or Replicated: an all-gather
  FeatureCut cut = {};                            ///< of the output features
  bool operator==(const ColumnParallel&) const = default;
};

/// A linear layer that takes some of its input features and adds the ranks' products up: weight [O, I/t], the whole bias, added once, after the sum.
struct RowParallel {
  TensorLayout input = TensorLayout::Features;     ///< or Replicated, of which each rank takes its part
  TensorLayout output = TensorLayout::Replicated;  ///< or Sequence: a reduce-scatter; or Partial: the sum is left to PrepareOutput further out
  FeatureCut cut = {};                             ///< of the input features
  bool operator==(const RowParallel&) const = default;
};

/// An embedding that holds some rows: the others give zeros, and the ranks' results are added up.
struct VocabParallelEmbedding {
  TensorLayout output = TensorLayout::Replicated;  ///< or Sequence
  bool operator==(const VocabParallelEmbedding&) const = default;
};

/// The head that owns the loss, with some rows of the vocabulary: logits are never gathered for the loss; asked for, they are.
struct VocabParallelHead {
  TensorLayout input = TensorLayout::Replicated;  ///< or Sequence
  bool operator==(const VocabParallelHead&) const = default;
};

/// A module that treats every position by itself (norms, dropout, look-up of positions) and gets its part of the sequence. Its parameters are whole on every
/// rank, and their gradients are summed over the group once a step.
struct SequenceParallel {
  bool operator==(const SequenceParallel&) const = default;
};

/// Turns argument `argument` of a module from one layout into another.
struct PrepareInput {
  TensorLayout from, to;
  int argument = 0;
  bool keep_gathered = false;         ///< Sequence to Copied: keep the whole until backward (S elements), rather than a part (S/t) and gather it again
  std::vector<std::string> layers{};  ///< column-wise layers inside, by path, that take the whole: what overlap multiplies with the parts as they come
  bool operator==(const PrepareInput&) const = default;
};

/// The same of the (first) result.
struct PrepareOutput {
  TensorLayout from, to;
  bool operator==(const PrepareOutput&) const = default;
};

/// States where the (first) result of a module lives of which no other style says it (attention cores, blocks), and changes nothing: comparisons with one
/// device read it, and check_parallel_plan holds it against what the pass gives.
struct Gives {
  TensorLayout layout;
  FeatureCut cut = {};  ///< Features: by which heads; [B, S, H, D] is cut in dimension 2, [B, S, H * D] in its last
  int dim = -1;         ///< Features: the dimension that is cut
  /// Sequence: the module takes its argument 0 that way, too, and treats every position by itself by operators that need not be followed (a mixture sorts
  /// tokens by expert). Modules inside with a PrepareInput are followed again.
  bool by_position = false;
  bool operator==(const Gives&) const = default;
};

using ParallelStyle =
    std::variant<ColumnParallel, RowParallel, VocabParallelEmbedding, VocabParallelHead, SequenceParallel, PrepareInput, PrepareOutput, Gives>;
std::string to_string(const ParallelStyle& style);  ///< as it is written: "ColumnParallel"

/// Path patterns and what becomes of the modules that match. Several entries may name one module where their meanings add up (PrepareInput and PrepareOutput
/// around another); later ones are further out.
using ParallelPlan = std::vector<std::pair<std::string, ParallelStyle>>;

}  // namespace tessera
