#pragma once

#include <string>
#include <vector>

#include "tessera/plan/device.h"

namespace tessera::plan {

/// By number format, how many times as fast each device multiplies as in fp32, or in its widest format where it has no rate of that: what narrower formats buy,
/// by generation. A bar a device, those of data sheets by their year and `measured` first, on a logarithmic scale; formats that none multiplies are left out.
std::string rates_svg(const Device& measured, std::vector<Device> data_sheets);

}  // namespace tessera::plan
