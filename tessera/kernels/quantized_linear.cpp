#include "tessera/kernels/quantized_linear.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include "tessera/core/error.h"
#include "tessera/core/once_differentiable.h"
#include "tessera/core/parallel.h"
#include "tessera/kernels/adam8bit.h"
#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/products.h"

// A row knows where its first element lies in the flattened matrix, and so in which block; along a row blocks are counted on. What is held of a row is
// therefore addressed alike whether it is whole or cut anywhere, and the loops know no layouts.

namespace tessera::kernels {
namespace {

constexpr int64_t kScalesOfOne = 256;  // that share an outer scale
constexpr int64_t kTileElements = int64_t{1} << 20;

/// Where the blocks of a row of the part lie.
struct RowBlocks {
  int64_t first = 0;   ///< of the flattened whole
  int64_t offset = 0;  ///< of the row's first element in it

  RowBlocks(const MatrixPart& part, int64_t block, int64_t row) {
    const int64_t begin = (part.row + row) * part.whole_columns + part.column;
    first = begin / block;
    offset = begin % block;
  }
  int64_t count(const MatrixPart& part, int64_t block) const { return part.columns == 0 ? 0 : (offset + part.columns - 1) / block + 1; }
};

/// The first of the runs of 256 blocks that a part touches.
int64_t first_outer(const MatrixPart& part, int64_t block) { return RowBlocks(part, block, 0).first / kScalesOfOne; }

struct Widths {
  int64_t codes = 0, scales = 0, outer = 0;
};

Widths widths_of(const MatrixPart& part, const QuantizeForm& form) {
  Widths widths{.codes = form.format == WeightFormat::Nf4 ? (part.columns + 1) / 2 : part.columns};
  for (int64_t row = 0; row < part.rows; ++row) widths.scales = std::max(widths.scales, RowBlocks(part, form.block, row).count(part, form.block));
  if (part.rows == 0 || part.columns == 0) return widths;
  const RowBlocks last(part, form.block, part.rows - 1);
  widths.outer = (last.first + last.count(part, form.block) - 1) / kScalesOfOne - first_outer(part, form.block) + 1;
  return widths;
}

size_t nearest_nf4(float x) {
  const auto& numbers = nf4_numbers();
  size_t code = 0;
  while (code < 15 && (numbers[code] + numbers[code + 1]) / 2 < x) ++code;
  return code;
}

uint8_t nearest_dynamic(float x) {
  const auto& numbers = dynamic_map(/*is_signed=*/true);
  const auto above = std::lower_bound(numbers.begin(), numbers.end(), x);
  if (above == numbers.begin()) return 0;
  if (above == numbers.end()) return 255;
  const auto below = above - 1;
  return static_cast<uint8_t>((x - *below <= *above - x ? below : above) - numbers.begin());
}

std::vector<float> largest_magnitudes(const float* values, int64_t numel, int64_t block) {
  std::vector<float> largest(static_cast<size_t>((numel + block - 1) / block));
  std::atomic<bool> finite = true;
  parallel_for(0, static_cast<int64_t>(largest.size()), 256, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      float most = 0;
      bool all = true;
      for (int64_t i = b * block; i < std::min(numel, (b + 1) * block); ++i) {
        most = std::max(most, std::abs(values[i]));
        all &= std::isfinite(values[i]);
      }
      largest[static_cast<size_t>(b)] = most;
      if (!all) finite = false;
    }
  });
  require(finite, "quantize: a weight holds numbers that are not finite, which no code stands for; look at where it comes from");
  return largest;
}

/// Scales in 8 bits, as they are told apart and as they read back.
struct DoubleScales {
  std::vector<uint8_t> codes;
  std::vector<float> outer;
  float mean = 0;

