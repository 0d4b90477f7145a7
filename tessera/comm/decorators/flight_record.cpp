#include "tessera/comm/decorators/flight_record.h"

#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/flight_record/flight_record.h"
#include "tessera/comm/unmeasured.h"
#include "tessera/core/log.h"

// A call is written down before the engine is called: a rank that never comes back has left its last line. Nothing watches works of the host for their end,
// which would cost a thread that polls; whoever first asks, waits or lets go sees it and writes it down. Of a device nobody learns that way how far it has
// come, so those the record's thread follows, as long as somebody holds the work: to hold it longer would be to hold its tensors.

namespace tessera::comm {
namespace {

using flight::State;

/// A call of the record, from entered to its end.
class RecordedCall {
 public:
  RecordedCall(std::shared_ptr<FlightRecord> record, uint64_t number) : record_(std::move(record)), number_(number) {}

  void mark(State state) const { record_->mark(number_, state); }

  void follow(std::function<State()> ask) const { record_->follow(number_, std::move(ask)); }
  void forget() const { record_->forget(number_); }

  /// Marks the end, if `work` has come to it.
  bool ended(c10d::Work& work) const {
    if (!work.isCompleted()) return false;
    mark(work.exception() ? State::Failed : State::Completed);
    return true;
  }

 private:
  std::shared_ptr<FlightRecord> record_;
  uint64_t number_;
};

/// The engine's work, whose end is written down by whoever sees it first.
class RecordedWork : public c10d::Work {
 public:
  /// `reached`: of a device, where the caller's stream stood when it was asked for.
  RecordedWork(RecordedCall call, comm::Work inner, std::optional<c10::Event> reached)
      : call_(std::move(call)), inner_(std::move(inner)), reached_(std::move(reached)) {
    if (reached_) call_.follow([this] { return how_far(); });
  }
  ~RecordedWork() override {
    if (reached_ && !ended_) call_.forget();
    try {
      see_end();
    } catch (...) {  // a device that failed: whoever uses it next is told
    }
  }

  bool isCompleted() override { return see_end(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  void synchronize() override { inner_->synchronize(); }

  bool wait(std::chrono::milliseconds timeout) override {
    if (ended_) return inner_->wait(timeout);
    if (!reached_) call_.mark(State::Waiting);
    try {
      const bool completed = inner_->wait(timeout);
      if (!completed) {
        end(State::Failed);
      } else {
        see_end();  // not yet on a device, whose stream waits in our place
      }
      return completed;
    } catch (...) {
      end(State::Failed);
      throw;
    }
  }

 private:
  // On the record's thread.
  State how_far() {
    if (inner_->isCompleted()) return inner_->exception() ? State::Failed : State::Completed;
    return reached_->query() ? State::Begun : State::InFlight;
  }

  bool see_end() {
    if (!ended_ && inner_->isCompleted()) end(inner_->exception() ? State::Failed : State::Completed);
    return ended_;
  }

  void end(State state) {
    if (reached_) call_.forget();  // who asks now has asked before the end
    call_.mark(state);
    ended_ = true;
  }

  RecordedCall call_;
  comm::Work inner_;
  std::optional<c10::Event> reached_;
  bool ended_ = false;
};

c10::Event stands_at(at::Device device) {
  c10::Event event(device.type());
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

class FlightRecordEngine : public DecoratedEngine {
 public:
  FlightRecordEngine(std::shared_ptr<FlightRecord> record, FlightRecord::GroupSlot slot, const GroupInfo& group, std::shared_ptr<Engine> inner)
      : DecoratedEngine(group, std::move(inner)), record_(std::move(record)), slot_(slot) {}

  Work start(const Call& call) override {
    if (call.is_on_device() && Unmeasured::now()) return inner()->start(call);  // of a graph: it is made in replays, of which nobody here hears
    const RecordedCall entered(record_, record_->enter(slot_, call, number_of_message(call)));
    try {
      std::optional<c10::Event> reached;
      if (call.is_on_device()) reached = stands_at(call.tensor().device());
      auto work = inner()->start(call);
      if (!work || entered.ended(*work)) return work;
      entered.mark(State::InFlight);
      return c10::make_intrusive<RecordedWork>(entered, std::move(work), std::move(reached));
    } catch (...) {
      entered.mark(State::Failed);
      throw;
    }
  }

  void set_place(std::string_view place) override {
    record_->set_place(place);
    DecoratedEngine::set_place(place);
  }

 private:
  // Messages between two ranks are matched by direction and tag, in their order; they are no part of the order of the group's collectives.
  uint64_t number_of_message(const Call& call) {
    if (!call.is_message()) return 0;
    const std::lock_guard lock(mutex_);  // they may come from two threads
    return ++messages_[{call.op, call.peer, call.tag}];
  }

  std::shared_ptr<FlightRecord> record_;
  FlightRecord::GroupSlot slot_;
  std::mutex mutex_;
  std::map<std::tuple<Operation, int, int>, uint64_t> messages_;
};

}  // namespace

Decorator flight_recording(const std::filesystem::path& dir, const Environment& environment) {
  std::shared_ptr<FlightRecord> record;
  try {
    record = std::make_shared<FlightRecord>(dir, environment);
  } catch (...) {
    log().warn("rank {} keeps no flight record: {}", environment.rank, message_of(std::current_exception()));
  }
  return [record](std::shared_ptr<Engine> inner, const GroupInfo& group) -> std::shared_ptr<Engine> {
    const auto slot = record ? record->add_group(group) : std::nullopt;
    if (record && !slot) log().warn("the flight record {} has no room for group {}: its collectives are not recorded", record->path().string(), group.name);
    if (!slot) return inner;
    return std::make_shared<FlightRecordEngine>(record, *slot, group, std::move(inner));
  };
}

}  // namespace tessera::comm
