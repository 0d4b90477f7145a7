#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/world.h"

namespace tessera::comm::testing_support {

/// An engine that works, until `failed` says that it found a failure of which nobody who waits is told.
class FailsUnseen final : public DecoratedEngine {
 public:
  FailsUnseen(const GroupInfo& group, std::shared_ptr<Engine> inner, const std::atomic<bool>& failed)
      : DecoratedEngine(group, std::move(inner)), failed_(failed) {}
  Work start(const Call& call) override { return inner()->start(call); }
  bool fails_unseen() const override { return true; }
  std::string failure() override { return failed_ ? "a call did not end on the device" : ""; }

 private:
  const std::atomic<bool>& failed_;
};

/// `failed`: by rank of the world, for as long as there are groups.
inline Decorator fails_unseen(std::span<const std::atomic<bool>> failed) {
  return [failed](std::shared_ptr<Engine> inner, const GroupInfo& group) -> std::shared_ptr<Engine> {
    return std::make_shared<FailsUnseen>(group, std::move(inner), failed[static_cast<size_t>(group.world_rank(group.rank))]);
  };
}

}  // namespace tessera::comm::testing_support
