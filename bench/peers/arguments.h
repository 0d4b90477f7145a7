#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cli/bench/sampling.h"

/// What the peers written in C++ share: their flags, and the rows that they print as `tessera bench comm --json` does.
namespace peer {

struct Arguments {
  std::vector<int64_t> bytes{4096};
  int threads = 2;
  tessera::bench::Limits limits{};
};

/// --bytes 4096,1048576 --threads N --seconds S. Exits with 2 for anything else.
inline Arguments read_arguments(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (value != nullptr && flag == "--bytes") {
      arguments.bytes.clear();
      for (const char* at = value; at != nullptr; at = std::strchr(at, ',') ? std::strchr(at, ',') + 1 : nullptr) arguments.bytes.push_back(std::atoll(at));
    } else if (value != nullptr && flag == "--threads") {
      arguments.threads = std::atoi(value);
    } else if (value != nullptr && flag == "--seconds") {
      arguments.limits.seconds = std::atof(value);
    } else {
      std::fprintf(stderr, "%s: unknown or incomplete flag %s; there are --bytes, --threads, --seconds\n", argv[0], flag.c_str());
      std::exit(2);
    }
  }
  return arguments;
}

inline void print_row(const char* op, const char* backend, int64_t bytes, int ranks, const tessera::bench::Timing& timing) {
  std::printf(R"({"op": "%s", "backend": "%s", "algorithm": "engine", "bytes": %lld, "ranks": %d, "time_us": %.3f, "min_us": %.3f, "calls": %lld})"
              "\n",
              op, backend, static_cast<long long>(bytes), ranks, timing.median_us, timing.min_us, static_cast<long long>(timing.calls));
  std::fflush(stdout);
}

}  // namespace peer
