#include "tessera/comm/algorithms/table.h"
#include "tests/fuzz/target.h"

/// comm.table: rows that are read are written and read again as the same, and every choice among them is one of them.
TESSERA_FUZZ_TARGET(comm_table) {
  using namespace tessera;
  const auto file = fuzz::scratch_file("table.jsonl", input);
  std::vector<comm::TableRow> rows;
  if (!fuzz::accepts(file.string(), [&] { rows = comm::read_table(file); })) return;
  const auto copy = fuzz::scratch_file("copy.jsonl", "");
  comm::write_table(copy, rows);
  fuzz::expect(comm::read_table(copy) == rows, "a table changes when it is written");
  const auto chosen = comm::winners(rows);
  for (const auto& row : rows) {
    const auto* best = comm::best(chosen, row.op, row.backend, row.ranks, row.bytes);
    fuzz::expect(best != nullptr && best->bytes == row.bytes && best->time_us <= row.time_us, "no best for a row of ", row.op);
  }
}
