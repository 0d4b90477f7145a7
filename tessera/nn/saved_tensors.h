#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// How often libtorch has seen it written, views and detached aliases included; 0 of inference tensors, of which it does not count.
inline int64_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version()); }

/// The tensor's values and version counter, without its graph and without a call of any operator.
at::Tensor alias_of(const at::Tensor& tensor);

/// Stands in for a tensor that autograd would keep from forward to backward. Dies as soon as the operator's backward has run (or its graph is dropped).
class SavedTensor {
 public:
  virtual ~SavedTensor() = default;

  /// The tensor's values, detached: asked for on the thread that runs backward, once, or once per backward where the graph is kept for another.
  virtual at::Tensor unpack() = 0;
};

/// What takes the place of tensors that autograd saves. One object serves one thread.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;

  /// Called with every tensor that an operator saves, in the order of saving; parameters and outputs included, undefined ones not. `tensor` is detached and
  /// shares its storage with what was saved. Null: the scope further out is asked, and beyond the last one the tensor is kept as it is, under libtorch's
  /// rule that it must not be changed in place meanwhile.
  virtual std::unique_ptr<SavedTensor> pack(const at::Tensor& tensor) = 0;

  /// Whether it keeps nothing, and computes in backward again what it is given now.
  virtual bool computes_again() const { return false; }
};

/// While alive, `hooks` serves what this thread's operators save. Scopes nest, and the innermost that takes a tensor has it.
/// (libtorch asks the autograd engine for such hooks. Ours is a subclass, installed once when the library loads; with no scope alive it
/// costs one thread-local read per saved tensor.)
class SavedTensorScope {
 public:
  explicit SavedTensorScope(std::shared_ptr<SavedTensorHooks> hooks);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;
};

/// Keeps `tensor` as an operator's saved tensor is kept: by the innermost scope that takes it, or as it is. What a technique itself holds from forward to
/// backward (the inputs of a block that will be computed again) goes this way, so that a scope further out may drop it or move it elsewhere.
/// unpack() throws ConfigError where a tensor that was kept as it is has been changed in place.
std::unique_ptr<SavedTensor> save(const at::Tensor& tensor);

/// Which scope serves this thread now; null outside of any. A name to compare, and nothing to call.
const void* innermost_saved_tensor_scope();

/// Whether a scope that is alive computes again what operators save now: whoever would save memory in another way has nothing to win, and would do it twice.
bool saved_tensors_are_computed_again();

/// Whether this thread is computing a part of the forward pass again, inside backward. An interceptor that keeps books on forward passes (the order in which
/// units are gathered) asks.
bool recomputing() noexcept;

/// The node of the backward pass for which it does; null where it computes nothing again.
const torch::autograd::Node* recomputed_for() noexcept;

/// Says so while alive.
class RecomputingScope {
 public:
  RecomputingScope();
  ~RecomputingScope();
  RecomputingScope(const RecomputingScope&) = delete;
  RecomputingScope& operator=(const RecomputingScope&) = delete;

 private:
  bool before_;
  const torch::autograd::Node* before_for_;
};

}  // namespace tessera::nn
