#pragma once

namespace tessera::kernels {

/// While alive, on this thread, a dry run stands for a device that multiplies fp16, as every accelerator does; else for a CPU, where such products are widened
/// (products.h). A backward pass follows the forward that recorded it.
class Fp16ProductsGuard {
 public:
  Fp16ProductsGuard();
  ~Fp16ProductsGuard();
  Fp16ProductsGuard(const Fp16ProductsGuard&) = delete;
  Fp16ProductsGuard& operator=(const Fp16ProductsGuard&) = delete;

 private:
  bool former_;
};

}  // namespace tessera::kernels
