#include "tessera/recompute/former_buffers.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/expanded.h"
#include "tessera/nn/saved_tensors.h"

// Which buffers a forward writes shows when an operator is about to: then it is copied, and no other. (A version counter tells afterwards, and BatchNorm does
// not count at all.) In the second pass the former values are written into the buffers' own memory, since views of it may be in use, by tensors with a counter
// of their own; what was there goes back the same way, and the counter is set to what it was: the elements are again those that it stood for.

namespace tessera {

namespace {

/// Its values, by a tensor whose writes the buffer does not count.
at::Tensor uncounted(const at::Tensor& buffer) { return buffer.variable_data(); }

at::Tensor copy_of(const at::Tensor& buffer) {
  const at::NoGradGuard no_grad;
  const MemoryScope kept(MemoryCategory::Activations);
  return uncounted(buffer).clone();
}

/// Of elements that an expanded buffer shows many times, one each.
void write_values(const at::Tensor& buffer, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const at::Tensor target = uncounted(buffer);
  nn::written_once(target, target).copy_(nn::written_once(values, target));
}

bool lies_on(const c10::weak_intrusive_ptr<c10::StorageImpl>& memory, const at::Tensor& tensor) {
  return !memory.expired() && memory._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl();
}

}  // namespace

class FormerBuffers::Recorder final : public nn::OperatorHooks {
 public:
  explicit Recorder(FormerBuffers& buffers) : buffers_(buffers) {}
  void call(nn::OperatorCall& operation) override {
    buffers_.for_each_write(operation, [&](Buffer& buffer) {
      if (buffer.copy.defined()) return;  // of what it found, wherever that lies by now
      buffer.copy = copy_of(buffer.before);
      buffer.written_at = std::min(buffer.written_at, buffers_.saved_);
    });
    operation.run(/*watch_inside=*/operation.composite());
  }

 private:
  FormerBuffers& buffers_;
};

class FormerBuffers::Replayer final : public nn::OperatorHooks {
 public:
  explicit Replayer(FormerBuffers& buffers) : buffers_(buffers) {}
  void call(nn::OperatorCall& operation) override {
    buffers_.for_each_write(operation, [&](Buffer& buffer) {
      require(buffer.former.defined(), buffers_.where(), ": computed again, ", operation.name(), " writes buffer '", buffers_.name_of(buffer),
              "', which the first forward pass did not write; its forward must do the same each time: take the module out of recompute.modules, or ",
              "what changes out of the module");
      buffer.again = true;
    });
    operation.run(/*watch_inside=*/operation.composite());
  }

 private:
  FormerBuffers& buffers_;
};

FormerBuffers::FormerBuffers(const torch::nn::Module& module, std::string path) : module_(module), path_(std::move(path)) {
  for (const at::Tensor& tensor : module.buffers()) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.is_inference()) continue;
    const bool known = std::ranges::any_of(buffers_, [&](const Buffer& one) { return one.tensor.is_same(tensor); });
    if (!known) buffers_.push_back({.tensor = tensor, .before = uncounted(tensor), .memory = memory_of(tensor), .version = nn::version_of(tensor)});
  }
}

FormerBuffers::Memory FormerBuffers::memory_of(const at::Tensor& tensor) {
  return Memory(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
}

/// Calls `visit` for each buffer that the operator is about to write.
template <class Visit>
void FormerBuffers::for_each_write(const nn::OperatorCall& operation, Visit&& visit) {
  const auto look = [&](const at::Tensor& written) {
    if (!written.defined() || !written.has_storage()) return;
    for (Buffer& buffer : buffers_) {
      const bool writes_former = buffer.before.defined() && buffer.before.is_alias_of(written);
      if (writes_former || buffer.tensor.is_alias_of(written)) visit(buffer);
    }
  };
  const auto arguments = operation.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!nn::writes_argument(operation.schema(), arguments, i)) continue;
    if (arguments[i].isTensor()) look(arguments[i].toTensor());
    if (arguments[i].isTensorList()) std::ranges::for_each(arguments[i].toTensorVector(), look);
  }
}

std::shared_ptr<nn::OperatorHooks> FormerBuffers::recorder() { return std::make_shared<Recorder>(*this); }
std::shared_ptr<nn::OperatorHooks> FormerBuffers::replayer() { return std::make_shared<Replayer>(*this); }

void FormerBuffers::before_saving() {
  for (Buffer& buffer : buffers_) {
    if (!lies_on(buffer.memory, buffer.tensor)) buffer.written_at = std::min(buffer.written_at, saved_);  // it was given other memory (set_data)
  }
  ++saved_;
}

int64_t FormerBuffers::copied_bytes() const {
  int64_t bytes = 0;
  for (const Buffer& buffer : buffers_) bytes += buffer.copy.defined() ? static_cast<int64_t>(buffer.copy.nbytes()) : 0;
  return bytes;
}

