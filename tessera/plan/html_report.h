#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "tessera/config/config.h"
#include "tessera/pipeline/schedules/picture.h"
#include "tessera/plan/bounds.h"
#include "tessera/plan/device.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/framework.h"
#include "tessera/plan/scaling.h"
#include "tessera/plan/search.h"

namespace tessera::plan {

/// What a report is made of. The dry run has to have been made with DryRunOptions::history; with a machine, where `device` is given.
struct Reported {
  const Config& config;
  const DryRun& run;
  const Device* device = nullptr;
  const LayoutSearch* search = nullptr;  ///< of which the run is the best
  const Framework* framework = nullptr;  ///< whose step it is, and whose verdict
  std::optional<Bounds> bounds{};        ///< where documents or routers decide
  const Scaling* scaling = nullptr;      ///< of which the run is the layout at the knee
  nlohmann::json json{};                 ///< what --json prints of them, kept in the file
};

/// One file that a browser opens without a network: memory by rank and over the step, the schedule in time, traffic by axis and link, the layout, and the
/// layouts that a search ranked. Pictures are SVG in the page, there is no script, colors follow the reader's light or dark. It is well-formed XML, too, and
/// holds the plan's JSON in an element `script` of type application/json whose id is "plan".
std::string html_report(const Reported& reported);

/// The schedule with the times of its actions, in milliseconds: of all ranks of the pipeline, or of the rank that decides where there is one stage. None where
/// the dry run was made without a machine.
std::optional<schedules::Drawing> drawing_of(const DryRun& run);

}  // namespace tessera::plan
