#include "tessera/recompute/thread_state.h"

#include <algorithm>
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include "tessera/recompute/kept_values.h"

// Backward runs later and maybe on a thread of libtorch's, where what the forward pass found set for its thread may have any other value: autocast, the scope
// of samples, the choice of kernels. Whatever of this changes a result has to be taken along, or the recomputation makes other values than were used. Random
// generators are set back to how the forward found them, and then to where they were: later draws are as if nothing had been made again.

namespace tessera {

namespace {

std::vector<at::Generator> generators_for(const nn::Values& inputs) {
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  for (const auto& input : inputs) {
    nn::map_tensors(input, [&](const at::Tensor& tensor) {
      if (tensor.defined() && !tensor.is_cpu() && !tensor.is_meta()) {
        const at::Generator generator = at::globalContext().defaultGenerator(tensor.device());
        if (std::find(generators.begin(), generators.end(), generator) == generators.end()) generators.push_back(generator);
      }
      return tensor;
    });
  }
  return generators;
}

}  // namespace

at::Tensor ThreadState::state_of(at::Generator generator) {
  MemoryTracker aside;  // 5 KB that live for a moment on the real device and in a dry run alike, and belong to no category
  const TrackMemory not_counted(aside);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void ThreadState::set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

std::array<ThreadState::Autocast, 2> ThreadState::autocast_now() {
  std::array<Autocast, 2> now;
  for (size_t i = 0; i < now.size(); ++i) now[i] = {at::autocast::is_autocast_enabled(kAutocast[i]), at::autocast::get_autocast_dtype(kAutocast[i])};
  return now;
}

void ThreadState::set_autocast(const std::array<Autocast, 2>& autocast) {
  for (size_t i = 0; i < autocast.size(); ++i) {
    at::autocast::set_autocast_enabled(kAutocast[i], autocast[i].enabled);
    at::autocast::set_autocast_dtype(kAutocast[i], autocast[i].dtype);
  }
}

ThreadState::ThreadState(const nn::Values& inputs)
    : sample_(nn::SampleScope::current()),
      kernels_(kernels::kernel_choices()),
      later_(nn::LeaveWeightGradients::current()),
      memory_(MemoryContext::current()),
      autocast_(autocast_now()),
      autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
  for (const auto& generator : generators_for(inputs)) random_.push_back({generator, state_of(generator)});
}

void ThreadState::forward_done() {
  mask_keys_.end();
  decisions_.end();
  values_.end();
  std::erase_if(random_, [](const Random& random) { return at::equal(state_of(random.generator), random.state); });
}

struct ThreadState::Guard::Former {
  explicit Former(const ThreadState& state)
      : memory(state.memory_), kernels(state.kernels_), later(state.later_), mask_keys(state.mask_keys_), decisions(state.decisions_), values(state.values_) {
    // The scope that is open already shares the rows of its tokens: a second one like it would make them again.
    if (!(nn::SampleScope::current() == state.sample_)) sample.emplace(state.sample_);
    for (const auto& [generator, begin] : state.random_) {
      random.push_back({generator, state_of(generator)});
      set_state(generator, begin);
    }
  }

  MemoryContext::Guard memory;
  kernels::KernelChoiceGuard kernels;
  nn::LeaveWeightGradients later;
  nn::MaskKeys::Replay mask_keys;
  nn::Decisions::Replay decisions;
  nn::Noted<nn::NotedValue>::Replay values;
  std::optional<nn::SampleScope> sample;
  std::array<Autocast, 2> autocast = autocast_now();
  bool autocast_cache = at::autocast::is_autocast_cache_enabled();
  std::vector<Random> random;
};

ThreadState::Guard::Guard(const ThreadState& state) : former_(std::make_unique<Former>(state)) {
  at::autocast::increment_nesting();
  at::autocast::set_autocast_cache_enabled(state.autocast_cache_);
  set_autocast(state.autocast_);
}

ThreadState::Guard::~Guard() {
  for (const auto& [generator, state] : former_->random) set_state(generator, state);
  // What autocast has cached for the recomputation goes with it.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_cache_enabled(former_->autocast_cache);
  set_autocast(former_->autocast);
}

}  // namespace tessera
