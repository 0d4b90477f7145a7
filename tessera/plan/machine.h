#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

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
  double host_link = 0;                       ///< bytes that a copy between the host and the device moves, each way
  double host_memory = 0;                     ///< bytes that the host's cores read and write for this device, of its memory
};

/// Between devices: bytes a second that one sends in large messages, and seconds of a message without any.
struct LinkRates {
  double bandwidth = 0;
  double latency = 0;
  double hop = 0;         ///< seconds of one step of a ring
  double contention = 0;  ///< by what share each host beyond the second makes a byte slower
};

/// What an operator of ours takes of a program that has not fused it.
struct OperatorHabit {
  std::string name{};       ///< how names of operators begin
  double launches = 1;      ///< kernels that the host asks for, one after the other
  double passes = 1;        ///< times the bytes that ours reads and writes
  double score_passes = 0;  ///< attention alone: times the whole scores cross memory, in two bytes each; 0: they are never there
};

/// How a program other than ours drives a device (framework.h).
struct Habits {
  double launch = 0;  ///< seconds in which the host asks for an operator, and for a collective; 0: as the device says
  double collective_launch = 0;
  double collective_launch_per_level = 0;       ///< and for each doubling of the ranks that meet
  double layer_collective_launch_per_rank = 0;  ///< of those within a layer (tensor parallelism), for each rank that meets
  int64_t logit_columns = 0;                    ///< of the product that makes logits, by which it is known; 0: they are made and used as ours
  double logit_bytes = 0;                       ///< that cross memory for each logit, in forward and backward together, beside the products
  double logit_launches = 0;                    ///< in so many kernels
  bool waits_for_collectives = false;           ///< nothing is computed beside a collective
  std::vector<OperatorHabit> operators{};

  const OperatorHabit* of(const std::string& name) const;
};

/// Hosts of equal devices. Ranks are dealt to them in their order, one a device.
struct Machine {
  DeviceRates device{};
  int devices_per_host = 8;
  LinkRates inside{};  ///< of a host
  LinkRates across{};  ///< hosts: what each device has for itself
  Habits habits{};     ///< of another framework; ours has none
};

/// What a device reaches of what its maker says, as its file has it (Device::reaches) or as is usual. Where a file names no link between hosts, there is one of
/// 100 Gbit/s for each; where it says nothing of the host, PCI Express 4.0 x16 and 25 GB/s of memory.
Machine machine_of(const Device& device);

}  // namespace tessera::plan
