#include "tessera/tensor_parallel/same_input.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/failure.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/nn/module.h"

// Ranks with other batches would compute without any error, and wrong sums. Comparing hashes costs one all-gather of 8 bytes a rank and a read of the input;
// nobody knows which ranks are right, so the message names those that are not like most.

namespace tessera::tensor_parallel {
namespace {

int64_t hash_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().cpu().contiguous();
  const std::string kind = detail::concat(tensor.sizes(), ' ', tensor.scalar_type());
  return static_cast<int64_t>(Hasher().update(kind.data(), kind.size()).update(values.const_data_ptr(), values.nbytes()).value());
}

std::vector<int64_t> gather(const comm::Group& group, int64_t own, at::Device device) {
  const at::Tensor mine = at::full({1}, own, at::TensorOptions(at::kLong).device(device)), all = at::empty({group.size()}, mine.options());
  comm::all_gather(group, all, mine);
  const at::Tensor host = all.cpu();
  return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + group.size()};
}

/// World ranks whose hash is not that of most; of as many, the first counts.
std::vector<int> odd_ones(const comm::Group& group, const std::vector<int64_t>& hashes) {
  const auto count = [&](int64_t hash) { return std::ranges::count(hashes, hash); };
  const int64_t most = *std::ranges::max_element(hashes, {}, count);
  std::vector<int> odd;
  for (int member = 0; member < group.size(); ++member) {
    if (hashes[static_cast<size_t>(member)] != most) odd.push_back(group.world_rank(member));
  }
  return odd;
}

class SameInput : public nn::Interceptor {
 public:
  SameInput(std::shared_ptr<Context> context, int argument) : context_(std::move(context)), argument_(static_cast<size_t>(argument)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    if (argument_ < inputs.size() && inputs[argument_].isTensor()) compare(module, inputs[argument_].toTensor());
    return next(std::move(inputs));
  }

 private:
  void compare(const nn::Module& module, const at::Tensor& input) const {
    if (!input.defined() || input.is_meta()) return;
    const auto odd = odd_ones(context_->group, gather(context_->group, hash_of(input), input.device()));
    if (odd.empty()) return;
    throw CommError(detail::concat("tensor parallelism: argument ", argument_, " of '", module.path(), "' has to be the same on every rank of ",
                                   context_->group.name(), ", and ", comm::name_ranks(odd), odd.size() == 1 ? " was" : " were",
                                   " given another one than the rest; give these ranks the same batch: deal samples by the rank along the data axes alone, and "
                                   "see that the data is the same on every host"));
  }

  std::shared_ptr<Context> context_;
  size_t argument_;
};

}  // namespace

std::shared_ptr<nn::Interceptor> same_input(std::shared_ptr<Context> context, int argument) {
  return std::make_shared<SameInput>(std::move(context), argument);
}

}  // namespace tessera::tensor_parallel
