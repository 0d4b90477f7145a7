#include "tessera/pipeline/split/traced_stage.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/core/error.h"

namespace tessera::tape {

namespace {

void check_form(const at::Tensor& tensor, const Form& form, int stage, const std::string& name) {
  require(tensor.defined() && tensor.sizes() == at::IntArrayRef(form.sizes) && tensor.scalar_type() == form.dtype, "pipeline: stage ", stage, " is given ",
          tensor.defined() ? to_string(form_of(tensor)) : "nothing", " for ", name, ", and was recorded with ", to_string(form),
          "; sizes are part of the recording: call expect() with inputs of the new shapes on every rank");
}

}  // namespace

StagePass::StagePass(std::shared_ptr<const Recording> recording, int stage, const std::vector<at::Tensor>& fed, const std::vector<at::Tensor>& received)
    : recording_(std::move(recording)), stage_(stage) {
  const Graph& graph = *recording_->graph;
  require(fed.size() == plan().fed.size(), "pipeline: stage ", stage, " takes ", plan().fed.size(), " of the model's inputs, and is given ", fed.size());
  invariant(received.size() == plan().receives.size(), "pipeline: stage ", stage, " receives ", plan().receives.size(), " tensors, and is given ",
            received.size());
  std::vector<Program::Given> given;
  for (size_t i = 0; i < fed.size(); ++i) {
    const int value = graph.inputs[static_cast<size_t>(plan().fed[i])];
    const Value& input = graph.values[static_cast<size_t>(value)];
    check_form(fed[i], input.forms.front().form, stage, input.name);
    given.push_back({value, fed[i]});
  }
  for (size_t i = 0; i < received.size(); ++i) {
    const Crossing& from = crossing(plan().receives[i]);
    check_form(received[i], from.form, stage, from.name);
    leaves_.push_back(received[i].detach());
    if (from.gradient && at::GradMode::is_enabled()) leaves_.back().set_requires_grad(true);
    given.push_back({from.value, leaves_.back()});
  }
  results_ = recording_->programs[static_cast<size_t>(stage)].run(given);
}

std::vector<at::Tensor> StagePass::sends() const {
  const auto& values = recording_->programs[static_cast<size_t>(stage_)].results();
  std::vector<at::Tensor> sends;
  for (const int c : plan().sends) sends.push_back(results_[static_cast<size_t>(std::ranges::find(values, crossing(c).value) - values.begin())].detach());
  return sends;
}

std::vector<at::Tensor> StagePass::outputs() const { return stage_ + 1 == recording_->stages.size() ? results_ : std::vector<at::Tensor>(); }

std::vector<at::Tensor> StagePass::backward(const std::vector<at::Tensor>& gradients) {
  const auto& values = recording_->programs[static_cast<size_t>(stage_)].results();
  std::vector<at::Tensor> of_results(results_.size());
  if (stage_ + 1 == recording_->stages.size()) {
    invariant(gradients.empty() || gradients.size() == results_.size(), "pipeline: the last stage gives ", results_.size(), " tensors, and is given ",
              gradients.size(), " gradients");
    std::ranges::copy(gradients, of_results.begin());
  } else {
    invariant(gradients.size() == plan().sends.size(), "pipeline: stage ", stage_, " sends ", plan().sends.size(), " tensors, and is given ", gradients.size(),
              " gradients");
    // From the last stage to the first, the order in which autograd adds up what the uses of one tensor give.
    for (size_t i = gradients.size(); i-- > 0;) {
      if (!gradients[i].defined()) continue;
      at::Tensor& sum = of_results[static_cast<size_t>(std::ranges::find(values, crossing(plan().sends[i]).value) - values.begin())];
      sum = sum.defined() ? sum + gradients[i] : gradients[i];
    }
  }
  std::vector<at::Tensor> roots, given;
  for (size_t i = 0; i < results_.size(); ++i) {
    if (!of_results[i].defined() || !results_[i].requires_grad()) continue;
    roots.push_back(results_[i]);
    given.push_back(of_results[i]);
  }
  if (!roots.empty()) torch::autograd::backward(roots, given);
  results_.clear();
  std::vector<at::Tensor> back;
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const bool goes_back = crossing(plan().receives[i]).gradient;
    const at::Tensor& gradient = leaves_[i].grad();
    back.push_back(!goes_back ? at::Tensor() : gradient.defined() ? gradient : at::zeros_like(leaves_[i]));
  }
  leaves_.clear();
  return back;
}

}  // namespace tessera::tape
