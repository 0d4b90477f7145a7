#include "tessera/nn/dry_sizes.h"

#include <utility>

#include "tessera/core/ambient.h"

namespace tessera::nn {
namespace {

const Ambient<DrySizes> sizes_now;
const Ambient<int64_t> groups_now;

}  // namespace

DrySizesScope::DrySizesScope(DrySizes sizes) : before_(std::exchange(*sizes_now, sizes)) {}
DrySizesScope::~DrySizesScope() { *sizes_now = before_; }

DrySizes DrySizesScope::now() { return *sizes_now; }

DryGroupsScope::DryGroupsScope(int64_t groups) : before_(std::exchange(*groups_now, groups)) {}
DryGroupsScope::~DryGroupsScope() { *groups_now = before_; }

int64_t DryGroupsScope::now() { return *groups_now; }

}  // namespace tessera::nn
