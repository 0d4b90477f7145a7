#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/context_parallel/context_parallel.h"
#include "tessera/layout/sequence_cut.h"
#include "tessera/nn/attention_tiles.h"

namespace tessera::context {

/// The documents that a whole sequence's columns belong to, as all ranks told each other: rows one after the other.
struct GatheredDocuments {
  int64_t rows = 0;
  std::vector<int64_t> ids;  ///< [rows, length]
};

/// What the interceptors of one attachment share.
struct Context {
  comm::Group group;
  ContextParallelOptions options;
  std::optional<SequenceCut> cut{};  ///< of the calls that follow
  uint64_t cut_mark = 0;             ///< its hash: what a recomputed call has to find again
  at::Tensor positions{};            ///< of this rank's columns, made when they are first asked for; undefined: nobody has

  /// Of this rank's `document_ids` [B, S_r]: in a pass that set_cut has begun gathered once for cores that are given the same tensor one after the other. What
  /// a tensor holds in the next pass is not for one rank to judge, for all have to gather or none: from when a core is called again until the next set_cut
  /// each call gathers. A pass that is computed again is given what the first one had. `called_in`: number of the pass in which the core was called last; 0:
  /// none. Throws ConfigError where values on the host have changed within such a pass.
  std::shared_ptr<const GatheredDocuments> documents_of(const at::Tensor& document_ids, uint64_t& called_in);
  /// Of a new cut.
  void begin_pass();

 private:
  at::Tensor ids_;  ///< of the last call, held so that no other tensor takes its memory
  uint32_t version_ = 0;
  uint64_t pass_ = 1;
  bool pass_is_known_ = true;  ///< set_cut has begun it, and no core was called twice
  uint64_t values_ = 0;        ///< hash of the last call's, where they lie on the host
  std::shared_ptr<const GatheredDocuments> documents_;
};

/// The sequence that one call of a core attends to: what every rank holds of it.
class Sequence {
 public:
  Sequence(SequenceCut cut, const nn::AttentionReach& reach) : cut_(std::move(cut)), reach_(reach) {}
  /// Packed documents.
  Sequence(SequenceCut cut, const nn::AttentionReach& reach, const GatheredDocuments& documents)
      : cut_(std::move(cut)), reach_(reach), documents_(&documents) {}

  const SequenceCut& cut() const { return cut_; }
  const nn::AttentionReach& reach() const { return reach_; }
  /// What a tensor holds that has these columns of the sequence one after the other.
  nn::AttentionColumns columns(const std::vector<ColumnRun>& runs) const;

 private:
  SequenceCut cut_;
  nn::AttentionReach reach_;
  const GatheredDocuments* documents_ = nullptr;  ///< null: one document
};

/// One rank's attention with the help of the others, outside of autograd; made for one call. Tensors: q [B, S_r, H, D]; k, v [B, S_r, K, D].
class Method {
 public:
  virtual ~Method() = default;

  struct Result {
    at::Tensor output;  ///< [B, S_r, H, D]
    at::Tensor kept;    ///< what backward needs beside it: log-sum-exps, or weights
  };
  struct Gradients {
    at::Tensor q, k, v;
  };
  virtual Result forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const = 0;
  virtual Gradients backward(const at::Tensor& grad_output, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Result& forward) const = 0;
};

/// The same for autograd, which keeps q, k, v and the result. Backward runs under forward's CallSite.
at::Tensor attend(std::shared_ptr<const Method> method, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

std::shared_ptr<const Method> all_gather_method(comm::Group group, const Sequence& sequence);

}  // namespace tessera::context