void FormerBuffers::forward_done() {
  for (Buffer& buffer : buffers_) {
    const bool written = buffer.copy.defined(), replaced = !lies_on(buffer.memory, buffer.tensor);
    require(written || replaced || nn::version_of(buffer.tensor) == buffer.version, where(), ": its forward writes buffer '", name_of(buffer),
            "' past libtorch's operators (by a collective, say), by which what it held before is lost to the second pass; let an operator write it ",
            "first (copy_ from a tensor that the collective filled), or take the module out of recompute.modules");
    const bool has_grown = replaced && buffer.before.sizes() != buffer.tensor.sizes();
    // What a replaced one found lies in memory that is somebody else's now, who may write it before the second pass.
    if (written || (replaced && !has_grown)) buffer.former = written ? buffer.copy : copy_of(buffer.before);
    buffer.copy = buffer.before = at::Tensor();
    buffer.memory_after = memory_of(buffer.tensor);
    buffer.version_after = nn::version_of(buffer.tensor);
  }
}

bool FormerBuffers::wrote(const at::Tensor& buffer) const {
  return std::ranges::any_of(buffers_, [&](const Buffer& one) { return one.former.defined() && one.tensor.is_same(buffer); });
}

struct FormerBuffers::Guard::Held {
  at::Tensor buffer;
  at::Tensor found;  ///< an alias of it
  at::Tensor copy;   ///< what it held
  int64_t version;
};

FormerBuffers::Guard::Guard(FormerBuffers& buffers) {
  for (const Buffer& buffer : buffers.buffers_) {
    const bool as_left = lies_on(buffer.memory_after, buffer.tensor) && nn::version_of(buffer.tensor) == buffer.version_after;
    require(!buffer.left || as_left, buffers.where(), ": computed again, its forward does not write buffer '", buffers.name_of(buffer),
            "', which the first forward pass wrote, and which was written again since; its forward must do the same each time: take the module out of "
            "recompute.modules, or keep what decides on the write in a buffer");
  }
  std::vector<at::Tensor> given;
  for (Buffer& buffer : buffers.buffers_) {
    buffer.again = false;
    if (!buffer.former.defined()) continue;
    // Where the buffer was given other memory since, or is in the pass, which hands on what it lay on, it gets memory of the pass's own.
    const bool moves = buffer.memory._unsafe_get_target() != buffer.memory_after._unsafe_get_target();
    const bool same_place = !moves && lies_on(buffer.memory, buffer.tensor) && buffer.tensor.sizes() == buffer.former.sizes();
    held_.push_back({.buffer = buffer.tensor,
                     .found = uncounted(buffer.tensor),
                     .copy = same_place ? copy_of(buffer.tensor) : at::Tensor(),
                     .version = nn::version_of(buffer.tensor)});
    given.push_back(same_place ? buffer.former : copy_of(buffer.former));
  }
  for (size_t i = 0; i < held_.size(); ++i) {  // nothing is allocated any more
    if (held_[i].copy.defined()) {
      write_values(held_[i].buffer, given[i]);
    } else {
      held_[i].buffer.unsafeGetTensorImpl()->shallow_copy_from(given[i].getIntrusivePtr());
    }
  }
  for (Buffer& buffer : buffers.buffers_) buffer.given = buffer.tensor.storage().unsafeGetStorageImpl();
}

FormerBuffers::Guard::~Guard() {
  for (const Held& held : held_) {
    auto* const impl = held.buffer.unsafeGetTensorImpl();
    impl->shallow_copy_from(held.found.getIntrusivePtr());
    if (held.copy.defined()) write_values(held.buffer, held.copy);
    c10::VariableVersion writes = impl->version_counter();
    writes.set_version(held.version);
  }
}

bool FormerBuffers::leaves_unwritten(size_t index) {
  bool found = false;
  for (Buffer& buffer : buffers_) {
    const bool replaced = buffer.tensor.storage().unsafeGetStorageImpl() != buffer.given;
    if (!buffer.former.defined() || buffer.written_at > index || buffer.again || replaced) continue;
    buffer.former = at::Tensor();
    buffer.left = found = true;
  }
  return found;
}

bool FormerBuffers::share_memory_with(const at::Tensor& tensor) const {
  return tensor.has_storage() && std::ranges::any_of(buffers_, [&](const Buffer& buffer) {
           return buffer.former.defined() && buffer.tensor.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl();
         });
}

std::string FormerBuffers::where() const { return detail::concat("recompute '", path_, "' (", module_.name(), ")"); }

std::string FormerBuffers::name_of(const Buffer& buffer) const {
  for (const auto& item : module_.named_buffers()) {
    if (item.value().is_same(buffer.tensor)) return item.key();
  }
  return {};
}

}  // namespace tessera
