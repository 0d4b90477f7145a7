#include "tessera/checkpoint/fault_point.h"

#include <atomic>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

std::atomic<const FaultPoint*> current = nullptr;

}  // namespace

FaultPointScope::FaultPointScope(FaultPoint point) : point_(std::move(point)) {
  invariant(current.exchange(&point_) == nullptr, "a second FaultPointScope while the first lives");
}

FaultPointScope::~FaultPointScope() { current = nullptr; }

void fault_point(std::string_view action, const std::filesystem::path& path) {
  if (const FaultPoint* point = current.load()) (*point)(action, path);
}

}  // namespace tessera::checkpoint
