#pragma once

#include <map>
#include <string>
#include <vector>

#include <c10/core/Device.h>

/// Where ranks have their devices. What one process sees says little: it may be shown one device of eight, or all of them and use the one that another uses,
/// too. So the members of a group tell each other, and what carries their tensors follows from what all have said, alike on each of them.
namespace tessera::comm {

/// What a rank tells of itself.
struct Whereabouts {
  std::string host{};                            ///< host_identity()
  std::map<std::string, std::string> devices{};  ///< by type ("cuda"): the device that it computes on (device_place); those that it has none of are missing

  std::string text() const;
  static Whereabouts read(const std::string& text);
};

/// A device by a name that is the same in every process, whatever number it has there: the machine and the device's place in it. `bus_id`: device_bus_id();
/// where nobody knows it the number has to do, and processes that are each shown a device of their own seem to share one.
std::string device_place(const std::string& machine, c10::Device device, const std::string& bus_id);

/// Whether the members of a group can meet on their devices of one type: each has one, and no two the same, for that is what engines of devices want (NCCL
/// refuses a communicator with two ranks on one device).
struct DeviceMeeting {
  std::vector<int> members{};  ///< that have a device, in group order
  std::vector<int> without{};  ///< that have none
  std::vector<int> sharing{};  ///< of the first device that several have: who has it

  bool possible() const { return without.empty() && sharing.empty(); }
};

/// `places`: of each member, in group order; empty where it has no such device.
DeviceMeeting meet_on_devices(const std::vector<std::string>& places);

}  // namespace tessera::comm
