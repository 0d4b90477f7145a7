#include "tessera/core/system_reason.h"

#include <cerrno>

#include "tessera/core/error.h"

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

bool is_full(int code) { return code == ENOSPC || code == EDQUOT || code == EFBIG; }

void fail_to_write(const std::string& problem, int code, const std::string& way_out) {
  const std::string sentence = detail::concat(problem, ": ", reason_of_writing(code), "; ");
  if (is_full(code)) throw Error(sentence + "make room there, or " + way_out);
  throw ConfigError(sentence + way_out);
}

}  // namespace tessera
