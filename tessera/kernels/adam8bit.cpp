#include "tessera/kernels/adam8bit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <numeric>
#include <utility>

#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/repeat_interleave.h>
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

/// A block that elements lie in: its number in the logical tensor, and its scale's among those that are held here.
struct Block {
  int64_t whole, held;
};

/// Calls visit(first, last, block): elements [first, last) of the local memory lie in that block.
template <class Visit>
void for_each_block(const std::vector<QuantizedRun>& runs, const Visit& visit) {
  for (const QuantizedRun& run : runs) {
    const auto index = static_cast<int64_t>(run.elements.first_index);
    parallel_for(0, run.blocks(), 32, [&, end = index + run.elements.count](int64_t from, int64_t to) {
      for (int64_t b = from; b < to; ++b) {
        const Block block{run.first_block() + b, run.first_scale + b};
        const int64_t begin = std::max(index, block.whole * kAdam8bitBlock), last = std::min(end, (block.whole + 1) * kAdam8bitBlock);
        visit(run.elements.offset + begin - index, run.elements.offset + last - index, block);
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

  float average(int64_t i, int64_t held, float gradient) const { return constants_.beta1 * (m_numbers_[m_[i]] * m_scale_[held]) + constants_.rest1 * gradient; }
  float square(int64_t i, int64_t held, float gradient) const {
    return constants_.beta2 * (v_numbers_[v_[i]] * v_scale_[held]) + constants_.rest2 * (gradient * gradient);
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

/// What operators take for all runs at once, which may be thousands: the rows of a weight that is cut by columns.
class RunTable {
 public:
  /// `counts`: how many numbers each run stands for, its elements or its blocks.
  RunTable(std::vector<int64_t> counts, at::Device device)
      : counts_(std::move(counts)), all_(std::reduce(counts_.begin(), counts_.end())), options_(at::TensorOptions(device).dtype(at::kLong)) {}

  /// Of each run the number given, as often as it counts: int64 [all].
  at::Tensor repeated(const std::vector<int64_t>& numbers) const {
    if (options_.device().is_meta()) return at::empty({all_}, options_);
    const auto there = [&](const std::vector<int64_t>& of_runs) { return at::tensor(of_runs, at::kLong).to(options_.device()); };
    return at::repeat_interleave(there(numbers), there(counts_), /*dim=*/0, all_);
  }
  /// first, first + 1 and so on of each run: int64 [all].
  at::Tensor counted_from(std::vector<int64_t> first) const {
    int64_t before = 0;
    for (size_t r = 0; r < first.size(); ++r) {
      first[r] -= before;
      before += counts_[r];
    }
    at::Tensor numbers = repeated(first);
    return numbers.is_meta() ? numbers : numbers.add_(at::arange(all_, options_));
  }

 private:
  std::vector<int64_t> counts_;
  int64_t all_;
  at::TensorOptions options_;
};

template <class Of>
std::vector<int64_t> of_each(const std::vector<QuantizedRun>& runs, const Of& of) {
  std::vector<int64_t> numbers;
  for (const QuantizedRun& run : runs) numbers.push_back(of(run));
  return numbers;
}

/// Of each element of the runs, one after another: its place in the local memory, and its block's among the scales held here and among the logical tensor's.
struct ElementPlaces {
  ElementPlaces(const std::vector<QuantizedRun>& runs, at::Device device) {
    const RunTable table(of_each(runs, [](const QuantizedRun& run) { return run.elements.count; }), device);
    element = table.counted_from(of_each(runs, [](const QuantizedRun& run) { return run.elements.offset; }));
    whole = table.counted_from(of_each(runs, [](const QuantizedRun& run) { return static_cast<int64_t>(run.elements.first_index); }));
    whole.div_(kAdam8bitBlock, "floor");  // floor_divide_ has no meta kernel
    held = table.repeated(of_each(runs, [](const QuantizedRun& run) { return run.first_scale - run.first_block(); })).add_(whole);
  }

  at::Tensor element, whole, held;
};

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
  return numbers.index_select(0, code).mul_(scales.index_select(0, places.held));
}

/// New averages by operators of libtorch, fp32 [elements of the runs].
std::array<at::Tensor, 2> new_averages(const at::Tensor& gradient, const Adam8bitState& state, const ElementPlaces& places, const Table& numbers,
                                       const Adam8bitStep& step) {
  const at::Tensor g = gradient.view({-1}).index_select(0, places.element);
  return {decoded(state.exp_avg, state.exp_avg_scale, places, numbers.with_sign).mul_(step.beta1).add_(g, 1 - step.beta1),
          decoded(state.exp_avg_sq, state.exp_avg_sq_scale, places, numbers.without).mul_(step.beta2).addcmul_(g, g, 1 - step.beta2)};
}

at::Tensor encoded(const at::Tensor& values, const at::Tensor& scales, const ElementPlaces& places, const Table& midpoints, bool is_signed) {
  const at::Tensor scale = scales.index_select(0, places.whole);
  const at::Tensor x = at::where(scale.gt(0), values.div(scale), at::zeros_like(values));
  at::Tensor code = x.is_meta() ? at::empty(x.sizes(), x.options().dtype(at::kLong))  // for which libtorch has no kernel
                                : at::bucketize(x, is_signed ? midpoints.with_sign : midpoints.without);
  if (is_signed) code = code.sub_(values.lt(0).bitwise_and_(code.eq(quantizer(true).encode(0))).to(code.scalar_type()));
  return code.to(at::kByte);
}

/// held[of this rank's blocks] <- whole[of the logical tensor's].
void keep_scales(const std::vector<QuantizedRun>& runs, const at::Tensor& whole, const at::Tensor& held) {
  if (held.numel() == whole.numel()) {
    at::Tensor(held).copy_(whole);
  } else if (held.is_cpu()) {
    const float* const from = whole.const_data_ptr<float>();
    float* const to = held.data_ptr<float>();
    for (const QuantizedRun& run : runs) std::copy_n(from + run.first_block(), run.blocks(), to + run.first_scale);
  } else {
    const RunTable table(of_each(runs, [](const QuantizedRun& run) { return run.blocks(); }), held.device());
    const at::Tensor from = table.counted_from(of_each(runs, [](const QuantizedRun& run) { return run.first_block(); }));
    at::Tensor(held).index_copy_(0, table.counted_from(of_each(runs, [](const QuantizedRun& run) { return run.first_scale; })), whole.index_select(0, from));
  }
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
      const ElementPlaces places(piece, gradient.device());
      const auto [average, square] = new_averages(gradient, state, places, numbers, step);
      at::Tensor(exp_avg_scale).scatter_reduce_(0, places.whole, average.abs(), "amax");
      at::Tensor(exp_avg_sq_scale).scatter_reduce_(0, places.whole, square, "amax");
    });
    return;
  }
  const Constants constants(step);
  const Averages averages(state, constants);
  const float* const g = gradient.const_data_ptr<float>();
  float *const m_scale = exp_avg_scale.data_ptr<float>(), *const v_scale = exp_avg_sq_scale.data_ptr<float>();
  for_each_block(runs, [&](int64_t first, int64_t last, Block block) {
    float largest = m_scale[block.whole], largest_square = v_scale[block.whole];
    for (int64_t i = first; i < last; ++i) {
      largest = std::max(largest, std::abs(averages.average(i, block.held, g[i])));
      largest_square = std::max(largest_square, averages.square(i, block.held, g[i]));
    }
    m_scale[block.whole] = largest;
    v_scale[block.whole] = largest_square;
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
    for_each_block(runs, [&](int64_t first, int64_t last, Block block) {
      const float largest = m_scale[block.whole], largest_square = v_scale[block.whole];
      for (int64_t i = first; i < last; ++i) {
        const float average = averages.average(i, block.held, g[i]), square = averages.square(i, block.held, g[i]);
        p[i] = c.kept * p[i] - c.step_size * average / (std::sqrt(square) / c.root + c.eps);
        uint8_t code = largest > 0 ? with_sign.encode(average / largest) : zero;
        if (average < 0 && code == zero) --code;  // an average near 0 that lost its sign would be as often wrong as right
        m[i] = code;
        v[i] = largest_square > 0 ? without.encode(square / largest_square) : 0;
      }
    });
  } else {
    const Table numbers = numbers_on(parameter.device()), midpoints = midpoints_on(parameter.device());
    const at::Tensor flat = parameter.detach().view({-1});  // a view of the parameter itself may be a forward's (fully_shard)
    for_each_piece(runs, parameter.is_meta(), [&](const std::vector<QuantizedRun>& piece) {
      ElementPlaces places(piece, parameter.device());
      const auto [average, square] = new_averages(gradient, state, places, numbers, step);
      places.held.reset();
      const at::Tensor updated = flat.index_select(0, places.element).mul_(1 - step.lr * step.weight_decay);
      updated.addcdiv_(average, square.sqrt().div_(c.root).add_(step.eps), -c.step_size);
      at::Tensor(flat).index_copy_(0, places.element, updated);
      at::Tensor(state.exp_avg.view({-1})).index_copy_(0, places.element, encoded(average, exp_avg_scale, places, midpoints, true));
      at::Tensor(state.exp_avg_sq.view({-1})).index_copy_(0, places.element, encoded(square, exp_avg_sq_scale, places, midpoints, false));
    });
  }
  keep_scales(runs, exp_avg_scale, state.exp_avg_scale);
  keep_scales(runs, exp_avg_sq_scale, state.exp_avg_sq_scale);
}

}  // namespace tessera::kernels
