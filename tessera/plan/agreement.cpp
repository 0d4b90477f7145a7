#include "tessera/plan/agreement.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/comm/dtype_name.h"
#include "tessera/mesh/positions.h"
#include "tessera/plan/read_events.h"

// Each kind of call gets a number, so a class is a list of numbers for each group. Which ranks meet follows from the mesh: those that differ in the group's
// axes alone. Being alike carries over, so the classes that meet are compared with the first of them and not in pairs; messages have two ends, and are. Classes
// meet in few ways however many ranks there are: each set of classes is looked at once.

namespace tessera::plan {
namespace {

constexpr int kNobody = -1, kSeveral = -2;

bool are_axes(const std::vector<std::string>& names, const MeshShape& shape) {
  return std::ranges::all_of(names, [&](const auto& name) { return std::ranges::find(shape, name, &MeshShape::value_type::first) != shape.end(); });
}

/// All axes for a name that is no list of axes: the world's own group.
std::vector<std::string> axes_of(const std::string& group, const MeshShape& shape) {
  if (auto axes = axes_in(group); are_axes(axes, shape)) return axes;
  std::vector<std::string> all;
  for (const auto& [axis, size] : shape) all.push_back(axis);
  return all;
}

template <class Map>
typename Map::mapped_type found_or_empty(const Map& map, const typename Map::key_type& key) {
  const auto found = map.find(key);
  return found == map.end() ? typename Map::mapped_type{} : found->second;
}

}  // namespace

Agreement::Agreement(MeshShape shape) : shape_(std::move(shape)) {
  size_t ranks = 1;
  for (const auto& [axis, size] : shape_) ranks *= static_cast<size_t>(size);
  class_of_.assign(ranks, kNobody);
}

uint32_t Agreement::number_of(const CollectiveEvent& call) {
  const bool uneven = call.op == "all_to_all";  // each rank knows its own rows
  const auto [at, fresh] =
      numbers_.try_emplace({call.op, static_cast<int>(call.dtype), uneven ? 0 : call.elements, call.peer}, static_cast<uint32_t>(texts_.size()));
  if (fresh) {
    texts_.push_back(fmt::format("{} of [{}] {}{}", call.op, fmt::join(call.shape, ", "), comm::dtype_name(call.dtype),
                                 call.peer >= 0 ? fmt::format(" with root {}", call.peer) : ""));
  }
  return at->second;
}

uint32_t Agreement::site_of(const CollectiveEvent& call) {
  const auto [at, fresh] = site_numbers_.try_emplace(call.site, static_cast<uint32_t>(sites_.size()));
  if (fresh) sites_.push_back(call.site.empty() ? "" : " (" + call.site + ")");
  return at->second;
}

void Agreement::add(const std::vector<int>& ranks, const Events& events) {
  Class& one = classes_.emplace_back();
  one.example = ranks.front();
  for (const int rank : ranks) class_of_.at(static_cast<size_t>(rank)) = static_cast<int>(classes_.size()) - 1;
  std::map<int64_t, Errands::Call> in_flight;
  for (const Event& event : events) {
    if (std::holds_alternative<WaitEvent>(event.what)) {
      const auto begun = event.reads.empty() ? in_flight.end() : in_flight.find(event.reads.front());
      if (begun != in_flight.end()) one.errands.wait(begun->second);
      continue;
    }
    const auto* call = std::get_if<CollectiveEvent>(&event.what);
    if (call == nullptr) continue;
    const uint32_t site = site_of(*call);
    Lane lane{.group = call->group};
    if (!is_message(*call)) {
      one.calls[call->group].push_back({.what = number_of(*call), .site = site});
    } else if (call->op == "send") {
      lane = {.group = call->group, .way = Lane::Way::Sent, .tag = call->tag, .from = call->group_rank, .to = call->peer};
      one.messages[call->group].sent[{call->tag, call->group_rank, call->peer}].push_back({.bytes = call->bytes, .site = site});
    } else {
      lane = {.group = call->group, .way = Lane::Way::Received, .tag = call->tag, .from = call->peer, .to = call->group_rank};
      one.messages[call->group].received[{call->tag, call->peer, call->group_rank}].push_back({.bytes = call->bytes, .site = site});
    }
    const auto begun = one.errands.begin(lane, call->op + " of " + call->group + sites_[site]);
    if (!event.writes.empty() && event.writes.back() < 0) in_flight.insert_or_assign(event.writes.back(), begun);
  }
}

std::string Agreement::compare_calls(const std::string& group, const Class& a, const Class& b) const {
  const Calls of_a = found_or_empty(a.calls, group), of_b = found_or_empty(b.calls, group);
  const auto [at_a, at_b] = std::ranges::mismatch(of_a, of_b, {}, &Asked::what, &Asked::what);
  if (at_a == of_a.end() && at_b == of_b.end()) return {};
  const auto number = at_a - of_a.begin() + 1;
  const auto asks = [&](const Class& who, const Calls& calls, auto at) {
    return at == calls.end() ? fmt::format("rank {} makes {} in all", who.example, calls.size())
                             : fmt::format("rank {} asks for {}{}", who.example, texts_[at->what], sites_[at->site]);
  };
  return fmt::format("collective #{} of {} in a step: {}; {}", number, group, asks(a, of_a, at_a), asks(b, of_b, at_b));
}

std::string Agreement::compare_messages(const std::string& group, const Class& a, int place_of_a, const Class& b, int place_of_b) const {
  const Messages of_a = found_or_empty(a.messages, group), of_b = found_or_empty(b.messages, group);
  std::set<int> tags;
  for (const auto* lines : {&of_a.sent, &of_b.received}) {
    for (const auto& [line, parts] : *lines) tags.insert(std::get<0>(line));
  }
  for (const int tag : tags) {
    const auto sent = found_or_empty(of_a.sent, {tag, place_of_a, place_of_b}), received = found_or_empty(of_b.received, {tag, place_of_a, place_of_b});
    const auto [at_sent, at_received] = std::ranges::mismatch(sent, received, {}, &Part::bytes, &Part::bytes);
    if (at_sent == sent.end() && at_received == received.end()) continue;
    const auto what = [&](const std::vector<Part>& parts, auto at) {
      return at == parts.end() ? std::string("none") : fmt::format("{} bytes{}", at->bytes, sites_[at->site]);
    };
    return fmt::format("message #{} of {} with tag {} from rank {} to rank {} in a step: sent {}, received {}", at_sent - sent.begin() + 1, group, tag,
                       a.example, b.example, what(sent, at_sent), what(received, at_received));
  }
  return {};
}

void Agreement::regroup(std::vector<std::string> over, MeshShape into) {
  over_ = std::move(over);
  into_ = std::move(into);
}

std::pair<std::vector<int>, std::vector<int>> Agreement::places_and_rows(const std::string& group) const {
  const std::vector<std::string> names = axes_in(group);
  if (!are_axes(names, into_)) {
    const auto axes = axes_of(group, shape_);
    return {ranks_along(shape_, axes), ranks_along(shape_, axes_beside(axes, shape_))};
  }
  // Its ranks are those of `over_`, whose number there tells the place on the other grid.
  const std::vector<int> within = ranks_along(into_, names), beside = ranks_along(into_, axes_beside(names, into_));
  std::vector<int> place = ranks_along(shape_, over_), row = ranks_along(shape_, axes_beside(over_, shape_));
  for (size_t rank = 0; rank < place.size(); ++rank) {
    const auto number = static_cast<size_t>(place[rank]);
    place[rank] = within[number];
    row[rank] = row[rank] * static_cast<int>(beside.size()) + beside[number];
  }
  return {std::move(place), std::move(row)};
}

std::vector<Agreement::Meetings> Agreement::meetings() const {
  std::set<std::string> groups;
  for (const auto& one : classes_) {
    for (const auto& [group, calls] : one.calls) groups.insert(group);
    for (const auto& [group, messages] : one.messages) groups.insert(group);
  }
  std::vector<Meetings> all;
  for (const auto& group : groups) {
    const auto [place, row] = places_and_rows(group);
    Meetings& of = all.emplace_back(Meetings{.group = group, .place_of = std::vector<int>(classes_.size(), kNobody), .together = {}});
    std::map<int, std::set<int>> rows;
    for (size_t rank = 0; rank < class_of_.size(); ++rank) {
      const int one = class_of_[rank];
      if (one == kNobody) continue;
      int& known = of.place_of[static_cast<size_t>(one)];
      known = known == kNobody || known == place[rank] ? place[rank] : kSeveral;
      rows[row[rank]].insert(one);
    }
    for (auto& [number, classes] : rows) of.together.insert(std::move(classes));
  }
  return all;
}

/// Each class with the first of its row, all with each other where peers count.
std::string Agreement::first_difference(const Meetings& of) const {
  for (const auto& classes : of.together) {
    for (const int b : classes) {
      const auto difference = compare_calls(of.group, classes_[static_cast<size_t>(*classes.begin())], classes_[static_cast<size_t>(b)]);
      if (!difference.empty()) return difference;
      for (const int a : classes) {
        const int from = of.place_of[static_cast<size_t>(a)], to = of.place_of[static_cast<size_t>(b)];
        if (from < 0 || to < 0) continue;
        const auto lost = compare_messages(of.group, classes_[static_cast<size_t>(a)], from, classes_[static_cast<size_t>(b)], to);
        if (!lost.empty()) return lost;
      }
    }
  }
  return {};
}

std::string Agreement::first_circle(const std::vector<Meetings>& all) const {
  CircularWait waits;
  for (const auto& one : classes_) waits.add(one.example, one.errands);
  for (const auto& of : all) {
    for (const auto& classes : of.together) {
      for (const int a : classes) {
        for (const int b : classes) waits.meet(of.group, a, of.place_of[static_cast<size_t>(a)], b, of.place_of[static_cast<size_t>(b)]);
      }
    }
  }
  return waits.find();
}

std::string Agreement::first_disagreement() const {
  const auto all = meetings();
  for (const auto& of : all) {
    if (auto difference = first_difference(of); !difference.empty()) return difference;
  }
  return first_circle(all);
}

}  // namespace tessera::plan
