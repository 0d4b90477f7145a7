#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/core/attachment.h"

namespace tessera::pipeline {

/// Which gradients of shared parameters are sums of all ranks' already, so that no second call counts them twice. It hears of what arrives at them afterwards.
class SummedGradients {
 public:
  enum class State : int64_t {
    Own,     ///< of this rank's passes alone, or none
    Summed,  ///< as a call has left it, or scaled since
    Added,   ///< such a one, and what passes behind that call have brought
  };

  /// This gradient is summed now.
  void note(const std::string& name, const at::Tensor& parameter);
  State of(const std::string& name, const at::Tensor& parameter) const;

 private:
  struct Noted {
    const void* gradient = nullptr;  ///< to be compared alone
    int64_t version = 0;
    bool arrived = false, added = false;  ///< gradients have, to a sum that was not cleared

    bool stands(const at::Tensor& now) const;
  };
  std::map<std::string, std::shared_ptr<Noted>> noted_;
  std::map<std::string, Attachment> listening_;
};

}  // namespace tessera::pipeline
