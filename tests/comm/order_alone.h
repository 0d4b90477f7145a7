#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>

#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/world.h"

namespace tessera::testing_support {

/// What is asked of NCCL, as ProcessGroupNCCL has it, on engines that ask for less:
///
///   order       the n-th message that a rank starts with another meets that one's n-th with it, whichever way they go and whatever their tags say. Two that do
///               not fit, as where both receive, never end
///   rendezvous  a send is done once its receive was started, and not because it fitted somewhere
///   connection  the first message of two ranks is where they are connected: whoever starts it stands there until the other starts it, too; likewise a group's
///               first collective, with all of its members
///
/// What waits for longer than `patience` ends with CommError.
class OrderAlone final : public comm::DecoratedEngine {
 public:
  OrderAlone(const comm::GroupInfo& group, std::shared_ptr<comm::Engine> inner, std::chrono::milliseconds patience) : DecoratedEngine(group, std::move(inner)) {
    this->inner()->set_timeout(patience);
  }

  bool matches_tags() const override { return false; }
  void set_timeout(std::chrono::milliseconds) override {}

  comm::Work start(const comm::Call& call) override {
    if (!call.is_message()) {
      if (!std::exchange(connected_, true)) inner()->start({.op = comm::Operation::Barrier, .async = false})->wait();
      return inner()->start(call);
    }
    int number = 0;
    {
      const std::lock_guard lock(mutex_);
      const auto [started, is_first] = started_.try_emplace(call.peer, 0);
      if (is_first) connect(call.peer);
      number = ++started->second;
    }
    const bool sends = call.op == comm::Operation::Send;
    comm::Call in_order = call;
    in_order.tag = message_tag(number);
    return comm::staged_work({{inner()->start(in_order)}, {token(/*sends=*/!sends, call.peer, receive_tag(number))}});
  }

 private:
  static constexpr int kConnectTag = 0;
  static int message_tag(int number) { return 2 * number; }
  static int receive_tag(int number) { return 2 * number + 1; }  ///< by which a receive tells the send that it was started

  comm::Work token(bool sends, int peer, int tag) {
    const std::vector<at::Tensor> tensor{at::zeros({1}, at::device(at::kCPU).dtype(at::kByte))};
    return inner()->start({.op = sends ? comm::Operation::Send : comm::Operation::Recv,
                           .inputs = sends ? tensor : std::vector<at::Tensor>(),
                           .outputs = sends ? std::vector<at::Tensor>() : tensor,
                           .peer = peer,
                           .tag = tag});
  }

  void connect(int peer) {
    const comm::Work ours = token(/*sends=*/true, peer, kConnectTag), theirs = token(/*sends=*/false, peer, kConnectTag);
    theirs->wait();
    ours->wait();
  }

  std::mutex mutex_;
  std::map<int, int> started_;  ///< by peer
  bool connected_ = false;      ///< as a group, for collectives
};

/// A rank that meets nobody within `patience` has no more to wait for; tests whose ranks do little between two calls may have less of it.
inline comm::Decorator order_alone(std::chrono::milliseconds patience = std::chrono::seconds(10)) {
  return
      [patience](std::shared_ptr<comm::Engine> inner, const comm::GroupInfo& group) { return std::make_shared<OrderAlone>(group, std::move(inner), patience); };
}

}  // namespace tessera::testing_support
