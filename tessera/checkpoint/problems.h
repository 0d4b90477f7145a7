#pragma once

#include <string>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::checkpoint {

/// Everything that is wrong with something, for one refusal that names it all, on one line.
class Problems {
 public:
  template <class... Parts>
  void add(Parts&&... parts) {
    text_ += (text_.empty() ? "" : "; ") + detail::concat(std::forward<Parts>(parts)...);
  }

  /// Throws ConfigError made of `parts` and the list, where there is one.
  template <class... Parts>
  void refuse(Parts&&... parts) const {
    require(text_.empty(), std::forward<Parts>(parts)..., text_);
  }

 private:
  std::string text_;
};

}  // namespace tessera::checkpoint
