#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Device.h>

namespace tessera::comm {

/// Seconds for which computing stood still for collectives, added up over scopes. Where the host computes, that is how long the scopes lived. On a device,
/// whose work goes on while the host asks for more, each wait within a scope is measured by two events of the stream that waits, one before it and one behind:
/// the time in which the stream had nothing to do. No host waits for that, and what runs beside a collective is left out.
///
///   costs  on the CPU two reads of the clock a scope; on a device two events a wait, kept as long as this value and its copies
class ExposedTime {
 public:
  /// While it lives, on its thread and in what autograd runs for it, waits of `device` count for `total`, which outlives it. Scopes of other totals within it
  /// count for both, scopes of the same one once.
  class Scope {
   public:
    Scope(ExposedTime& total, at::Device device);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    friend class StreamWait;
    ExposedTime& total_;
    bool on_host_;
    const Scope* outer_;
    std::chrono::steady_clock::time_point start_;
  };

  ExposedTime& operator+=(const ExposedTime& other);

  /// On a device the host waits for the last wait's end, unless it has read what that stream computed since.
  double seconds() const;

 private:
  friend class StreamWait;
  struct Events;
  double on_host_ = 0;
  int open_ = 0;  ///< scopes
  std::vector<std::shared_ptr<const Events>> waits_{};
};

/// Around what makes the current stream of `device` wait for a collective; nothing where no scope wants to know, and on the CPU and meta.
class StreamWait {
 public:
  explicit StreamWait(at::Device device);
  ~StreamWait();
  StreamWait(const StreamWait&) = delete;
  StreamWait& operator=(const StreamWait&) = delete;

 private:
  std::shared_ptr<ExposedTime::Events> events_{};
};

}  // namespace tessera::comm
