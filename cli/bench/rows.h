#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "cli/bench/sampling.h"
#include "cli/bench/workload.h"

namespace tessera::cli {

/// One line of `tessera bench comm`. Bandwidths are in bytes per second.
struct Row {
  std::string op, backend, algorithm;
  std::string dtype;        ///< fp32, bf16, ...
  std::string buffers;      ///< plain, shared
  int64_t bytes = 0;        ///< as asked for
  int64_t whole_bytes = 0;  ///< as measured: the whole in equal parts
  int ranks = 0;
  bench::Timing timing{};
  double link_bandwidth = 0;  ///< the best between two ranks over this backend, in the same run

  double algorithm_bandwidth() const;  ///< whole_bytes over the median time
  double bus_bandwidth() const;        ///< that times bus_factor
  double link_share() const;           ///< the bus bandwidth over the link's; above 1 where ranks read each other's memory and no message is sent
  std::string series() const;          ///< "shm ring", and what else tells the lines of a plot apart
};

/// Keys: op backend algorithm dtype buffers bytes whole_bytes ranks time_us min_us calls algorithm_gb_s bus_gb_s link_gb_s link_share. GB are 10^9 bytes.
void to_json(nlohmann::json& json, const Row& row);
void from_json(const nlohmann::json& json, Row& row);

/// Reads "4096", "4K", "1M", "2G" (powers of 1024; also "4KiB"). Throws ConfigError naming `knob`.
int64_t parse_bytes(const std::string& knob, const std::string& text);

/// "4 KiB", "1 MiB", "1000 B": the largest unit that leaves a whole number.
std::string format_size(int64_t bytes);

/// The rows as a table whose columns line up, with a heading; an empty line between operations.
std::string format_table(const std::vector<Row>& rows);

}  // namespace tessera::cli
