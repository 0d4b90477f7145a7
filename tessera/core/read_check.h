#pragma once

#include <functional>
#include <utility>

namespace tessera {

/// While it lives on a thread, and on those that work for it, `check` is asked behind each read of a device's data on the host (host_read.h), and may throw:
/// what the device was asked for may have been broken off, and what was read is no result then. Scopes may nest; the innermost counts.
class ReadCheck {
 public:
  explicit ReadCheck(std::function<void()> check);
  ~ReadCheck();
  ReadCheck(const ReadCheck&) = delete;
  ReadCheck& operator=(const ReadCheck&) = delete;

  /// Asks this thread's, if there is one.
  static void ask();

 private:
  std::function<void()> check_;
  const ReadCheck* before_;
};

}  // namespace tessera
