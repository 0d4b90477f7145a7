#pragma once

#include <string>
#include <vector>

/// What this host's interfaces are.
namespace tessera::comm {

/// Addresses of the interfaces that are up, IPv4 first, without loopback and link-local ones.
std::vector<std::string> local_addresses();

/// Throws ConfigError, naming comm.interface and what this host has, unless `interface` is one of its interfaces, addresses or names.
void check_interface(const std::string& interface);

}  // namespace tessera::comm
