#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/nn/bucket_layout.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/parameter.h"

/// What data-parallel techniques share. Not part of the public surface.
namespace tessera {

/// Parameters of `module` that have a gradient or may have one later (of a floating dtype, frozen ones too), each once, of those in `only`. Throws ConfigError
/// where none wants one now.
std::vector<nn::NamedParameter> floating_parameters(const std::string& technique, const torch::nn::Module& module, const nn::ParameterFilter& only = {});

/// Says aloud which of them are registered under several names: libtorch's parameters() lists those as often, its optimizers update them as often a step, and
/// its clip_grad_norm_ counts them so, on one device and on several. Where a program's own loop begins, on one rank.
void warn_of_tied(const std::string& technique, const std::vector<nn::NamedParameter>& parameters);

/// Throws ConfigError where one of them is the weight of an embedding with max_norm, which writes the rows that are looked up in forward: those of this rank's
/// samples.
void refuse_renormalized(const std::string& technique, const torch::nn::Module& module, const std::vector<nn::NamedParameter>& parameters);

/// Gradients that were there when parameters were wrapped: of samples of this rank, as far as anybody knows, and met by no other rank's.
class LeftGradients {
 public:
  LeftGradients() = default;
  explicit LeftGradients(const std::vector<nn::NamedParameter>& parameters);

  /// Before each backward pass; does nothing once one has found them cleared. Throws ConfigError where one still stands and is not zero.
  void refuse(const std::string& technique, const std::vector<nn::NamedParameter>& parameters);

 private:
  std::vector<at::Tensor> left_;
};

/// Throws ConfigError where ranks between which parameters are cut are taken for replicas of one another.
void require_disjoint(const char* technique, const comm::Group& shard, const comm::Group& replicate);

/// Which of them want a gradient now that `owner` synchronizes (nn::GradientDispatcher::claim).
std::vector<bool> trained_parameters(const std::vector<nn::NamedParameter>& parameters, const GradientSynchronizer* owner);

/// How the parameter's gradient lies where it lies by itself: with the parameter's strides, where those leave no gaps, which is the layout that autograd keeps
/// when it accumulates in place; otherwise row-major.
std::vector<int64_t> gradient_strides(const at::Tensor& parameter);

/// Of each of them, to be kept for as long as ranks add these gradients up as flat memory. `alike`: whether the parameters lie alike on all ranks, as
/// equalize_replicas says; where they do not, all are row-major.
std::vector<std::vector<int64_t>> gradient_strides(const std::vector<nn::NamedParameter>& parameters, bool alike);

/// The elements of `flat` from `offset` on, in this shape and with these strides, which leave no gaps. It shares the memory, and keeps it alive; to autograd it
/// is no view, so that zero_grad may detach it in place.
at::Tensor gradient_view(const at::Tensor& flat, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides);

/// The same, row-major.
at::Tensor gradient_view(const at::Tensor& flat, int64_t offset, at::IntArrayRef sizes);

/// Throws ConfigError, by name, where autograd has brought a gradient that cannot be summed over ranks in flat memory: one that is not dense, or has a history
/// (create_graph), which would end there in silence.
void require_summable(const std::string& technique, const nn::NamedParameter& parameter);

/// In which type the parameter's gradient is summed, where `dtype` is what options say: complex ones stay as they are.
at::ScalarType summed_dtype(const at::Tensor& parameter, std::optional<at::ScalarType> dtype);

/// What a plan of flat buffers sees of the parameter's gradient, in `dtype`.
GradientSpec spec_of(const nn::NamedParameter& parameter, at::ScalarType dtype);

/// Makes `view` the parameter's gradient. Its dtype may differ from the parameter's.
void set_gradient(const at::Tensor& parameter, const at::Tensor& view);

/// Whether `gradient` is the very memory of `view`, seen in the same way.
bool occupies(const at::Tensor& gradient, const at::Tensor& view);

/// Whether somebody has taken `view` as the place of the parameter's gradient (nn::GradientDispatcher::offer_place) and another gradient came first: it then is
/// not to be touched.
bool is_place_awaited(const at::Tensor& parameter, const at::Tensor& view);

/// Brings the parameter's gradient into `view` and makes that the gradient, unless it lies there already: the first of a step, or one that took the view's
/// place (zero_grad, create_graph). Zeros where there is none.
void recover_gradient(const at::Tensor& parameter, const at::Tensor& view);

/// Gives up `scratch` with its memory now, whoever else still holds the tensor: an engine's worker lets go of a collective that is done when it gets to it, and
/// until then a bucket's worth would be held. What held a view must not use it again.
void release_scratch(at::Tensor& scratch);

/// Where small messages live that a group's hosts make and read: on the CPU, so that nobody waits for a device, which reads them no more than it wrote them; on
/// the parameter's device where the group's engine carries nothing else (nccl alone).
at::Device message_device(const at::Tensor& parameter, const comm::Group& group);

/// Of gradients that the program has put on parameters, by parameter, drops those that add nothing, and says whether there are others. One read on the host
/// where there are any.
bool drop_zeros(std::vector<at::Tensor>& given);

/// Throws ConfigError, by name and on every rank, where gradients that the program has put on parameters (`given`, by parameter, undefined elsewhere) are not
/// the same on all ranks of the groups: replicas would part by them. Reads them on the host. Collective: an all-reduce of three words in each group.
void refuse_given_apart(const std::string& technique, const std::vector<nn::NamedParameter>& parameters, const std::vector<at::Tensor>& given,
                        const std::vector<comm::Group>& groups);

/// What `who` says that is about to take the gradient of parameter `name` for that of the global batch, where it waits on this rank.
std::string gradient_that_waits(const std::string& who, const std::string& name);

/// What ranks tell each other at the end of a step beside which parameters they used, and, when that has been told, what is so on any of them.
struct StepWords {
  bool failed = false;          ///< the pass ended by an exception (UsedParameters::anywhere)
  bool written = false;         ///< parameters were written after a pass that left gradients of this rank alone
  bool given = false;           ///< the program has put gradients that the step adds to
  bool unlike_writes = false;   ///< parameters were written more often on some rank than on another that holds the same
  bool unlike_buffers = false;  ///< buffers are others on some rank than on another
  uint64_t writes = 0;          ///< nn::WriteCounts
  uint64_t buffers = 0;         ///< hash_of_buffers
  uint64_t order = 0;           ///< in which order what was reduced came, where that follows from the pass (UsedParameters::refuse_unused_anywhere)
};

/// Which parameters got a gradient in this step, of those that want one.
class UsedParameters {
 public:
  /// `technique`: in whose name it refuses.
  UsedParameters(std::string technique, const std::vector<nn::NamedParameter>& parameters);

