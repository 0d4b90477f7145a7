#include "tessera/plan/rehearsal.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/plan/read_events.h"
#include "tessera/train/engine.h"

// A step repeats itself: but for the first and the last, micro-batches do the same, and what is different between ranks of a pipeline is the order of their
// actions, which the schedule says. So a few micro-batches are run by the real code, and their actions' events are put in the order of all. What a rank posts
// to be received belongs to the action that takes it, wherever it is posted: from room for it to the event that says its receive has started.

namespace tessera::plan {
namespace {

using pipeline::Leg;
using schedules::Action;
using schedules::Kind;
using schedules::Schedule;

using Key = std::tuple<Kind, int, int>;  ///< of an action: kind, stage, micro-batch

Key key_of(const Action& action, int micro_batch) { return {action.kind, action.stage, micro_batch}; }

/// What tells actions apart.
struct Place {
  Kind kind{};
  int stage = 0;
  bool first = false, second = false, last = false;  ///< of its kind and stage; the second where neighbours count, whose first was another
  bool alone = false;                                ///< no other micro-batch is between forward and backward there, with which it would share copies of weights
  std::vector<std::pair<Kind, int>> neighbours{};
  auto operator<=>(const Place&) const = default;
};

/// Of each micro-batch, what it does.
using Parts = std::vector<std::set<Place>>;

Parts parts_of(const std::vector<Leg>& legs, int micro_batches, bool neighbours) {
  std::map<std::pair<Kind, int>, int> all, before;
  const auto count = [](std::map<std::pair<Kind, int>, int>& counts, const Action& action) { return ++counts[{action.kind, action.stage}]; };
  for (const Leg& leg : legs) count(all, leg.action);
  Parts parts(static_cast<size_t>(micro_batches));
  std::map<int, int> in_flight;  // by stage
  for (size_t i = 0; i < legs.size(); ++i) {
    const Action& action = legs[i].action;
    const int number = count(before, action);
    Place place{.kind = action.kind, .stage = action.stage, .first = number == 1, .last = number == all[{action.kind, action.stage}]};
    int& others = in_flight[action.stage];
    if (action.kind == Kind::Forward) place.alone = others++ == 0;
    if (action.kind == Kind::Backward || action.kind == Kind::BackwardInput) place.alone = --others == 0;
    if (neighbours) {
      place.second = number == 2;
      if (i > 0) place.neighbours.emplace_back(legs[i - 1].action.kind, legs[i - 1].action.stage);
      if (i + 1 < legs.size()) place.neighbours.emplace_back(legs[i + 1].action.kind, legs[i + 1].action.stage);
    }
    parts.at(static_cast<size_t>(action.micro_batch)).insert(std::move(place));
  }
  return parts;
}

/// Whether forwards of the last stage are ahead of its backwards: then its head does another thing (Engine).
bool runs_ahead(const std::vector<Leg>& legs, int last_stage) {
  int alive = 0, most = 0;
  for (const Leg& leg : legs) {
    if (leg.action.stage != last_stage) continue;
    alive += leg.action.kind == Kind::Forward ? 1 : leg.action.kind == Kind::BackwardWeight ? 0 : -1;
    most = std::max(most, alive);
  }
  return most > 1;
}

struct Made {
  Schedule schedule;
  std::vector<Leg> legs;
};

Made made_for(const std::function<Schedule(int)>& make, int micro_batches, int rank) {
  Made made{.schedule = schedules::with_backwards_alike(make(micro_batches)), .legs = {}};
  if (!made.schedule.is_asynchronous()) made.legs = pipeline::itinerary(made.schedule, pipeline::chain(made.schedule.stages()), rank);
  return made;
}

std::optional<std::vector<int>> stand_ins(const Parts& whole, const Parts& shown) {
  std::vector<int> found;
  for (const auto& part : whole) {
    const auto at = std::ranges::find(shown, part);
    if (at == shown.end()) return std::nullopt;
    found.push_back(static_cast<int>(at - shown.begin()));
  }
  return found;
}

/// Whether each action takes and makes the messages that its stand-in does.
bool same_messages(const std::vector<Leg>& whole, const std::vector<Leg>& shown, const std::vector<int>& stands_for) {
  std::map<Key, const Leg*> known;
  for (const Leg& leg : shown) known.emplace(key_of(leg.action, leg.action.micro_batch), &leg);
  const auto same = [&](const std::vector<pipeline::Message>& x, const std::vector<pipeline::Message>& y) {
    return std::ranges::equal(x, y, [&](const auto& one, const auto& other) {
      return one.crossing == other.crossing && one.gradient == other.gradient && stands_for[static_cast<size_t>(one.micro_batch)] == other.micro_batch;
    });
  };
  return std::ranges::all_of(whole, [&](const Leg& leg) {
    const Leg& like = *known.at(key_of(leg.action, stands_for[static_cast<size_t>(leg.action.micro_batch)]));
    return same(leg.needs, like.needs) && same(leg.sends, like.sends);
  });
}

std::optional<Rehearsal> shown_by(const Made& whole, const Parts& of_whole, std::vector<Leg> shown, int fewer, const std::vector<std::string>& channels,
                                  bool neighbours) {
  const int last_stage = whole.schedule.stages() - 1;
  if (runs_ahead(shown, last_stage) != runs_ahead(whole.legs, last_stage)) return std::nullopt;
  auto found = stand_ins(of_whole, parts_of(shown, fewer, neighbours));
  if (!found || !same_messages(whole.legs, shown, *found)) return std::nullopt;
  return Rehearsal{.micro_batches = fewer,
                   .stands_for = std::move(*found),
                   .shown = std::move(shown),
                   .whole = whole.legs,
                   .tags = pipeline::end_of_tags(1, pipeline::chain(whole.schedule.stages())),
                   .channels = channels};
}

}  // namespace

std::optional<Rehearsal> shortest_rehearsal(const std::function<Schedule(int)>& make, int micro_batches, int rank, const std::vector<std::string>& channels,
                                            bool neighbours) {
  constexpr int fewest = 3;  // a first, a last, and one between
  if (micro_batches <= fewest) return std::nullopt;
  const Made whole = made_for(make, micro_batches, rank);
  if (whole.schedule.is_asynchronous()) return std::nullopt;
  const Parts of_whole = parts_of(whole.legs, micro_batches, neighbours);
  const int most = std::min(micro_batches, fewest + 8 * whole.schedule.stages());  // beyond, a schedule that does not repeat itself
  for (int fewer = fewest; fewer < most; ++fewer) {
    auto shown = [&]() -> std::optional<Made> {
      try {
        return made_for(make, fewer, rank);
      } catch (const ConfigError&) {
        return std::nullopt;  // a number that this schedule cannot take
      }
    }();
    if (!shown) continue;
    if (auto found = shown_by(whole, of_whole, std::move(shown->legs), fewer, channels, neighbours)) return found;
  }
  return std::nullopt;
}

std::optional<Rehearsal> rehearsal_by(std::vector<Leg> shown, const std::function<Schedule(int)>& make, int micro_batches, int rank,
                                      const std::vector<std::string>& channels, bool neighbours) {
  int fewer = 0;
  for (const Leg& leg : shown) fewer = std::max(fewer, leg.action.micro_batch + 1);
  const Made whole = made_for(make, micro_batches, rank);
  return shown_by(whole, parts_of(whole.legs, micro_batches, neighbours), std::move(shown), fewer, channels, neighbours);
}

namespace {

struct Span {
  size_t begin = 0, end = 0;
};

using Arrival = std::tuple<int, int, bool>;  ///< crossing, micro-batch, whether it is a gradient

/// The shorter step in pieces.
struct Pieces {
  Span before, after;
  std::map<Key, Span> actions;
  std::map<Arrival, Span> posts;
  std::unordered_map<int64_t, int> begun_by;  ///< storages and calls in flight that an action began: of which micro-batch
};

bool is_receive(const Event& event) {
  const auto* call = std::get_if<CollectiveEvent>(&event.what);
  return call != nullptr && call->op == "recv";
}

Pieces pieces_of(const Events& events, const std::vector<Leg>& legs) {
  Pieces pieces;
  size_t at = 0;
  const auto begins = [&](bool begins) {
    const auto* action = std::get_if<ActionEvent>(&events[at].what);
    return action != nullptr && action->begins == begins && action->action != kLeftOut;
  };
  const auto begun_since = [&](size_t from, int micro_batch) {
    for (size_t i = from; i < at; ++i) {
      for (const int64_t storage : events[i].writes) {
        const auto* memory = std::get_if<MemoryChange>(&events[i].what);
        if (storage < 0 || (memory != nullptr && memory->bytes > 0)) pieces.begun_by.try_emplace(storage, micro_batch);
      }
    }
  };
  while (!begins(true)) ++at;
  pieces.before = {0, at};
  for (const Leg& leg : legs) {
    size_t from = at;
    invariant(begins(true), "an action's events do not follow those of the one before");
    ++at;
    for (const auto& post : leg.posts) {
      const size_t posted = at;
      while (!is_receive(events[at])) ++at;
      ++at;
      pieces.posts[{post.crossing, post.micro_batch, post.gradient}] = {posted, at};
      begun_since(posted, post.micro_batch);
      from = at;
    }
    while (!begins(false)) ++at;
    ++at;
    begun_since(from, leg.action.micro_batch);
    pieces.actions[key_of(leg.action, leg.action.micro_batch)] = {from, at};
  }
  pieces.after = {at, events.size()};
  return pieces;
}

/// What an action's events are called in another micro-batch.
class Renaming {
 public:
  Renaming(const Events& shown, const Pieces& pieces, const Rehearsal& rehearsal) : pieces_(pieces), rehearsal_(rehearsal) {
    for (const Event& event : shown) {
      for (const int64_t storage : event.writes) lowest_ = std::min(lowest_, storage), highest_ = std::max(highest_, storage);
    }
  }

