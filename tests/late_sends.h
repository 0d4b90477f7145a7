#pragma once

#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/world.h"

/// Finds memory that is written while it is still being sent.
namespace tessera::testing_support {

/// Messages of this rank leave late, as over a slow link, and whoever does not wait for one may have written over it by then.
class LateSends : public comm::DecoratedEngine {
 public:
  using DecoratedEngine::DecoratedEngine;

  comm::Work start(const comm::Call& call) override {
    if (call.op != comm::Operation::Send) return inner()->start(call);
    return c10::make_intrusive<Late>(std::async(std::launch::async, [inner = inner(), call] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      inner->start(call)->wait();
    }));
  }

 private:
  struct Late : c10d::Work {
    explicit Late(std::future<void> sent) : sent(std::make_shared<std::future<void>>(std::move(sent))) {}
    /// Dropped without a wait, it must not wait either.
    ~Late() override {
      std::thread([sent = sent] { sent->wait(); }).detach();
    }
    bool wait(std::chrono::milliseconds) override {
      sent->wait();
      return true;
    }
    std::shared_ptr<std::future<void>> sent;
  };
};

/// Of rank 0 alone, so that the others are ahead of it.
inline comm::Decorator late_sends_of_rank_0() {
  return [](std::shared_ptr<comm::Engine> inner, const comm::GroupInfo& group) -> std::shared_ptr<comm::Engine> {
    if (group.rank != 0) return inner;
    return std::make_shared<LateSends>(group, std::move(inner));
  };
}

}  // namespace tessera::testing_support
