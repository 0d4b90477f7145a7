#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tessera/core/svg.h"
#include "tessera/train/observer.h"

namespace tessera {

/// The load of each expert over a run's steps as a heat map: a row for each expert of each layer, a column for some steps in a row, blue below the mean load,
/// red above.
class ExpertHeat {
 public:
  void add(int64_t step, const std::vector<ExpertLoad>& loads);
  bool empty() const { return columns_.empty(); }

  Svg draw(const std::string& title) const;

  static constexpr size_t kMostColumns = 200;  ///< when there are more, two become one: memory does not grow with the run

 private:
  struct Column {
    int64_t first = 0, last = 0;
    double steps = 0;
    std::vector<std::vector<double>> relative;  ///< [layer][expert] sum over its steps of load / mean load
  };
  std::vector<int64_t> layers_;
  std::vector<Column> columns_;
  int64_t steps_per_column_ = 1;
};

/// Writes `log_dir/expert_load.svg` when the run ends; of a resumed run the steps since it went on. What cannot be written is said aloud.
class ExpertMap : public Observer {
 public:
  void on_start(const RunInfo& run) override;
  void after_step(const StepResult& result) override;
  void on_end(const RunEnd& end) override;

 private:
  std::filesystem::path file_;
  std::string title_;
  ExpertHeat heat_;
};

}  // namespace tessera
