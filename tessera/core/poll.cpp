#include "tessera/core/poll.h"

#include <thread>

#include "tessera/core/format.h"
#include "tessera/core/log.h"

namespace tessera {

bool poll_until(std::chrono::milliseconds patience, const std::function<bool()>& done, const std::function<std::string()>& awaited) {
  constexpr std::chrono::seconds quiet(2);
  const auto begin = std::chrono::steady_clock::now();
  for (bool said = false; !done();) {
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited >= patience) return false;
    if (waited >= quiet && !said) {
      log().warn("{}; waiting up to {} for its end", awaited(), format_duration(std::chrono::duration<double>(patience).count()));
      said = true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return true;
}

}  // namespace tessera
