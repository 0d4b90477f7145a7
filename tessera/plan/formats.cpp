#include "tessera/plan/formats.h"

#include <cmath>

#include <fmt/format.h>

#include "tessera/core/columns.h"

namespace tessera::plan {

double NumberFormat::largest() const {
  const int highest = (1 << exponent_bits) - 1 - (top == Top::Special ? 1 : 0);
  const double missing = top == Top::OneNan ? 2 : 1;  // of the mantissa, below two
  return std::ldexp(2 - missing * std::ldexp(1, -mantissa_bits), highest - bias());
}

double NumberFormat::smallest_normal() const { return std::ldexp(1, 1 - bias()); }
double NumberFormat::smallest() const { return std::ldexp(1, 1 - bias() - mantissa_bits); }
double NumberFormat::epsilon() const { return std::ldexp(1, -mantissa_bits); }

std::vector<NumberFormat> number_formats() {
  using Top = NumberFormat::Top;
  return {{"fp32", 32, 8, 23, Top::Special, "parameters, masters, sums"},
          {"tf32", 32, 8, 10, Top::Special, "products of fp32 on tensor cores"},
          {"bf16", 16, 8, 7, Top::Special, "products, activations"},
          {"fp16", 16, 5, 10, Top::Special, "products, with a scaled loss"},
          {"fp8 e4m3", 8, 4, 3, Top::OneNan, "products: inputs and weights"},
          {"fp8 e5m2", 8, 5, 2, Top::Special, "products: gradients"},
          {"fp4 e2m1", 4, 2, 1, Top::Numbers, "MX: 32 numbers share a scale of 8 bits"}};
}

std::string to_string(const std::vector<NumberFormat>& formats) {
  std::vector<std::vector<std::string>> rows{{"format", "bits", "exponent", "mantissa", "largest", "smallest normal", "smallest", "epsilon", "for"}};
  for (const NumberFormat& format : formats) {
    const auto number = [](double value) { return fmt::format("{:.5g}", value); };
    rows.push_back({format.name, std::to_string(format.bits), std::to_string(format.exponent_bits), std::to_string(format.mantissa_bits),
                    number(format.largest()), number(format.smallest_normal()), number(format.smallest()), number(format.epsilon()), format.where});
  }
  return format_columns(rows, {0, 8});
}

}  // namespace tessera::plan
