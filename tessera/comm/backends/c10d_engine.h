#pragma once

#include <atomic>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/comm/engine.h"

namespace tessera::comm {

/// A backend of libtorch's, or one that is written for it, as an engine: the one place that knows how c10d asks for each operation.
class C10dEngine : public Engine {
 public:
  explicit C10dEngine(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  std::string name() const override { return backend_->getBackendName(); }
  Work start(const Call& call) override;
  bool matches_tags() const override { return !runs_on_streams(); }
  void set_timeout(std::chrono::milliseconds timeout) override { backend_->setTimeout(timeout); }
  void abort() override { backend_->abort(); }
  void shutdown() override { backend_->shutdown(); }
  bool fails_unseen() const override { return runs_on_streams(); }
  std::string failure() override;
  at::Tensor empty(int64_t elements, const at::TensorOptions& options) override;

 private:
  /// Whether calls are work of the group's own streams of a device, in order there (NCCL).
  bool runs_on_streams() const { return backend_->getBackendName() == "nccl"; }
  Work ask(const Call& call);
  Work ask_in_order(const Call& call);  ///< for a minimum or maximum that keeps NaN (extremum.h)

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::atomic<uint64_t> asked_{0};                   ///< calls so far
  std::atomic<Operation> last_{Operation::Barrier};  ///< of them
};

}  // namespace tessera::comm
