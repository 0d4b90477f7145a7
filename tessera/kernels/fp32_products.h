#pragma once

#include <string>
#include <string_view>

/// fp32 matrix products of a CPU by the library that uses its vectors. libtorch multiplies fp32 by MKL, whose kernels for processors of other makers than Intel
/// are AVX2 code; oneDNN, which libtorch brings along for 16-bit numbers, makes code for what the processor has. On a Zen 5 it is twice as fast.
namespace tessera::kernels {

/// Who multiplies fp32 on this machine's CPU.
struct CpuProducts {
  bool onednn = false;
  std::string reason;  ///< "AuthenticAMD with avx512"; or why libtorch's choice stays

  /// `maker`: as the processor says it; `max_isa`: ONEDNN_MAX_CPU_ISA; `forced`: TESSERA_CPU_PRODUCTS, which is onednn, libtorch, or empty. Throws ConfigError
  /// on anything else, and on onednn without `avx512` (f, bw, vl and dq), where libtorch would throw at the first product.
  static CpuProducts from(std::string_view maker, bool avx512, std::string_view max_isa, std::string_view forced);
};

/// Looked up once in the process.
const CpuProducts& cpu_products();

/// While it lives, this thread's aten::mm and aten::addmm of fp32 on a CPU, and those of its backward passes, are made as cpu_products() says: the operators
/// stay what they are for whoever watches them. Products that are too small to gain, or whose operands or result have gaps, stay libtorch's. In any case one
/// result a shape: the bits depend on nothing else but, where the inner dimension is much the longest, the number of threads.
class FastProducts {
 public:
  explicit FastProducts(bool fast = true);
  ~FastProducts();
  FastProducts(const FastProducts&) = delete;
  FastProducts& operator=(const FastProducts&) = delete;

  /// Whether this thread has one that says so, whatever cpu_products() says: what a thread that computes on its behalf is given.
  static bool are_wanted();

 private:
  bool former_;
};

}  // namespace tessera::kernels
