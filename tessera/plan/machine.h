#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

namespace tessera::plan {

/// What devices of a kind do in a second, and what keeps them from it. Shares are of the figures above them: what long operators reach.
struct DeviceRates {
  std::map<c10::ScalarType, double> flops{};  ///< dense matrix products in that type, by the data sheet
  double tf32_flops = 0;                      ///< the same with TF32 for fp32; 0: there is none
  double product_share = 0.7;                 ///< what a large product reaches of those
  double attention_share = 0.45;              ///< fused attention
  double memory_bandwidth = 0;                ///< bytes
  double memory_share = 0.8;                  ///< what an elementwise operator reaches of that
  int multiprocessors = 1;                    ///< a product is computed in tiles, each on one of them
  double kernel_gap = 2e-6;                   ///< seconds from the end of an operator to the begin of the next
  double launch = 10e-6;                      ///< seconds in which the host asks for an operator
  double collective_launch = 30e-6;           ///< and for a collective, or message
};

/// Between devices: bytes a second that one sends, in large messages, and seconds of a message without any.
struct LinkRates {
  double bandwidth = 0;
  double latency = 0;
};

/// Hosts of equal devices. Ranks are dealt to them in their order, one a device.
struct Machine {
  std::string title{};
  std::vector<std::string> sources{};
  int64_t memory_bytes = 0;  ///< of a device
  double power_watts = 0;    ///< of a device at most; 0: not known
  DeviceRates device{};
  int devices_per_host = 8;
  LinkRates inside{};  ///< of a host
  LinkRates across{};  ///< hosts: what each device has for itself
};

/// `text`: a file as those in tessera/plan/hardware, `place` its name for messages. Throws ConfigError, with the key and the line, for what is missing, is not
/// known, is no number or not above zero.
Machine parse_machine(std::string_view text, const std::string& place);

/// One of those that come with the library ("h100"), or a file. Throws ConfigError for neither, with what there is, and the nearest.
Machine find_machine(const std::string& name_or_file);
/// Those that come with the library, in the order of their names.
std::vector<std::string> machine_names();

}  // namespace tessera::plan
