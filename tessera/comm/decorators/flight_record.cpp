#include "tessera/comm/decorators/flight_record.h"

#include <map>
#include <memory>

#include <c10/util/accumulate.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/flight_record/flight_record.h"
#include "tessera/core/log.h"

namespace tessera::comm {
namespace {

using flight::State;

std::string_view name_of(Op reduction) {
  switch (reduction) {
    case Op::Sum:
      return "sum";
    case Op::Product:
      return "product";
    case Op::Min:
      return "min";
    case Op::Max:
      return "max";
  }
  return "other";
}

/// A call of the record, from entered to its end.
class RecordedCall {
 public:
  RecordedCall(std::shared_ptr<FlightRecord> record, uint64_t number) : record_(std::move(record)), number_(number) {}

  void mark(State state) const { record_->mark(number_, state); }

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
  RecordedWork(RecordedCall call, c10::intrusive_ptr<c10d::Work> inner) : call_(std::move(call)), inner_(std::move(inner)) {}
  ~RecordedWork() override {
    try {
      see_end();
    } catch (...) {  // a device that failed: whoever uses it next is told
    }
  }

  bool isCompleted() override { return see_end(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

  bool wait(std::chrono::milliseconds timeout) override {
    if (ended_) return inner_->wait(timeout);
    call_.mark(State::Waiting);
    try {
      const bool completed = inner_->wait(timeout);
      if (!completed) {
        end(State::Failed);
      } else if (!see_end()) {
        call_.mark(State::InFlight);  // on a device, whose stream waits in our place
      }
      return completed;
    } catch (...) {
      end(State::Failed);
      throw;
    }
  }

 private:
  bool see_end() {
    if (!ended_) ended_ = call_.ended(*inner_);
    return ended_;
  }

  void end(State state) {
    call_.mark(state);
    ended_ = true;
  }

  RecordedCall call_;
  c10::intrusive_ptr<c10d::Work> inner_;
  bool ended_ = false;
};

class FlightRecordBackend : public DecoratedBackend {
 public:
  FlightRecordBackend(std::shared_ptr<FlightRecord> record, FlightRecord::GroupSlot slot, const GroupInfo& group, c10::intrusive_ptr<c10d::Backend> inner)
      : DecoratedBackend(group, std::move(inner)), record_(std::move(record)), slot_(slot) {}

 protected:
  Work call(const Call& call, const Forward& forward) override {
    const RecordedCall entered(record_, enter(call));
    try {
      auto work = forward();
      if (!work || entered.ended(*work)) return work;
      entered.mark(State::InFlight);
      return c10::make_intrusive<RecordedWork>(entered, std::move(work));
    } catch (...) {
      entered.mark(State::Failed);
      throw;
    }
  }

 private:
  uint64_t enter(const Call& call) {
    const auto* tensor = !call.inputs.empty() ? &call.inputs[0] : !call.outputs.empty() ? &call.outputs[0] : nullptr;
    const bool has_data = tensor && tensor->defined();
    return record_->enter(slot_, {.op = call.op,
                                  .shape = call.whole,
                                  .dtype = has_data ? tensor->scalar_type() : c10::ScalarType::Undefined,
                                  .reduction = call.reduction ? name_of(*call.reduction) : std::string_view{},
                                  .bytes = has_data ? c10::multiply_integers(call.whole) * static_cast<int64_t>(tensor->element_size()) : 0,
                                  .peer = call.peer,
                                  .tag = call.tag,
                                  .site = CallSite::current(),
                                  .message = number_of_message(call)});
  }

  // Messages between two ranks are matched by direction and tag, in their order; they are no part of the order of the group's collectives.
  uint64_t number_of_message(const Call& call) {
    const bool sends = call.op == "send";
    if (!sends && call.op != "recv") return 0;
    return ++messages_[{sends, call.peer, call.tag}];
  }

  std::shared_ptr<FlightRecord> record_;
  FlightRecord::GroupSlot slot_;
  std::map<std::tuple<bool, int, int>, uint64_t> messages_;
};

}  // namespace

Decorator flight_recording(const std::filesystem::path& dir, const Environment& environment) {
  std::shared_ptr<FlightRecord> record;
  try {
    record = std::make_shared<FlightRecord>(dir, environment);
  } catch (...) {
    log().warn("rank {} keeps no flight record: {}", environment.rank, message_of(std::current_exception()));
  }
  return [record](c10::intrusive_ptr<c10d::Backend> inner, const GroupInfo& group) -> c10::intrusive_ptr<c10d::Backend> {
    const auto slot = record ? record->add_group(group) : std::nullopt;
    if (record && !slot) log().warn("the flight record {} has no room for group {}: its collectives are not recorded", record->path().string(), group.name);
    if (!slot) return inner;
    return c10::make_intrusive<FlightRecordBackend>(record, *slot, group, std::move(inner));
  };
}

}  // namespace tessera::comm
