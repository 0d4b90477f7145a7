#include "tessera/recompute/recomputed_call.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/core/Formatting.h>
#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/operators.h"
#include "tessera/recompute/operator_trace.h"

// The graph of the first pass is the one that backward walks; of the second pass only values are wanted. A forward that does the same saves the same tensors in
// the same order, so the number of a tensor among them is all that ties the two passes together, and every shape is compared. Tensors are gone after forward,
// but their version counters are kept: a write that autograd would have refused is refused here, too. Behind the last tensor that is wanted a module may still
// compute much, which is left out by an exception of our own.

namespace tessera {

namespace {

/// Breaks a recomputation off when nothing more is needed of it. No std::exception: a module that catches those lets it pass.
struct AllComputed {};

/// Breaks one off that does not write a buffer as the first pass did.
struct LeavesUnwritten {};

std::string describe(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  return detail::concat(c10::toString(dtype), " ", sizes, " on ", device.str());
}

}  // namespace

/// In the graph, in place of one saved tensor.
class RecomputedCall::Slot final : public nn::SavedTensor {
 public:
  Slot(std::shared_ptr<RecomputedCall> call, size_t index) : call_(std::move(call)), index_(index) {}
  ~Slot() override {
    auto& entry = call_->entries_[index_];
    entry.alive = false;
    entry.tensor = at::Tensor();
  }
  at::Tensor unpack() override { return call_->unpack(index_); }

 private:
  std::shared_ptr<RecomputedCall> call_;
  size_t index_;
};

/// The first forward pass: keeps nothing.
class RecomputedCall::Dropper final : public nn::SavedTensorHooks {
 public:
  explicit Dropper(std::shared_ptr<RecomputedCall> call) : call_(std::move(call)) {}
  std::unique_ptr<nn::SavedTensor> pack(const at::Tensor& tensor) override {
    auto& entries = call_->entries_;
    call_->buffers_.before_saving();
    const c10::VariableVersion& writes = tensor.unsafeGetTensorImpl()->version_counter();
    entries.push_back({.sizes = tensor.sizes().vec(), .dtype = tensor.scalar_type(), .device = tensor.device(), .writes = writes});
    if (writes.enabled()) entries.back().version = writes.current_version();
    return std::make_unique<Slot>(call_, entries.size() - 1);
  }
  bool computes_again() const override { return true; }

 private:
  std::shared_ptr<RecomputedCall> call_;
};

/// The second one: serves the slots.
class RecomputedCall::Filler final : public nn::SavedTensorHooks {
 public:
  Filler(RecomputedCall& call, size_t wanted, const OperatorTrace& trace) : call_(call), wanted_(wanted), trace_(trace) {}

  std::unique_ptr<nn::SavedTensor> pack(const at::Tensor& tensor) override {
    if (threw_) call_.refuse_caught();
    threw_ = true;  // unless it returns
    if (call_.buffers_.leaves_unwritten(next_)) throw LeavesUnwritten{};
    if (next_ == call_.entries_.size()) call_.refuse_more(trace_.current());
    Entry& entry = call_.entries_[next_];
    const bool same = tensor.sizes() == at::IntArrayRef(entry.sizes) && tensor.scalar_type() == entry.dtype && tensor.device() == entry.device;
    if (!same) call_.refuse(next_, trace_.current() + " saves " + describe(tensor.sizes(), tensor.scalar_type(), tensor.device()));
    if (entry.alive) entry.tensor = tensor;
    if (++next_ == wanted_) throw AllComputed{};
    threw_ = false;
    return std::make_unique<Held>(tensor);
  }
  bool computes_again() const override { return true; }
  size_t saved() const { return next_; }
  bool threw() const { return threw_; }

 private:
  /// The graph of the second pass is thrown away, unless the module itself differentiates inside forward.
  struct Held final : nn::SavedTensor {
    explicit Held(at::Tensor tensor) : tensor(std::move(tensor)) {}
    at::Tensor unpack() override { return tensor; }
    at::Tensor tensor;
  };

  RecomputedCall& call_;
  size_t wanted_, next_ = 0;
  bool threw_ = false;
  const OperatorTrace& trace_;
};

/// In place of an input that is an output of the call before.
class RecomputedCall::OutputSlot final : public nn::SavedTensor {
 public:
  OutputSlot(std::shared_ptr<RecomputedCall> call, size_t index) : call_(std::move(call)), index_(index) {}
  at::Tensor unpack() override { return call_->output(index_); }

 private:
  std::shared_ptr<RecomputedCall> call_;
  size_t index_;
};

class RecomputedCall::FromBefore final : public nn::SavedTensorHooks {
 public:
  explicit FromBefore(std::shared_ptr<RecomputedCall> call) : call_(std::move(call)) {}
  std::unique_ptr<nn::SavedTensor> pack(const at::Tensor& tensor) override {
    const auto index = call_->output_that_is(tensor);
    return index ? std::make_unique<OutputSlot>(call_, *index) : nullptr;
  }

