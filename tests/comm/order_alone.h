#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/world.h"

namespace tessera::testing_support {

/// Matches messages as NCCL does: the n-th that a rank starts with another meets that one's n-th with it, whichever way they go and whatever their tags say. Two
/// that do not fit, as where both receive, never end.
class OrderAlone final : public comm::DecoratedEngine {
 public:
  using DecoratedEngine::DecoratedEngine;

  bool matches_tags() const override { return false; }

  comm::Work start(const comm::Call& call) override {
    if (!call.is_message()) return inner()->start(call);
    comm::Call in_order = call;
    {
      const std::lock_guard lock(mutex_);
      in_order.tag = started_[call.peer]++;
    }
    return inner()->start(in_order);
  }

 private:
  std::mutex mutex_;
  std::map<int, int> started_;  ///< by peer
};

inline comm::Decorator order_alone() {
  return [](std::shared_ptr<comm::Engine> inner, const comm::GroupInfo& group) { return std::make_shared<OrderAlone>(group, std::move(inner)); };
}

}  // namespace tessera::testing_support
