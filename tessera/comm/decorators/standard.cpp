#include "tessera/comm/decorators/standard.h"

namespace tessera::comm {

std::vector<Decorator> standard_decorators(const DecoratorContext& context) {
  const auto& options = context.options;
  std::vector<Decorator> decorators;
  decorators.insert(decorators.end(), options.decorators.begin(), options.decorators.end());
  return decorators;
}

}  // namespace tessera::comm
