#include "tessera/comm/backends/record.h"

#include <numeric>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include "tessera/comm/call_site.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/dtype_name.h"
#include "tessera/comm/traffic.h"

namespace tessera::comm {
namespace {

// Root-only duties fall to one rank; uneven rows are known one by one.
int64_t bytes_sent(const Call& call, const GroupInfo& group, int64_t bytes) {
  if (call.op == "gather" && call.peer == group.rank) return 0;
  if (call.op == "scatter" && call.peer != group.rank) return 0;
  if (call.op == "all_to_all" && !call.in_splits.empty()) {
    const auto& in = call.inputs[0];
    const auto rows = std::accumulate(call.in_splits.begin(), call.in_splits.end(), int64_t{0});
    return rows == 0 ? 0 : (rows - call.in_splits[group.rank]) * static_cast<int64_t>(in.nbytes() / rows);
  }
  return traffic(call.op, group.size, bytes).sent_bytes;
}

class RecordBackend : public DecoratedBackend {
 public:
  RecordBackend(std::shared_ptr<Recorder> recorder, const GroupInfo& group, c10::intrusive_ptr<c10d::Backend> inner)
      : DecoratedBackend(group, std::move(inner)), recorder_(std::move(recorder)) {}

 protected:
  Work call(const Call& call, const Forward& forward) override {
    Record record;
    record.op = call.op;
    record.group = group().name;
    record.group_size = group().size;
    record.group_rank = group().rank;
    record.peer = call.peer;
    record.tag = call.tag;
    record.shape = call.whole;
    record.elements = c10::multiply_integers(call.whole);
    record.dtype = call.dtype();
    record.bytes = record.dtype == c10::ScalarType::Undefined ? 0 : record.elements * static_cast<int64_t>(c10::elementSize(record.dtype));
    record.sent_bytes = bytes_sent(call, group(), record.bytes);
    record.site = CallSite::current();
    recorder_->add(std::move(record));
    return carry_out(call, forward);
  }

  virtual Work carry_out(const Call&, const Forward& forward) { return forward(); }

 private:
  std::shared_ptr<Recorder> recorder_;
};

class DryBackend : public RecordBackend {
 public:
  DryBackend(std::shared_ptr<Recorder> recorder, const GroupInfo& group, ScratchBytes scratch_bytes)
      : RecordBackend(std::move(recorder), group, {}), scratch_bytes_(std::move(scratch_bytes)) {}

 protected:
  Work carry_out(const Call& call, const Forward&) override {
    const int64_t bytes = scratch_bytes_ ? scratch_bytes_(call, group()) : 0;
    if (bytes == 0) return completed_work();
    return completed_work(at::empty({bytes}, call.outputs[0].options().dtype(at::kByte)));
  }

 private:
  ScratchBytes scratch_bytes_;
};

}  // namespace

void to_json(nlohmann::json& json, const Record& record) {
  json = {{"sequence", record.sequence},
          {"op", record.op},
          {"group", record.group},
          {"group_size", record.group_size},
          {"group_rank", record.group_rank},
          {"peer", record.peer},
          {"tag", record.tag},
          {"shape", record.shape},
          {"elements", record.elements},
          {"bytes", record.bytes},
          {"sent_bytes", record.sent_bytes},
          {"dtype", dtype_name(record.dtype)},
          {"site", record.site}};
}

void Recorder::add(Record record) {
  const std::lock_guard lock(mutex_);
  record.sequence = static_cast<int64_t>(records_.size());
  records_.push_back(std::move(record));
}

std::vector<Record> Recorder::records() const {
  const std::lock_guard lock(mutex_);
  return records_;
}

void Recorder::clear() {
  const std::lock_guard lock(mutex_);
  records_.clear();
}

c10::intrusive_ptr<c10d::Backend> make_record_backend(std::shared_ptr<Recorder> recorder, const GroupInfo& group, c10::intrusive_ptr<c10d::Backend> inner) {
  return c10::make_intrusive<RecordBackend>(std::move(recorder), group, std::move(inner));
}

c10::intrusive_ptr<c10d::Backend> make_dry_backend(std::shared_ptr<Recorder> recorder, const GroupInfo& group, ScratchBytes scratch_bytes) {
  return c10::make_intrusive<DryBackend>(std::move(recorder), group, std::move(scratch_bytes));
}

Decorator recording(std::shared_ptr<Recorder> recorder) {
  return [recorder](c10::intrusive_ptr<c10d::Backend> inner, const GroupInfo& group) { return make_record_backend(recorder, group, std::move(inner)); };
}

}  // namespace tessera::comm