 private:
  std::shared_ptr<RecomputedCall> call_;
};

KeptValues RecomputedCall::keep(const nn::Values& inputs, std::shared_ptr<RecomputedCall> before) {
  if (!before) return KeptValues(inputs);
  const nn::SavedTensorScope from_before(std::make_shared<FromBefore>(std::move(before)));
  return KeptValues(inputs);
}

void RecomputedCall::note_outputs(const nn::Values& outputs) {
  for (const auto& value : outputs) {
    nn::map_tensors(value, [&](const at::Tensor& tensor) {
      returned_.push_back({.storage = c10::weak_intrusive_ptr(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl())),
                           .sizes = tensor.sizes().vec(),
                           .strides = tensor.strides().vec(),
                           .offset = tensor.storage_offset(),
                           .dtype = tensor.scalar_type(),
                           .version = nn::version_of(tensor)});
      return tensor;
    });
  }
}

std::optional<size_t> RecomputedCall::output_that_is(const at::Tensor& tensor) const {
  for (size_t i = 0; i < returned_.size(); ++i) {
    const Output& one = returned_[i];
    const bool same = !one.storage.expired() && one.storage._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl() &&
                      tensor.sizes() == at::IntArrayRef(one.sizes) && tensor.strides() == at::IntArrayRef(one.strides) &&
                      tensor.storage_offset() == one.offset && tensor.scalar_type() == one.dtype && nn::version_of(tensor) == one.version;
    if (same) return i;
  }
  return std::nullopt;
}

at::Tensor RecomputedCall::output(size_t index) {
  if (!returned_[index].again.defined()) compute_again(/*to_the_end=*/true);
  return std::exchange(returned_[index].again, at::Tensor());
}

RecomputedCall::RecomputedCall(nn::Module& module, const nn::Values& inputs, const nn::Next& next, std::shared_ptr<const std::set<std::string>> keep,
                               std::shared_ptr<RecomputedCall> before)
    : module_(nn::share(module)),
      path_(module.path()),
      next_(next),
      inputs_(RecomputedCall::keep(inputs, std::move(before))),
      state_(inputs),
      buffers_(*module_, path_) {
  if (keep) outputs_.emplace(std::move(keep), path_);
  note_state(versions_);
}

nn::Values RecomputedCall::call(nn::Module& module, nn::Values inputs, const nn::Next& next, std::shared_ptr<const std::set<std::string>> keep,
                                std::shared_ptr<RecomputedCall> before, std::weak_ptr<RecomputedCall>* latest) {
  const auto made = std::make_shared<RecomputedCall>(module, inputs, next, std::move(keep), std::move(before));
  nn::Values outputs;
  {
    const nn::SavedTensorScope dropped(std::make_shared<Dropper>(made));
    std::optional<nn::OperatorScope> kept, watched;
    if (made->outputs_) kept.emplace(made->outputs_->recorder());
    if (made->buffers_.has_any()) watched.emplace(made->buffers_.recorder());
    outputs = made->next_(std::move(inputs));
  }
  made->forward_done();
  if (latest != nullptr) {
    made->note_outputs(outputs);
    *latest = made;
  }
  return outputs;
}

/// Whether its elements are other ones now is what the counter of a tensor tells; of one that is read only where no counter is kept (inference), nothing.
void RecomputedCall::note_state(std::vector<std::optional<uint32_t>>& versions) const {
  const auto note = [&](const at::Tensor& tensor) {
    const auto* const impl = tensor.defined() ? tensor.unsafeGetTensorImpl() : nullptr;
    const bool counts = impl != nullptr && impl->version_counter().enabled();
    versions.push_back(counts ? std::optional(impl->version_counter().current_version()) : std::nullopt);
  };
  for (const auto& tensor : module_->parameters()) note(tensor);
  for (const auto& tensor : module_->buffers()) note(tensor);
}

void RecomputedCall::forward_done() {
  state_.forward_done();
  if (outputs_) outputs_->forward_done();
  buffers_.forward_done();
  std::vector<std::optional<uint32_t>> after;
  note_state(after);
  after.resize(versions_.size());
  for (size_t i = 0; i < versions_.size(); ++i) {
    if (after[i] != versions_[i]) versions_[i].reset();
  }
  const auto buffers = module_->buffers();
  for (size_t i = 1; i <= std::min(buffers.size(), versions_.size()); ++i) {
    if (buffers_.wrote(buffers[buffers.size() - i])) versions_[versions_.size() - i].reset();
  }
}

