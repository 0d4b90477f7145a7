#include "tessera/comm/backends/two_level/two_level.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/comm/backends/two_level/collectives.h"
#include "tessera/comm/backends/work_queue.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

Op supported(const c10d::ReduceOp& op) {
  const auto ours = op_of(op);
  if (!ours) throw std::runtime_error("a group of two levels can sum, multiply and take the least and the most");
  return *ours;
}

class TwoLevelBackend : public c10d::Backend {
 public:
  TwoLevelBackend(const GroupInfo& group, Levels levels) : Backend(group.rank, group.size), levels_(std::move(levels)), collectives_(levels_, group.rank) {}

  const std::string getBackendName() const override { return "two_level"; }

  void setTimeout(std::chrono::milliseconds timeout) override {
    for (const auto& engine : engines()) engine->setTimeout(timeout);
  }

  void abort() override {
    queue_.abort();
    for (const auto& engine : engines()) engine->abort();
  }

  void shutdown() override {
    for (const auto& engine : engines()) engine->shutdown();
  }

  // Memory in which a host's members reduce in place.
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return levels_.local.backend() && levels_.local.backend()->supportsTensorAlloc(device); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override { return levels_.local.backend()->allocateTensor(size, std::move(options)); }

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return queue_.run([this, tensor = tensors[0], op = supported(options.reduceOp)] { collectives_.all_reduce(tensor, op); }, options.asyncOp);
  }

  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return queue_.run(
        [this, tensor = tensors[0], root = static_cast<int>(options.rootRank), op = supported(options.reduceOp)] { collectives_.reduce(tensor, root, op); },
        options.asyncOp);
  }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return queue_.run([this, tensor = tensors[0], root = static_cast<int>(options.rootRank)] { collectives_.broadcast(tensor, root); }, options.asyncOp);
  }

  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return queue_.run([this, output, input] { collectives_.all_gather(output, input); }, options.asyncOp);
  }

  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return queue_.run([this, output, input, op = supported(options.reduceOp)] { collectives_.reduce_scatter(output, input, op); }, options.asyncOp);
  }

  Work barrier(const c10d::BarrierOptions& options) override {
    return queue_.run([this] { collectives_.barrier(); }, options.asyncOp);
  }

  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                     const c10d::AllToAllOptions& options) override {
    return flat().alltoall_base(output, input, output_splits, input_splits, options);
  }

  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override { return flat().gather(outputs, inputs, options); }

  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return flat().scatter(outputs, inputs, options);
  }

  // Engines take messages beside collectives, so they need not queue: two ranks that send to each other first must not wait for each other.
  Work send(Tensors& tensors, int destination, int tag) override {
    const auto [engine, peer] = way_to(destination);
    return engine->send(tensors, peer, tag);
  }

  Work recv(Tensors& tensors, int source, int tag) override {
    const auto [engine, peer] = way_to(source);
    return engine->recv(tensors, peer, tag);
  }

 private:
  c10d::Backend& flat() const { return *levels_.flat.backend(); }

  std::vector<c10::intrusive_ptr<c10d::Backend>> engines() const {
    std::vector<c10::intrusive_ptr<c10d::Backend>> engines;
    for (const auto* group : {&levels_.local, &levels_.across, &levels_.flat}) {
      if (group->backend()) engines.push_back(group->backend());
    }
    return engines;
  }

  std::pair<c10::intrusive_ptr<c10d::Backend>, int> way_to(int member) const {
    const auto& hosts = levels_.hosts;
    if (hosts.host(member) != hosts.host(getRank())) return {levels_.flat.backend(), member};
    return {levels_.local.backend(), hosts.local_rank(member)};
  }

  const Levels levels_;
  TwoLevelCollectives collectives_;
  WorkQueue queue_;  // last: it ends first
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_two_level_backend(const GroupInfo& group, Levels levels) {
  return c10::make_intrusive<TwoLevelBackend>(group, std::move(levels));
}

}  // namespace tessera::comm
