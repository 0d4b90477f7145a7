#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "tessera/comm/group.h"
#include "tessera/core/error.h"
#include "tessera/nn/module.h"
#include "tessera/pipeline/split/cuts.h"
#include "tessera/pipeline/split/recording.h"
#include "tessera/pipeline/split/summed_gradients.h"
#include "tessera/pipeline/stage.h"

namespace tessera::pipeline {

/// A model cut into pipeline stages: any torch::nn::Module whose forward takes and returns tensors, unmodified.
///
/// Libtorch's modules have no hooks in C++, so the forward pass is recorded as a list of operators (tessera/pipeline/split/recorder.h says what that takes and
/// refuses), and the list is cut at the split points (cuts.h says where). A stage runs its part of the list again, bit for bit what the whole model's forward
/// does, buffers and gradients included. What one stage makes and another uses (skip connections, masks, several tensors) goes straight from the one to the
/// other. One exception to bit for bit: where a tensor is used twice in a stage between and once behind it, or a parameter is shared by stages, terms of a
/// gradient are added up in another order.
///
/// A recording is for one set of input shapes, modes of modules (train(), eval()) and autocast; it is made anew where these change, without memory and
/// arithmetic, in a millisecond or two for a hundred operators. The first in a mode is made twice, to see that forward is the same each time. One rank, one
/// thread, as the module.
class SplitModel {
 public:
  /// See split().
  SplitModel(std::shared_ptr<torch::nn::Module> root, tape::Forward forward, std::vector<at::Tensor> example_inputs, SplitSpec splits);

  int stages() const;
  /// The stage graph, for people.
  std::string to_string() const;
  /// The stage graph as data, for inputs of the current shapes and the modes of now.
  std::shared_ptr<const tape::Recording> recording(int micro_batch = 0) const;
  /// The same for a stage that is about to run it (TracedStage). Throws ConfigError where more crosses than crossings() has said, and where the pass is not
  /// what it was when it was recorded: it is recorded once more in steps 2, 4, 8, ... 64 and every 64th of a kind, unless a wrapper holds the parameters.
  std::shared_ptr<const tape::Recording> recording_to_run(int stage, int micro_batch) const;
  /// Forgets the recordings. For a program that has changed what forward reads and no shape or mode shows (a scale that is a member, Dropout's p): between two
  /// steps, on every rank.
  void record_anew() const;
  /// What an executor sends from stage to stage, for all micro-batches that expect() knows by now: a gradient comes back where it could in one of them, with
  /// gradients on and no parameter frozen, so that freezing and unfreezing changes nothing here. Under NoGradGuard, where forward then sends other tensors:
  /// those, and no gradient. Throws ConfigError where micro-batches send other tensors.
  Crossings crossings() const;
  /// Parameters of which several stages hold a copy.
  const std::vector<tape::SharedParameter>& shared() const;
  /// Whose gradients are summed already (sum_shared_gradients).
  SummedGradients& summed() const;
  /// Which of the model's inputs a stage takes from its own loader, by their places.
  std::vector<int> takes(int stage) const;
  /// The parameters and buffers of one stage, by their names in the whole model. On meta: `materialize(*split.module(0), seed)` gives them memory and values.
  /// The same module at each call. It is the split model's, and lives as long as this or a copy of it does (TracedStage has one): a wrapper may be made of
  /// `*split.module(0)`. Its train() and eval() go through the whole model, whose pass every rank records, but for modules of other stages that were asked for
  /// here, too.
  std::shared_ptr<torch::nn::Module> module(int stage) const;
  /// Those of several stages, in whatever order: one module for each set of stages.
  std::shared_ptr<torch::nn::Module> module(const std::vector<int>& stages) const;
  /// Puts the parameters and buffers that none of `stages` uses on meta, which frees their memory.
  void keep_only(const std::vector<int>& stages) const;

  /// Says that no stage before `stage` is ever trained: no gradient comes back to them, and their part of each backward is empty, for every executor that is
  /// given the crossings() asked for from here on. Every rank says the same. A parameter there that requires a gradient is refused when its stage runs.
  void train_from(int stage) const;

