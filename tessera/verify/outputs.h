#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "tessera/core/attachment.h"
#include "tessera/mesh/mesh.h"
#include "tessera/nn/interceptor.h"
#include "tessera/verify/bounds.h"
#include "tessera/verify/verify.h"

namespace tessera {

/// Which output: of the `call`-th call of a module for one micro-batch, going forward, or its gradient going backward.
struct OutputKey {
  bool backward = false;
  std::string module;
  int64_t first_sample = 0;  ///< of the micro-batch, over the whole run
  int64_t call = 0;
  auto operator<=>(const OutputKey&) const = default;
};

/// Takes what a tap hears. Called on the thread that computes; `values` is detached and must be copied to be kept.
class OutputSink {
 public:
  virtual ~OutputSink() = default;
  virtual void output(const OutputKey& key, const at::Tensor& values, const nn::OutputLayout& layout) = 0;
};

/// The samples whose micro-batches are heard of; padding lies outside.
struct SampleRange {
  int64_t begin = 0, end = 0;
};

/// How samples, counted over the whole run, make up steps and micro-batches.
struct BatchShape {
  int64_t global_size = 1, micro_size = 1;
  int64_t keys = 0;  ///< the most that a query sees; 0: not said

  int64_t step_of(int64_t sample) const { return sample / global_size + 1; }
  int64_t micro_batch_of(int64_t sample) const { return sample % global_size / micro_size; }
};

struct TapOptions {
  /// A module beside the tree that is called in place of the root: the last part of one that is cut into stages.
  nn::Module* instead = nullptr;
  /// The axis over which sequences are cut, on both sides; empty where they are not.
  std::string column_axis = {};
  /// Each rank routes some tokens of a sequence, on one of the sides: what is chosen for them, and what is sorted by it, is not heard. Choices are compared by
  /// themselves (routing.h).
  bool routes_parts = false;
  /// A pattern of modules that are passed over, which one side calls in another way than the other (for a tile of its tokens at a time).
  std::string unheard = {};
};

/// Hands the first output of every nn::Module under `root` (itself included) to `sink`, and the gradient that arrives at it, until what is returned dies. It
/// sits outside of everything that is attached already, so it hears what the caller gets. Modules computed again in backward (recomputation) are not heard
/// twice. Plain torch::nn modules cannot be intercepted and are passed over. `sink` must live until the last backward is done.
///
/// Where the micro-batch holds some columns of its samples (SampleContext::positions), what interceptors state of an output is meant of these, and is handed on
/// as a part of the whole sequence: along dimension 1 of [B, S, ...], and 0 of what has a row for each token, or no rows; a number is a term of the sum over
/// the axis of columns.
[[nodiscard]] Attachment tap_outputs(torch::nn::Module& root, SampleRange samples, OutputSink& sink, const TapOptions& options = {});

/// What a rank gave out in a step, kept until it is compared: the values up to a budget of bytes, beyond it their hash.
class RecordedOutputs : public OutputSink {
 public:
  struct Output {
    std::vector<Box> boxes;                 ///< of the logical output; empty: the whole
    std::vector<std::string> partial_over;  ///< a term of a sum over these axes of the mesh; empty: final values
    std::vector<int64_t> sizes;             ///< of the rank-local tensor
    at::ScalarType dtype = at::kFloat;
    at::Tensor values;  ///< undefined beyond the budget
    uint64_t hash = 0;  ///< of the values, where they are not kept
  };

  explicit RecordedOutputs(int64_t budget_bytes) : budget_bytes_(budget_bytes), bytes_left_(budget_bytes) {}
  /// Forgets the step before.
  void begin_step();
  void output(const OutputKey& key, const at::Tensor& values, const nn::OutputLayout& layout) override;
  std::map<OutputKey, Output>& outputs() { return outputs_; }

 private:
  std::map<OutputKey, Output> outputs_;
  int64_t budget_bytes_, bytes_left_;
};

/// Holds each output of the one device against what the ranks recorded of it, part by part, as soon as it appears, and drops the records. Terms of a sum are
/// added up first, in double precision, and stand for the first rank that gave one.
class OutputComparer : public OutputSink {
 public:
  /// `axes`: on which the ranks lie; empty: those who give terms of an output are all terms of one sum.
  OutputComparer(std::vector<RecordedOutputs*> ranks, const VerifyBounds& bounds, BatchShape batch, MeshShape axes = {})
      : ranks_(std::move(ranks)), bounds_(bounds), batch_(batch), axes_(std::move(axes)) {}
  void output(const OutputKey& key, const at::Tensor& values, const nn::OutputLayout& layout) override;
  void begin_step() {
    before_ = {backward_, first_};
    largest_.clear();
  }
  /// What was found of gradients since: of a step that both sides skip they are not numbers.
  void forget_gradients();

  const OutputComparison& forward() const { return forward_; }
  const OutputComparison& backward() const { return backward_; }

 private:
  /// When a module ran: one device runs micro-batch after micro-batch, but of a step the earliest module says most, whichever micro-batch shows it.
  struct Place {
    int64_t step = 0, depth = 0, micro_batch = 0;
    auto operator<=>(const Place&) const = default;
  };
  struct Given {
    int rank = 0;
    RecordedOutputs::Output output;
  };
  std::vector<Given> take_given(const OutputKey& key);
  bool same_sum(const Given& one, const Given& other);
  void compare(const OutputKey& key, int rank, const RecordedOutputs::Output& got, const at::Tensor& want, int64_t depth);
  double scale_of(const OutputKey& key, const at::Tensor& want) const;
  void note_parting(const OutputKey& key, const Place& place, Parting parting);

  std::vector<RecordedOutputs*> ranks_;
  VerifyBounds bounds_;
  BatchShape batch_;
  MeshShape axes_;
  std::map<std::vector<std::string>, std::vector<int>> sums_;  ///< by axes that sums go over: of each rank, which of the sums is its
  std::map<int64_t, int64_t> depth_;                           ///< outputs so far, by micro-batch
  std::map<std::string, double> largest_;                      ///< entry of a module's gradients in the step so far
  OutputComparison forward_, backward_;
  std::map<bool, Place> first_;                                ///< of the first parting, by direction
  std::pair<OutputComparison, std::map<bool, Place>> before_;  ///< the step: backward_ and first_
};

}  // namespace tessera
