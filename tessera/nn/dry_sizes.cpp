#include "tessera/nn/dry_sizes.h"

#include <utility>

#include "tessera/core/ambient.h"

namespace tessera::nn {
namespace {

const Ambient<DrySizes> sizes_now;

}  // namespace

DrySizesScope::DrySizesScope(DrySizes sizes) : before_(std::exchange(*sizes_now, sizes)) {}
DrySizesScope::~DrySizesScope() { *sizes_now = before_; }

DrySizes DrySizesScope::now() { return *sizes_now; }

}  // namespace tessera::nn