  void clear();
  void want(std::vector<bool> wanted);  ///< which of them are to have one; all until this is said
  void mark(size_t index, bool used = true) { used_[index] = used; }
  bool used(size_t index) const { return used_[index] != 0; }
  /// It may go without: an earlier pass has left it a gradient. For collectives whose order follows from what a pass uses, so that this is the same on all
  /// ranks.
  void forgive(size_t index) { forgiven_[index] = true; }
  bool all() const { return first_missing() < 0; }

  /// Throws ConfigError naming those without a gradient on this rank, and the way out.
  void refuse_unused(const comm::Group& group) const;

  /// The same on every rank where any misses one, or wants or forgives others than the rest, or came in another order, so that none goes on alone. Ranks are
  /// those of the groups one after the other (of each rank of the first, its peers in the second): an all-gather of twelve words in each. Ranks of the last
  /// group hold the same, so their writes are compared; it goes first, for the others to hear of it.
  StepWords refuse_unused_anywhere(const std::vector<comm::Group>& groups, const StepWords& own = {}) const;

  /// Which were used on any rank of the groups, as above: in each one all-reduce of a word for each, and seven more with `words`, of which it tells and hears
  /// what is not of order.
  std::vector<bool> anywhere(const std::vector<comm::Group>& groups, StepWords* words = nullptr) const;

 private:
  bool is_missing(size_t index) const { return wanted_[index] && used_[index] == 0 && !forgiven_[index]; }
  int64_t first_missing() const;  ///< -1: none
  int64_t count_missing() const;
  std::string missing_gradients(int64_t rank, const std::string& group, int64_t missing, const std::string& names) const;

  std::string technique_;
  const std::vector<nn::NamedParameter>& parameters_;
  std::vector<bool> wanted_, forgiven_;
  std::vector<int32_t> used_;
};

}  // namespace tessera
