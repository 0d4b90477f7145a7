#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"
#include "tessera/nn/interceptor.h"
#include "tessera/nn/parameter.h"

/// What a program does to parameters whose gradients, or values, ranks have to meet for: forwards look.
namespace tessera::tensor_parallel {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Refuses to compute with data of another shape that a program has put in a part's place, of which nobody knows what it is a part of. And with parameters that
/// were updated by a term of their gradient, each rank by another; of those that a wrapper shards, whoever clips or updates its parts looks.
class KnownParts final : public nn::Interceptor {
 public:
  KnownParts(std::string axis, const std::vector<at::Tensor>& parameters, bool watches_terms);

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override;

  const std::string& axis() const { return axis_; }

 private:
  struct Part {
    std::string name;
    WeakTensor tensor;
    bool is_looked_after = false;               ///< no term, or terms were summed
    std::shared_ptr<at::Tensor> at_gradient{};  ///< the sum of its values when a gradient came
    Attachment listening{};
  };

  void check_known(const std::string& name, const at::Tensor& parameter) const;
  void look_after_term(Part& part, const at::Tensor& parameter) const;

  std::string axis_;
  bool watches_terms_;
  std::vector<Part> parts_;
};

/// What a plan does not name is taken for whole, with the whole of its gradient. Around the calls of all of the plan's layers, one for all: of the layer that
/// this rank calls first (a stage of a pipeline calls its own alone) a few calls look whether the ranks have updated it alike (nn::require_alike), and whether
/// all have been given one rank's parts. Sharded parameters, whose slices are not shown while a forward runs, are nn::sum_terms' to look at.
class WholeParts final : public nn::Interceptor {
 public:
  WholeParts(comm::Group group, const std::vector<nn::NamedParameter>& parameters);

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override;

 private:
  comm::Group group_;
  const nn::Module* first_ = nullptr;
  std::vector<std::pair<std::string, WeakTensor>> parts_;
  int64_t passes_ = 0;
};

}  // namespace tessera::tensor_parallel