  explicit DoubleScales(const std::vector<float>& scales) : codes(scales.size()), outer((scales.size() + kScalesOfOne - 1) / kScalesOfOne) {
    double sum = 0;
    for (const float scale : scales) sum += scale;
    mean = scales.empty() ? 0 : static_cast<float>(sum / static_cast<double>(scales.size()));
    for (size_t i = 0; i < scales.size(); ++i) {
      float& largest = outer[i / kScalesOfOne];
      largest = std::max(largest, std::abs(scales[i] - mean));
    }
    for (size_t i = 0; i < scales.size(); ++i) {
      const float largest = outer[i / kScalesOfOne];
      codes[i] = nearest_dynamic(largest > 0 ? (scales[i] - mean) / largest : 0);
    }
  }
};

void write_codes(const float* whole, const std::vector<float>& scales, const QuantizedMatrix& matrix) {
  const QuantizeForm& form = matrix.form;
  const MatrixPart& part = matrix.part;
  const int64_t width = matrix.codes.stride(0);
  auto* const codes = static_cast<uint8_t*>(matrix.codes.data_ptr());
  parallel_for(0, part.rows, 16, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const RowBlocks blocks(part, form.block, row);
      const float* const values = whole + (part.row + row) * part.whole_columns + part.column;
      uint8_t* const out = codes + row * width;
      for (int64_t j = 0; j < part.columns; ++j) {
        const float scale = scales[static_cast<size_t>(blocks.first + (blocks.offset + j) / form.block)];
        const float x = scale > 0 ? values[j] / scale : 0;
        if (form.format == WeightFormat::Int8) {
          out[j] = static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(x * 127)));
        } else {
          const auto code = static_cast<uint8_t>(nearest_nf4(x));
          out[j / 2] = j % 2 == 0 ? static_cast<uint8_t>(code << 4) : static_cast<uint8_t>(out[j / 2] | code);
        }
      }
    }
  });
}

void write_scales(const std::vector<float>& scales, QuantizedMatrix& matrix) {
  const auto& form = matrix.form;
  std::optional<DoubleScales> coded;
  if (form.double_scales) coded.emplace(scales);
  if (coded) matrix.mean = coded->mean;
  for (int64_t row = 0; row < matrix.part.rows; ++row) {
    const RowBlocks blocks(matrix.part, form.block, row);
    for (int64_t k = 0; k < blocks.count(matrix.part, form.block); ++k) {
      const auto at = static_cast<size_t>(blocks.first + k);
      const int64_t place = row * matrix.scales.stride(0) + k;
      if (coded) {
        matrix.scales.mutable_data_ptr<uint8_t>()[place] = coded->codes[at];
      } else {
        matrix.scales.mutable_data_ptr<float>()[place] = scales[at];
      }
    }
  }
  const int64_t from = first_outer(matrix.part, form.block);
  for (int64_t k = 0; coded && k < matrix.outer.numel(); ++k) matrix.outer.mutable_data_ptr<float>()[k] = coded->outer[static_cast<size_t>(from + k)];
}

/// Scales of a row's blocks as they multiply, in `made` where they are kept in 8 bits.
const float* scales_of(const QuantizedMatrix& matrix, int64_t row, std::vector<float>& made) {
  const int64_t place = row * matrix.scales.stride(0);
  if (!matrix.form.double_scales) return matrix.scales.const_data_ptr<float>() + place;
  const auto& numbers = dynamic_map(/*is_signed=*/true);
  const int64_t first = RowBlocks(matrix.part, matrix.form.block, row).first, from = first_outer(matrix.part, matrix.form.block);
  const auto* const codes = matrix.scales.const_data_ptr<uint8_t>() + place;
  const float* const outer = matrix.outer.const_data_ptr<float>();
  const int64_t blocks = RowBlocks(matrix.part, matrix.form.block, row).count(matrix.part, matrix.form.block);
  made.resize(static_cast<size_t>(blocks));
  for (int64_t k = 0; k < blocks; ++k) {
    made[static_cast<size_t>(k)] = numbers[codes[k]] * outer[(first + k) / kScalesOfOne - from] + static_cast<float>(matrix.mean);
  }
  return made.data();
}

