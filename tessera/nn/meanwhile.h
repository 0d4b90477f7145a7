#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// What a module computes beside a call of another that may have to wait for other ranks (a shared expert beside those that lie elsewhere). Whoever waits
/// inside of that call runs it; where nobody did, value() does. Neither knows of the other:
///
///   nn::Meanwhile shared([&] { return shared_(x); });
///   const at::Tensor routed = experts_(rows, counts);   // an interceptor sends rows out, calls Meanwhile::run(), and takes rows in
///   return routed + shared.value();
///
/// Whoever lies between the two and keeps books on what the call computes (recomputation of the inner module alone) is not disturbed: within it there is
/// nothing to run. Scopes nest, per rank.
class Meanwhile {
 public:
  explicit Meanwhile(std::function<at::Tensor()> compute);
  ~Meanwhile();
  Meanwhile(const Meanwhile&) = delete;
  Meanwhile& operator=(const Meanwhile&) = delete;

  at::Tensor value();

  /// Whether the innermost scope of this thread has something that can be computed here and was not yet.
  static bool any();
  /// Computes it.
  static void run();

 private:
  std::function<at::Tensor()> compute_;
  at::Tensor value_;
  const void* books_;  ///< who kept them when this was made
  Meanwhile* outer_;
};

}  // namespace tessera::nn
