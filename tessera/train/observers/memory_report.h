#pragma once

#include <filesystem>
#include <string>

#include "tessera/core/svg.h"
#include "tessera/train/observer.h"

namespace tessera {

/// What was alive when most was, and how it came to that, of one step of rank 0 (docs/memory.md): a picture, and the same as text on standard output. Hears
/// of one such step in a run (MemoryWishes::report). A file that cannot be written is said aloud, and training goes on.
class MemoryReport : public Observer {
 public:
  /// `file`: of the picture; empty: memory_report.svg in log.dir.
  explicit MemoryReport(std::filesystem::path file = {}) : file_(std::move(file)) {}

  void on_start(const RunInfo& run) override;
  void after_step(const StepResult& result) override;

 private:
  std::filesystem::path file_;
  RunInfo run_;
};

/// The picture: stacked areas by category over the step, its phases, the peak with its value, and the ten largest tensors alive then.
Svg draw_memory(const MemoryHistory& history, const std::string& title);

/// Where the peak was, how much each category had then, and the ten largest tensors.
std::string memory_text(const MemoryHistory& history);

}  // namespace tessera
