#include "tessera/tensor_parallel/linear.h"

#include <utility>

#include "tessera/nn/cut_parameter.h"
#include "tessera/tensor_parallel/open_features.h"
#include "tessera/tensor_parallel/overlap.h"

// The row-wise product is a term of a sum, so the bias is added after it, once, and the layer's own forward is told to leave it out. The column-wise one is cut
// with its bias and needs no more than the input that its layout asks for.

namespace tessera::tensor_parallel {
namespace {

class ColumnWise : public nn::Interceptor {
 public:
  ColumnWise(std::shared_ptr<Context> context, const ColumnParallel& style, std::vector<FeatureShare> shares)
      : context_(std::move(context)), style_(style), shares_(std::move(shares)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    if (context_->open_features) context_->open_features->note_whole(inputs[0].toTensor());
    nn::Values outputs{overlapped(static_cast<nn::LinearImpl&>(module), inputs[0].toTensor())};
    if (!outputs[0].toTensor().defined()) {
      inputs[0] = convert(*context_, module.path(), inputs[0].toTensor(), style_.input, TensorLayout::Copied);
      outputs = own(*context_, module.path(), TensorLayout::Features, [&] { return next(std::move(inputs)); }, shares_, style_.cut);
    }
    outputs[0] = convert(*context_, module.path(), outputs[0].toTensor(), TensorLayout::Features, style_.output, features());
    if (context_->open_features && style_.output == TensorLayout::Features) {
      context_->open_features->open(module.path(), outputs[0].toTensor(), shares_);
    }
    return outputs;
  }

  std::optional<nn::OutputLayout> output_layout(const nn::Module&, const at::Tensor& output) const override {
    return tensor_parallel::output_layout(*context_, output, style_.output, shares_[static_cast<size_t>(context_->group.rank())]);
  }

 private:
  /// The product, prepared already or computed while its input is gathered; undefined where there is nothing to overlap.
  at::Tensor overlapped(nn::LinearImpl& linear, const at::Tensor& x) const {
    if (!context_->overlap) return {};
    const int64_t held = shares_[static_cast<size_t>(context_->group.rank())].size;
    if (style_.input == TensorLayout::Copied) return context_->overlap->take(linear, x);
    return can_overlap(linear, x, style_.input, held) ? multiply_columns(*context_, x, style_.input, {&linear}).products[0] : at::Tensor();
  }
  int64_t features() const { return shares_.back().begin + shares_.back().size; }

  std::shared_ptr<Context> context_;
  ColumnParallel style_;
  std::vector<FeatureShare> shares_;
};

class RowWise : public nn::Interceptor {
 public:
  RowWise(std::shared_ptr<Context> context, const RowParallel& style, std::vector<FeatureShare> shares)
      : context_(std::move(context)), style_(style), shares_(std::move(shares)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    auto& linear = static_cast<nn::LinearImpl&>(module);
    if (context_->trace && style_.input == TensorLayout::Features) {
      context_->trace->takes_features(module.path(), inputs[0].toTensor(), shares_);
    }
    inputs[0] = convert(*context_, module.path(), inputs[0].toTensor(), style_.input, TensorLayout::Features);
    nn::Values outputs{summed(linear, std::move(inputs), next)};
    if (linear.bias.defined()) {
      const at::Tensor sum = outputs[0].toTensor();
      outputs = own(*context_, module.path(), style_.output, [&] { return nn::Values{sum + nn::cast(linear.bias, sum.scalar_type())}; });
    }
    if (context_->open_features) context_->open_features->close(outputs[0].toTensor());
    return outputs;
  }

  std::optional<nn::OutputLayout> output_layout(const nn::Module&, const at::Tensor& output) const override {
    return tensor_parallel::output_layout(*context_, output, style_.output);
  }

 private:
  at::Tensor summed(nn::LinearImpl& linear, nn::Values inputs, const nn::Next& next) const {
    const at::Tensor& x = inputs[0].toTensor();
    if (context_->overlap && style_.output != TensorLayout::Partial && can_overlap(linear, x, style_.output, linear.options.out_features())) {
      return multiply_rows(*context_, x, linear, style_.output);
    }
    nn::Values outputs = own(*context_, linear.path(), TensorLayout::Partial, [&] { return next(std::move(inputs)); });
    return convert(*context_, linear.path(), outputs[0].toTensor(), TensorLayout::Partial, style_.output);
  }

  std::shared_ptr<Context> context_;
  RowParallel style_;
  std::vector<FeatureShare> shares_;
};

}  // namespace

void cut_columns(nn::LinearImpl& linear, const FeatureShare& share) {
  nn::cut_parameter(linear.weight, 0, share.begin, share.size);
  if (linear.bias.defined()) nn::cut_parameter(linear.bias, 0, share.begin, share.size);
}

void cut_rows(nn::LinearImpl& linear, const FeatureShare& share) {
  nn::cut_parameter(linear.weight, 1, share.begin, share.size);
  linear.leave_bias_out(true);
}

std::shared_ptr<nn::Interceptor> column_parallel(std::shared_ptr<Context> context, const ColumnParallel& style, std::vector<FeatureShare> shares) {
  return std::make_shared<ColumnWise>(std::move(context), style, std::move(shares));
}

std::shared_ptr<nn::Interceptor> row_parallel(std::shared_ptr<Context> context, const RowParallel& style, std::vector<FeatureShare> shares) {
  return std::make_shared<RowWise>(std::move(context), style, std::move(shares));
}

}  // namespace tessera::tensor_parallel
