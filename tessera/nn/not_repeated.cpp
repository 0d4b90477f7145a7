#include "tessera/nn/not_repeated.h"

#include <utility>

#include "tessera/core/ambient.h"

namespace tessera::nn {

namespace {
const Ambient<bool> not_repeated;
}  // namespace

NotRepeated::NotRepeated() : before_(std::exchange(*not_repeated, true)) {}
NotRepeated::~NotRepeated() { *not_repeated = before_; }
bool NotRepeated::now() { return *not_repeated; }

}  // namespace tessera::nn
