#include "tessera/optim/several.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "tessera/memory/memory.h"

namespace tessera::optim {

namespace {

std::vector<ParameterGroup> groups_of(const std::vector<Several::Part>& parts) {
  std::vector<ParameterGroup> all;
  for (const auto& part : parts) std::ranges::copy(part.optimizer->groups(), std::back_inserter(all));
  return all;
}

}  // namespace

Several::Several(std::string kind, std::vector<Part> parts) : Optimizer(groups_of(parts)), kind_(std::move(kind)), parts_(std::move(parts)) {}

template <class Tell>
void Several::tell(Tell&& tell) const {
  for (const Part& part : parts_) {
    const HostMemory beside(part.on_host);
    tell(*part.optimizer);
  }
}

template <class Ask>
std::vector<StateTensor> Several::all_of(Ask&& ask) const {
  std::vector<StateTensor> all;
  tell([&](const Optimizer& optimizer) { std::ranges::move(ask(optimizer), std::back_inserter(all)); });
  return all;
}

std::map<std::string, std::string> Several::kinds() const {
  std::map<std::string, std::string> all;
  for (const Part& part : parts_) all.merge(part.optimizer->kinds());
  return all;
}

void Several::take_back_count() {
  tell([](Optimizer& optimizer) { optimizer.take_back_count(); });
}

void Several::remember_counts() {
  tell([](Optimizer& optimizer) { optimizer.remember_counts(); });
}

void Several::begin(double lr) {
  tell([&](Optimizer& optimizer) { optimizer.begin(lr); });
}

void Several::apply(const UpdateTerms& terms) {
  tell([&](Optimizer& optimizer) { optimizer.apply(terms); });
}

std::set<std::string> Several::needs_wholes() const {
  std::set<std::string> all;
  for (const Part& part : parts_) all.merge(part.optimizer->needs_wholes());
  return all;
}

void Several::meet_nobody() {
  tell([](Optimizer& optimizer) { optimizer.meet_nobody(); });
}

bool Several::needs_begin() const {
  return std::ranges::any_of(parts_, [](const Part& part) { return part.optimizer->needs_begin(); });
}

bool Several::updates_late() const {
  return std::ranges::any_of(parts_, [](const Part& part) { return part.optimizer->updates_late(); });
}

/// A part on the host cannot ask a device.
bool Several::skips_on_device() const {
  return std::ranges::all_of(parts_, [](const Part& part) { return !part.on_host && part.optimizer->skips_on_device(); });
}

bool Several::updates_in_one_pass() const {
  return std::ranges::all_of(parts_, [](const Part& part) { return part.optimizer->updates_in_one_pass(); });
}

bool Several::writes_rounded() const {
  return std::ranges::all_of(parts_, [](const Part& part) { return part.optimizer->writes_rounded(); });
}

std::vector<StateTensor> Several::state() const {
  return all_of([](const Optimizer& optimizer) { return optimizer.state(); });
}

std::vector<StateTensor> Several::state_to_save() const {
  return all_of([](const Optimizer& optimizer) { return optimizer.state_to_save(); });
}

std::vector<StateTensor> Several::state_at_hand() const {
  return all_of([](const Optimizer& optimizer) { return optimizer.state_at_hand(); });
}

void Several::hold_state(const std::map<std::string, int64_t>& counts) {
  tell([&](Optimizer& optimizer) { optimizer.hold_state(counts); });
}

void Several::follow_all_but(const std::set<std::string>& ahead) {
  tell([&](Optimizer& optimizer) { optimizer.follow_all_but(ahead); });
}

std::map<std::string, int64_t> Several::update_counts() const {
  std::map<std::string, int64_t> all;
  for (const Part& part : parts_) all.merge(part.optimizer->update_counts());
  return all;
}

void Several::set_update_counts(const std::map<std::string, int64_t>& counts) {
  require_counts_of_all(counts);
  tell([&](Optimizer& optimizer) {
    std::map<std::string, int64_t> own;
    for (const auto& [name, count] : optimizer.update_counts()) own[name] = counts.at(name);
    optimizer.set_update_counts(own);
  });
}

}  // namespace tessera::optim
