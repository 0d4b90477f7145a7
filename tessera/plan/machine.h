#pragma once

#include <map>

#include <c10/core/ScalarType.h>

#include "tessera/plan/device.h"

namespace tessera::plan {

/// What devices of a kind do in a second, and what keeps them from it. Shares are of the figures above them: what long operators reach.
struct DeviceRates {
  std::map<c10::ScalarType, double> flops{};  ///< dense matrix products in that type, by the data sheet
  double product_share = 0.7;                 ///< what a large product reaches of those
  double attention_share = 0.4;               ///< fused attention
  double memory_bandwidth = 0;                ///< bytes
  double memory_share = 0.8;                  ///< what an elementwise operator reaches of that
  int multiprocessors = 1;                    ///< a product is computed in tiles, each on one of them
  double kernel_gap = 2e-6;                   ///< seconds from the end of an operator to the begin of the next
  double launch = 10e-6;                      ///< seconds in which the host asks for an operator
  double collective_launch = 30e-6;           ///< and for a collective, or message
};

/// Between devices: bytes a second that one sends in large messages, and seconds of a message without any.
struct LinkRates {
  double bandwidth = 0;
  double latency = 0;
};

/// Hosts of equal devices. Ranks are dealt to them in their order, one a device.
struct Machine {
  DeviceRates device{};
  int devices_per_host = 8;
  LinkRates inside{};  ///< of a host
  LinkRates across{};  ///< hosts: what each device has for itself
};

/// What a device reaches of what its maker says, as its file has it (Device::reaches) or as is usual. Where a file names no link between hosts, there is one of
/// 100 Gbit/s for each.
Machine machine_of(const Device& device);

}  // namespace tessera::plan
