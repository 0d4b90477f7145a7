#include "cli/plan_pictures.h"

#include "cli/common.h"
#include "tessera/core/error.h"
#include "tessera/core/text_file.h"
#include "tessera/pipeline/schedules/picture.h"

namespace tessera::cli {

void PlanPictures::add_options(Command& command) {
  command.add_option("--report", report, "Draw the plan, or with --search the best layout and its rivals, into one page that opens offline (HTML)");
  command.add_option("--trace", trace, "Write the step's actions as planned for Perfetto (JSON), as tessera trace does of measured ones").needs("--device");
}

void PlanPictures::check(const std::string& input, bool has_device) const {
  if (!report.empty()) check_output_file("--report", report, {input});
  if (trace.empty()) return;
  check_output_file("--trace", trace, {input});
  require(has_device, "--trace = ", trace, ": times are said of a device; add --device NAME");
  require(trace != report, "--trace = ", trace, ": the same file as --report; name another");
}

void PlanPictures::write(const plan::Reported& reported) const {
  if (!report.empty()) write_text_file("--report " + report, report, plan::html_report(reported));
  if (trace.empty()) return;
  if (const auto drawing = plan::drawing_of(reported.run)) write_text_file("--trace " + trace, trace, schedules::trace_of({*drawing}));
}

}  // namespace tessera::cli
