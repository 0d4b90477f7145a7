#include "tessera/comm/clock_offset.h"

#include <cmath>
#include <limits>

#include <ATen/ops/zeros.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"

namespace tessera::comm {

double clock_offset(const Group& group, const std::function<double()>& clock, int rounds) {
  const CallSite site("clock");
  const at::Tensor time = at::zeros({1}, at::device(at::kCPU).dtype(at::kDouble));
  double offset = 0, least = std::numeric_limits<double>::infinity();
  for (int rank = 1; rank < group.size(); ++rank) {
    for (int round = 0; round < rounds; ++round) {
      if (group.rank() == 0) {
        recv(group, time, rank);
        *time.mutable_data_ptr<double>() = clock();
        send(group, time, rank);
      } else if (group.rank() == rank) {
        const double asked = clock();
        send(group, time, 0);
        recv(group, time, 0);
        const double answered = clock(), half = (answered - asked) / 2;
        if (half >= least) continue;
        least = half;
        offset = *time.const_data_ptr<double>() - (asked + half);
      }
    }
  }
  return std::abs(offset) <= least ? 0 : offset;
}

}  // namespace tessera::comm
