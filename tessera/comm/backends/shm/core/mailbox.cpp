#include "tessera/comm/backends/shm/core/mailbox.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

// Two ranks that send each other more than a ring holds wait for each other for ever, if each waits for its own message alone. So whoever waits, for whatever,
// moves everything that can move; and what comes is taken out of the ring whether or not it was asked for, lest a message block those behind it. That is why a
// rank has one bell for all its rings: a waiter has to wake for each.
// A ring has one writer and one reader, each with a counter of its own that only grows: no lock between processes. The mutex is for the threads of one rank. A
// thread of the mailbox moves what nobody waits for, and stands back while somebody does.

namespace tessera::comm::shm {

Mailbox::Mailbox(std::shared_ptr<Session> session) : session_(std::move(session)) {
  const auto& layout = session_->layout();
  const int self = session_->rank();
  for (int peer = 0; peer < session_->size(); ++peer) {
    const auto control = [&](int from, int to) { return reinterpret_cast<RingControl*>(session_->at(layout.ring_control_at(from, to))); };
    outgoing_.push_back({control(self, peer), session_->at(layout.ring_at(self, peer))});
    incoming_.push_back({control(peer, self), session_->at(layout.ring_at(peer, self))});
  }
}

Mailbox::~Mailbox() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    posted_.notify_all();
  }
  if (worker_.joinable()) worker_.join();
}

// Copies into and out of a ring, around its end where necessary.
void Mailbox::put(const Outgoing& out, const void* data, size_t bytes) const {
  const auto at = static_cast<size_t>(out.control->written.load(std::memory_order_relaxed)) % ring_bytes();
  const auto first = std::min(bytes, ring_bytes() - at);
  std::memcpy(out.ring + at, data, first);
  if (first < bytes) std::memcpy(out.ring, static_cast<const std::byte*>(data) + first, bytes - first);
  out.control->written.store(out.control->written.load(std::memory_order_relaxed) + bytes, std::memory_order_release);
}

void Mailbox::take(const Incoming& in, void* data, size_t bytes) const {
  const auto at = static_cast<size_t>(in.control->read.load(std::memory_order_relaxed)) % ring_bytes();
  const auto first = std::min(bytes, ring_bytes() - at);
  if (data) {
    std::memcpy(data, in.ring + at, first);
    if (first < bytes) std::memcpy(static_cast<std::byte*>(data) + first, in.ring, bytes - first);
  }
  in.control->read.store(in.control->read.load(std::memory_order_relaxed) + bytes, std::memory_order_release);
}

void Mailbox::finish(Request& request, std::exception_ptr error) {
  request.owner_ = nullptr;  // before whoever waits goes on, lest memory is freed some time later
  request.error_ = std::move(error);
  request.done_.store(true, std::memory_order_release);
}

Mailbox::Pointer Mailbox::send(const void* data, size_t bytes, int to, int tag, std::shared_ptr<const void> owner) {
  auto request = std::make_shared<Request>();
  request->data_ = static_cast<std::byte*>(const_cast<void*>(data));
  request->owner_ = std::move(owner);
  request->bytes_ = bytes;
  request->tag_ = tag;
  session_->check_sound();
  const std::lock_guard lock(mutex_);
  auto& out = outgoing_[static_cast<size_t>(to)];
  if (!out.reserved) {
    session_->reserve(session_->layout().ring_at(session_->rank(), to), ring_bytes());
    out.reserved = true;
  }
  out.requests.push_back(request);
  push(to);
  return request;
}

Mailbox::Pointer Mailbox::receive(void* data, size_t bytes, int from, int tag, std::shared_ptr<const void> owner) {
  auto request = std::make_shared<Request>();
  request->data_ = static_cast<std::byte*>(data);
  request->owner_ = std::move(owner);
  request->bytes_ = bytes;
  request->tag_ = tag;
  session_->check_sound();
  const std::lock_guard lock(mutex_);
  match(incoming_[static_cast<size_t>(from)], request);
  pull(from);
  return request;
}

