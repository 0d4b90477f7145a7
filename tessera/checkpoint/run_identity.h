#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace tessera::checkpoint {

/// Who wrote a checkpoint: what tells a run's own checkpoints from those of another run, and from those that it went back behind.
///
/// A fresh start draws the name of a run, which all that goes on from its checkpoints keeps. Each start of a process draws another, and knows the starts that
/// it follows, and at which step it left each: the line that it stands on. Two starts that went on from one checkpoint are two lines of one run.
struct RunIdentity {
  struct Ancestor {
    std::string start;
    int64_t step = 0;  ///< of the checkpoint from which the next one went on
    bool operator==(const Ancestor&) const = default;
  };
  std::string run{};                ///< empty: of a version that wrote none
  std::string start{};              ///< of the process that wrote it
  std::string job{};                ///< of the launcher, in all attempts that it made of the program; empty: it gave none, or a version that wrote none
  std::vector<Ancestor> lineage{};  ///< of earlier starts, the oldest first

  /// `job` in both: as Environment::job says.
  static RunIdentity fresh(std::string job = {});
  /// What goes on from this one's checkpoint of `step`.
  RunIdentity continued(int64_t step, std::string job = {}) const;
  /// Whether the checkpoint that `writer` wrote at `step` lies on this line, up to here.
  bool holds(const RunIdentity& writer, int64_t step) const;
  /// Whether it went on, directly or through others, from the checkpoint that `writer` wrote at `step`.
  bool descends_from(const RunIdentity& writer, int64_t step) const;
  bool operator==(const RunIdentity&) const = default;
};

nlohmann::json to_json(const RunIdentity& identity);
/// Throws what parse_manifest turns into a refusal.
RunIdentity run_identity_from(const nlohmann::json& json);

}  // namespace tessera::checkpoint
