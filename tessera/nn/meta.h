#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
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

/// Gives `tensor`, made on meta, memory on `device` in place: handles, hooks and optimizers that hold it keep working. Its shape becomes that of its
/// slice. The contents are undefined. On meta as `device` it is given meta memory anew, so that a dry run accounts for it.
void materialize_storage(const at::Tensor& tensor, at::Device device);

/// Fills `parameter` by `rule` with the values that the logical tensor has at the places its slice names; bit-equal in any layout.
void draw(const at::Tensor& parameter, uint64_t seed);

}  // namespace nn

/// Builds a module without memory: `auto model = on_meta([&] { return Llama(options); });`
template <class F>
auto on_meta(F&& build) {
  nn::OnMeta guard;
  return std::forward<F>(build)();
}

/// Gives every parameter and buffer under `root` memory on `device` (category Parameters) and its initial value. Parameters are drawn from (seed,
/// logical name, global index) for their slice only; tied ones once. Buffers are recomputed. Where a parameter has no rule, the one libtorch uses
/// for that kind of module is taken (Linear, convolutions, embeddings, norms, recurrent cells).
/// On device meta nothing is drawn, but the same bytes are accounted for. Parameters that have memory already are drawn anew.
/// Throws ConfigError naming each parameter, or the first buffer, for whose values there is no rule.
void materialize(torch::nn::Module& root, uint64_t seed, at::Device device = at::kCPU);

/// The same for every holder.
template <class Contained>
void materialize(const torch::nn::ModuleHolder<Contained>& root, uint64_t seed, at::Device device = at::kCPU) {
  materialize(*root.ptr(), seed, device);
}

}  // namespace tessera
