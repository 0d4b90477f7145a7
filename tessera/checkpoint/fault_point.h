#pragma once

#include <filesystem>
#include <functional>
#include <string_view>

namespace tessera::checkpoint {

/// Hears of each change that this room is about to make to the file system, on the thread that makes it: "make folder", "create", "write", "sync", "rename",
/// "sync folder", "remove"; of each slice whose bytes it reads back to hash them: "hash"; and of each thread that it is about to start: "start thread". It may
/// throw what a full disk or a lost permission would, or end the process: tests that kill a save at every such point find what a crash at that moment leaves.
using FaultPoint = std::function<void(std::string_view action, const std::filesystem::path& path)>;

/// Sets the one fault point of the process for as long as it lives. For tests: set while no save runs, one at a time.
class FaultPointScope {
 public:
  explicit FaultPointScope(FaultPoint point);
  ~FaultPointScope();
  FaultPointScope(const FaultPointScope&) = delete;
  FaultPointScope& operator=(const FaultPointScope&) = delete;

 private:
  FaultPoint point_;
};

/// Tells the fault point, where there is one. Costs one load otherwise.
void fault_point(std::string_view action, const std::filesystem::path& path);

}  // namespace tessera::checkpoint
