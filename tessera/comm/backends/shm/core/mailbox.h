#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <list>
#include <mutex>
#include <thread>

#include "tessera/comm/backends/shm/core/session.h"

namespace tessera::comm::shm {

/// Messages from rank to rank. Each ordered pair has a ring in shared memory, through which messages pass one after the other, each behind its tag and size.
///
/// A small message fits into the ring and is sent whether or not the receiver waits. A larger one passes as the receiver takes it. What comes before it is
/// asked for is kept in the receiver's memory, so messages may be received in any order of tags, and ranks that send each other large messages at once get on:
/// whoever waits, for whatever, moves everything that can move. Bytes moved for S: 2 S by copy, through the cache. Thread-safe.
class Mailbox {
 public:
  explicit Mailbox(std::shared_ptr<Session> session);
  /// Waits for what is still to be sent or received, or for the group to break.
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  /// A send or receive. The buffer has to live until it is done, whoever still looks at the request then: `owner` is kept so long.
  class Request {
   public:
    bool done() const { return done_.load(std::memory_order_acquire); }
    /// Once done: what went wrong, if anything did.
    const std::exception_ptr& error() const { return error_; }

   private:
    friend class Mailbox;
    std::byte* data_ = nullptr;
    std::shared_ptr<const void> owner_;
    size_t bytes_ = 0, moved_ = 0;
    int tag_ = 0;
    bool header_sent_ = false;
    std::exception_ptr error_;
    std::atomic<bool> done_{false};
  };
  using Pointer = std::shared_ptr<Request>;

  Pointer send(const void* data, size_t bytes, int to, int tag, std::shared_ptr<const void> owner = nullptr);
  Pointer receive(void* data, size_t bytes, int from, int tag, std::shared_ptr<const void> owner = nullptr);

  /// Blocks until it is done; throws what went wrong with it, Failure as Session::await.
  void wait(const Pointer& request);
  /// Sees to it that what is pending moves on while nobody waits for it.
  void move_on_alone();

 private:
  struct Frame {
    uint64_t bytes = 0;
    int64_t tag = 0;
  };
  /// A message that came, or is coming, before it was asked for.
  struct Unexpected {
    Frame frame;
    std::unique_ptr<std::byte[]> data;
    Pointer claimed{};  ///< who will get it once it is complete
  };
  struct Outgoing {
    RingControl* control;
    std::byte* ring;
    std::deque<Pointer> requests{};
    bool reserved = false;
  };
  struct Incoming {
    RingControl* control;
    std::byte* ring;
    std::list<Pointer> requests{};
    std::list<Unexpected> unexpected{};
    // The message on its way:
    bool in_message = false;
    Frame frame{};
    uint64_t moved = 0;
    Pointer target{};              ///< null where it is unexpected,
    Unexpected* keeper = nullptr;  ///< or where what comes is thrown away with its request's error
  };

  size_t ring_bytes() const { return session_->layout().ring; }
  void put(const Outgoing& out, const void* data, size_t bytes) const;
  void take(const Incoming& in, void* data, size_t bytes) const;
  bool push(int to);
  bool pull(int from);
  bool begin_message(Incoming& in);
  bool continue_message(int from, Incoming& in);
  void end_message(Incoming& in);
  void match(Incoming& in, const Pointer& request);
  static void finish(Request& request, std::exception_ptr error = nullptr);
  void deliver(Unexpected& message, Request& request) const;
  bool progress();
  bool pending() const;
  std::vector<int> awaited() const;
  void fail_all(const std::exception_ptr& error);
  template <class Done>
  void move_until(const Done& done);
  void work();

  std::shared_ptr<Session> session_;
  mutable std::mutex mutex_;
  std::condition_variable posted_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::atomic<int> waiting_{0};  ///< threads in move_until
  std::atomic<uint64_t> moves_{0};
  bool ending_ = false;
  std::thread worker_;
};

}  // namespace tessera::comm::shm
