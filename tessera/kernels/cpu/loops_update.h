#pragma once

#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/cpu/simd.h"

namespace tessera::kernels::cpu {
namespace {

/// Full vectors and the rest go through one body, so that an element has the same bits wherever a part of a tensor begins or ends.
template <class G>
void adamw_elements(const AdamW& args, int64_t begin, int64_t end) {
  const auto* gradient = static_cast<const G*>(args.gradient.data);
  auto* copy = static_cast<BFloat16*>(args.copy);
  for (int64_t i = begin; i < end; i += kLanes) {
    const bool whole = end - i >= kLanes;
    const FirstLanes some{static_cast<int>(end - i)};
    const auto read = [&](const auto* from) { return whole ? load(from + i, AllLanes{}) : load(from + i, some); };
    const auto write = [&](auto* to, Floats values) { whole ? store(to + i, values, AllLanes{}) : store(to + i, values, some); };
    const Floats g = read(gradient) * args.scale;
    const Floats average = args.beta1 * read(args.exp_avg) + args.rest1 * g;
    const Floats square = args.beta2 * read(args.exp_avg_sq) + args.rest2 * g * g;
    const Floats updated = args.kept * read(args.parameter) - args.step_size * average / (root(square) * args.inverse_root + args.eps);
    write(args.exp_avg, average);
    write(args.exp_avg_sq, square);
    write(args.parameter, updated);
    if (copy != nullptr) write(copy, updated);
  }
}

}  // namespace
}  // namespace tessera::kernels::cpu
