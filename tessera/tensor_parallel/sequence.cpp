#include "tessera/tensor_parallel/sequence.h"

#include <functional>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/module.h"
#include "tessera/nn/pass_state.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/tensor_parallel/regather.h"

// A part of the sequence has to draw what the whole would have drawn there: the positions of the sample scope are moved by where the part begins, and masks
// follow. What is gathered for column-wise layers is n times as large as the part, and each layer would save it for backward; the part is saved instead, and
// gathered again there, at the price of one more all-gather, unless a recomputation does that anyway.

namespace tessera::tensor_parallel {
namespace {

/// Of a region further out, which is not in force here: rows of [S, D] have other places, and one around the module that cuts the sequence goes by the last.
void leave_part(nn::SampleContext& here) {
  here.first_column -= here.part->begin;
  here.seq_len = here.part->seq_len;
  here.columns = std::nullopt;
  here.part = std::nullopt;
}

class SequencePart : public nn::Interceptor {
 public:
  explicit SequencePart(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    const at::Tensor x = inputs.empty() || !inputs[0].isTensor() ? at::Tensor() : inputs[0].toTensor();
    const bool drops = dynamic_cast<nn::DropoutImpl*>(&module) != nullptr;
    if (drops && context_->sequence > 0) require_part_of_sequence(*context_, module.path(), x);
    nn::SampleContext here = nn::SampleScope::current();
    const auto [first, columns] = chunk(context_->sequence, context_->group.size(), context_->group.rank());
    const bool takes_rows = drops && sequence_dim(x) == 0;
    if (here.part && (takes_rows || here.part->of != context_->sequence)) leave_part(here);
    if (takes_rows) {
      here.first_sample += first;  // [S, D]: dropout takes rows for samples
    } else if (!here.part) {       // a region within another is in its part
      if (context_->sequence > 0) here.part = {.begin = first, .seq_len = here.seq_len, .of = context_->sequence};
      if (here.seq_len == 0) here.seq_len = context_->sequence;
      here.first_column += first;
      if (context_->sequence > 0) here.columns = columns;
    }
    const nn::SampleScope scope(here);
    // The mask of dropout is that of its positions, whichever operators draw it.
    if (context_->trace && drops) {
      context_->trace->takes(module.path(), x, TensorLayout::Sequence, cut_of(*context_, x, TensorLayout::Sequence));
      return own(*context_, module.path(), TensorLayout::Sequence, [&] { return next(std::move(inputs)); });
    }
    return next(std::move(inputs));
  }

  std::optional<nn::OutputLayout> output_layout(const nn::Module&, const at::Tensor& output) const override {
    return tensor_parallel::output_layout(*context_, output, TensorLayout::Sequence);
  }

 private:
  std::shared_ptr<Context> context_;
};

class Input : public nn::Interceptor {
 public:
  Input(std::shared_ptr<Context> context, const PrepareInput& style) : context_(std::move(context)), style_(style) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    const auto argument = static_cast<size_t>(style_.argument);
    require(argument < inputs.size() && inputs[argument].isTensor(), "PrepareInput of '", module.path(), "': argument ", style_.argument,
            " is no tensor of this call");
    const at::Tensor given = inputs[argument].toTensor();
    const at::Tensor prepared = convert(*context_, module.path(), given, style_.from, style_.to);
    inputs[argument] = prepared;
    const LayoutTrace::Judged judged(context_->trace);
    if (prepared.is_same(given) || !gathers_again()) return next(std::move(inputs));
    const nn::SavedTensorScope scope(regather(context_, given, prepared));
    return next(std::move(inputs));
  }

 private:
  /// A recomputed module gathers again anyhow.
  bool gathers_again() const {
    return style_.from == TensorLayout::Sequence && style_.to == TensorLayout::Copied && !style_.keep_gathered && at::GradMode::is_enabled() &&
           !nn::saved_tensors_are_computed_again();
  }