// What has come unexpectedly, in order; else the request waits.
void Mailbox::match(Incoming& in, const Pointer& request) {
  const auto message = std::find_if(in.unexpected.begin(), in.unexpected.end(), [&](const auto& m) { return m.frame.tag == request->tag_ && !m.claimed; });
  if (message == in.unexpected.end()) {
    in.requests.push_back(request);
  } else if (in.keeper == &*message) {
    message->claimed = request;
  } else {
    deliver(*message, *request);
    in.unexpected.erase(message);
  }
}

namespace {
std::exception_ptr wrong_size(uint64_t sent, size_t expected, int64_t tag) {
  return std::make_exception_ptr(
      Failure("the message of tag " + std::to_string(tag) + " has " + std::to_string(sent) + " bytes where " + std::to_string(expected) + " are received"));
}
}  // namespace

void Mailbox::deliver(Unexpected& message, Request& request) const {
  if (message.frame.bytes != request.bytes_) return finish(request, wrong_size(message.frame.bytes, request.bytes_, message.frame.tag));
  if (request.bytes_ > 0) std::memcpy(request.data_, message.data.get(), request.bytes_);
  finish(request);
}

// Writes what fits, at most a quarter of the ring at a time so that the receiver copies beside us. True where anything moved.
bool Mailbox::push(int to) {
  auto& out = outgoing_[static_cast<size_t>(to)];
  bool moved = false;
  while (!out.requests.empty()) {
    auto& request = *out.requests.front();
    const auto room = ring_bytes() - (out.control->written.load(std::memory_order_relaxed) - out.control->read.load(std::memory_order_acquire));
    if (!request.header_sent_) {
      if (room < sizeof(Frame)) break;
      const Frame frame{.bytes = request.bytes_, .tag = request.tag_};
      put(out, &frame, sizeof frame);
      request.header_sent_ = true;
    } else if (request.moved_ < request.bytes_) {
      const auto bytes = std::min({static_cast<size_t>(room), request.bytes_ - request.moved_, ring_bytes() / 4});
      if (bytes == 0) break;
      put(out, request.data_ + request.moved_, bytes);
      request.moved_ += bytes;
    }
    moved = true;
    const bool complete = request.moved_ == request.bytes_;
    if (complete || request.moved_ > 0) session_->control(to).bell.ring();
    if (!complete) continue;
    finish(request);
    out.requests.pop_front();
  }
  return moved;
}

bool Mailbox::pull(int from) {
  auto& in = incoming_[static_cast<size_t>(from)];
  bool moved = false;
  while (in.in_message ? continue_message(from, in) : begin_message(in)) moved = true;
  return moved;
}

bool Mailbox::begin_message(Incoming& in) {
  if (in.control->written.load(std::memory_order_acquire) - in.control->read.load(std::memory_order_relaxed) < sizeof(Frame)) return false;
  take(in, &in.frame, sizeof in.frame);
  in.in_message = true;
  in.moved = 0;
  in.target = nullptr;
  in.keeper = nullptr;
  const auto request = std::find_if(in.requests.begin(), in.requests.end(), [&](const auto& r) { return r->tag_ == in.frame.tag; });
  if (request != in.requests.end()) {
    in.target = *request;
    in.requests.erase(request);
  } else {
    in.unexpected.push_back({in.frame, std::make_unique_for_overwrite<std::byte[]>(in.frame.bytes)});
    in.keeper = &in.unexpected.back();
  }
  if (in.frame.bytes == 0) end_message(in);
  return true;
}

bool Mailbox::continue_message(int from, Incoming& in) {
  const auto there = in.control->written.load(std::memory_order_acquire) - in.control->read.load(std::memory_order_relaxed);
  const auto bytes = std::min(there, in.frame.bytes - in.moved);
  if (bytes == 0) return false;
  const bool fits = !in.target || in.target->bytes_ == in.frame.bytes;  // else it is thrown away
  auto* const data = in.target ? in.target->data_ : in.keeper->data.get();
  take(in, fits ? data + in.moved : nullptr, bytes);
  in.moved += bytes;
  session_->control(from).bell.ring();
  if (in.moved == in.frame.bytes) end_message(in);
  return true;
}

