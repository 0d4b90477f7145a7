#include "tessera/comm/call_site.h"

#include "tessera/core/ambient.h"

namespace tessera::comm {
namespace {
const Ambient<std::string_view> current_site;
}

CallSite::CallSite(std::string_view name) : outer_(*current_site) {
  if (!name.empty()) *current_site = name;
}
CallSite::~CallSite() { *current_site = outer_; }
std::string_view CallSite::current() { return *current_site; }

}  // namespace tessera::comm
