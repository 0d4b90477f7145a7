#include "tessera/launch/round.h"
#include "tests/fuzz/target.h"

/// What an agent says of its workers: read, judged, and written again as the same.
TESSERA_FUZZ_TARGET(launch_record) {
  using namespace tessera;
  launch::NodeReport record;
  if (!fuzz::accepts("record", [&] { record = launch::read_record(std::string(input)); })) return;
  fuzz::expect(launch::read_record(launch::write_record(record)) == record, "a record changes when it is written");
  launch::judge(record.failures);
}
