#pragma once

#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace tessera::comm {

/// Local addresses, as /proc/net writes them ("0100007F" is 127.0.0.1), of the sockets that listen on a port of this host.
inline std::set<std::string> listening_addresses(int port) {
  constexpr const char* listening = "0A";
  std::set<std::string> found;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(table);
    for (std::string line; std::getline(file, line);) {
      std::istringstream fields(line);
      std::string number, local, remote, state;
      fields >> number >> local >> remote >> state;
      const auto colon = local.rfind(':');
      if (state == listening && colon != std::string::npos && std::stoi(local.substr(colon + 1), nullptr, 16) == port) found.insert(local.substr(0, colon));
    }
  }
  return found;
}

inline const std::string kLoopback4 = "0100007F", kLoopback6 = "00000000000000000000000001000000";

}  // namespace tessera::comm
