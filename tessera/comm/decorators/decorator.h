#pragma once

#include "tessera/comm/engine.h"

namespace tessera::comm {

/// An engine around another one: sees in `start` what is asked, and decides whether, when and how often the inner engine does it. Tracing, checking, fault
/// injection and recording are subclasses of a few lines.
class DecoratedEngine : public Engine {
 public:
  /// `inner` may be null for a decorator that never forwards.
  DecoratedEngine(const GroupInfo& group, std::shared_ptr<Engine> inner) : group_(group), inner_(std::move(inner)) {}

  std::string name() const override { return inner_ ? inner_->name() : "record"; }
  bool moves_data() const override { return inner_ && inner_->moves_data(); }
  bool matches_tags() const override { return !inner_ || inner_->matches_tags(); }
  void set_timeout(std::chrono::milliseconds timeout) override { inner_ ? inner_->set_timeout(timeout) : void(); }
  void abort() override { inner_ ? inner_->abort() : void(); }
  void shutdown() override { inner_ ? inner_->shutdown() : void(); }
  bool fails_unseen() const override { return inner_ && inner_->fails_unseen(); }
  std::string failure() override { return inner_ ? inner_->failure() : std::string(); }
  void set_place(std::string_view place) override { inner_ ? inner_->set_place(place) : void(); }
  at::Tensor empty(int64_t elements, const at::TensorOptions& options) override { return inner_ ? inner_->empty(elements, options) : at::Tensor(); }

 protected:
  const GroupInfo& group() const { return group_; }
  const std::shared_ptr<Engine>& inner() const { return inner_; }

 private:
  GroupInfo group_;
  std::shared_ptr<Engine> inner_;
};

}  // namespace tessera::comm
