#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/attachment.h"
#include "tessera/kernels/gradient_place.h"
#include "tessera/nn/parameter.h"

namespace tessera {
class GradientSynchronizer;
}

namespace tessera::nn {

/// What an engine announces about the backward passes it runs. One per engine, shared with the dispatchers that follow it; changed between
/// backward passes only.
struct StepPhase {
  int64_t step = 0;              ///< grows by one with every optimizer step
  bool last_micro_batch = true;  ///< gradients of the backward that runs next, or now, complete those of the step
};

/// In what autograd takes the gradients of a leaf up: it brings each contribution into this type, and adds those of one pass up in it.
struct TakenUp {
  std::optional<at::ScalarType> in;  ///< none: each stays as it came
};

/// Serves everyone who waits for the gradient of one parameter, of ours or of a plain torch::nn::Module. It owns libtorch's single
/// post-accumulate slot of that tensor (taking it a second time would silently replace the first owner), lives as long as the tensor and holds
/// no reference to it. Take it after materialize. Listeners run on the thread that runs backward, in the order in which they came.
///
/// Three moments are served. *Arriving*: autograd, or `deliver`, is about to add a contribution to `grad`. *Accumulated*: `grad` has just taken up another
/// contribution (once per backward, however often the parameter was used in it, plus once per `deliver`). *Final*: nothing more will be added in this step;
/// announced once per step, as soon as the phase that the engine set says that the last micro-batch runs and every delivery that was promised has come, or by
/// announce_final. With no phase to follow, each backward is a step of its own.
class GradientDispatcher {
 public:
  using Listener = std::function<void(const at::Tensor& parameter)>;
  using PlaceMaker = std::function<at::Tensor()>;

  /// The dispatcher of `parameter`, made at the first use; it may be frozen now, and later not. Throws InternalError for a tensor that is no leaf or can have
  /// no gradient.
  static GradientDispatcher& of(const at::Tensor& parameter);

  /// That of `parameter` if it has one, else null. Never throws.
  static GradientDispatcher* find(const at::Tensor& parameter);

  /// Called before each accumulation, while `grad` is what it was: the moment to set that aside. Not where torch::autograd::grad asks for the gradient, which
  /// accumulates nothing.
  [[nodiscard]] Attachment listen_arriving(Listener before_accumulation);

  /// The same for who only looks: called before all who may set `grad` aside.
  [[nodiscard]] Attachment watch_arriving(Listener before_anybody);

  /// Called after each accumulation, with the parameter, whose `grad` is complete up to here. Capture what identifies it, never a tensor.
  [[nodiscard]] Attachment listen(Listener on_accumulated);

  /// Called when the gradient of the step is final.
  [[nodiscard]] Attachment listen_final(Listener on_final);

  /// From now on `phase` says which backward is the step's last.
  void follow(std::shared_ptr<const StepPhase> phase);

  /// Ends that, unless another phase is followed by now.
  void unfollow(const std::shared_ptr<const StepPhase>& phase);

  /// Says who makes the parameter's gradient that of the global batch, until the attachment goes. Who claimed it last does; those before wait until then. Where
  /// autograd is to take gradients up otherwise than in the parameter's own type for him (Tensor::set_grad_dtype), he says how; so far of leaves alone.
  [[nodiscard]] Attachment claim(GradientSynchronizer* owner, std::optional<TakenUp> taken_up = {});
  GradientSynchronizer* owner() const;  ///< null where nobody has claimed it

  /// Promises `count` more gradients that autograd does not bring itself (weight gradients computed later): the gradient is not final before they
  /// were delivered.
  void expect(int count = 1);

  /// Adds `gradient` to the parameter's as autograd would, in its grad_dtype() and through its hooks (Tensor::register_hook: called for each delivery), and
  /// tells the listeners. Throws InternalError where shapes differ.
  void deliver(const at::Tensor& gradient);

  /// Offers `place`, of the parameter's shape, strides and dtype, where the step's gradient is to end up. A place is offered to the first who takes
  /// it, and anew with every call.
  void offer_place(at::Tensor place);

  /// The same of a place that has no memory yet: `make` gives it some when it is taken.
  void offer_place(PlaceMaker make);

  void withdraw_place();

  /// From here on, until it is told otherwise, who computes a gradient may add it to what is there: the engine says so that runs one micro-batch's backward,
  /// of those whose forward has begun to compute gradients, before the next's. No effect where anyone listens to arrivals, or a program has put a hook on the
  /// parameter: they are to see each contribution by itself.
  void add_in_place(bool adds);

  /// Whether it is so now of `parameter`, with or without a dispatcher.
  static bool adds_in_place(const at::Tensor& parameter);

  /// The place (an alias of it) for a gradient of `parameter` that is about to be computed: the one on offer, if it has none so far; where gradients are added
  /// in place, `grad` itself, which is taken from the parameter, or new memory if there is none; else none. Who takes it fills it and hands it to autograd,
  /// keeping no handle: then it becomes `grad` as it is, without a copy.
  static kernels::GradientPlace take_place(const at::Tensor& parameter);

  /// Whether the place of the last offer was taken: before its gradient has come, nothing else may be written there.
  bool is_place_taken() const;

  /// What is known of `parameter` itself, whatever data it is given: libtorch keeps a dispatcher with a tensor, and hands over what else it carries with the
  /// data (set_data, and so Module::to and vector_to_parameters). Null: nothing was said. `know` makes the dispatcher, as `of` does.
  static c10::intrusive_ptr<c10::BackendMeta> known_of(const at::Tensor& parameter);
  static void know(const at::Tensor& parameter, c10::intrusive_ptr<c10::BackendMeta> known);

  /// Says that the gradient is final although nothing arrived in the last micro-batch. No effect where it was said already in this step.
  void announce_final();

 private:
  class Hook;
  class ArrivalHook;
  struct State;
  explicit GradientDispatcher(c10::TensorImpl* parameter);
  void accumulated(const at::Tensor& parameter);
  void hear_arrivals();
  Attachment while_alive(std::shared_ptr<const Listener> arriving) const;
  at::Tensor parameter() const;

  c10::TensorImpl* parameter_;  ///< owner of the slot that owns us: alive as long as we are
  std::shared_ptr<State> state_;
};

/// Which of `leaves` the backward pass that runs on this thread may bring several contributions, told before the first of them comes: the engine adds them up
/// in what the leaf takes gradients up in, and nobody sees them apart.
std::vector<bool> met_several_times(const std::vector<at::Tensor>& leaves);

/// Who makes the gradient of a parameter, or of that of which this is updated in place, that of the global batch; null: nobody.
GradientSynchronizer* owner_of(const at::Tensor& updated);

/// Of what `synchronizer` updates, what no other has claimed since.
std::vector<NamedParameter> owned_by(const GradientSynchronizer& synchronizer);

}  // namespace tessera::nn
