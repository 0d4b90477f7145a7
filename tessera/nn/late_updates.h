#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// Says of what is updated in a parameter's place that it has just been given an update that was begun in a step before (HostOptimizer), so that it may have no
/// gradient any more, and the parameter may be frozen by now. By this whoever brings parts together (GradientSynchronizer::after_update) knows that there is
/// something to bring; of what is updated itself, and has no parts, nothing is noted. To be said on every rank that has a part of the parameter, in the same
/// step.
void note_late_update(const at::Tensor& updated);

/// Lets the counter of the parameter in whose place `updated` was updated show it, as that of a parameter which is updated itself does: a graph that has saved
/// the parameter refuses a backward pass from then on. No write of the program's (WriteMark).
void show_update(const at::Tensor& updated);

/// How often that was said of the parameter: where it is another number than when parts were last brought together, they have parted since.
int64_t late_updates(const at::Tensor& updated);

}  // namespace tessera::nn
