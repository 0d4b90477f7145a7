#pragma once

#include <string>

namespace tessera::comm {

/// Names the host of this process: processes with equal identities share /dev/shm, the loopback network and the numbers of processes; others may not.
/// Made of the kernel's boot id, the network namespace, that of processes and the file system at /dev/shm. So two containers on one machine, or two network
/// namespaces (that is how several hosts are tried on one machine), count as two hosts. What cannot be read counts as "none".
std::string host_identity();

/// Names the machine, whatever part of it this process is shown: containers on one machine share its devices. The kernel's boot id; where that cannot be read,
/// the name of the host.
std::string machine_identity();

}  // namespace tessera::comm
