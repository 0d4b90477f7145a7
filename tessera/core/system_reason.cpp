#include "tessera/core/system_reason.h"

#include <cerrno>

namespace tessera {

std::string reason_of(const std::system_error& error) {
  return error.code() != std::errc::resource_unavailable_try_again ? error.what() : std::string(kNoMoreThreads);
}

std::string reason_of_writing(int code) {
  if (code == 0) return "the reason is not known";
  std::string reason = std::generic_category().message(code);
  if (code == EFBIG) reason += " (ulimit -f)";
  if (code == EMFILE) reason += " (ulimit -n)";
  return reason;
}

}  // namespace tessera
