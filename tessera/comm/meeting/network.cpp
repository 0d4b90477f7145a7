#include "tessera/comm/meeting/network.h"

#include <memory>
#include <set>

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "tessera/comm/meeting/endpoint.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

std::string text_of(const sockaddr* address) {
  const socklen_t length = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  char host[NI_MAXHOST];
  return ::getnameinfo(address, length, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) == 0 ? host : std::string();
}

}  // namespace

std::vector<std::string> local_addresses() {
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> interfaces(found, &::freeifaddrs);
  std::vector<std::string> addresses;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const auto* entry = interfaces.get(); entry; entry = entry->ifa_next) {
      if (!entry->ifa_addr || entry->ifa_addr->sa_family != family || !(entry->ifa_flags & IFF_UP) || (entry->ifa_flags & IFF_LOOPBACK)) continue;
      auto address = text_of(entry->ifa_addr);
      if (!address.empty() && !address.starts_with("169.254.") && !address.starts_with("fe80:")) addresses.push_back(std::move(address));
    }
  }
  return addresses;
}

namespace {

/// Names of interfaces that have an address, each once.
std::set<std::string> interfaces_with_addresses() {
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> interfaces(found, &::freeifaddrs);
  std::set<std::string> names;
  for (const auto* entry = interfaces.get(); entry; entry = entry->ifa_next) {
    if (entry->ifa_addr && (entry->ifa_addr->sa_family == AF_INET || entry->ifa_addr->sa_family == AF_INET6)) names.insert(entry->ifa_name);
  }
  return names;
}

}  // namespace

void check_interface(const std::string& interface) {
  const auto usable = interfaces_with_addresses();
  if (usable.contains(interface) || is_local(interface)) return;
  const bool exists = ::if_nametoindex(interface.c_str()) != 0;
  std::string names;
  for (const auto& name : usable) names += (names.empty() ? "" : ", ") + name;
  for (const auto& address : local_addresses()) names += ", " + address;
  throw ConfigError(detail::concat("comm.interface = ", interface,
                                   exists ? ": this interface has no address to bind to" : ": this host has no such interface, name or address", "; it has ",
                                   names));
}

}  // namespace tessera::comm