  void rename(Event& event, int stand_in, int micro_batch) {
    if (stand_in == micro_batch) return;
    if (auto* call = std::get_if<CollectiveEvent>(&event.what)) rename(*call, stand_in, micro_batch);
    for (auto* storages : {&event.reads, &event.writes}) {
      for (int64_t& storage : *storages) storage = number_of(storage, stand_in, micro_batch);
    }
  }

 private:
  int64_t number_of(int64_t storage, int stand_in, int micro_batch) {
    const auto begun = pieces_.begun_by.find(storage);
    if (begun == pieces_.begun_by.end() || begun->second != stand_in) return storage;
    const auto [at, fresh] = numbers_.try_emplace({storage, micro_batch}, 0);
    if (fresh) at->second = storage < 0 ? --lowest_ : ++highest_;
    return at->second;
  }

  void rename(CollectiveEvent& call, int stand_in, int micro_batch) const {
    if (is_message(call) && std::ranges::find(rehearsal_.channels, call.group) != rehearsal_.channels.end())
      call.tag += (micro_batch - stand_in) * rehearsal_.tags;
    const std::string name = " micro-batch " + std::to_string(stand_in);
    if (call.site.ends_with(name)) call.site.replace(call.site.size() - name.size(), name.size(), " micro-batch " + std::to_string(micro_batch));
  }

