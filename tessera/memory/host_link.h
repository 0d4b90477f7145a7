#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

namespace tessera {

/// A stream of a device for copies beside the one that computes. On the CPU and on meta, where work is done when it is asked for, there is none, and nothing
/// here does anything. A value: copies of it are the same stream. Used by one thread.
class CopyStream {
 public:
  explicit CopyStream(at::Device device);

  /// What copies begin behind.
  enum class Behind {
    Current,  ///< everything that was asked for on the thread's current stream before: memory that is read or used again is ready by then
    Nothing,  ///< but the stream's own: for memory that no other stream has touched, allocated within the scope
  };

  /// While alive, the device's work that this thread asks for goes to the stream.
  class Scope {
   public:
    explicit Scope(const CopyStream& stream, Behind behind = Behind::Current);

   private:
    c10::OptionalStreamGuard guard_;
  };

  /// What the stream was asked for up to a moment. Default: nothing.
  class Point {
   public:
    Point() = default;
    /// What the current stream is asked for from here on waits for it.
    void hold_device() const;
    /// The host waits for it.
    void wait() const;
    /// Whether `wait` would return at once.
    bool done() const;

   private:
    friend class CopyStream;
    struct Event;
    std::shared_ptr<Event> event_{};  ///< null: nothing to wait for
  };
  Point point() const;

 private:
  std::optional<c10::Stream> stream_{};
};

/// The memory of `tensor`, which was allocated on another stream, is given to nobody else before what the current stream was asked for by the time when it is
/// freed is done. Nothing on the CPU and on meta.
void keep_until_used(const at::Tensor& tensor);

/// The host beside a device: memory there, and a stream for each direction, so that both run at once.
struct HostLink {
  explicit HostLink(at::Device device);

  /// A tensor of `size` elements on the host, undefined in content: where the device is an accelerator, in pinned memory, which it copies from and to while the
  /// host goes on. Counts as HostMemory under the thread's category.
  at::Tensor empty(int64_t size, at::ScalarType dtype) const;

  at::Device device;
  CopyStream in, out;  ///< to the device, to the host
};

}  // namespace tessera
