#include "tessera/pipeline/split/traced_stage.h"

#include <utility>

#include <ATen/core/grad_mode.h>

#include "tessera/comm/dtype_name.h"
#include "tessera/core/error.h"
#include "tessera/pipeline/split/wire.h"

namespace tessera::pipeline {

namespace {

/// Operators give what they gave when they were recorded; a module may give something else, which nobody who receives it would expect.
void check_sent(const tape::Recording& recording, const tape::Crossing& crossing, const at::Tensor& value) {
  const tape::Form& form = crossing.form;
  const auto hold = [&](bool is_so, const auto&... text) {
    require(is_so, "pipeline: stage ", crossing.from, " sends what ", crossing.name, " gives, ", text...,
            "; what crosses goes by what a module gave when it was recorded: give the same in each pass of a mode, or call record_anew() on every rank between "
            "two steps");
  };
  hold(value.scalar_type() == form.dtype, comm::dtype_name(value.scalar_type()), " ", value.sizes(), ", where it was recorded as ",
       comm::dtype_name(form.dtype), " ", at::IntArrayRef(form.sizes), " (a wrapper's param_dtype casts, too)");
  hold(tape::fits_wire(value, form), "with rows of its own, where it was recorded as one that is repeated (expand)");
  hold(!at::GradMode::is_enabled() || !value.requires_grad() || form.requires_grad, "with a gradient, where it was recorded without one");
  hold(recording.takes_layout(crossing.value, value, form), "with strides ", value.strides(), ", where it was recorded with ", at::IntArrayRef(form.strides),
       ", and forward writes in place into what is a part of it, or a copy, by how it lies (reshape)");
}

}  // namespace

TracedStage::TracedStage(SplitModel model, int stage, Inputs inputs, Loss loss)
    : model_(std::move(model)), stage_(stage), inputs_(std::move(inputs)), loss_(std::move(loss)) {
  require(stage >= 0 && stage < model_.stages(), "pipeline: there is no stage ", stage, "; the model has stages 0 to ", model_.stages() - 1);
}

StageOutputs TracedStage::forward(int micro_batch, const std::vector<at::Tensor>& inputs) {
  const auto recording = model_.recording_to_run(stage_, micro_batch);
  const tape::Graph& graph = *recording->graph;
  const tape::StagePlan& plan = recording->stages.stages[static_cast<size_t>(stage_)];
  const tape::Program& program = recording->programs[static_cast<size_t>(stage_)];
  const auto crossing = [&](int c) -> const tape::Crossing& { return recording->stages.crossings[static_cast<size_t>(c)]; };
  invariant(inputs.size() == plan.receives.size(), "stage ", stage_, " receives ", plan.receives.size(), " tensors, and is given ", inputs.size());

  std::vector<tape::Program::Given> given;
  const std::vector<at::Tensor> own = plan.fed.empty() ? std::vector<at::Tensor>() : inputs_(micro_batch);
  for (const int number : plan.fed) {
    const int value = graph.inputs[static_cast<size_t>(number)];
    const tape::Form& form = graph.values[static_cast<size_t>(value)].forms.front().form;
    const at::Tensor tensor = static_cast<size_t>(number) < own.size() ? own[static_cast<size_t>(number)] : at::Tensor();
    require(tensor.defined() && tensor.sizes() == at::IntArrayRef(form.sizes) && tensor.scalar_type() == form.dtype, "pipeline: stage ", stage_, " is given ",
            tensor.defined() ? tape::to_string(tape::form_of(tensor)) : "nothing", " for input ", number, ", where ", tape::to_string(form),
            " is expected; sizes are part of a recording: call expect() with inputs of these shapes, on every rank");
    require(
        recording->takes_layout(value, tensor, form), "pipeline: stage ", stage_, " is given input ", number, " with strides ", tensor.strides(),
        ", where the example has ", at::IntArrayRef(form.strides),
        ", and forward writes in place into what is a part of it, or a copy, by how it lies (reshape); give contiguous inputs, or call expect() with inputs "
        "that lie so, on every rank");
    const bool wants_gradient = at::GradMode::is_enabled() && tensor.requires_grad();
    require(
        !wants_gradient || model_.expects_gradient(micro_batch, number), "pipeline: stage ", stage_, " is given an input ", number,
        " that requires a gradient, where the example did not, and what of it crosses to other stages would bring none back; call expect() with inputs that "
        "require gradients, on every rank, and take crossings() behind it");
    given.push_back({value, tensor});
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const tape::Crossing& from = crossing(plan.receives[i]);
    const TensorSpec expected = tape::wire_spec(from.form);
    require(inputs[i].sizes() == at::IntArrayRef(expected.sizes) && inputs[i].scalar_type() == expected.dtype, "pipeline: stage ", stage_, " receives ",
            tape::to_string(tape::form_of(inputs[i])), " for ", from.name, ", where ", comm::dtype_name(expected.dtype), " ", at::IntArrayRef(expected.sizes),
            " is expected; call expect() with the same shapes on every rank");
    given.push_back({from.value, tape::from_wire(inputs[i], from.form, recording->goes_by_layout(from.value))});
  }

  const std::vector<at::Tensor> results = program.run(given);
  StageOutputs outputs;
  for (const int c : plan.sends) {
    const at::Tensor& value = results[static_cast<size_t>(program.result_number(crossing(c).value))];
    check_sent(*recording, crossing(c), value);
    const at::Tensor wire = tape::to_wire(value, crossing(c).form);
    outputs.values.push_back(crossing(c).copied ? wire.clone(at::MemoryFormat::Contiguous) : wire);
  }
  if (stage_ + 1 == model_.stages() && loss_) outputs.loss = loss_(micro_batch, results);
  return outputs;
}

std::optional<TensorSpec> TracedStage::input_spec(int micro_batch, int input) const {
  const auto recording = model_.recording(micro_batch);
  const tape::StagePlan& plan = recording->stages.stages[static_cast<size_t>(stage_)];
  return tape::wire_spec(recording->stages.crossings[static_cast<size_t>(plan.receives[static_cast<size_t>(input)])].form);
}

}  // namespace tessera::pipeline
