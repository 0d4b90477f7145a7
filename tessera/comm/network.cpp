#include "tessera/comm/network.h"

#include <memory>

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "tessera/comm/endpoint.h"
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

void check_interface(const std::string& interface) {
  if (::if_nametoindex(interface.c_str()) != 0 || is_local(interface)) return;
  std::string names;
  const std::unique_ptr<struct if_nameindex, decltype(&::if_freenameindex)> found(::if_nameindex(), &::if_freenameindex);
  for (const auto* entry = found.get(); entry && entry->if_name; ++entry) names += detail::concat(names.empty() ? "" : ", ", entry->if_name);
  for (const auto& address : local_addresses()) names += ", " + address;
  throw ConfigError(detail::concat("comm.interface = ", interface, ": this host has no such interface, name or address; it has ", names));
}

}  // namespace tessera::comm