  /// Says what shapes and dtypes the inputs have from now on, or in one micro-batch of the step alone. Every rank says it: only the first stage could see it.
  void expect(const std::vector<at::Tensor>& inputs) const;
  void expect(const std::vector<at::Tensor>& inputs, int micro_batch) const;
  /// Whether an input was said to require a gradient: what comes back between stages follows from it.
  bool expects_gradient(int micro_batch, int input) const;
  /// Throws ConfigError on every rank where the ranks of `group` have recorded different graphs, of any micro-batch. Traffic: 8 bytes a rank.
  void check_agreement(const comm::Group& group) const;

 private:
  void check_stage(int stage) const;
  void check_untrained(int stage) const;
  void mark_parts() const;
  Crossings crossings_of_now() const;

  struct State;
  std::shared_ptr<State> state_;
};

namespace split_detail {

/// Tensors that are undefined are left out, as optional ones are.
inline void flatten_outputs(std::vector<at::Tensor>& all, const at::Tensor& output) {
  if (output.defined()) all.push_back(output);
}
inline void flatten_outputs(std::vector<at::Tensor>& all, const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) flatten_outputs(all, output);
}
template <class T>
void flatten_outputs(std::vector<at::Tensor>& all, const std::optional<T>& output) {
  if (output) flatten_outputs(all, *output);
}
template <class... T>
void flatten_outputs(std::vector<at::Tensor>& all, const std::tuple<T...>& outputs) {
  std::apply([&](const T&... output) { (flatten_outputs(all, output), ...); }, outputs);
}
template <class A, class B>
void flatten_outputs(std::vector<at::Tensor>& all, const std::pair<A, B>& outputs) {
  flatten_outputs(all, outputs.first);
  flatten_outputs(all, outputs.second);
}

template <size_t>
using TensorArgument = const at::Tensor&;
template <class Impl, size_t... I>
concept TakesTensors = requires(Impl& impl, const at::Tensor& tensor) { impl.forward(static_cast<TensorArgument<I>>(tensor)...); };

/// Calls the module with as many tensors as there are inputs; through its holder where it has one, so that what is attached to it is passed.
template <class Impl, class Model, size_t N = 0>
std::vector<at::Tensor> call_with(Model& model, const std::vector<at::Tensor>& inputs) {
  constexpr size_t most = 12;
  if constexpr (N <= most) {
    if (inputs.size() != N) return call_with<Impl, Model, N + 1>(model, inputs);
    std::vector<at::Tensor> outputs;
    const bool called = [&]<size_t... I>(std::index_sequence<I...>) {
      if constexpr (!TakesTensors<Impl, I...>) {
        return false;
      } else if constexpr (std::derived_from<Impl, nn::Module>) {
        flatten_outputs(outputs, nn::call(*model, inputs[I]...));
        return true;
      } else {
        flatten_outputs(outputs, model->forward(inputs[I]...));
        return true;
      }
    }(std::make_index_sequence<N>());
    if (called) return outputs;
  }
  require(false, "pipeline: the forward of ", model->name(), " cannot be called with ", inputs.size(), " tensors; give an example of each input that it takes");
  return {};
}

}  // namespace split_detail

/// Splits `model`, the holder or shared_ptr of any torch::nn::Module, into pipeline stages:
///   auto stages = pipeline::split(model, {tokens}, {{"layers.4", SplitPoint::Beginning}, {"layers.8", SplitPoint::Beginning}});
/// `example_inputs` give shapes and dtypes, and may be on meta, as the model may be. The splits need not be in order; each makes one stage more.
/// Throws ConfigError for a path that names no module (with the nearest), stages that would be empty, and for what cannot be recorded, naming the module and
/// the alternative.
template <class Model>
SplitModel split(Model model, std::vector<at::Tensor> example_inputs, SplitSpec splits) {
  using Impl = std::remove_cvref_t<decltype(*model)>;
  std::shared_ptr<torch::nn::Module> root;
  if constexpr (requires { model.ptr(); }) {
    root = model.ptr();
  } else {
    root = model;
  }
  auto forward = [model](const std::vector<at::Tensor>& inputs) mutable { return split_detail::call_with<Impl>(model, inputs); };
  return SplitModel(std::move(root), std::move(forward), std::move(example_inputs), std::move(splits));
}

}  // namespace tessera::pipeline
