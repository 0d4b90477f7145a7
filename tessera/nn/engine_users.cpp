#include "tessera/nn/engine_users.h"

#include <map>
#include <mutex>

namespace tessera::nn {
namespace {

struct Users {
  std::mutex mutex;
  std::map<const void*, int> count;  ///< by engine
};

Users& users() {
  static Users users;
  return users;
}

}  // namespace

Attachment use_engine(const comm::Group& group) {
  const auto engine = group.backend();
  if (!engine) return {};
  const std::lock_guard lock(users().mutex);
  ++users().count[engine.get()];
  return Attachment([engine] {
    const std::lock_guard lock(users().mutex);
    if (--users().count[engine.get()] == 0) users().count.erase(engine.get());
  });
}

bool is_engine_shared(const comm::Group& group) {
  const auto engine = group.backend();
  if (!engine) return false;
  const std::lock_guard lock(users().mutex);
  const auto found = users().count.find(engine.get());
  return found != users().count.end() && found->second > 1;
}

}  // namespace tessera::nn
