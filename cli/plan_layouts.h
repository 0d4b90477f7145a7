#pragma once

#include "cli/plan_request.h"

namespace tessera::cli {

/// plan --layouts: one line of JSON for each layout of the file: what `--json` has of a run, but for its ranks; or why it is refused.
void say_layouts(const PlanRequest& request);

}  // namespace tessera::cli