  std::shared_ptr<Context> context_;
  PrepareInput style_;
};

class Output : public nn::Interceptor {
 public:
  Output(std::shared_ptr<Context> context, const PrepareOutput& style) : context_(std::move(context)), style_(style) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    nn::Values outputs = next(std::move(inputs));
    outputs[0] = convert(*context_, module.path(), outputs[0].toTensor(), style_.from, style_.to);
    return outputs;
  }

  std::optional<nn::OutputLayout> output_layout(const nn::Module&, const at::Tensor& output) const override {
    return tensor_parallel::output_layout(*context_, output, style_.to);
  }

 private:
  std::shared_ptr<Context> context_;
  PrepareOutput style_;
};

class Stated : public nn::Interceptor {
 public:
  Stated(std::shared_ptr<Context> context, const Gives& style, const FeatureShare& heads) : context_(std::move(context)), style_(style), heads_(heads) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    if (!context_->trace) return next(std::move(inputs));
    if (style_.by_position) {
      context_->trace->takes(module.path(), inputs[0].toTensor(), style_.layout, cut_of(*context_, inputs[0].toTensor(), style_.layout));
      return own(*context_, module.path(), style_.layout, [&] { return next(std::move(inputs)); });
    }
    nn::Values outputs = dynamic_cast<nn::AttentionCoreImpl*>(&module) ? attended(module, std::move(inputs), next) : next(std::move(inputs));
    const at::Tensor& output = outputs[0].toTensor();
    context_->trace->agrees(module.path(), output, style_.layout, style_.layout == TensorLayout::Sequence ? sequence_dim(output) : style_.dim);
    return outputs;
  }

  std::optional<nn::OutputLayout> output_layout(const nn::Module&, const at::Tensor& output) const override {
    FeatureShare share = heads_;
    if (style_.layout == TensorLayout::Features) share.begin *= output.size(style_.dim) / heads_.size;
    return tensor_parallel::output_layout(*context_, output, style_.layout, share, style_.dim);
  }

 private:
  /// What attention of ours does with heads is known, whichever operators it is made of.
  nn::Values attended(const nn::Module& module, nn::Values inputs, const nn::Next& next) const {
    LayoutTrace& trace = *context_->trace;
    Cut cut = trace.takes_heads(module.path(), inputs[0].toTensor(), inputs[1].toTensor(), inputs[2].toTensor());
    if (!cut.defined()) return next(std::move(inputs));
    const LayoutTrace::Trusted trusted(context_->trace);
    nn::Values outputs = next(std::move(inputs));
    outputs[0] = outputs[0].toTensor().alias();
    trace.gives(module.path(), outputs[0].toTensor(), TensorLayout::Features, std::move(cut));
    return outputs;
  }

  std::shared_ptr<Context> context_;
  Gives style_;
  FeatureShare heads_;
};

class KeepsLength final : public nn::Interceptor, public nn::PassState {
 public:
  explicit KeepsLength(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override { return next(std::move(inputs)); }
  std::function<void()> now() const override {
    return [context = std::weak_ptr(context_), length = context_->sequence] {
      const auto alive = context.lock();
      if (alive && !alive->says_sequence) alive->sequence = length;
    };
  }

 private:
  std::shared_ptr<Context> context_;
};

}  // namespace

std::shared_ptr<nn::Interceptor> keeps_length(std::shared_ptr<Context> context) { return std::make_shared<KeepsLength>(std::move(context)); }

std::shared_ptr<nn::Interceptor> gives(std::shared_ptr<Context> context, const Gives& style, const FeatureShare& share) {
  return std::make_shared<Stated>(std::move(context), style, share);
}

std::shared_ptr<nn::Interceptor> sequence_parallel(std::shared_ptr<Context> context) { return std::make_shared<SequencePart>(std::move(context)); }

std::shared_ptr<nn::Interceptor> prepare_input(std::shared_ptr<Context> context, const PrepareInput& style) {
  return std::make_shared<Input>(std::move(context), style);
}

std::shared_ptr<nn::Interceptor> prepare_output(std::shared_ptr<Context> context, const PrepareOutput& style) {
  return std::make_shared<Output>(std::move(context), style);
}

}  // namespace tessera::tensor_parallel
