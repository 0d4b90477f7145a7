#pragma once

#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/stored_slices.h"
#include "tessera/layout/slice.h"

namespace tessera::checkpoint {

/// Whether the checkpoint has the tensor, in this type.
bool is_stored_as(const Manifest& manifest, const std::string& name, at::ScalarType dtype);

/// The stored weight of which a parameter's master is: that of the model, or where updates are delayed the copy that is one update ahead.
std::string weight_of_master(const Manifest& manifest, std::string_view parameter);

/// The stored tensor that fills the stored `weight` ("model.norm.weight") for who wants it as `dtype`. Stored as that, itself; as another, its fp32 master,
/// where there is one: that is what was trained, of which the weight is a rounding, and with which a run goes on. Where updates are delayed, masters are of the
/// copies that are one update ahead ("optimizer.next.norm.weight"), and stand in for these alone. What is no weight is itself.
std::string fullest(const Manifest& manifest, const std::string& weight, at::ScalarType dtype);

/// Fills `target` with `slice` of a stored tensor, for who wants it as `dtype`, as fullest() says; where a weight's master does not round to it, somebody has
/// written the weight since the last update, and it is the weight's value, element by element, as in the next update (precision::MasterWeights). `narrowed` and
/// `place` are those of `stored`. Memory: of a weight that has another master, the slice once more in fp32 and once as stored.
void fill_fullest(StoredSlices& stored, const Manifest& manifest, at::Tensor target, const Slice& slice, at::ScalarType dtype,
                  const StoredSlices::Narrowed& narrowed, const std::string& place);

}  // namespace tessera::checkpoint
