#pragma once

#include "cli/plan_request.h"

namespace tessera::cli {

/// Flags of plan --search and of plan --curve, beside each other and what else stands in place of a plan. Throws ConfigError.
void check_search(const PlanFlags& flags);
void check_curve(const PlanFlags& flags);

/// What data ranks there will be is not known before a layout is chosen. Throws ConfigError.
void size_steps(const PlanFlags& flags, Config& config);

/// plan --search, of a configuration as it was read. Exit code 0 where something fits, else 1: a script asks for a layout and needs to know.
int search_layouts_of(Config config, const PlanRequest& request);

/// plan --curve.
void draw_curve_of(Config config, const PlanRequest& request);

}  // namespace tessera::cli
