#include <cstddef>
#include <cstdint>

#include "tests/fuzz/target.h"

/// libFuzzer's entry. Each of its programs holds one target.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const tessera::fuzz::Target target = tessera::fuzz::targets().begin()->second;
  target({reinterpret_cast<const char*>(data), size});
  return 0;
}
