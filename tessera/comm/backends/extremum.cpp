#include "tessera/comm/backends/extremum.h"

#include <limits>

namespace tessera::comm {
namespace {

template <class Integer>
void turn_negative(at::Tensor& bits) {
  bits.bitwise_xor_(bits.bitwise_right_shift(std::numeric_limits<Integer>::digits).bitwise_and_(std::numeric_limits<Integer>::max()));
}

// Numbers as integers are in order, but for the negative ones, which are in the opposite one until all bits but the sign are turned round. Its own inverse.
void turn(at::Tensor& bits) { bits.scalar_type() == at::kLong ? turn_negative<int64_t>(bits) : turn_negative<int32_t>(bits); }

at::Scalar most_extreme(at::ScalarType dtype, Op op) {
  const auto of = [op](auto limits) { return at::Scalar(op == Op::Max ? limits.max() : limits.min()); };
  return dtype == at::kLong ? of(std::numeric_limits<int64_t>()) : of(std::numeric_limits<int32_t>());
}

}  // namespace

bool is_extremum(at::ScalarType dtype, Op op) {
  const bool known = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
  return known && (op == Op::Min || op == Op::Max);
}

bool is_extremum(const Call& call) { return call.reduction && is_extremum(call.inputs[0].scalar_type(), *call.reduction); }

at::Tensor to_ordered(const at::Tensor& numbers, Op op) {
  const bool is_double = numbers.scalar_type() == at::kDouble;
  at::Tensor bits = numbers.to(is_double ? at::kDouble : at::kFloat, /*non_blocking=*/false, /*copy=*/true).view(is_double ? at::kLong : at::kInt);
  turn(bits);
  return bits.masked_fill_(numbers.isnan(), most_extreme(bits.scalar_type(), op));
}

void from_ordered(at::Tensor ordered, const at::Tensor& numbers) {
  turn(ordered);
  at::Tensor(numbers).copy_(ordered.view(ordered.scalar_type() == at::kLong ? at::kDouble : at::kFloat));
}

int64_t ordered_bytes(const at::Tensor& numbers) { return numbers.numel() * (numbers.scalar_type() == at::kDouble ? 8 : 4); }

int64_t ordered_bytes(const Call& call) {
  if (!is_extremum(call)) return 0;
  return ordered_bytes(call.inputs[0]) + (call.op == Operation::ReduceScatter ? ordered_bytes(call.outputs[0]) : 0);
}

}  // namespace tessera::comm
