#include "tessera/comm/backends/device_places.h"

#include <algorithm>
#include <sstream>

namespace tessera::comm {

// The host, and below it a line for each device: its type, a blank, its place.
std::string Whereabouts::text() const {
  std::string text = host;
  for (const auto& [type, place] : devices) text += "\n" + type + " " + place;
  return text;
}

Whereabouts Whereabouts::read(const std::string& text) {
  std::istringstream lines(text);
  Whereabouts read;
  std::getline(lines, read.host);
  for (std::string line; std::getline(lines, line);) {
    const auto blank = line.find(' ');
    if (blank != std::string::npos) read.devices[line.substr(0, blank)] = line.substr(blank + 1);
  }
  return read;
}

std::string device_place(const std::string& machine, c10::Device device, const std::string& bus_id) {
  return machine + "/" + (bus_id.empty() ? device.str() : bus_id);
}

DeviceMeeting meet_on_devices(const std::vector<std::string>& places) {
  DeviceMeeting meeting;
  std::map<std::string, std::vector<int>> at;
  for (int member = 0; member < static_cast<int>(places.size()); ++member) {
    const std::string& place = places[static_cast<size_t>(member)];
    (place.empty() ? meeting.without : meeting.members).push_back(member);
    if (!place.empty()) at[place].push_back(member);
  }
  for (const auto& [place, members] : at) {
    if (members.size() > 1 && (meeting.sharing.empty() || members.front() < meeting.sharing.front())) meeting.sharing = members;
  }
  return meeting;
}

}  // namespace tessera::comm
