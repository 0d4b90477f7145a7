#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Device.h>

/// Which device a rank computes on: the one place where `run.device` becomes a device.
namespace tessera {

/// Devices of a type that this process sees. 0 where this torch knows none of that type, or the machine has none.
int num_devices(at::DeviceType type);

/// Whether this build can train there: it has kernels for the type, and counts its memory. CPU and meta: always.
bool supports_device(at::DeviceType type);
/// Said once for each type, when what makes it so is loaded (memory/cuda, a simulated accelerator).
void add_supported_device(at::DeviceType type);

/// What is known of a device. Numbers that nobody knows are 0, texts empty.
struct DeviceFacts {
  std::string model{};       ///< "NVIDIA H100 80GB HBM3"
  std::string capability{};  ///< "9.0"
  int64_t memory_bytes = 0, free_bytes = 0;
  std::vector<int> peers{};  ///< devices of the type whose memory it reaches by itself, without the host
};
DeviceFacts device_facts(at::Device device);
/// Where it sits in this machine, the same for every process whatever number the device has there ("0000:3b:00.0"); empty where nobody knows. Opens nothing on
/// it.
std::string device_bus_id(at::Device device);
/// Who knows more of a type than how much memory its allocator may have.
void add_device_facts(at::DeviceType type, DeviceFacts (*facts)(at::Device device), std::string (*bus_id)(at::Device device));

/// A rank among those of its host.
struct LocalRank {
  int rank = 0;
  int ranks = 1;
};

/// Refuses a text that names no device: anything but auto, cpu, cuda and cuda:N. Throws ConfigError.
void check_device_name(const std::string& wanted, const std::string& key = "run.device");

/// The device that `wanted`, the value of run.device, means to a rank:
///   cpu      the CPU
///   cuda     cuda:LOCAL_RANK, so that each rank of a host has one of its own
///   cuda:N   that one; ranks that are given the same share it
///   auto     as cuda where this build and torch have CUDA and a device is visible, else the CPU
/// Nothing is allocated there. `key`: where it was said, for messages. Throws ConfigError, naming the way out, for what is not there: CUDA in this torch or
/// build, a device, one for each local rank.
at::Device resolve_device(const std::string& wanted, LocalRank local = {}, const std::string& key = "run.device");

}  // namespace tessera
