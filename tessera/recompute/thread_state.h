#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "tessera/kernels/choice.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/decisions.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/nn/values.h"
#include "tessera/nn/weight_gradients.h"

namespace tessera {

/// What a thread has set that a forward pass depends on, taken along to make the same pass again later, maybe on another thread: the samples it works on, the
/// kernels it takes, to whom it leaves weights' gradients, autocast, the state of random generators, and on which tracker its memory counts. (Module paths in
/// collectives come with nn::Next.)
class ThreadState {
 public:
  /// `inputs` tell which devices' generators are in use beside the CPU's.
  explicit ThreadState(const nn::Values& inputs);

  /// Forgets the generators from which nothing was drawn since the construction. A recomputation leaves those alone.
  void forward_done();

  /// Sets all of it while alive. Generators go on afterwards as if nothing had been drawn.
  class Guard {
   public:
    explicit Guard(const ThreadState& state);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    struct Former;
    std::unique_ptr<Former> former_;
  };

 private:
  struct Autocast {
    bool enabled = false;
    at::ScalarType dtype = at::kFloat;
  };
  struct Random {
    at::Generator generator;
    at::Tensor state;
  };
  static constexpr std::array<at::DeviceType, 2> kAutocast = {at::kCPU, at::kCUDA};
  static at::Tensor state_of(at::Generator generator);
  static void set_state(at::Generator generator, const at::Tensor& state);
  static std::array<Autocast, 2> autocast_now();
  static void set_autocast(const std::array<Autocast, 2>& autocast);

  nn::SampleContext sample_;
  nn::MaskKeys::Record mask_keys_;
  nn::Decisions::Record decisions_;
  nn::Noted<nn::NotedValue>::Record values_;
  kernels::KernelChoices kernels_;
  std::shared_ptr<nn::WeightGradients> later_;
  MemoryContext memory_;
  std::array<Autocast, 2> autocast_;
  bool autocast_cache_;
  std::vector<Random> random_;
};

}  // namespace tessera
