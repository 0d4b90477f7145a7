#include "tessera/tensor_parallel/regather.h"

#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>

#include "tessera/comm/call_site.h"

// All layers that saved the whole, or a view of it, are known by its storage and get handles of one Source: it gathers for the first that asks, and the whole
// dies with the last handle, when the last of these layers has run its backward. A handle keeps sizes and strides, so that views come back as views of the one
// tensor.

namespace tessera::tensor_parallel {
namespace {

/// The part, and, from the first that asks until the last handle dies, the whole.
class Source {
 public:
  Source(std::shared_ptr<Context> context, const at::Tensor& part)
      : context_(std::move(context)), sequence_(context_->sequence), site_(comm::CallSite::current()), part_(nn::save(part.detach())) {}

  const at::Tensor& whole() {
    if (whole_.defined()) return whole_;
    const at::NoGradGuard no_grad;
    const comm::CallSite site(site_);
    Context then{context_->group, sequence_};
    whole_ = convert(then, site_, part_->unpack(), TensorLayout::Sequence, TensorLayout::Replicated);
    part_.reset();
    return whole_;
  }

 private:
  std::shared_ptr<Context> context_;
  int64_t sequence_;
  std::string site_;
  std::unique_ptr<nn::SavedTensor> part_;
  at::Tensor whole_;
};

/// `whole`, or a view of it that keeps its elements in order.
class Handle : public nn::SavedTensor {
 public:
  Handle(std::shared_ptr<Source> source, const at::Tensor& view)
      : source_(std::move(source)), sizes_(view.sizes().vec()), strides_(view.strides().vec()), offset_(view.storage_offset()) {}

  at::Tensor unpack() override { return at::as_strided(source_->whole(), sizes_, strides_, offset_); }

 private:
  std::shared_ptr<Source> source_;
  std::vector<int64_t> sizes_, strides_;
  int64_t offset_;
};

class Hooks : public nn::SavedTensorHooks {
 public:
  Hooks(std::shared_ptr<Context> context, const at::Tensor& part, const at::Tensor& whole)
      : source_(std::make_shared<Source>(std::move(context), part)), storage_(whole.storage()), dtype_(whole.scalar_type()), version_(nn::version_of(whole)) {}

  std::unique_ptr<nn::SavedTensor> pack(const at::Tensor& tensor) override {
    if (!tensor.has_storage() || !tensor.storage().is_alias_of(storage_) || tensor.scalar_type() != dtype_) return nullptr;
    if (nn::version_of(tensor) != version_) return nullptr;  // written since: what is gathered again would be what was there before
    return std::make_unique<Handle>(source_, tensor);
  }

 private:
  std::shared_ptr<Source> source_;
  at::Storage storage_;
  at::ScalarType dtype_;
  int64_t version_;
};

}  // namespace

std::shared_ptr<nn::SavedTensorHooks> regather(std::shared_ptr<Context> context, const at::Tensor& part, const at::Tensor& whole) {
  return std::make_shared<Hooks>(std::move(context), part, whole);
}

}  // namespace tessera::tensor_parallel
