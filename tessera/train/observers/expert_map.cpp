#include "tessera/train/observers/expert_map.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "tessera/core/error.h"
#include "tessera/core/log.h"

namespace tessera {

namespace {

/// White at the mean load, blue towards none, red towards three times it.
std::string heat_color(double relative) {
  const double away = std::clamp(relative < 1 ? 1 - relative : (relative - 1) / 2, 0.0, 1.0);
  const int paper = static_cast<int>(std::lround(255 * (1 - away)));
  return relative < 1 ? fmt::format("#{:02x}{:02x}ff", paper, paper) : fmt::format("#ff{:02x}{:02x}", paper, paper);
}

}  // namespace

void ExpertHeat::add(int64_t step, const std::vector<ExpertLoad>& loads) {
  if (loads.empty()) return;
  layers_.clear();
  for (const ExpertLoad& load : loads) layers_.push_back(load.layer);
  if (columns_.empty() || columns_.back().steps >= static_cast<double>(steps_per_column_)) {
    columns_.push_back({.first = step, .relative = std::vector(loads.size(), std::vector<double>(loads.front().share.size()))});
  }
  Column& column = columns_.back();
  column.last = step;
  column.steps += 1;
  for (size_t layer = 0; layer < loads.size(); ++layer) {
    const auto& share = loads[layer].share;
    for (size_t expert = 0; expert < share.size(); ++expert) column.relative[layer][expert] += share[expert] * static_cast<double>(share.size());
  }
  if (columns_.size() <= kMostColumns) return;
  std::vector<Column> halved;
  for (size_t i = 0; i < columns_.size(); i += 2) {
    halved.push_back(columns_[i]);
    if (i + 1 == columns_.size()) break;
    Column& both = halved.back();
    both.last = columns_[i + 1].last;
    both.steps += columns_[i + 1].steps;
    for (size_t layer = 0; layer < both.relative.size(); ++layer) {
      for (size_t expert = 0; expert < both.relative[layer].size(); ++expert) both.relative[layer][expert] += columns_[i + 1].relative[layer][expert];
    }
  }
  columns_ = std::move(halved);
  steps_per_column_ *= 2;
}

Svg ExpertHeat::draw(const std::string& title) const {
  invariant(!empty(), "a heat map of no steps");
  const size_t experts = columns_.front().relative.front().size();
  const double left = 70, top = 50, cell = 800.0 / static_cast<double>(columns_.size()), row = experts > 32 ? 4 : 10, gap = 8;
  const double layer_height = static_cast<double>(experts) * row + gap;
  Svg picture(left + 820, top + static_cast<double>(layers_.size()) * layer_height + 40);
  picture.text(left, 20, title, {.size = 14, .bold = true});
  picture.text(left, 38, "load of each expert over the mean load: white 1, blue below, red above (full at 3)", {.size = 11});
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    const double y = top + static_cast<double>(layer) * layer_height;
    picture.text(left - 6, y + 10, fmt::format("layer {}", layers_[layer]), {.size = 10, .anchor = "end"});
    for (size_t c = 0; c < columns_.size(); ++c) {
      const Column& column = columns_[c];
      for (size_t expert = 0; expert < experts; ++expert) {
        const double relative = column.relative[layer][expert] / column.steps;
        picture.rect(left + static_cast<double>(c) * cell, y + static_cast<double>(expert) * row, cell, row, heat_color(relative),
                     fmt::format("layer {}, expert {}, steps {} to {}: {:.2f}", layers_[layer], expert, column.first, column.last, relative));
      }
    }
  }
  const double below = top + static_cast<double>(layers_.size()) * layer_height + 14;
  picture.text(left, below, fmt::format("step {}", columns_.front().first), {.size = 10});
  picture.text(left + 800, below, fmt::format("step {}", columns_.back().last), {.size = 10, .anchor = "end"});
  return picture;
}

void ExpertMap::on_start(const RunInfo& run) {
  file_ = run.log_dir / "expert_load.svg";
  title_ = run.name + ": experts";
}

void ExpertMap::after_step(const StepResult& result) { heat_.add(result.step, result.experts); }

void ExpertMap::on_end(const RunEnd&) {
  if (heat_.empty()) return;
  try {
    heat_.draw(title_).save(file_.string());
  } catch (const Error& error) {
    log().warn("{}; the run is not affected", error.what());
  }
}

}  // namespace tessera
