#pragma once

#include <cstdint>
#include <string>

#include "tessera/core/error.h"
#include "tessera/core/events.h"
#include "tessera/plan/machine.h"

namespace tessera::plan {

/// The device has no rate for the type of a product, whatever the layout.
class NoRate : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

/// Seconds of a device for `batch` products of [m, k] and [k, n], operands and results of `element_bytes`. In waves: results are cut into tiles, of several
/// shapes tried, of which each multiprocessor computes one after the other, so that 1.01 waves take as long as two, and small products leave most of the device
/// idle; or, where that is longer, the time in which operands and results cross the memory.
double product_seconds(int64_t m, int64_t n, int64_t k, int64_t batch, int64_t element_bytes, double flops_per_second, const DeviceRates& device);

/// Seconds of a device for an operator: matrix products as above, attention by its FLOPs (causal: half of them), all others by the bytes that they read and
/// write. What is a view on a device takes none. Throws NoRate where the device has no rate for the type of a product.
/// `habit`: of a program that runs it in other kernels.
double operator_seconds(const OperatorEvent& ran, const DeviceRates& device, const OperatorHabit* habit = nullptr);

/// Whether what an operator takes is known: products whose FLOPs are counted, and those of libtorch and of ours that do little with what they read and write.
/// Of others (a user's, sorts, convolutions, decompositions) the bytes stand for the time, a guess that is seldom too high. `habit`: who says what it takes.
bool has_cost(const OperatorEvent& ran, const OperatorHabit* habit = nullptr);

/// Whether an operator moves values from one place to another, and does nothing else.
bool is_copy(const std::string& name);

}  // namespace tessera::plan
