#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

namespace tessera {

namespace nn {

/// While alive, every tensor that this thread makes is made on meta, whatever device the code asks for: shapes, no memory. Modules of torch::nn
/// included. (A boxed fallback that rewrites the `device` argument, on a dispatch key that only this guard switches on.)
class OnMeta {
 public:
  OnMeta();
  ~OnMeta();
  OnMeta(const OnMeta&) = delete;
  OnMeta& operator=(const OnMeta&) = delete;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

/// Says of an error that libtorch has thrown under OnMeta what the constructor did that has no meaning there: throws ConfigError. Others it leaves alone.
void refuse_without_memory(const c10::Error& error);

/// Gives `tensor`, made on meta, memory on `device` in place: handles, hooks and optimizers that hold it keep working. Its shape becomes that of its
/// slice. The contents are undefined. On meta as `device` it is given meta memory anew, so that a dry run accounts for it.
void materialize_storage(const at::Tensor& tensor, at::Device device);

/// Gives the buffers under `root` that are on meta memory and their first values: those that the module's constructor gave them, or reset_buffers() of ours.
/// Random ones are drawn from (seed, path). Throws ConfigError naming the first whose values nobody knows.
void materialize_buffers(torch::nn::Module& root, uint64_t seed, at::Device device);

/// Fills `parameter` by `rule` with the values that the logical tensor has at the places its slice names; bit-equal in any layout.
void draw(const at::Tensor& parameter, uint64_t seed);

}  // namespace nn

/// Builds a module without memory: `auto model = on_meta([&] { return make_model(config.model); });`. How its constructors initialize it (their
/// reset_parameters, torch::nn::init, whatever operators) is remembered, and materialize does it.
/// Throws ConfigError where a constructor looks at values, which are not there.
template <class F>
auto on_meta(F&& build) {
  nn::OnMeta guard;
  try {
    return std::forward<F>(build)();
  } catch (const c10::Error& error) {
    nn::refuse_without_memory(error);
    throw;
  }
}

/// The same, and then `init(module)` for the module and each one in it, as PyTorch's `model.apply(init_weights)`: it may fill any parameter or buffer.
template <class F, class Init>
auto on_meta(F&& build, Init&& init) {
  return on_meta([&] {
    auto model = std::forward<F>(build)();
    const std::function<void(torch::nn::Module&)> initialize = std::forward<Init>(init);
    model->apply(initialize);
    return model;
  });
}

/// Gives every parameter and buffer under `root` memory on `device` (category Parameters) and its initial value, bit-equal in any layout.
///
/// A parameter that its constructor (or `init` of on_meta) fills with one distribution or constant, in whole, is drawn from (seed, logical name, global index)
/// for its slice only; so is one with a rule (set_init; what fills it later has the last word), and tied ones once. What is computed in another way (orthogonal
/// matrices, tables, masks) is computed again whole, its random numbers drawn from (seed, logical name), and the slice is kept: that tensor's size in memory,
/// for a moment. Modules built outside of on_meta are drawn by libtorch's rules for their kind (Linear, convolutions, embeddings, norms, recurrent cells,
/// attention); their buffers are left alone.
/// On device meta nothing is drawn, but the same bytes are accounted for. Parameters that have memory already are drawn anew.
/// Throws ConfigError naming each parameter, or the first buffer, whose values nobody knows.
void materialize(torch::nn::Module& root, uint64_t seed, at::Device device = at::kCPU);

/// The same for every holder.
template <class Contained>
void materialize(const torch::nn::ModuleHolder<Contained>& root, uint64_t seed, at::Device device = at::kCPU) {
  materialize(*root.ptr(), seed, device);
}

}  // namespace tessera
