#include "tessera/plan/circular_wait.h"

#include <algorithm>

#include <fmt/format.h>

// Whether lists of calls come to an end does not depend on who goes first: to begin a call never waits, and what was begun stays so. So every class is led as
// far as it comes, again and again, until none moves. Who stands then waits for another who stands, and following that ends in a circle.

namespace tessera::plan {

Errands::Call Errands::begin(const Lane& lane, const std::string& text) {
  const auto [at, fresh] = lanes_.try_emplace(lane, static_cast<uint32_t>(begun_.size()));
  if (fresh) {
    begun_.push_back(0);
    texts_.emplace_back();
  }
  const auto [name, unheard] = known_.try_emplace(text, static_cast<uint32_t>(names_.size()));
  if (unheard) names_.push_back(text);
  texts_[at->second].push_back(name->second);
  const Call call{.lane = at->second, .number = begun_[at->second]++};
  moments_.push_back({.call = call});
  return call;
}

void Errands::wait(const Call& call) { moments_.push_back({.call = call, .waits = true}); }

void CircularWait::add(int rank, const Errands& errands) {
  const size_t lanes = errands.begun_.size();
  all_.push_back({.rank = rank, .errands = &errands, .partners = std::vector<std::vector<Partner>>(lanes), .begun = std::vector<uint32_t>(lanes)});
}

void CircularWait::meet(const std::string& group, int a, int place_of_a, int b, int place_of_b) {
  One& one = all_[static_cast<size_t>(a)];
  const auto& of_b = all_[static_cast<size_t>(b)].errands->lanes_;
  for (auto at = one.errands->lanes_.lower_bound({.group = group, .tag = 0}); at != one.errands->lanes_.end() && at->first.group == group; ++at) {
    Lane other = at->first;
    if (other.way != Lane::Way::Collective) {
      const bool sends = other.way == Lane::Way::Sent;
      if (place_of_a < 0 || place_of_b < 0 || (sends ? other.to : other.from) != place_of_b) continue;
      other.way = sends ? Lane::Way::Received : Lane::Way::Sent;
    }
    const auto found = of_b.find(other);
    if (found == of_b.end()) continue;
    auto& known = one.partners[at->second];
    if (std::ranges::none_of(known, [&](const Partner& partner) { return partner.who == b; })) known.push_back({.who = b, .lane = found->second});
  }
}

const CircularWait::Partner* CircularWait::missing(const One& one) const {
  const Errands::Moment& moment = one.errands->moments_[one.at];
  if (!moment.waits) return nullptr;
  for (const Partner& partner : one.partners[moment.call.lane]) {
    if (all_[static_cast<size_t>(partner.who)].begun[partner.lane] <= moment.call.number) return &partner;
  }
  return nullptr;
}

bool CircularWait::advance(One& one) {
  const size_t before = one.at;
  for (; one.at < one.errands->moments_.size() && missing(one) == nullptr; ++one.at) {
    const Errands::Moment& moment = one.errands->moments_[one.at];
    if (!moment.waits) ++one.begun[moment.call.lane];
  }
  return one.at != before;
}

std::string CircularWait::circle_from(int first) const {
  std::vector<int> seen;
  while (std::ranges::find(seen, first) == seen.end()) {
    seen.push_back(first);
    const One& one = all_[static_cast<size_t>(first)];
    first = missing(one)->who;
  }
  std::string text = "waits in a circle: ";
  for (auto at = std::ranges::find(seen, first); at != seen.end(); ++at) {
    const One& one = all_[static_cast<size_t>(*at)];
    const auto& call = one.errands->moments_[one.at].call;
    text +=
        fmt::format("rank {} waits in {} (#{} of its kind) for ", one.rank, one.errands->names_[one.errands->texts_[call.lane][call.number]], call.number + 1);
    text += fmt::format("rank {}{}", all_[static_cast<size_t>(missing(one)->who)].rank, at + 1 == seen.end() ? "" : "; ");
  }
  return text;
}

std::string CircularWait::find() {
  for (bool moved = true; moved;) {
    moved = false;
    for (One& one : all_) moved = advance(one) || moved;
  }
  for (size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].at < all_[i].errands->moments_.size()) return circle_from(static_cast<int>(i));
  }
  return {};
}

}  // namespace tessera::plan
