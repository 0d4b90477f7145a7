#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/world.h"

namespace tessera::comm {

/// What goes wrong.
enum class FaultAction {
  Kill,     ///< this process gets SIGKILL
  Stop,     ///< this process gets SIGSTOP; goes on after SIGCONT
  Hang,     ///< the call never returns; it throws CommError once this rank's world is aborted
  Delay,    ///< the call begins later
  Corrupt,  ///< the bits of the result's first element are inverted, without a word; calls without a result are left alone
  Error,    ///< the call throws CommError
  Skip,     ///< the call is left out, and its outputs as they are: from here on this rank is one call ahead of the others
};

/// One fault: which calls of which rank, and what happens to them.
struct Fault {
  int rank = 0;                    ///< of the world
  std::string op = "any";          ///< a Call's op; any: all of them
  int64_t first = 1, last = 1;     ///< that rank's calls of that op, from 1, over all groups
  std::optional<int> attempt = 0;  ///< TORCHELASTIC_RESTART_COUNT; unset: every attempt
  FaultAction action = FaultAction::Error;
  std::chrono::milliseconds delay{0};
  static constexpr int64_t kForever = std::numeric_limits<int64_t>::max();
  bool operator==(const Fault&) const = default;
};

/// Reads faults as `--inject` takes them: fields in any order, faults separated by semicolons; empty text: none, and any other names one at least.
///   rank=R        which rank
///   op=NAME       all_reduce, ..., send, recv, barrier, or any (default)
///   count=N       which call: 40, 40..60, 40+ (default 1)
///   do=WHAT       kill, stop, hang, delay:200ms, delay:2s, corrupt, error, skip
///   attempt=N     0 (default): not again after a restart; any
/// Throws ConfigError that begins with `knob` and names field, value, rule and way out.
std::vector<Fault> parse_faults(const std::string& text, const std::string& knob = "--inject");

/// The same, refusing what cannot happen in a world of `size` ranks: a rank outside of it, or any fault where there is but one. A restart may have fewer
/// ranks than the first attempt, so ranks are only looked at in that.
std::vector<Fault> parse_faults(const std::string& text, int size, int attempt, const std::string& knob = "--inject");

/// Makes `faults` happen to the calls of world rank `rank` in this attempt. One decorator serves all groups of a rank, since calls are counted across them. A
/// call that nothing happens to costs a comparison per fault. What has never happened when the last group is gone is said aloud.
Decorator fault_injection(const std::vector<Fault>& faults, int rank, int attempt);

}  // namespace tessera::comm
