#pragma once

#include <string>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::schedules {

/// A request that its schedule does not take, and which field of it has to change: "micro_batches", "chunks", "kept", ...
class RefusedRequest : public ConfigError {
 public:
  RefusedRequest(std::string knob, const std::string& what) : ConfigError(what), knob_(std::move(knob)) {}
  const std::string& knob() const { return knob_; }

 private:
  std::string knob_;
};

/// Throws RefusedRequest where `condition` does not hold.
template <typename... Parts>
void require_of(const char* knob, bool condition, const Parts&... parts) {
  if (!condition) throw RefusedRequest(knob, tessera::detail::concat(parts...));
}

}  // namespace tessera::schedules
