#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "tessera/launch/board.h"
#include "tessera/launch/signals.h"

/// An agent's line to the others. Not part of the public surface.
namespace tessera::launch {

/// Exchanges with the board on a thread of its own, since c10d's stores block without limit where a link is cut. A line that no longer answers is left behind,
/// with its thread, and another one is made.
class Link {
 public:
  using Clock = Board::Clock;
  /// Makes the board; called again after an error. Throws CommError with the cause.
  using Connect = std::function<std::unique_ptr<Board>()>;

  struct Seen {
    std::optional<View> view{};  ///< of the last exchange that went through
    int64_t exchanges = 0;       ///< that went through
    int64_t tries = 0;           ///< that came to an end
    bool connecting = false;     ///< the present try has no board yet
    bool current = false;        ///< it wrote what was posted last
    std::string problem{};       ///< why the last try did not
  };

  /// `wake` rings after each exchange; it must outlive the link, and is not used after.
  Link(Connect connect, NodeReport record, std::chrono::milliseconds interval, const Wake& wake);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  /// What the next exchange writes; at once if it differs from what the last one wrote, apart from the beat.
  void post(const NodeReport& record);
  void propose(Proposal proposal);

  Seen look() const;

 private:
  struct Shared;
  static void carry(const std::shared_ptr<Shared>& shared);
  std::shared_ptr<Shared> shared_;
};

}  // namespace tessera::launch
