#include "tessera/nn/calls.h"

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/TensorImpl.h>

#include "tessera/comm/call_site.h"
#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/gradient_dispatcher.h"

// A layer's forward cannot see from its arguments who called it. What it can see is this thread's stack of forwards that run as the last link of a chain: if it
// is not on top, nobody led the call through its chain. Users' modules have no such line in their forward, so the other way round: the gradient of one of their
// parameters shows that they were used, and by then a call through the holder must have been counted.

namespace tessera::nn {

namespace {

/// The module may die before, so what is asked of it is asked at once. Its tensors stay the same ones through materialize and sharding.
struct ExpectedCall {
  std::string who, path, kind;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> parameters;
  bool called = false;
  Attachment listening;

  void refuse_if_not_called() const {
    require(called, who, ": '", path, "' (", kind,
            ") passed by what is attached to it: its parameters get gradients, but no call went through its holder. Write `layer(x)` for `layer->forward(x)`, "
            "tessera::nn::Sequential for torch::nn::Sequential, and hold it by its own type in place of torch::nn::AnyModule");
  }
};

thread_local std::vector<const Module*> under_way;  ///< whose forward runs as the last link of its chain
thread_local std::unordered_multimap<const Module*, std::shared_ptr<ExpectedCall>> expected;

}  // namespace

namespace detail {

bool is_innermost(const Module& module) noexcept { return !under_way.empty() && under_way.back() == &module; }

void count_call(const Module& module) {
  if (expected.empty()) [[likely]]
    return;
  const auto [begin, end] = expected.equal_range(&module);
  for (auto it = begin; it != end; ++it) {
    it->second->called = true;
    it->second->listening.detach();
  }
  expected.erase(begin, end);
}

/// Only now, since a parameter on meta, or one that is yet to be cut, must not be asked for its accumulator.
void arm_expected_calls() {
  for (auto& [module, call] : expected) {
    if (!call->listening.empty()) continue;
    for (const auto& weak : call->parameters) {
      auto impl = weak.lock();
      if (!impl) continue;
      const at::Tensor parameter(std::move(impl));
      if (!parameter.is_leaf() || !parameter.requires_grad()) continue;
      call->listening.add(GradientDispatcher::of(parameter).listen([alive = std::weak_ptr(call)](const at::Tensor&) {
        if (const auto call = alive.lock()) call->refuse_if_not_called();
      }));
    }
  }
}

}  // namespace detail

Values Next::operator()(Values inputs) const {
  struct UnderWay {
    explicit UnderWay(const Module* module) { under_way.push_back(module); }
    ~UnderWay() { under_way.pop_back(); }
  };
  const comm::CallSite site(module_->path());
  if (remaining_ == chain_->size()) detail::count_call(*module_);
  if (remaining_ > 0) return (*chain_)[remaining_ - 1]->call(*module_, std::move(inputs), Next(chain_, remaining_ - 1, module_, forward_));
  const UnderWay innermost(module_);
  return forward_(*module_, inputs);
}

Values Recall::operator()(Values inputs) const {
  const auto& chain = module_->chain();
  if (!chain) return forward_(*module_, inputs);
  return Next(chain, chain->size(), module_, forward_)(std::move(inputs));
}

namespace {

class NeedsHandle final : public Interceptor {
 public:
  NeedsHandle(std::weak_ptr<const void> handle, std::string who) : handle_(std::move(handle)), who_(std::move(who)) {}

  Values call(Module& module, Values inputs, const Next& next) override {
    require(!handle_.expired(), who_, ": '", module.path(),
            "' is called, and what was returned for it is gone: this rank's part of the layer computes nothing ",
            "without the other ranks'. Keep it in a variable that lives as long as the model: const auto parallel = ", who_, "(...)");
    return next(std::move(inputs));
  }

 private:
  std::weak_ptr<const void> handle_;
  std::string who_;
};

}  // namespace

void require_handle(Module& module, std::weak_ptr<const void> handle, std::string who) {
  attach(module, std::make_shared<NeedsHandle>(std::move(handle), std::move(who))).release();
}

Attachment expect_call(Module& module, std::string who) {
  auto call = std::make_shared<ExpectedCall>();
  call->who = std::move(who);
  call->path = module.path();
  call->kind = module.name();
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.defined()) call->parameters.emplace_back(parameter.getIntrusivePtr());
  }
  if (call->parameters.empty()) return {};
  expected.emplace(&module, call);
  return Attachment([call, key = &module] {
    const auto [begin, end] = expected.equal_range(key);
    for (auto it = begin; it != end; ++it) {
      if (it->second != call) continue;
      expected.erase(it);
      return;
    }
  });
}

}  // namespace tessera::nn
