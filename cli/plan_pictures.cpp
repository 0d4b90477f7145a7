#include "cli/plan_pictures.h"

#include "tessera/core/error.h"
#include "tessera/core/text_file.h"
#include "tessera/pipeline/schedules/picture.h"

namespace tessera::cli {

void PlanPictures::add_options(Command& command) {
  command.add_option("--report", report, "Draw the plan, or with --search the best layout and its rivals, into one page that opens offline (HTML)");
  command.add_option("--trace", trace, "Write the step's actions as planned for Perfetto (JSON), as tessera trace does of measured ones").needs("--device");
}

void PlanPictures::check(bool has_device) const {
  require(trace.empty() || has_device, "--trace = ", trace, ": times are said of a device; add --device NAME");
}

void PlanPictures::write(const plan::Reported& reported) const {
  if (!report.empty()) write_text_file("--report " + report, report, plan::html_report(reported));
  if (trace.empty()) return;
  if (const auto drawing = plan::drawing_of(reported.run)) write_text_file("--trace " + trace, trace, schedules::trace_of({*drawing}));
}

}  // namespace tessera::cli
