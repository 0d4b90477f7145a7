#include "cli/bench/measure.h"

#include <algorithm>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "cli/bench/workload.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/engine.h"
#include "tessera/core/error.h"

namespace tessera::bench {

void wait_for(at::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

Timing measure(const comm::Group& group, const std::function<void()>& call, const Limits& limits) {
  invariant(group.size() > 1, "a group of one has nothing to measure");
  const Ranks ranks{.barrier = [&] { barrier(group); },
                    .slowest =
                        [&](const std::vector<double>& mine) {
                          const auto numbers = at::tensor(mine, at::device(at::kCPU).dtype(at::kDouble));
                          all_reduce(group, numbers, comm::Op::Max);
                          return std::vector<double>(numbers.data_ptr<double>(), numbers.data_ptr<double>() + numbers.numel());
                        }};
  return measure(ranks, call, limits);
}

std::string part_for(const std::string& engine, at::Device device) {
  const auto plus = engine.find('+');
  return device.is_cpu() || plus == std::string::npos ? engine.substr(0, plus) : engine.substr(plus + 1);
}

std::string engine_for(const comm::Group& group, at::Device device) { return part_for(group.engine()->name(), device); }

double measure_link(const comm::Group& group, const Limits& limits, at::Device device) {
  double best = 0;
  for (const char* op : {"send", "send_recv"}) {
    for (const int64_t bytes : {int64_t{256} << 10, int64_t{1} << 20, int64_t{4} << 20, int64_t{16} << 20}) {
      Workload messages(group, {.op = op, .bytes = bytes, .device = device});
      const auto timing = measure(group, [&] { messages.run(); }, limits);
      best = std::max(best, static_cast<double>(bytes) / (timing.median_us * 1e-6));
    }
  }
  return best;
}

}  // namespace tessera::bench
