#pragma once

#include <string>
#include <vector>

#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/pipeline/schedules/simulate.h"

namespace tessera::schedules {

/// A schedule in time: foretold (simulate.h) or measured.
struct Drawing {
  std::string title{};
  Schedule schedule{};
  Timeline timeline{};
  std::vector<std::vector<double>> asked{};  ///< of a measured one: since when each action waited for what other ranks send (timed.h)
  std::string unit{};                        ///< of its times, as it stands behind a number: " ms"
};

/// Rows of ranks over columns of time, one line a rank: "F0" or, with several stages a rank, "4F0" stands where an action begins, "=" where it goes on, "."
/// where the rank idles. Columns are as wide in time as the times allow; more of them than `most_columns` are not drawn, and a line says so.
std::string grid_of(const Schedule& schedule, const Timeline& timeline, int most_columns = 240);

/// The same as a picture (SVG): a row per rank, time to the right, numbers are micro-batches; a rank's later chunks are lighter; the peak of activations at the
/// end of its row. Updates are black lines. Several drawings stand below one another on one scale of time.
std::string svg_of(const std::vector<Drawing>& drawings);

/// The same for Perfetto and Chrome's viewer (JSON): a process per drawing, a thread per rank, arrows where results go to another rank, and the activations
/// that each rank holds; and how long its actions waited, where that was measured. A unit of the timelines is `microseconds` long.
std::string trace_of(const std::vector<Drawing>& drawings, double microseconds = 1000);

}  // namespace tessera::schedules
