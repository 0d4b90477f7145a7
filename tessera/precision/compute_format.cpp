#include "tessera/precision/compute_format.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/kernels/products.h"

namespace tessera::precision {

namespace {

constexpr const char* kKey = "precision.compute";
constexpr const char* kPlanned = "the device that is planned for";

/// A device that lacks bf16 products, and why; nothing where none does.
struct Lack {
  std::string device, reason;
};

std::string reason_of(c10::Device device) {
  if (kernels::multiplies_bf16(device)) return "";
  if (kernels::is_planned(device)) return "it has no such products";
  return device.is_cuda() ? "bf16 products begin with sm80" : kernels::cpu_formats().reason;
}

bool depends_on_the_device(const Config& config) {
  const auto& compute = config.precision.compute;
  return !config.asked.contains(kKey) && (compute == "auto" || compute == "bf16");
}

/// The settled configuration's line; empty where there is nothing to say.
std::string settle(Config& config, c10::Device device, const Lack& lack) {
  auto& compute = config.precision.compute;
  config.asked[kKey] = compute;
  const bool multiplies = lack.reason.empty();
  if (compute == "auto") {
    compute = multiplies ? "bf16" : "fp32";
    if (!multiplies) return detail::concat("precision.compute = auto: fp32, as ", lack.device, " does not multiply bf16 (", lack.reason, ")");
    if (kernels::is_planned(device)) return detail::concat("precision.compute = auto: bf16, which ", kPlanned, " multiplies");
    return detail::concat("precision.compute = auto: bf16, which this ", device.is_cuda() ? "device" : "CPU", " multiplies (",
                          device.is_cuda() ? "sm80 or later" : kernels::cpu_formats().reason, ")");
  }
  if (multiplies || device.is_cuda()) return "";
  return detail::concat("precision.compute = bf16: ", lack.device, " does not multiply bf16 (", lack.reason,
                        "), so operands are widened, multiplied in fp32 and rounded once; precision.compute = auto would compute in fp32 here");
}

std::string name_of(c10::Device device) { return kernels::is_planned(device) ? kPlanned : device.is_cuda() ? "this device" : "this CPU"; }

}  // namespace

void settle_compute(Config& config, c10::Device device, Saying saying) {
  if (!depends_on_the_device(config)) return;
  const auto line = settle(config, device, {.device = name_of(device), .reason = reason_of(device)});
  if (saying == Saying::Aloud && !line.empty()) log().info("{}", line);
}

void settle_compute(Config& config, c10::Device device, const comm::Group& group) {
  if (!depends_on_the_device(config)) return;
  constexpr int64_t kLength = 128;  // of a reason, its end included
  const comm::CallSite site("start");
  const std::string mine = reason_of(device);
  const at::Tensor text = at::zeros({kLength}, at::device(at::kCPU).dtype(at::kByte)), all = at::empty({group.size() * kLength}, text.options());
  std::memcpy(text.mutable_data_ptr(), mine.data(), std::min<size_t>(mine.size(), kLength - 1));
  comm::all_gather(group, all, text);
  Lack lack;
  int lacking = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::string reason(static_cast<const char*>(all.const_data_ptr()) + rank * kLength);
    if (reason.empty()) continue;
    if (lacking++ == 0) lack = {.device = detail::concat(device.is_cuda() ? "the device" : "the CPU", " of rank ", group.world_rank(rank)), .reason = reason};
  }
  if (lacking == group.size()) lack.device = name_of(device);
  const auto line = settle(config, device, lack);
  if (group.rank() == 0 && !line.empty()) log().info("{}", line);
}

}  // namespace tessera::precision
