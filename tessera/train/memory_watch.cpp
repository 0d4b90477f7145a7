#include "tessera/train/memory_watch.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "tessera/comm/call_site.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/saved_tensors.h"

// A backward node does not know its module, and hooks on nodes would cost one for each operator. But libtorch numbers nodes as forward makes them, so a
// module's nodes are those whose number lies between its beginning and its end: a list of where each stretch begins, and a binary search in backward.

namespace tessera {

namespace {

/// Which module made which autograd node. Numbers only grow on the thread that runs forward, so what a module made lies between its entering and its leaving.
class NodeMakers {
 public:
  /// From the next node on, `module` makes them.
  void from_now(std::string_view module) {
    if (std::exchange(backward_has_run_, false) && !nn::recomputing()) stretches_.clear();  // of a graph that is gone
    stretches_.push_back({at::sequence_number::peek(), module});
  }

  /// Who made the node that this thread runs in backward, or the parameter whose gradients it adds up; empty in forward, and for nodes of no module.
  std::string_view of_running_node() {
    const auto node = torch::autograd::get_current_node();
    if (!node) return {};
    backward_has_run_ = true;
    if (const auto* sum = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get())) return nn::slice_of(sum->variable).name;
    const auto after = std::upper_bound(stretches_.begin(), stretches_.end(), node->sequence_nr(),
                                        [](uint64_t number, const Stretch& stretch) { return number < stretch.first; });
    return after == stretches_.begin() ? std::string_view() : std::prev(after)->module;
  }

 private:
  struct Stretch {
    uint64_t first;
    std::string_view module;
  };
  std::vector<Stretch> stretches_;
  bool backward_has_run_ = false;
};

class LabelModules final : public nn::Interceptor {
 public:
  explicit LabelModules(std::shared_ptr<NodeMakers> makers) : makers_(std::move(makers)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    const Inside inside(*makers_, module.path());
    return next(std::move(inputs));
  }

 private:
  class Inside {
   public:
    Inside(NodeMakers& makers, std::string_view path) : makers_(makers), outer_(MemoryLabel::current()), label_(path) {
      makers_.from_now(MemoryLabel::current());
    }
    ~Inside() { makers_.from_now(outer_); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    NodeMakers& makers_;
    std::string_view outer_;
    MemoryLabel label_;
  };

  std::shared_ptr<NodeMakers> makers_;
};

class DescribeResults final : public nn::OperatorHooks {
 public:
  DescribeResults(MemoryTracker tracker, std::shared_ptr<NodeMakers> makers) : tracker_(std::move(tracker)), makers_(std::move(makers)) {}

  void call(nn::OperatorCall& operation) override {
    {
      const MemoryLabel label(MemoryLabel::current().empty() ? place() : std::string_view());
      operation.run();
    }
    for (const auto& result : operation.results()) {
      if (result.isTensor()) tracker_.describe(result.toTensor());
      if (!result.isTensorList()) continue;
      for (const at::Tensor& tensor : result.toTensorVector()) tracker_.describe(tensor);
    }
  }

 private:
  /// Outside of every module's call. (What is computed again in backward runs inside of one.)
  std::string_view place() {
    const auto module = makers_->of_running_node();
    return module.empty() ? comm::CallSite::current() : module;
  }

  MemoryTracker tracker_;
  std::shared_ptr<NodeMakers> makers_;
};

}  // namespace

MemoryWatch::MemoryWatch(MemoryTracker tracker, const Composition& run) {
  for (const auto* named : {&run.parameters, &run.updated}) {
    for (const auto& p : *named) {
      tracker.describe(p.tensor, p.name);
      tracker.describe(p.tensor.grad(), p.name + ".grad");
    }
  }
  for (const auto& held : run.optimizer->state_at_hand()) tracker.describe(held.tensor, held.parameter + "." + held.state);
  for (const auto& p : run.parameters) {
    if (!p.tensor.requires_grad()) continue;
    attached_.add(nn::GradientDispatcher::of(p.tensor).listen(
        [tracker, name = p.name + ".grad"](const at::Tensor& parameter) mutable { tracker.describe(parameter.grad(), name); }));
  }
  const auto makers = std::make_shared<NodeMakers>();
  const auto labels = std::make_shared<LabelModules>(makers);
  run.model->apply([&](torch::nn::Module& module) {
    if (auto* ours = dynamic_cast<nn::Module*>(&module)) attached_.add(nn::attach(*ours, labels));
  });
  operators_.emplace(std::make_shared<DescribeResults>(tracker, makers));
}

MemoryWatch::~MemoryWatch() = default;

}  // namespace tessera
