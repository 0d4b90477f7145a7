#pragma once

#include <string_view>

namespace tessera::comm {

/// Names, for as long as it lives, where this thread's collectives come from: a module path such as "layers.3.mlp". Records and verdicts show it.
/// The text is not copied and must outlive the scope. Scopes nest; the innermost counts, and an empty name leaves the outer one. Interceptors' calls name their
/// module (nn/interceptor.h). Costs two loads and two stores.
class CallSite {
 public:
  explicit CallSite(std::string_view name);
  ~CallSite();
  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;

  /// The innermost scope's name on this thread; empty outside of any.
  static std::string_view current();

 private:
  std::string_view outer_;
};

}  // namespace tessera::comm
