#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include <c10/core/ScalarType.h>

/// What a rank does, one event after the other: operators, collectives and the waits for them, reads on the host, memory that is taken and given back, and the
/// actions of a schedule around them. Who does something says so where it is done (memory/ledger.cpp, comm/collectives.cpp, nn/record_events.cpp,
/// pipeline/executor.cpp), to the one stream that its thread has; who counts or foretells reads the list.
namespace tessera {

enum class MemoryCategory : uint8_t;  // memory/memory.h

/// An operator that is not made of others; views and empty tensors are none.
struct OperatorEvent {
  std::string name{};                                  ///< "aten::mm"
  std::vector<int64_t> shape{};                        ///< of its first result
  c10::ScalarType dtype = c10::ScalarType::Undefined;  ///< the same
  double flops = 0;                                    ///< of matrix products (nn::product_flops)
  int64_t read_bytes = 0, written_bytes = 0;           ///< of the tensors that it takes, and that it makes or changes
  bool again = false;                                  ///< computed a second time, by recompute
  bool beside = false;                                 ///< of no pass of the model (BesidePasses)
  bool crosses = false;                                ///< between the host and the device beside it
  bool on_host = false;                                ///< what it makes or changes lies beside the device; where nothing crosses the host's cores run it
  bool causal = false;                                 ///< attention of a triangle: half of its FLOPs, which are those of the square, are never computed
  bool operator==(const OperatorEvent&) const = default;
};

/// A collective or message has started; what its engine, and decorators of it, took and computed for that is told before. Shape, elements and bytes are of the
/// whole: the reduced tensor, the gathered result, what is scattered or dealt.
struct CollectiveEvent {
  int64_t sequence = 0;  ///< of this rank, over all groups, from 0
  std::string op{};      ///< a comm::Operation's name
  std::string group{};   ///< the group's name: mesh axes joined by '+'
  int group_size = 1;
  int group_rank = 0;
  int peer = -1;  ///< root, destination or source, in the group
  int tag = 0;
  std::vector<int64_t> shape{};
  int64_t elements = 0;
  int64_t bytes = 0;
  int64_t sent_bytes = 0;  ///< what this rank sends at least (comm/traffic.h; for uneven all_to_all its own rows)
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::string site{};  ///< innermost comm::CallSite
  bool operator==(const CollectiveEvent&) const = default;
};

/// The rank waits until a collective is done.
struct WaitEvent {
  bool operator==(const WaitEvent&) const = default;
};

/// The rank waits for values on the host (core/host_read.h).
struct HostReadEvent {
  int64_t bytes = 0;
  bool operator==(const HostReadEvent&) const = default;
};

/// Memory taken, or given back where `bytes` is below zero. What changes its category is given back under the one and taken under the other.
struct MemoryChange {
  MemoryCategory category{};
  int64_t bytes = 0;
  bool on_host = false;  ///< beside the device
  bool operator==(const MemoryChange&) const = default;
};

/// Where an action of a schedule, with its messages, begins or ends.
struct ActionEvent {
  std::string action{};  ///< "2F0" (pipeline/schedules/schedule.h)
  bool begins = true;
  bool operator==(const ActionEvent&) const = default;
};

struct Event {
  using What = std::variant<OperatorEvent, CollectiveEvent, WaitEvent, HostReadEvent, MemoryChange, ActionEvent>;
  What what{};
  /// Storages, by the number that the rank's tracker gave each (memory/ledger.h); a collective in flight counts as one of its own, below zero, which its start
  /// writes and its wait reads. What is not tracked has none.
  std::vector<int64_t> reads{}, writes{};
  bool operator==(const Event&) const = default;
};

using Events = std::vector<Event>;

/// For each event the earlier ones that it has to wait for, ascending: those that last wrote what it reads, writes, or gives back, and for what is written or
/// given back also those that have read it since. Besides, whatever the rank asks of one place is done in the order of the list: operators on the device, the
/// collectives of a group, the host's waits and reads, which hold up all that comes behind them.
std::vector<std::vector<int64_t>> dependencies(const Events& events);

/// Takes down what happens, from any thread.
class EventStream {
 public:
  void add(Event event);
  /// A number for a call in flight.
  int64_t number_in_flight();
  /// All up to now; the stream is empty again.
  Events take();
  /// Of the operators up to now, taken or not.
  double flops() const;
  /// How many events there were, taken or not.
  int64_t count() const;

  /// Where this thread's events go; null: nobody listens.
  static EventStream* current();

 private:
  mutable std::mutex mutex_;
  Events events_;
  int64_t count_ = 0, in_flight_ = 0;
  double flops_ = 0;
};

/// While alive, the events of this thread, and of whatever works on its behalf (core/ambient.h), go to `stream`. nn/record_events.h opens it with all the rest.
class ListenToEvents {
 public:
  explicit ListenToEvents(EventStream& stream);
  ~ListenToEvents();
  ListenToEvents(const ListenToEvents&) = delete;
  ListenToEvents& operator=(const ListenToEvents&) = delete;

 private:
  EventStream* before_;
};

/// While alive, what this thread computes, and whatever works on its behalf, is of no pass of the model, though it may lie between the products of one: an
/// optimizer's matrix products, or those that compress gradients. FLOPs of passes leave them out.
class BesidePasses {
 public:
  BesidePasses();
  ~BesidePasses();
  BesidePasses(const BesidePasses&) = delete;
  BesidePasses& operator=(const BesidePasses&) = delete;

  /// Whether one is alive.
  static bool now();

 private:
  bool before_;
};

/// Those of one kind, in their order.
template <typename What>
std::vector<What> only(const Events& events) {
  std::vector<What> found;
  for (const Event& event : events) {
    if (const auto* what = std::get_if<What>(&event.what)) found.push_back(*what);
  }
  return found;
}

}  // namespace tessera
