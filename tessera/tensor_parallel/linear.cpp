#include "tessera/tensor_parallel/linear.h"

#include <utility>

#include "tessera/tensor_parallel/cut_parameter.h"

namespace tessera::tensor_parallel {
namespace {

class Column : public nn::Interceptor {
 public:
  Column(std::shared_ptr<Context> context, const ColumnParallel& style, std::vector<FeatureShare> shares)
      : context_(std::move(context)), style_(style), shares_(std::move(shares)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    inputs[0] = convert(*context_, module.path(), inputs[0].toTensor(), style_.input, TensorLayout::Copied);
    nn::Values outputs = own(*context_, module.path(), TensorLayout::Features, [&] { return next(std::move(inputs)); });
    outputs[0] = convert(*context_, module.path(), outputs[0].toTensor(), TensorLayout::Features, style_.output, features());
    return outputs;
  }

  std::optional<nn::OutputLayout> output_layout(const nn::Module&, const at::Tensor& output) const override {
    return tensor_parallel::output_layout(*context_, output, style_.output, shares_[static_cast<size_t>(context_->group.rank())].begin);
  }

 private:
  int64_t features() const { return shares_.back().begin + shares_.back().size; }

  std::shared_ptr<Context> context_;
  ColumnParallel style_;
  std::vector<FeatureShare> shares_;
};

class Row : public nn::Interceptor {
 public:
  Row(std::shared_ptr<Context> context, const RowParallel& style) : context_(std::move(context)), style_(style) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    auto& linear = static_cast<nn::LinearImpl&>(module);
    inputs[0] = convert(*context_, module.path(), inputs[0].toTensor(), style_.input, TensorLayout::Features);
    nn::Values outputs = own(*context_, module.path(), TensorLayout::Partial, [&] { return next(std::move(inputs)); });
    const at::Tensor sum = convert(*context_, module.path(), outputs[0].toTensor(), TensorLayout::Partial, style_.output);
    if (!linear.bias.defined()) return {sum};
    return own(*context_, module.path(), style_.output, [&] { return nn::Values{sum + nn::cast(linear.bias, sum.scalar_type())}; });
  }

  std::optional<nn::OutputLayout> output_layout(const nn::Module&, const at::Tensor& output) const override {
    return tensor_parallel::output_layout(*context_, output, style_.output);
  }

 private:
  std::shared_ptr<Context> context_;
  RowParallel style_;
};

}  // namespace

void cut_columns(nn::LinearImpl& linear, const FeatureShare& share) {
  cut_parameter(linear.weight, 0, share.begin, share.size);
  if (linear.bias.defined()) cut_parameter(linear.bias, 0, share.begin, share.size);
}

void cut_rows(nn::LinearImpl& linear, const FeatureShare& share) {
  cut_parameter(linear.weight, 1, share.begin, share.size);
  linear.leave_bias_out(true);
}

std::shared_ptr<nn::Interceptor> column_parallel(std::shared_ptr<Context> context, const ColumnParallel& style, std::vector<FeatureShare> shares) {
  return std::make_shared<Column>(std::move(context), style, std::move(shares));
}

std::shared_ptr<nn::Interceptor> row_parallel(std::shared_ptr<Context> context, const RowParallel& style) {
  return std::make_shared<Row>(std::move(context), style);
}

}  // namespace tessera::tensor_parallel
