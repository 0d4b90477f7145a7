#include "tessera/comm/connect.h"

#include <ATen/ops/zeros.h>

#include "tessera/comm/collectives.h"
#include "tessera/memory/memory.h"

namespace tessera::comm {

// Every rank goes through its peers from the lowest up. That is one order of all pairs, by the lower rank of each and then by the higher, so no ranks wait for
// each other in a circle.
void connect(const Group& group, const std::set<int>& peers, at::Device device) {
  if (group.matches_tags() || peers.empty()) return;
  const MemoryScope scratch(MemoryCategory::Comm);
  const at::Tensor token = at::zeros({1}, at::TensorOptions(at::kByte).device(device));
  for (const int peer : peers) group.rank() < peer ? send(group, token, peer) : recv(group, token, peer);
}

}  // namespace tessera::comm
