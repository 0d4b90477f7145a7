#pragma once

#include <cstddef>
#include <cstdio>

#include <sys/resource.h>

namespace tessera::cli {

/// Writes why the host gives this process no more memory, as a sentence for a person, without allocating any.
inline void describe_memory_limit(char* text, size_t size) {
  struct Limit {
    decltype(RLIMIT_AS) kind;
    const char *what, *name, *flag;
  };
  for (const Limit& each : {Limit{RLIMIT_AS, "address space", "RLIMIT_AS", "-v"}, Limit{RLIMIT_DATA, "data", "RLIMIT_DATA", "-d"}}) {
    rlimit limit{};
    if (getrlimit(each.kind, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) continue;
    std::snprintf(text, size,
                  "the %s of this process is limited to %llu bytes (%s, ulimit %s), and that is too little: allow more, such as ulimit %s unlimited", each.what,
                  static_cast<unsigned long long>(limit.rlim_cur), each.name, each.flag, each.flag);
    return;
  }
  std::snprintf(text, size, "the host has no more memory to give");
}

}  // namespace tessera::cli
