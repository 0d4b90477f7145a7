#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"
#include "tessera/nn/interceptor.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/write_watch.h"

/// What a program does to parameters whose gradients, or values, ranks have to meet for: forwards look.
namespace tessera::tensor_parallel {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Who cuts these layers, as refusals and nn::Dealt say it.
inline constexpr const char* kName = "parallelize_module";

/// Of parts that were given since parts were compared: what their layers have told of them when they were called next.
struct Told {
  int64_t bits;         ///< nn::bits_given
  int64_t times_given;  ///< nn::times_given; where it is another now, other values were loaded behind it
};
using ToldParts = std::map<const c10::TensorImpl*, Told>;

/// Refuses to compute with data of another shape that a program has put in a part's place, of which nobody knows what it is a part of. And with parameters that
/// were updated by a term of their gradient, each rank by another; of those that a wrapper shards, whoever clips or updates its parts looks.
class KnownParts final : public nn::Interceptor {
 public:
  KnownParts(std::string axis, const std::vector<at::Tensor>& parameters, bool watches_terms, std::shared_ptr<ToldParts> told);

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override;

  const std::string& axis() const { return axis_; }

 private:
  struct Part {
    std::string name;
    WeakTensor tensor;
    bool is_looked_after = false;               ///< no term, or terms were summed
    bool was_shown = false;                     ///< with data, in a call
    std::shared_ptr<at::Tensor> at_gradient{};  ///< the sum of its values when a gradient came
    Attachment listening{};
  };

  void tell(Part& part, const at::Tensor& parameter) const;
  void check_known(const std::string& name, const at::Tensor& parameter) const;
  void look_after_term(Part& part, const at::Tensor& parameter) const;

  std::string axis_;
  bool watches_terms_;
  std::shared_ptr<ToldParts> told_;
  std::vector<Part> parts_;
};

/// What a plan does not name is taken for whole, with the whole of its gradient. Around the calls of all of the plan's layers, one for all: of the layer that
/// this rank calls first (a stage of a pipeline calls its own alone) a few calls look whether the ranks have updated it alike (nn::require_alike), and whether
/// all have been given one rank's parts, which they look for in evaluations, too: there of a layer whose forward meets the other ranks anyway, for a program
/// may have one rank evaluate others. The first call looks at what was written since the cut, before updates make others of it. Whether sharded
/// parameters, whose slices are not shown while a forward runs, were updated alike nn::sum_terms looks.
class WholeParts final : public nn::Interceptor {
 public:
  /// `meeting`: layers without whose forward on all ranks none ends.
  WholeParts(comm::Group group, const std::vector<nn::NamedParameter>& parameters, std::set<const nn::Module*> meeting, std::shared_ptr<ToldParts> told);

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override;

 private:
  struct Passes {
    const nn::Module* first = nullptr;  ///< the layer by whose calls they are counted
    int64_t count = 0;
  };

  comm::Group group_;
  std::set<const nn::Module*> meeting_;
  std::shared_ptr<ToldParts> told_;
  std::vector<nn::NamedParameter> parameters() const;  ///< those that are left
  int64_t writes_of(const std::vector<nn::NamedParameter>& there, const std::vector<nn::NamedParameter>& parts) const;
  void refuse_what_was_written_alike(const std::vector<nn::NamedParameter>& there);

  std::vector<std::pair<std::string, WeakTensor>> parts_;
  std::vector<int64_t> times_given_;  ///< of each, at the cut
  nn::ParameterWrites since_cut_;
  bool was_cut_on_meta_ = false;  ///< some of them; so nobody knows what they were first
  bool may_be_written_ = false;   ///< whether nobody has looked yet at what was written since the cut
  Passes training_, evaluation_;
};

}  // namespace tessera::tensor_parallel
