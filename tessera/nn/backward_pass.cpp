#include "tessera/nn/backward_pass.h"

#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "tessera/core/error.h"

namespace tessera::nn {

int backward_pass() { return torch::autograd::get_current_graph_task_id(); }

void at_end_of_backward(std::function<void()> done) {
  invariant(backward_pass() >= 0, "at_end_of_backward was called outside of a backward pass");
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(done));
}

// The pass that ends has left its last node; one that is being evaluated on this thread is another pass's.
bool is_inside_of_backward() { return torch::autograd::get_current_node() != nullptr; }

}  // namespace tessera::nn
