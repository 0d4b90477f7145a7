#include "tessera/launch/job_end.h"
#include "tests/fuzz/target.h"

/// TORCHELASTIC_ERROR_FILE, ours or torch's: whatever a worker left there, the launcher says how the job ended in one line.
TESSERA_FUZZ_TARGET(error_file) {
  using namespace tessera;
  const std::string contents(input);
  if (const auto report = launch::read_report(contents)) {
    fuzz::expect(report->reason.find('\n') == std::string::npos, "a reason of several lines");
    const auto again = launch::read_report(launch::write_report(*report));
    fuzz::expect(report->reason.empty() || (again && again->kind == report->kind && again->reason == report->reason), "a report changes when it is written");
  }
  for (const int wait_status : {0, 1 << 8, 2 << 8, 9, 6}) {
    const auto job_end = launch::judge({{.rank = 3, .wait_status = wait_status, .report = contents}});
    fuzz::expect(job_end.sentence.empty() == (wait_status == 0) && job_end.sentence.find('\n') == std::string::npos, "a sentence of several lines");
  }
}