  const Pieces& pieces_;
  const Rehearsal& rehearsal_;
  int64_t lowest_ = 0, highest_ = 0;
  std::map<std::pair<int64_t, int>, int64_t> numbers_;
};

using Visit = std::function<void(const Event& event, int stand_in, int micro_batch)>;

Event bracket(const Action& action, bool begins) { return {.what = ActionEvent{.action = schedules::to_string(action), .begins = begins}}; }

void for_each_event(const Events& shown, const Pieces& pieces, const Rehearsal& rehearsal, const Visit& visit) {
  const auto outside = [&](const Span& span) {
    bool left_out = false;
    for (size_t i = span.begin; i < span.end; ++i) {
      const auto* action = std::get_if<ActionEvent>(&shown[i].what);
      const bool edge = action != nullptr && action->action == kLeftOut;
      if (edge) left_out = action->begins;
      if (!edge && !left_out) visit(shown[i], -1, -1);
    }
  };
  const auto inside = [&](const Span& span, int stand_in, int micro_batch) {
    for (size_t i = span.begin; i < span.end; ++i) {
      if (!std::holds_alternative<ActionEvent>(shown[i].what)) visit(shown[i], stand_in, micro_batch);
    }
  };
  outside(pieces.before);
  for (const Leg& leg : rehearsal.whole) {
    const auto stand_in = [&](int micro_batch) { return rehearsal.stands_for[static_cast<size_t>(micro_batch)]; };
    visit(bracket(leg.action, /*begins=*/true), -1, -1);
    for (const auto& post : leg.posts) {
      const int like = stand_in(post.micro_batch);
      inside(pieces.posts.at({post.crossing, like, post.gradient}), like, post.micro_batch);
    }
    const int like = stand_in(leg.action.micro_batch);
    inside(pieces.actions.at(key_of(leg.action, like)), like, leg.action.micro_batch);
    visit(bracket(leg.action, /*begins=*/false), -1, -1);
  }
  outside(pieces.after);
}

}  // namespace

void for_each_event(const Events& shown, const Rehearsal& rehearsal, const Visit& visit) {
  for_each_event(shown, pieces_of(shown, rehearsal.shown), rehearsal, visit);
}

Events whole_step(const Events& shown, const Rehearsal& rehearsal, const std::function<bool(const Event&)>& keep) {
  const Pieces pieces = pieces_of(shown, rehearsal.shown);
  Renaming renaming(shown, pieces, rehearsal);
  Events whole;
  for_each_event(shown, pieces, rehearsal, [&](const Event& event, int stand_in, int micro_batch) {
    if (!keep || keep(event)) renaming.rename(whole.emplace_back(event), stand_in, micro_batch);
  });
  return whole;
}

}  // namespace tessera::plan
