#include "tessera/core/once_differentiable.h"

#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/error.h"

namespace tessera {
namespace {

/// Stands where the derivative of a backward would be. It leads on to all that the gradients depend on, so that every pass for any of it comes by.
class Refusal final : public torch::autograd::Node {
 public:
  Refusal(torch::autograd::edge_list next, std::string text) : Node(std::move(next)), text_(std::move(text)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& /*gradients*/) override { throw ConfigError(text_); }

 private:
  std::string text_;
};

}  // namespace

std::vector<at::Tensor> once_differentiable(const char* operation, const char* way_out, const std::vector<at::Tensor>& received,
                                            std::vector<at::Tensor> gradients) {
  if (!at::GradMode::is_enabled()) return gradients;
  torch::autograd::edge_list next = torch::autograd::collect_next_edges(received);
  const auto node = torch::autograd::get_current_node();
  invariant(node != nullptr, "once_differentiable was called outside of a backward pass");
  next.insert(next.end(), node->next_edges().begin(), node->next_edges().end());
  const auto refusal = c10::make_intrusive<Refusal>(
      std::move(next), detail::concat(operation, ": its gradient was differentiated once more (create_graph), and it has no second derivative; ", way_out));
  for (at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    gradient = gradient.detach();
    torch::autograd::set_history(gradient, refusal);
  }
  return gradients;
}

}  // namespace tessera
