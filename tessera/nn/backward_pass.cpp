#include "tessera/nn/backward_pass.h"

#include <map>
#include <memory>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/ambient.h"
#include "tessera/core/error.h"

// The engine owns what is to be called at a pass's end, and nobody else: where a pass fails, that goes with it, and whoever waits for it learns of the failure.

namespace tessera::nn {
namespace {

using Endings = std::multimap<Turn, std::function<void()>>;

Ambient<int64_t> turns;
Ambient<std::map<int, std::weak_ptr<Endings>>> endings_of_pass;

}  // namespace

int backward_pass() { return torch::autograd::get_current_graph_task_id(); }

Turn::Turn(std::string first_parameter) : first_parameter(std::move(first_parameter)), number((*turns)++) {}

void at_end_of_backward(const Turn& turn, std::function<void()> done) {
  invariant(backward_pass() >= 0, "at_end_of_backward was called outside of a backward pass");
  std::shared_ptr<Endings> endings = (*endings_of_pass)[backward_pass()].lock();
  if (!endings) {
    std::erase_if(*endings_of_pass, [](const auto& item) { return item.second.expired(); });
    endings = std::make_shared<Endings>();
    (*endings_of_pass)[backward_pass()] = endings;
    torch::autograd::Engine::get_default_engine().queue_callback([endings] {
      while (!endings->empty()) endings->extract(endings->begin()).mapped()();
    });
  }
  endings->emplace(turn, std::move(done));
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
