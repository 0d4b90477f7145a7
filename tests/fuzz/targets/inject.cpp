#include "tessera/comm/decorators/inject.h"

#include "tests/fuzz/target.h"

/// --inject and TESSERA_INJECT.
TESSERA_FUZZ_TARGET(inject) {
  using namespace tessera;
  const std::string text(input);
  fuzz::accepts("TESSERA_INJECT", [&] {
    for (const auto& fault : comm::parse_faults(text, "TESSERA_INJECT")) {
      fuzz::expect(fault.rank >= 0 && fault.first >= 1 && fault.last >= fault.first && fault.delay.count() >= 0 && fault.attempt.value_or(0) >= 0,
                   "an impossible fault");
    }
    for (const auto& fault : comm::parse_faults(text, 4, 0, "TESSERA_INJECT")) fuzz::expect(fault.rank < 4, "a fault of rank ", fault.rank, " of 4");
  });
}
