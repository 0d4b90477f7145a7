#include "tessera/comm/decorators/standard.h"

#include "tessera/comm/decorators/algorithm.h"
#include "tessera/comm/decorators/check.h"
#include "tessera/comm/decorators/flight_record.h"
#include "tessera/comm/decorators/inject.h"

namespace tessera::comm {

std::vector<Decorator> standard_decorators(const DecoratorContext& context) {
  const auto& options = context.options;
  std::vector<Decorator> decorators;
  auto choice = std::make_shared<const AlgorithmChoice>(options);
  if (!choice->engine_only()) decorators.push_back(algorithm_choice(std::move(choice), context));
  if (options.check) decorators.push_back(checking());
  if (!options.record_dir.empty()) decorators.push_back(flight_recording(options.record_dir, context.environment));
  const auto& environment = context.environment;
  const auto faults = parse_faults(options.inject, environment.size, environment.restart_count);
  if (!faults.empty()) decorators.push_back(fault_injection(faults, environment.rank, environment.restart_count));
  decorators.insert(decorators.end(), options.decorators.begin(), options.decorators.end());
  return decorators;
}

}  // namespace tessera::comm
