#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

/// The value of a one-element tensor on the host: with host_read_all the one place where a step looks at data. A dry run has none, and gets `dry_answer` for a
/// meta tensor instead. On a device this waits for the work queued before it; who listens to events hears of each (HostReadEvent). Throws InternalError for a
/// tensor of more or fewer elements than one.
double host_read(const at::Tensor& scalar, double dry_answer);

/// Every element of `tensor` on the host, in one transfer; `dry_answer` for each of a meta tensor's.
std::vector<double> host_read_all(const at::Tensor& tensor, double dry_answer);

/// The same of whole numbers, none of which is rounded: a double has room for those below 2^53 alone.
std::vector<int64_t> host_read_integers(const at::Tensor& tensor, int64_t dry_answer);

/// Whether this thread is in one of these reads: the operators that run then bring values to the host, and a dry run has none of them.
bool reading_on_host();

}  // namespace tessera
