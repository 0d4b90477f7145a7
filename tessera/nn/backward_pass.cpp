#include "tessera/nn/backward_pass.h"

#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/error.h"

namespace tessera::nn {

int backward_pass() { return torch::autograd::get_current_graph_task_id(); }

void at_end_of_backward(std::function<void()> done) {
  invariant(backward_pass() >= 0, "at_end_of_backward was called outside of a backward pass");
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(done));
}

// The pass that ends has left its last node; one that is being evaluated on this thread is another pass's.
bool is_inside_of_backward() { return torch::autograd::get_current_node() != nullptr; }

bool accumulates_into(const at::Tensor& leaf) {
  const auto* const passes_through = torch::autograd::get_current_graph_task_exec_info();
  if (passes_through == nullptr || passes_through->empty()) return true;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  const auto found = passes_through->find(accumulator.get());
  return found != passes_through->end() && found->second.needed_;
}

}  // namespace tessera::nn
