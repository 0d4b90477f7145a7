#include "tessera/pipeline/schedules/csv.h"
#include "tessera/pipeline/schedules/lower.h"
#include "tests/fuzz/target.h"

/// A pipeline's schedule: one that is read is proven, so it is written and read again as the same, ends where it is simulated, and takes its messages.
TESSERA_FUZZ_TARGET(schedule) {
  using namespace tessera;
  const auto file = fuzz::scratch_file("schedule.csv", input);
  schedules::Schedule schedule;
  if (!fuzz::accepts(file.string(), [&] { schedule = schedules::read_csv_file(file.string()); })) return;
  fuzz::expect(schedules::read_csv(to_csv(schedule), schedule.name) == schedule, "a schedule changes when it is written");
  const auto measures = schedules::measure(schedule, schedules::simulate(schedule));
  fuzz::expect(measures.bubble_fraction >= 0 && measures.bubble_fraction < 1, "a bubble of ", measures.bubble_fraction);
  if (!schedule.is_lowered()) schedules::read_csv(to_csv(schedules::lower(schedule)), schedule.name);
}
