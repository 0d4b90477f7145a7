#include "tessera/precision/non_finite.h"

#include <algorithm>
#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/nn/attach.h"

// By the time that a norm is NaN, so is nearly everything, and where it began cannot be seen any more. The step's inputs and draws are known, so it is made
// again, looked at in order: outputs as forward makes them, gradients before any sum over ranks spreads them.

namespace tessera::precision {

struct NonFiniteWatch::State {
  std::string found;

  void look_at(const at::Tensor& tensor, const char* what, const std::string& name) {
    if (!found.empty() || !tensor.defined() || !at::isFloatingType(tensor.scalar_type())) return;
    const at::NoGradGuard no_grad;
    if (host_read(at::isfinite(tensor).all(), 1) == 0) found = detail::concat(what, " of '", name, "'");
  }
};

namespace {

template <class Look>
class OutputWatch final : public nn::Interceptor {
 public:
  explicit OutputWatch(Look look) : look_(std::move(look)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    nn::Values outputs = next(std::move(inputs));
    for (const auto& output : outputs) {
      if (output.isTensor()) look_(output.toTensor(), module.path());
    }
    return outputs;
  }

 private:
  Look look_;
};

}  // namespace

NonFiniteWatch::NonFiniteWatch(torch::nn::Module& root, const std::vector<nn::NamedParameter>& parameters) : state_(std::make_shared<State>()) {
  const auto look = [state = state_](const at::Tensor& output, const std::string& path) {
    state->look_at(output, "the output", path.empty() ? "model" : path);
  };
  const auto watch = std::make_shared<OutputWatch<decltype(look)>>(look);
  root.apply([&](torch::nn::Module& module) {
    if (auto* ours = dynamic_cast<nn::Module*>(&module)) attached_.add(nn::attach(*ours, watch));
  });
  for (const auto& parameter : parameters) {
    if (!parameter.tensor.requires_grad()) continue;
    // As autograd brings it: who waits for the accumulated gradient may have taken it away.
    const unsigned hook =
        parameter.tensor.register_hook([state = state_, name = parameter.name](const at::Tensor& gradient) { state->look_at(gradient, "the gradient", name); });
    attached_.add(Attachment([tensor = parameter.tensor, hook] { tensor.remove_hook(hook); }));
  }
}

NonFiniteWatch::~NonFiniteWatch() = default;

const std::string& NonFiniteWatch::found() const { return state_->found; }

std::string describe_non_finite(const NonFiniteWatch& watch, const comm::Group& group) {
  constexpr int64_t kLength = 256;  // of a description, its end included
  const comm::CallSite site("non_finite");
  const at::Tensor mine = at::zeros({kLength}, at::device(at::kCPU).dtype(at::kByte)), all = at::empty({group.size() * kLength}, mine.options());
  std::memcpy(mine.mutable_data_ptr(), watch.found().data(), std::min<size_t>(watch.found().size(), kLength - 1));
  comm::all_gather(group, all, mine);
  std::string text;
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::string found(static_cast<const char*>(all.const_data_ptr()) + rank * kLength);
    if (found.empty()) continue;
    text += detail::concat(text.empty() ? "" : "; ", "on rank ", group.world_rank(rank), " ", found, " is the first that is not finite");
  }
  if (!text.empty()) return text;
  return "a second pass over the same batch found every output and gradient finite on every rank: they overflow in the sum over ranks, or this machine does "
         "not "
         "compute the same twice";
}

}  // namespace tessera::precision
