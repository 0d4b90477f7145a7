#include "tessera/comm/backends/record.h"

#include <numeric>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include "tessera/comm/call_site.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/dtype_name.h"
#include "tessera/comm/traffic.h"

// A dry engine makes the scratch that the engine would make, and lets go of it when the work goes: then the memory of a dry run is that of the run, to the
// byte.

namespace tessera::comm {
namespace {

// Root-only duties fall to one rank; uneven rows are known one by one.
int64_t bytes_sent(const Call& call, const GroupInfo& group, int64_t bytes) {
  if (call.op == Operation::Gather && call.peer == group.rank) return 0;
  if (call.op == Operation::Scatter && call.peer != group.rank) return 0;
  if (call.op == Operation::AllToAll && !call.in_splits.empty()) {
    const auto& in = call.inputs[0];
    const auto rows = std::accumulate(call.in_splits.begin(), call.in_splits.end(), int64_t{0});
    return rows == 0 ? 0 : (rows - call.in_splits[group.rank]) * static_cast<int64_t>(in.nbytes() / rows);
  }
  return traffic(call.op, group.size, bytes).sent_bytes;
}

}  // namespace

CollectiveEvent event_of(const Call& call, const GroupInfo& group) {
  const auto bytes = call.bytes(group.size);
  auto shape = call.whole(group.size);
  return {.op = std::string(to_string(call.op)),
          .group = group.name,
          .group_size = group.size,
          .group_rank = group.rank,
          .peer = call.peer,
          .tag = call.tag,
          .shape = shape,
          .elements = c10::multiply_integers(shape),
          .bytes = bytes,
          .sent_bytes = bytes_sent(call, group, bytes),
          .dtype = call.named_dtype(),
          .site = std::string(CallSite::current())};
}

namespace {

/// Without an inner engine it computes nothing.
class RecordEngine : public DecoratedEngine {
 public:
  RecordEngine(std::shared_ptr<Recorder> recorder, const GroupInfo& group, std::shared_ptr<Engine> inner, ScratchBytes scratch_bytes = {})
      : DecoratedEngine(group, std::move(inner)), recorder_(std::move(recorder)), scratch_bytes_(std::move(scratch_bytes)) {}

  Work start(const Call& call) override {
    if (recorder_) recorder_->add(event_of(call, group()));
    if (inner()) return inner()->start(call);
    const int64_t bytes = scratch_bytes_ ? scratch_bytes_(call, group()) : 0;
    return completed_work(bytes == 0 ? at::Tensor() : at::empty({bytes}, call.outputs[0].options().dtype(at::kByte)));
  }

 private:
  std::shared_ptr<Recorder> recorder_;
  ScratchBytes scratch_bytes_;
};

}  // namespace

void Recorder::add(CollectiveEvent call) {
  const std::lock_guard lock(mutex_);
  call.sequence = static_cast<int64_t>(records_.size());
  records_.push_back(std::move(call));
}

std::vector<CollectiveEvent> Recorder::records() const {
  const std::lock_guard lock(mutex_);
  return records_;
}

void Recorder::clear() {
  const std::lock_guard lock(mutex_);
  records_.clear();
}

std::shared_ptr<Engine> make_record_engine(std::shared_ptr<Recorder> recorder, const GroupInfo& group, std::shared_ptr<Engine> inner) {
  return std::make_shared<RecordEngine>(std::move(recorder), group, std::move(inner));
}

std::shared_ptr<Engine> make_dry_engine(std::shared_ptr<Recorder> recorder, const GroupInfo& group, ScratchBytes scratch_bytes) {
  return std::make_shared<RecordEngine>(std::move(recorder), group, nullptr, std::move(scratch_bytes));
}

Decorator recording(std::shared_ptr<Recorder> recorder) {
  return [recorder](std::shared_ptr<Engine> inner, const GroupInfo& group) { return make_record_engine(recorder, group, std::move(inner)); };
}

}  // namespace tessera::comm

namespace tessera {

void to_json(nlohmann::json& json, const CollectiveEvent& call) {
  json = {{"sequence", call.sequence},
          {"op", call.op},
          {"group", call.group},
          {"group_size", call.group_size},
          {"group_rank", call.group_rank},
          {"peer", call.peer},
          {"tag", call.tag},
          {"shape", call.shape},
          {"elements", call.elements},
          {"bytes", call.bytes},
          {"sent_bytes", call.sent_bytes},
          {"dtype", comm::dtype_name(call.dtype)},
          {"site", call.site}};
}

}  // namespace tessera
