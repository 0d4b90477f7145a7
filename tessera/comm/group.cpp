#include "tessera/comm/group.h"

#include "tessera/comm/backends/c10d_engine.h"
#include "tessera/core/error.h"

namespace tessera::comm {

struct Group::State {
  GroupInfo info;
  std::shared_ptr<Engine> engine;
  std::function<std::string()> explain;
  std::shared_ptr<BackwardUsers> in_backward = std::make_shared<BackwardUsers>();
};

Group::Group() : Group(self()) {}

Group Group::self(std::string name) { return {{.name = std::move(name)}, std::shared_ptr<Engine>()}; }

Group::Group(GroupInfo info, c10::intrusive_ptr<c10d::Backend> backend, std::function<std::string()> explain)
    : Group(std::move(info), backend ? std::make_shared<C10dEngine>(std::move(backend)) : nullptr, std::move(explain)) {}

Group::Group(GroupInfo info, std::shared_ptr<Engine> engine, std::function<std::string()> explain) {
  invariant(info.size >= 1 && info.rank >= 0 && info.rank < info.size, "group ", info.name, ": rank ", info.rank, " of ", info.size);
  invariant(info.ranks.empty() || static_cast<int>(info.ranks.size()) == info.size, "group ", info.name, ": ", info.ranks.size(), " members for size ",
            info.size);
  invariant(info.size == 1 || engine, "group ", info.name, " of ", info.size, " has no engine");
  state_ = std::make_shared<const State>(State{.info = std::move(info), .engine = std::move(engine), .explain = std::move(explain)});
}

int Group::rank() const { return state_->info.rank; }
int Group::size() const { return state_->info.size; }
const std::string& Group::name() const { return state_->info.name; }
std::chrono::milliseconds Group::timeout() const { return state_->info.timeout; }
const std::shared_ptr<Engine>& Group::engine() const { return state_->engine; }

int Group::world_rank(int member) const {
  const auto& info = state_->info;
  invariant(member >= 0 && member < info.size, "group ", info.name, " of ", info.size, " has no member ", member);
  return info.world_rank(member);
}

BackwardUsers& Group::in_backward() const { return *state_->in_backward; }

Attachment Group::synchronize_in_backward() const {
  ++state_->in_backward->synchronizers;
  return Attachment([users = state_->in_backward] { --users->synchronizers; });
}

bool Group::matches_tags() const { return !state_->engine || state_->engine->matches_tags(); }
void Group::set_place(std::string_view place) const {
  if (state_->engine) state_->engine->set_place(place);
}

std::string Group::explain() const {
  if (!state_->explain) return {};
  const auto cause = state_->explain();
  return cause.empty() ? cause : "; " + cause;
}

}  // namespace tessera::comm
