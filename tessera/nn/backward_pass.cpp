#include "tessera/nn/backward_pass.h"

#include <map>
#include <mutex>
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
      try {
        while (!endings->empty()) endings->extract(endings->begin()).mapped()();
      } catch (...) {
        endings->clear();  // of what the first threw the others hear before the pass's caller does
        throw;
      }
    });
  }
  endings->emplace(turn, std::move(done));
}

struct PassWatch::Pass {
  std::recursive_mutex mutex{};  // held while `failed` runs, which may ask
  bool over = false, forgotten = false;
};

/// The engine's, until it is done with the pass.
struct PassWatch::Token {
  std::shared_ptr<Pass> pass;
  std::function<void()> done, failed;
  bool ended = false;  ///< as passes end, and `done` without an exception

  Token(std::shared_ptr<Pass> pass, std::function<void()> done, std::function<void()> failed)
      : pass(std::move(pass)), done(std::move(done)), failed(std::move(failed)) {}
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;
  ~Token() {
    const std::lock_guard lock(pass->mutex);
    pass->over = true;
    if (!ended && !pass->forgotten) failed();
  }
};

void PassWatch::begin(const Turn& turn, std::function<void()> done, std::function<void()> failed) {
  forget();
  pass_ = std::make_shared<Pass>();
  auto token = std::make_shared<Token>(pass_, std::move(done), std::move(failed));
  at_end_of_backward(turn, [token = std::move(token)] {
    if (!token->pass->forgotten) token->done();
    token->ended = true;
  });
}

bool PassWatch::is_over() const {
  if (!pass_) return true;
  const std::lock_guard lock(pass_->mutex);
  return pass_->over;
}

void PassWatch::forget() {
  if (!pass_) return;
  const std::lock_guard lock(pass_->mutex);
  pass_->forgotten = true;
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
