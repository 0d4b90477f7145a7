#include "tessera/comm/engine.h"

#include <algorithm>
#include <atomic>

namespace tessera::comm {
namespace {

class CompletedWork : public c10d::Work {
 public:
  explicit CompletedWork(at::Tensor scratch) : scratch_(std::move(scratch)) { finish(); }

 private:
  at::Tensor scratch_;
};

class StagedWork : public c10d::Work {
 public:
  explicit StagedWork(std::vector<WorkStage> stages) : stages_(std::move(stages)) {}

  bool isCompleted() override {
    return std::all_of(stages_.begin() + static_cast<std::ptrdiff_t>(done_), stages_.end(), [](const WorkStage& stage) { return stage.work->isCompleted(); });
  }

  bool isSuccess() const override {
    return std::ranges::all_of(stages_, [](const WorkStage& stage) { return stage.work->isSuccess(); });
  }

  std::exception_ptr exception() const override {
    for (const WorkStage& stage : stages_) {
      if (auto error = stage.work->exception()) return error;
    }
    return nullptr;
  }

  bool wait(std::chrono::milliseconds timeout) override {
    for (; done_ < stages_.size(); ++done_) {
      const auto& stage = stages_[done_];
      if (!stage.work->wait(timeout)) return false;
      if (stage.after) stage.after();
    }
    return true;
  }

  void synchronize() override {
    for (size_t i = done_; i < stages_.size(); ++i) stages_[i].work->synchronize();
  }

 private:
  std::vector<WorkStage> stages_;
  std::atomic<size_t> done_ = 0;  // who asks whether it is completed may be another thread
};

// Shape of `ranks` parts one below the other.
std::vector<int64_t> stacked(const at::Tensor& part, int ranks) {
  if (part.dim() == 0) return {ranks};
  auto shape = part.sizes().vec();
  shape[0] *= ranks;
  return shape;
}

}  // namespace

Work completed_work(at::Tensor scratch) { return c10::make_intrusive<CompletedWork>(std::move(scratch)); }
Work staged_work(std::vector<WorkStage> stages) { return c10::make_intrusive<StagedWork>(std::move(stages)); }

const at::Tensor& Call::tensor() const {
  static const at::Tensor none;
  return !inputs.empty() ? inputs[0] : !outputs.empty() ? outputs[0] : none;
}

std::vector<int64_t> Call::whole(int ranks) const {
  if (!tensor().defined()) return {0};
  if (op == Operation::Gather) return stacked(inputs[0], ranks);
  if (op == Operation::Scatter) return stacked(outputs[0], ranks);
  return (op == Operation::AllGather ? outputs[0] : tensor()).sizes().vec();
}

int64_t Call::bytes(int ranks) const {
  if (!tensor().defined()) return 0;
  if (op == Operation::Gather) return static_cast<int64_t>(inputs[0].nbytes()) * ranks;
  return static_cast<int64_t>(op == Operation::AllGather || op == Operation::Scatter ? outputs[0].nbytes() : tensor().nbytes()) *
         (op == Operation::Scatter ? ranks : 1);
}

}  // namespace tessera::comm
