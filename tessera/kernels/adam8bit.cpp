#include "tessera/kernels/adam8bit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <utility>

#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/core/error.h"
#include "tessera/core/parallel.h"
#include "tessera/memory/on_host.h"

// To find the nearest of 256 numbers by halving takes eight steps that a processor cannot foresee. The upper half of a float's bits says where it lies to less
// than 1%, which is about the distance of two of the numbers at their closest; so a table by these 65,536 patterns tells the place, or the one before it.
//
// Compiled without contraction of products and sums (CMakeLists.txt): an element's bits must not depend on whether it falls into a vectorized loop's body.
namespace tessera::kernels {

namespace {

struct Quantizer {
  explicit Quantizer(bool is_signed);

  /// The nearest number's place: how many midpoints between neighbours lie below `x`.
  uint8_t encode(float x) const {
    size_t code = start[std::bit_cast<uint32_t>(x) >> 16];
    while (code < 255 && midpoints[code] < x) ++code;
    return static_cast<uint8_t>(code);
  }

  std::array<float, 256> numbers;
  std::array<float, 255> midpoints;
  std::array<uint8_t, 65536> start;  ///< by the upper half of the bits: the place of the lowest float that has them
};

Quantizer::Quantizer(bool is_signed) {
  std::vector<double> all{0, 1};
  constexpr int decades = 7;
  for (int i = 0; i < decades; ++i) {
    const int parts = 1 << (is_signed ? i : i + 1);
    const double scale = std::pow(10.0, i - (decades - 1));
    for (int part = 0; part < parts; ++part) {
      const double middle = scale * (0.1 + 0.9 * (part + 0.5) / parts);
      all.push_back(middle);
      if (is_signed) all.push_back(-middle);
    }
  }
  std::sort(all.begin(), all.end());
  invariant(all.size() == numbers.size(), "a code of 8 bits stands for ", all.size(), " numbers");
  for (size_t i = 0; i < all.size(); ++i) numbers[i] = static_cast<float>(all[i]);
  for (size_t i = 0; i < midpoints.size(); ++i) midpoints[i] = 0.5f * (numbers[i] + numbers[i + 1]);
  for (uint32_t upper = 0; upper < start.size(); ++upper) {
    const bool negative = (upper & 0x8000) != 0;
    const auto lowest = std::bit_cast<float>((upper << 16) | (negative ? 0xffffu : 0u));
    const auto place = std::isnan(lowest) ? midpoints.begin() : std::lower_bound(midpoints.begin(), midpoints.end(), lowest);
    start[upper] = static_cast<uint8_t>(place - midpoints.begin());
  }
}

const Quantizer& quantizer(bool is_signed) {
  static const auto with_sign = std::make_unique<const Quantizer>(true), without = std::make_unique<const Quantizer>(false);
  return is_signed ? *with_sign : *without;
}

/// The constants of a step in fp32.
struct Constants {
  explicit Constants(const Adam8bitStep& o)
      : beta1(static_cast<float>(o.beta1)),
        rest1(static_cast<float>(1 - o.beta1)),
        beta2(static_cast<float>(o.beta2)),
        rest2(static_cast<float>(1 - o.beta2)),
        eps(static_cast<float>(o.eps)),
        kept(static_cast<float>(1 - o.lr * o.weight_decay)),
        step_size(static_cast<float>(o.lr / (1 - std::pow(o.beta1, static_cast<double>(o.step))))),
        root(static_cast<float>(std::sqrt(1 - std::pow(o.beta2, static_cast<double>(o.step))))) {}

