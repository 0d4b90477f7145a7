#include "tessera/optim/several.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera::optim {

namespace {

std::vector<ParameterGroup> groups_of(const std::vector<std::unique_ptr<Optimizer>>& optimizers) {
  std::vector<ParameterGroup> all;
  for (const auto& optimizer : optimizers) std::ranges::copy(optimizer->groups(), std::back_inserter(all));
  return all;
}

}  // namespace

Several::Several(std::string kind, std::vector<std::unique_ptr<Optimizer>> optimizers)
    : Optimizer(groups_of(optimizers)), kind_(std::move(kind)), optimizers_(std::move(optimizers)) {}

void Several::take_back_count() {
  for (const auto& optimizer : optimizers_) optimizer->take_back_count();
}

void Several::remember_counts() {
  for (const auto& optimizer : optimizers_) optimizer->remember_counts();
}

void Several::begin(double lr) {
  for (const auto& optimizer : optimizers_) optimizer->begin(lr);
}

void Several::apply(const UpdateTerms& terms) {
  for (const auto& optimizer : optimizers_) optimizer->apply(terms);
}

bool Several::needs_begin() const {
  return std::ranges::any_of(optimizers_, [](const auto& optimizer) { return optimizer->needs_begin(); });
}

bool Several::skips_on_device() const {
  return std::ranges::all_of(optimizers_, [](const auto& optimizer) { return optimizer->skips_on_device(); });
}

bool Several::updates_in_one_pass() const {
  return std::ranges::all_of(optimizers_, [](const auto& optimizer) { return optimizer->updates_in_one_pass(); });
}

std::vector<StateTensor> Several::state() const {
  std::vector<StateTensor> all;
  for (const auto& optimizer : optimizers_) std::ranges::move(optimizer->state(), std::back_inserter(all));
  return all;
}

void Several::hold_state(const std::map<std::string, int64_t>& counts) {
  for (const auto& optimizer : optimizers_) optimizer->hold_state(counts);
}

std::map<std::string, int64_t> Several::update_counts() const {
  std::map<std::string, int64_t> all;
  for (const auto& optimizer : optimizers_) all.merge(optimizer->update_counts());
  return all;
}

void Several::set_update_counts(const std::map<std::string, int64_t>& counts) {
  require_counts_of_all(counts);
  for (const auto& optimizer : optimizers_) {
    std::map<std::string, int64_t> own;
    for (const auto& [name, count] : optimizer->update_counts()) own[name] = counts.at(name);
    optimizer->set_update_counts(own);
  }
}

}  // namespace tessera::optim
