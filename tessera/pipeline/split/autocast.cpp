#include "tessera/pipeline/split/autocast.h"

#include <ATen/autocast_mode.h>

#include "tessera/core/error.h"

namespace tessera::tape {

Autocast Autocast::now() {
  Autocast now;
  for (size_t i = 0; i < kTypes.size(); ++i) {
    if (at::autocast::is_autocast_enabled(kTypes[i])) now.dtypes[i] = at::autocast::get_autocast_dtype(kTypes[i]);
  }
  return now;
}

std::string to_string(const Autocast& autocast) {
  std::string text;
  for (size_t i = 0; i < Autocast::kTypes.size(); ++i) {
    if (autocast.dtypes[i]) text += detail::concat(", autocast ", Autocast::kTypes[i], " ", *autocast.dtypes[i]);
  }
  return text;
}

AutocastSwitch::AutocastSwitch() : before_(Autocast::now()) {
  for (size_t i = 0; i < dtypes_before_.size(); ++i) dtypes_before_[i] = at::autocast::get_autocast_dtype(Autocast::kTypes[i]);
  at::autocast::increment_nesting();
}

// Weights that were cast meanwhile are those of this step.
AutocastSwitch::~AutocastSwitch() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  set(before_);
  for (size_t i = 0; i < dtypes_before_.size(); ++i) at::autocast::set_autocast_dtype(Autocast::kTypes[i], dtypes_before_[i]);
}

void AutocastSwitch::set(const Autocast& autocast) {
  for (size_t i = 0; i < Autocast::kTypes.size(); ++i) {
    at::autocast::set_autocast_enabled(Autocast::kTypes[i], autocast.dtypes[i].has_value());
    if (autocast.dtypes[i]) at::autocast::set_autocast_dtype(Autocast::kTypes[i], *autocast.dtypes[i]);
  }
}

}  // namespace tessera::tape