/// On the CPU, by the vector loops (cpu/loops_quantized.h).
void read_rows(const QuantizedMatrix& matrix, int64_t first, int64_t count, const at::Tensor& out) {
  const MatrixPart& part = matrix.part;
  const int64_t width = matrix.codes.stride(0);
  const auto* const codes = static_cast<const uint8_t*>(matrix.codes.const_data_ptr());
  const auto type = out.scalar_type() == at::kFloat ? cpu::Type::Float : cpu::Type::BFloat16;
  auto* const to = static_cast<std::byte*>(out.data_ptr());
  parallel_for(first, first + count, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, part.columns)), [&](int64_t begin, int64_t end) {
    std::vector<float> made;
    for (int64_t row = begin; row < end; ++row) {
      cpu::loops().dequantize({.codes = codes + row * width,
                               .is_nf4 = matrix.form.format == WeightFormat::Nf4,
                               .numbers = nf4_numbers().data(),
                               .scales = scales_of(matrix, row, made),
                               .offset = RowBlocks(part, matrix.form.block, row).offset,
                               .block = matrix.form.block,
                               .columns = part.columns,
                               .out = {to + (row - first) * part.columns * out.element_size(), type}});
    }
  });
}

int64_t rows_of_tile(const MatrixPart& part) { return std::max<int64_t>(1, kTileElements / std::max<int64_t>(1, part.columns)); }

template <class Use>
void for_each_tile(const QuantizedMatrix& matrix, at::ScalarType dtype, const Use& use) {
  const int64_t most = rows_of_tile(matrix.part);
  for (int64_t row = 0; row < matrix.part.rows; row += most) {
    const int64_t count = std::min(most, matrix.part.rows - row);
    use(row, count, dequantize(matrix, row, count, dtype));
  }
}

struct Held : torch::CustomClassHolder {
  explicit Held(MatrixSource source) : source(std::move(source)) {}
  MatrixSource source;
};

at::Tensor multiply(const at::Tensor& x, const MatrixSource& source) {
  const std::shared_ptr<const QuantizedMatrix> held = source();
  const QuantizedMatrix& matrix = *held;
  require(x.size(-1) == matrix.part.columns, "a quantized weight of ", matrix.part.columns, " columns cannot multiply an input of shape ", x.sizes());
  auto sizes = x.sizes().vec();
  sizes.back() = matrix.part.rows;
  const at::Tensor y = at::empty(sizes, x.options().requires_grad(false));
  for_each_tile(matrix, x.scalar_type(), [&](int64_t row, int64_t count, const at::Tensor& tile) { y.narrow(-1, row, count).copy_(kernels::linear(x, tile)); });
  return y;
}

struct QuantizedLinear : torch::autograd::Function<QuantizedLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const c10::intrusive_ptr<Held>& held) {
    context->saved_data["held"] = c10::IValue::make_capsule(held);
    return multiply(x, held->source);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const at::NoGradGuard no_grad;
    const auto held = c10::static_intrusive_pointer_cast<Held>(context->saved_data["held"].toCapsule());
    require(held->source != nullptr, "backward through a product with a quantized weight a second time; give the first one retain_graph = true");
    const auto matrix = held->source();
    // What is kept for backward goes with it, as saved tensors do, and not with the graph.
    if (!torch::autograd::get_current_graph_task_keep_graph()) held->source = nullptr;
    const at::Tensor dy = grads[0].detach();
    auto sizes = dy.sizes().vec();
    sizes.back() = matrix->part.columns;
    at::Tensor dx;
    for_each_tile(*matrix, dy.scalar_type(), [&](int64_t row, int64_t count, const at::Tensor& tile) {
      const at::Tensor term = kernels::linear_input_gradient(dy.narrow(-1, row, count), tile, sizes);
      if (dx.defined()) {
        dx.add_(term);
      } else {  // of several tiles in fp32, so that errors do not grow with their number
        dx = count < matrix->part.rows ? term.to(at::toOpMathType(dy.scalar_type())) : term;
      }
    });
    dx = dx.defined() ? dx.to(dy.scalar_type()) : at::zeros(sizes, dy.options());
    return {once_differentiable("a product with a quantized weight", "keep the weight in 16 bits or more where gradients are differentiated", grads, {dx})[0],
            at::Tensor()};
  }
};

}  // namespace