  float beta1, rest1, beta2, rest2, eps, kept, step_size, root;
};

/// Calls visit(first, last, block): elements [first, last) of the local memory lie in the block whose scale is number `block`.
template <class Visit>
void for_each_block(const std::vector<QuantizedRun>& runs, const Visit& visit) {
  for (const auto& [elements, first_scale] : runs) {
    const auto index = static_cast<int64_t>(elements.first_index);
    const int64_t first_block = index / kAdam8bitBlock, end = index + elements.count;
    const int64_t blocks = (end + kAdam8bitBlock - 1) / kAdam8bitBlock - first_block;
    parallel_for(0, blocks, 32, [&, offset = elements.offset, scale = first_scale](int64_t from, int64_t to) {
      for (int64_t block = from; block < to; ++block) {
        const int64_t begin = std::max(index, (first_block + block) * kAdam8bitBlock), last = std::min(end, (first_block + block + 1) * kAdam8bitBlock);
        visit(offset + begin - index, offset + last - index, scale + block);
      }
    });
  }
}

/// New averages of one element.
struct Averages {
  Averages(const Adam8bitState& state, const Constants& constants)
      : m_(state.exp_avg.const_data_ptr<uint8_t>()),
        v_(state.exp_avg_sq.const_data_ptr<uint8_t>()),
        m_scale_(state.exp_avg_scale.const_data_ptr<float>()),
        v_scale_(state.exp_avg_sq_scale.const_data_ptr<float>()),
        m_numbers_(quantizer(true).numbers.data()),
        v_numbers_(quantizer(false).numbers.data()),
        constants_(constants) {}

  float average(int64_t i, int64_t block, float gradient) const {
    return constants_.beta1 * (m_numbers_[m_[i]] * m_scale_[block]) + constants_.rest1 * gradient;
  }
  float square(int64_t i, int64_t block, float gradient) const {
    return constants_.beta2 * (v_numbers_[v_[i]] * v_scale_[block]) + constants_.rest2 * (gradient * gradient);
  }

 private:
  const uint8_t *m_, *v_;
  const float *m_scale_, *v_scale_, *m_numbers_, *v_numbers_;
  const Constants& constants_;
};

void check(const at::Tensor& gradient, const Adam8bitState& state) {
  invariant(gradient.scalar_type() == at::kFloat && gradient.is_contiguous(), "adam8bit: gradients must be fp32 and contiguous");
  invariant(state.exp_avg.scalar_type() == at::kByte && state.exp_avg_sq.scalar_type() == at::kByte, "adam8bit: averages must be kept in 8 bits");
}

/// Of each element of the runs, one after another: its place in the local memory, and its block's scale.
struct ElementPlaces {
  at::Tensor element, block;
};

int64_t elements_of(const std::vector<QuantizedRun>& runs) {
  int64_t elements = 0;
  for (const auto& run : runs) elements += run.elements.count;
  return elements;
}

ElementPlaces places_of(const std::vector<QuantizedRun>& runs, at::Device device) {
  const auto options = at::TensorOptions(device).dtype(at::kLong);
  if (device.is_meta()) return {at::empty({elements_of(runs)}, options), at::empty({elements_of(runs)}, options)};  // runs may be thousands
  std::vector<at::Tensor> elements{at::empty({0}, options)}, blocks{at::empty({0}, options)};
  for (const auto& [run, first_scale] : runs) {
    const auto index = static_cast<int64_t>(run.first_index);
    elements.push_back(at::arange(run.offset, run.offset + run.count, options));
    const at::Tensor block = at::arange(index, index + run.count, options).floor_divide_(kAdam8bitBlock);
    blocks.push_back(block.add_(first_scale - index / kAdam8bitBlock));
  }
  return {at::cat(elements), at::cat(blocks)};
}

/// Calls visit(piece) with runs of as many elements as operators may take memory for: 54 bytes each, 226 MB. Of a dry run (`on_meta`) the first stands for all.
template <class Visit>
void for_each_piece(const std::vector<QuantizedRun>& runs, bool on_meta, const Visit& visit) {
  constexpr int64_t kPiece = int64_t{1} << 22;
  std::vector<QuantizedRun> piece;
  int64_t taken = 0;
  for (const auto& [elements, first_scale] : runs) {
    for (int64_t begin = 0, count = 0; begin < elements.count; begin += count) {
      count = std::min(elements.count - begin, kPiece - taken);
      const auto first = static_cast<int64_t>(elements.first_index), index = first + begin;
      piece.push_back({{elements.offset + begin, count, static_cast<uint64_t>(index)}, first_scale + index / kAdam8bitBlock - first / kAdam8bitBlock});
      taken += count;
      if (taken < kPiece) continue;
      visit(std::exchange(piece, {}));
      if (on_meta) return;
      taken = 0;
    }
  }
  if (taken > 0) visit(piece);
}

/// On the device of what is quantized: copied there once for all pieces.
struct Table {
  template <size_t N>
  Table(const std::array<float, N>& with_sign, const std::array<float, N>& without, at::Device device)
      : with_sign(on(device, with_sign)), without(on(device, without)) {}