void Mailbox::end_message(Incoming& in) {
  in.in_message = false;
  if (in.target) {
    const auto target = std::exchange(in.target, nullptr);
    finish(*target, target->bytes_ == in.frame.bytes ? nullptr : wrong_size(in.frame.bytes, target->bytes_, in.frame.tag));
  } else if (const auto* const keeper = std::exchange(in.keeper, nullptr); keeper->claimed) {
    const auto message = std::find_if(in.unexpected.begin(), in.unexpected.end(), [&](const auto& m) { return &m == keeper; });
    deliver(*message, *message->claimed);
    in.unexpected.erase(message);
  }
}

bool Mailbox::progress() {
  bool moved = false;
  for (int peer = 0; peer < session_->size(); ++peer) {
    moved |= push(peer);
    moved |= pull(peer);
  }
  moves_ += moved;
  return moved;
}

std::vector<int> Mailbox::awaited() const {
  std::vector<int> ranks;
  for (size_t peer = 0; peer < incoming_.size(); ++peer) {
    const auto& in = incoming_[peer];
    const bool receives = !in.requests.empty() || in.target || (in.keeper && in.keeper->claimed);
    if (receives || !outgoing_[peer].requests.empty()) ranks.push_back(static_cast<int>(peer));
  }
  return ranks;
}

bool Mailbox::pending() const { return !awaited().empty(); }

void Mailbox::fail_all(const std::exception_ptr& error) {
  const auto end = [&](auto& requests) {
    for (const auto& request : requests) finish(*request, error);
    requests.clear();
  };
  for (auto& out : outgoing_) end(out.requests);
  for (auto& in : incoming_) {
    end(in.requests);
    if (in.target) finish(*std::exchange(in.target, nullptr), error);
    for (const auto& message : in.unexpected) {
      if (message.claimed) finish(*message.claimed, error);
    }
    in.unexpected.clear();
    in.keeper = nullptr;
    in.in_message = false;
  }
}

// Moves everything that can move until `done`, or until something went wrong, which is then everybody's error.
template <class Done>
void Mailbox::move_until(const Done& done) {
  auto& bell = session_->control(session_->rank()).bell;
  const auto advanced = [&] {
    const std::lock_guard lock(mutex_);
    if (progress() && waiting_ > 1) bell.ring();  // what moved may be what another thread of this rank waits for
    return done();
  };
  const auto late = [&] {
    const std::lock_guard lock(mutex_);
    return awaited();
  };
  waiting_ += 1;
  try {
    session_->await(bell, advanced, late);
    waiting_ -= 1;
  } catch (...) {
    const std::lock_guard lock(mutex_);
    waiting_ -= 1;
    fail_all(std::current_exception());
    bell.ring();
  }
}

void Mailbox::wait(const Pointer& request) {
  if (!request->done()) move_until([&] { return request->done(); });
  if (request->error()) std::rethrow_exception(request->error());
}

void Mailbox::move_on_alone() {
  const std::lock_guard lock(mutex_);
  if (!pending()) return;
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  posted_.notify_all();
}

void Mailbox::work() {
  wait_in_background();
  while (true) {
    {
      std::unique_lock lock(mutex_);
      posted_.wait(lock, [&] { return ending_ || pending(); });
      if (!pending()) return;  // ending
      if (waiting_ > 0) {      // whoever waits moves everything: no need for a second one that competes
        posted_.wait_for(lock, std::chrono::milliseconds(1));
        continue;
      }
    }
    // What moves proves that peers are well: the next wait has its own time.
    const auto before = moves_.load();
    move_until([&] { return moves_ != before || !pending(); });
  }
}

}  // namespace tessera::comm::shm
