#pragma once

#include <string>
#include <vector>

namespace tessera::plan {

/// A floating-point format by the bits of its fields; all that follows is arithmetic on them.
struct NumberFormat {
  /// What the codes with the highest exponent mean.
  enum class Top {
    Special,  ///< infinities and NaNs: IEEE 754
    OneNan,   ///< numbers, but for the one with all bits set, a NaN (e4m3, OCP 8-bit specification)
    Numbers   ///< numbers (e2m1, OCP microscaling formats)
  };

  std::string name{};
  int bits = 0;  ///< that a number takes in memory
  int exponent_bits = 0, mantissa_bits = 0;
  Top top = Top::Special;
  std::string where{};  ///< what it is used for

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  double largest() const;
  double smallest_normal() const;
  double smallest() const;  ///< with a mantissa of one bit; 0 lies below
  double epsilon() const;   ///< from 1 to the next number
};

/// fp32 tf32 bf16 fp16, both of 8 bits, fp4 with the scales of its blocks.
std::vector<NumberFormat> number_formats();

/// A table for people.
std::string to_string(const std::vector<NumberFormat>& formats);

}  // namespace tessera::plan