  at::Tensor with_sign, without;

 private:
  static at::Tensor on(at::Device device, at::ArrayRef<float> numbers) { return at::tensor(numbers, at::kFloat).to(device); }
};

Table numbers_on(at::Device device) { return {quantizer(true).numbers, quantizer(false).numbers, device}; }
Table midpoints_on(at::Device device) { return {quantizer(true).midpoints, quantizer(false).midpoints, device}; }

at::Tensor decoded(const at::Tensor& codes, const at::Tensor& scales, const ElementPlaces& places, const at::Tensor& numbers) {
  const at::Tensor code = codes.view({-1}).index_select(0, places.element).to(at::kLong);
  return numbers.index_select(0, code).mul_(scales.index_select(0, places.block));
}

/// New averages by operators of libtorch, fp32 [elements of the runs].
std::array<at::Tensor, 2> new_averages(const at::Tensor& gradient, const Adam8bitState& state, const ElementPlaces& places, const Table& numbers,
                                       const Adam8bitStep& step) {
  const at::Tensor g = gradient.view({-1}).index_select(0, places.element);
  return {decoded(state.exp_avg, state.exp_avg_scale, places, numbers.with_sign).mul_(step.beta1).add_(g, 1 - step.beta1),
          decoded(state.exp_avg_sq, state.exp_avg_sq_scale, places, numbers.without).mul_(step.beta2).addcmul_(g, g, 1 - step.beta2)};
}

at::Tensor encoded(const at::Tensor& values, const at::Tensor& scales, const ElementPlaces& places, const Table& midpoints, bool is_signed) {
  const at::Tensor scale = scales.index_select(0, places.block);
  const at::Tensor x = at::where(scale.gt(0), values.div(scale), at::zeros_like(values));
  at::Tensor code = x.is_meta() ? at::empty(x.sizes(), x.options().dtype(at::kLong))  // for which libtorch has no kernel
                                : at::bucketize(x, is_signed ? midpoints.with_sign : midpoints.without);
  if (is_signed) code = code.sub_(values.lt(0).bitwise_and_(code.eq(quantizer(true).encode(0))).to(code.scalar_type()));
  return code.to(at::kByte);
}

}  // namespace

const std::array<float, 256>& dynamic_map(bool is_signed) { return quantizer(is_signed).numbers; }

void adam8bit_scales(const at::Tensor& gradient, const Adam8bitState& state, const std::vector<QuantizedRun>& runs, const Adam8bitStep& step,
                     const at::Tensor& exp_avg_scale, const at::Tensor& exp_avg_sq_scale) {
  check(gradient, state);
  if (gradient.is_meta() && is_on_host(gradient)) return;
  if (!gradient.is_cpu()) {
    const Table numbers = numbers_on(gradient.device());
    for_each_piece(runs, gradient.is_meta(), [&](const std::vector<QuantizedRun>& piece) {
      const ElementPlaces places = places_of(piece, gradient.device());
      const auto [average, square] = new_averages(gradient, state, places, numbers, step);
      at::Tensor(exp_avg_scale).scatter_reduce_(0, places.block, average.abs(), "amax");
      at::Tensor(exp_avg_sq_scale).scatter_reduce_(0, places.block, square, "amax");
    });
    return;
  }
  const Constants constants(step);
  const Averages averages(state, constants);
  const float* const g = gradient.const_data_ptr<float>();
  float *const m_scale = exp_avg_scale.data_ptr<float>(), *const v_scale = exp_avg_sq_scale.data_ptr<float>();
  for_each_block(runs, [&](int64_t first, int64_t last, int64_t block) {
    float largest = m_scale[block], largest_square = v_scale[block];
    for (int64_t i = first; i < last; ++i) {
      largest = std::max(largest, std::abs(averages.average(i, block, g[i])));
      largest_square = std::max(largest_square, averages.square(i, block, g[i]));
    }
    m_scale[block] = largest;
    v_scale[block] = largest_square;
  });
}

void adam8bit_update_(const at::Tensor& parameter, const at::Tensor& gradient, const Adam8bitState& state, const std::vector<QuantizedRun>& runs,
                      const Adam8bitStep& step, const at::Tensor& exp_avg_scale, const at::Tensor& exp_avg_sq_scale) {
  check(gradient, state);
  invariant(parameter.scalar_type() == at::kFloat && parameter.is_contiguous(), "adam8bit: parameters must be fp32 and contiguous");
  if (parameter.is_meta() && is_on_host(parameter)) return;
  const Constants c(step);
  if (parameter.is_cpu()) {
    const Averages averages(state, c);
    const Quantizer &with_sign = quantizer(true), &without = quantizer(false);
    const uint8_t zero = with_sign.encode(0);
    float* const p = parameter.data_ptr<float>();
    const float* const g = gradient.const_data_ptr<float>();
    uint8_t *const m = state.exp_avg.data_ptr<uint8_t>(), *const v = state.exp_avg_sq.data_ptr<uint8_t>();
    const float *const m_scale = exp_avg_scale.const_data_ptr<float>(), *const v_scale = exp_avg_sq_scale.const_data_ptr<float>();
    for_each_block(runs, [&](int64_t first, int64_t last, int64_t block) {
      for (int64_t i = first; i < last; ++i) {
        const float average = averages.average(i, block, g[i]), square = averages.square(i, block, g[i]);
        p[i] = c.kept * p[i] - c.step_size * average / (std::sqrt(square) / c.root + c.eps);
        uint8_t code = m_scale[block] > 0 ? with_sign.encode(average / m_scale[block]) : zero;
        if (average < 0 && code == zero) --code;  // an average near 0 that lost its sign would be as often wrong as right
        m[i] = code;
        v[i] = v_scale[block] > 0 ? without.encode(square / v_scale[block]) : 0;
      }
    });
  } else {
    const Table numbers = numbers_on(parameter.device()), midpoints = midpoints_on(parameter.device());
    for_each_piece(runs, parameter.is_meta(), [&](const std::vector<QuantizedRun>& piece) {
      const ElementPlaces places = places_of(piece, parameter.device());
      const auto [average, square] = new_averages(gradient, state, places, numbers, step);
      const at::Tensor updated = parameter.view({-1}).index_select(0, places.element).mul_(1 - step.lr * step.weight_decay);
      updated.addcdiv_(average, square.sqrt().div_(c.root).add_(step.eps), -c.step_size);
      at::Tensor(parameter.view({-1})).index_copy_(0, places.element, updated);
      at::Tensor(state.exp_avg.view({-1})).index_copy_(0, places.element, encoded(average, exp_avg_scale, places, midpoints, true));
      at::Tensor(state.exp_avg_sq.view({-1})).index_copy_(0, places.element, encoded(square, exp_avg_sq_scale, places, midpoints, false));
    });
  }
  at::Tensor(state.exp_avg_scale).copy_(exp_avg_scale);
  at::Tensor(state.exp_avg_sq_scale).copy_(exp_avg_sq_scale);
}

}  // namespace tessera::kernels