/// What is read beside the inputs, and was written since the first pass: the second would make other values than the loss was made of.
void RecomputedCall::refuse_written() const {
  std::vector<std::optional<uint32_t>> now;
  note_state(now);
  if (now.size() != versions_.size()) return;  // a module was put in or out
  for (size_t i = 0; i < now.size(); ++i) {
    if (!versions_[i] || now[i] == versions_[i]) continue;
    const auto parameters = module_->named_parameters();
    const bool parameter = i < parameters.size();
    const std::string name = parameter ? parameters[i].key() : module_->named_buffers()[i - parameters.size()].key();
    throw ConfigError(detail::concat("recompute '", path_, "' (", module_->name(), "): ", parameter ? "parameter '" : "buffer '", name,
                                     "' was written between forward and backward, and computed again the module would make other values than its output was ",
                                     "made of; write it after backward, or take the module out of recompute.modules"));
  }
}

at::Tensor RecomputedCall::unpack(size_t index) {
  const Entry& entry = entries_[index];
  require(!entry.writes.enabled() || entry.writes.current_version() == entry.version, "recompute '", path_, "' (", module_->name(), "): a tensor of shape ",
          at::IntArrayRef(entry.sizes), " that backward needs (saved tensor ", index + 1, " of ", entries_.size(),
          ") was changed in place after it was saved; change a copy");
  if (!entries_[index].tensor.defined()) compute_again();
  return std::exchange(entries_[index].tensor, at::Tensor());
}

/// `to_the_end`: for what it returns, beside what it saves.
void RecomputedCall::compute_again(bool to_the_end) {
  while (!pass_again(to_the_end)) {
  }
}

/// False: it is to be made anew, with other buffers as they are.
bool RecomputedCall::pass_again(bool to_the_end) {
  const auto self = shared_from_this();
  const auto last = std::find_if(entries_.rbegin(), entries_.rend(), [](const Entry& entry) { return entry.alive; });
  const auto wanted = to_the_end ? std::numeric_limits<size_t>::max() : static_cast<size_t>(entries_.rend() - last);
  refuse_written();
  nn::Values inputs = inputs_.restore();  // which may be dropped, too: then the module around this one is computed again first
  const nn::RecomputingScope recomputing;
  const at::AutoGradMode recorded(true);
  const ThreadState::Guard state(state_);
  const FormerBuffers::Guard buffers(buffers_);
  const OperatorTrace trace;
  const auto filler = std::make_shared<Filler>(*this, wanted, trace);
  try {
    const nn::SavedTensorScope filled(filler);
    std::optional<nn::OperatorScope> replayed, watched;
    if (outputs_) replayed.emplace(outputs_->replayer());
    if (buffers_.has_any()) watched.emplace(buffers_.replayer());  // sees what kept outputs stand in for
    const nn::Values outputs = next_(std::move(inputs));
    if (filler->threw()) refuse_caught();
    if (to_the_end && filler->saved() == entries_.size()) {
      take_outputs(outputs);
      return true;
    }
  } catch (const AllComputed&) {
    return true;
  } catch (const LeavesUnwritten&) {
    return false;
  } catch (...) {
    for (auto& entry : entries_) entry.tensor = at::Tensor();
    throw;
  }
  refuse(filler->saved(), "it saves no further tensor after " + trace.current());
}

void RecomputedCall::take_outputs(const nn::Values& outputs) {
  size_t next = 0;
  for (const auto& value : outputs) {
    nn::map_tensors(value, [&](const at::Tensor& tensor) {
      if (next < returned_.size()) returned_[next].again = buffers_.share_memory_with(tensor) ? tensor.detach().clone() : tensor.detach();
      ++next;
      return tensor;
    });
  }
}

void RecomputedCall::refuse_more(const std::string& by) const {
  throw ConfigError(detail::concat("recompute '", path_, "' (", module_->name(), "): computed again, ", by, " saves one tensor more than the ", entries_.size(),
                                   " of the first forward pass; its forward must do the same each time: take the module out of recompute.modules, or what ",
                                   "changes out of the module"));
}

void RecomputedCall::refuse_caught() const {
  throw ConfigError(detail::concat("recompute '", path_, "' (", module_->name(),
                                   "): computed again, its forward caught an exception that was to pass, by which ",
                                   "recompute ends it; let what is not its own pass (a type in place of catch (...), or throw; behind it), or take the module ",
                                   "out of recompute.modules"));
}

void RecomputedCall::refuse(size_t index, const std::string& found) const {
  const Entry& entry = entries_[index];
  throw ConfigError(detail::concat("recompute '", path_, "' (", module_->name(), "): computed again, ", found, ", where the first forward pass saved ",
                                   describe(entry.sizes, entry.dtype, entry.device), " (saved tensor ", index + 1, " of ", entries_.size(),
                                   "); its forward must do the same each time: take the module out of recompute.modules, or what changes out of the module"));
}

}  // namespace tessera
