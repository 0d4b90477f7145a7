#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::plan {

/// What a device has of one kind of connection to others.
struct Link {
  std::string name{};
  double bytes_per_s = 0;             ///< each way, of one device
  std::optional<double> latency_s{};  ///< of a hop; none where nobody says
  double contention = 0;              ///< between nodes: by what share each node beyond the second makes a byte slower
};

/// Beside the devices of a node.
struct HostSide {
  std::string link{};             ///< "PCI Express 5.0 x16"
  double bytes_per_s = 0;         ///< of that, each way, of one device
  double memory_bytes_per_s = 0;  ///< of the host's memory, which the devices of a node share
};

/// What its maker says of a device, and of the machine in which it stands: the numbers that a plan of a cluster begins with. Files are in plan/hardware/, each
/// with its sources; whoever has another device writes one of the same form.
struct Device {
  std::string key{};          ///< "h100", or the file
  std::string name{};         ///< "NVIDIA H100 SXM5 80 GB"
  std::optional<int> year{};  ///< of its introduction: generations in pictures
  double memory_bytes = 0;
  double memory_bytes_per_s = 0;
  double context_bytes = 0;  ///< of its memory, that a program takes beside tensors: code of kernels, workspaces of libraries, buffers of collectives
  std::optional<double> power_w{};
  std::optional<double> held_to_w{};  ///< of a device that its owner lets draw less: clocks follow the cube root of the power
  std::optional<double> drawn_w() const { return held_to_w ? held_to_w : power_w; }
  int devices_per_node = 1;
  std::map<std::string, double> flops_per_s{};   ///< of dense matrix products, by number format (precision.compute); a format that is missing is not multiplied
  std::optional<Link> inside{}, between{};       ///< a node, and nodes; none where nobody says
  std::optional<HostSide> host{};                ///< the same
  std::map<std::string, double> reaches{};       ///< what of it training reaches, as measured: kReached in device.cpp has the names
  std::map<std::string, std::string> sources{};  ///< of what, and where it is said
};

/// One of the files that tessera brings, by name, or a file. Throws ConfigError for a name that is neither (with the nearest), and for a file that is not of
/// this form.
Device find_device(const std::string& name_or_file, const std::string& flag = "--device");

/// Of a file's text; `origin` stands in messages.
Device parse_device(const std::string& text, const std::string& origin);

/// A file from which parse_device() reads this, up to the sixth digit of a figure.
std::string to_toml(const Device& device);

/// Those that tessera brings, in the order of their names.
std::vector<std::string> device_names();

}  // namespace tessera::plan