const std::array<float, 16>& nf4_numbers() {
  static const std::array<float, 16> numbers{-1.0F,
                                             -0.6961928009986877F,
                                             -0.5250730514526367F,
                                             -0.39491748809814453F,
                                             -0.28444138169288635F,
                                             -0.18477343022823334F,
                                             -0.09105003625154495F,
                                             0.0F,
                                             0.07958029955625534F,
                                             0.16093020141124725F,
                                             0.24611230194568634F,
                                             0.33791524171829224F,
                                             0.44070982933044434F,
                                             0.5626170039176941F,
                                             0.7229568362236023F,
                                             1.0F};
  return numbers;
}

int64_t QuantizedMatrix::bytes() const { return static_cast<int64_t>(codes.nbytes() + scales.nbytes() + (outer.defined() ? outer.nbytes() : 0)); }

QuantizedMatrix quantize(const at::Tensor& whole, const QuantizeForm& form, const MatrixPart& part, at::Device device) {
  require(form.block >= 1, "quantize: block = ", form.block, " must be at least 1");
  const Widths widths = widths_of(part, form);
  const bool dry = device.is_meta();
  const auto on = at::TensorOptions(dry ? device : at::Device(at::kCPU));
  QuantizedMatrix matrix{.form = form, .part = part};
  matrix.codes = at::empty({part.rows, widths.codes}, on.dtype(form.format == WeightFormat::Nf4 ? at::kByte : at::kChar));
  matrix.scales = at::empty({part.rows, widths.scales}, on.dtype(form.double_scales ? at::kByte : at::kFloat));
  if (form.double_scales) matrix.outer = at::empty({widths.outer}, on.dtype(at::kFloat));
  if (dry) return matrix;
  matrix.scales.zero_();
  if (matrix.outer.defined()) matrix.outer.zero_();
  const at::NoGradGuard no_grad;
  const at::Tensor values = whole.detach().to(at::kFloat).contiguous();
  auto scales = largest_magnitudes(values.const_data_ptr<float>(), values.numel(), form.block);
  write_codes(values.const_data_ptr<float>(), scales, matrix);
  write_scales(scales, matrix);
  for (at::Tensor* tensor : {&matrix.codes, &matrix.scales, &matrix.outer}) {
    if (tensor->defined() && tensor->device() != device) *tensor = tensor->to(device);
  }
  return matrix;
}

at::Tensor dequantize(const QuantizedMatrix& matrix, int64_t first, int64_t count, at::ScalarType dtype) {
  if (dtype != at::kFloat && dtype != at::kBFloat16) return dequantize(matrix, first, count, at::kFloat).to(dtype);
  const at::Device device = matrix.codes.device();
  require(device.is_cpu() || device.is_meta(), "quantized weights are multiplied on the CPU alone in this build, and these lie on ", device,
          "; set run.device = cpu");
  const at::Tensor tile = at::empty({count, matrix.part.columns}, at::TensorOptions(device).dtype(dtype));
  if (!device.is_meta()) read_rows(matrix, first, count, tile);
  return tile;
}

at::Tensor quantized_linear(const at::Tensor& x, const std::shared_ptr<const QuantizedMatrix>& matrix) {
  return quantized_linear(x, [matrix] { return matrix; });
}

at::Tensor quantized_linear(const at::Tensor& x, const MatrixSource& source) {
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return multiply(x, source);
  return QuantizedLinear::apply(x, c10::make_intrusive<Held>(source));
}

}  // namespace tessera::kernels
