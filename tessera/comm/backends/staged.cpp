#include "tessera/comm/backends/staged.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "tessera/comm/decorators/decorator.h"
#include "tessera/memory/host_link.h"

namespace tessera::comm {
namespace {

using Tensors = std::vector<at::Tensor>;

bool is_of_host(const Call& call) {
  const at::Tensor& tensor = call.tensor();
  return !tensor.defined() || tensor.is_cpu() || tensor.is_meta();
}

class StagedEngine final : public DecoratedEngine {
 public:
  using DecoratedEngine::DecoratedEngine;

  Work start(const Call& call) override {
    if (is_of_host(call)) return inner()->start(call);
    const HostLink& link = link_to(call.tensor().device());
    Call staged = call;
    for (auto& tensor : staged.inputs) tensor = link.empty(tensor.numel(), tensor.scalar_type()).view(tensor.sizes());
    for (size_t i = 0; i < call.outputs.size(); ++i) staged.outputs[i] = beside(link, call, staged.inputs, call.outputs[i]);
    {
      const CopyStream::Scope copying(link.out);
      for (size_t i = 0; i < call.inputs.size(); ++i) staged.inputs[i].copy_(call.inputs[i], /*non_blocking=*/true);
      link.out.point().wait();  // the engine reads them at once
    }
    Work work = inner()->start(staged);
    return staged_work({{.work = std::move(work), .after = [&link, from = std::move(staged.outputs), to = call.outputs] { copy_back(link, from, to); }}});
  }

 private:
  /// Host memory for an output: that of the input where the call works in place.
  static at::Tensor beside(const HostLink& link, const Call& call, const Tensors& inputs, const at::Tensor& output) {
    const auto same = std::find_if(call.inputs.begin(), call.inputs.end(), [&](const at::Tensor& input) { return input.is_same(output); });
    if (same != call.inputs.end()) return inputs[static_cast<size_t>(same - call.inputs.begin())];
    return link.empty(output.numel(), output.scalar_type()).view(output.sizes());
  }

  static void copy_back(const HostLink& link, const Tensors& from, const Tensors& to) {
    CopyStream::Point there;
    {
      const CopyStream::Scope copying(link.in);
      for (size_t i = 0; i < to.size(); ++i) at::Tensor(to[i]).copy_(from[i], /*non_blocking=*/true);
      there = link.in.point();
    }
    there.hold_device();
  }

  const HostLink& link_to(at::Device device) {
    const std::lock_guard lock(mutex_);  // messages may come from two threads
    return links_.try_emplace(device.index(), device).first->second;
  }

  std::mutex mutex_;
  std::map<c10::DeviceIndex, const HostLink> links_;
};

}  // namespace

std::shared_ptr<Engine> stage_on_host(const GroupInfo& group, std::shared_ptr<Engine> engine) {
  return std::make_shared<StagedEngine>(group, std::move(engine));
}

}  // namespace tessera::comm
