#include "tessera/precision/master_weights.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include <ATen/Dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/core/parallel.h"
#include "tessera/kernels/pieces.h"
#include "tessera/memory/memory.h"
#include "tessera/memory/on_host.h"
#include "tessera/nn/late_updates.h"
#include "tessera/nn/names.h"

// The optimizer inside is handed masters as its parameters, and a gradient each. One that writes weights along in its pass is told which. Others know
// nothing of 16 bits. All gradients in fp32 at once would be a second set of masters; instead their step is called several times, with the gradients of a few
// parameters each and none for the others, which they leave alone. That is the same update, since it goes element by element and counts updates for each
// parameter.

namespace tessera::precision {

MasterWeights::MasterWeights(const std::vector<nn::NamedParameter>& weights, const Build& build) : Optimizer(std::vector{optim::ParameterGroup{weights}}) {
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Optimizer);
  for (const auto& weight : parameters_) {
    if (!weight.tensor.requires_grad()) {  // its master begins with its first update; until then the weight stands for it, and takes no memory
      masters_.push_back({weight.name, weight.tensor.detach(), weight.aliases});
      continue;
    }
    const at::Tensor master = at::empty_like(weight.tensor, weight.tensor.options().dtype(at::kFloat).requires_grad(false));
    master.copy_(weight.tensor);
    master.set_requires_grad(true);  // what says whether the optimizer inside keeps state of it from the start
    nn::set_slice(master, nn::slice_of(weight.tensor));
    masters_.push_back({weight.name, master, weight.aliases});
  }
  inner_ = build(masters_);
}

namespace {
bool is_master(const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat; }
}  // namespace

std::vector<optim::StateTensor> MasterWeights::with_masters(std::vector<optim::StateTensor> state) const {
  for (const auto& master : masters_) {
    if (is_master(master.tensor)) state.push_back({master.name, "master", master.tensor.detach(), nn::slice_of(master.tensor)});
  }
  return state;
}

void MasterWeights::make_master(size_t index) {
  const at::Tensor& master = masters_[index].tensor;
  if (is_master(master)) return;
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Optimizer);
  nn::set_data_of_same(master, parameters_[index].tensor.detach().to(at::kFloat));
  master.unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(/*version=*/0));  // it stood for the weight, whose writes these are not any more
  master.set_requires_grad(true);
}

void MasterWeights::hold_state(const std::map<std::string, int64_t>& counts) {
  for (size_t i = 0; i < masters_.size(); ++i) {
    if (const auto found = counts.find(masters_[i].name); found != counts.end() && found->second > 0) make_master(i);
  }
  inner_->hold_state(counts);
}

/// One past the last of the batch's parameters whose copied gradients fit the staging, from `begin` on.
size_t MasterWeights::staged_end(const Batch& batch, size_t begin) const {
  int64_t bytes = 0;
  size_t end = begin;
  for (; end < batch.indices.size(); ++end) {
    const at::Tensor& gradient = batch.gradients[end];
    if (gradient.scalar_type() != at::kFloat) bytes += gradient.numel() * static_cast<int64_t>(sizeof(float));
    if (end > begin && bytes > kStagingBytes) break;
  }
  return end;
}

namespace {

/// Where `master` does not round to `weight`, somebody has written the weight since: it takes the weight's value. Whether there was any such.
template <class Weight>
bool follow(float* master, const Weight* weight, int64_t count) {
  std::atomic<bool> written = false;
  parallel_for(0, count, 1 << 14, [=, &written](int64_t first, int64_t last) {
    bool all_stand = true;
    for (int64_t i = first; i < last; ++i) {
      const bool stands = static_cast<Weight>(master[i]) == weight[i];
      master[i] = stands ? master[i] : static_cast<float>(weight[i]);
      all_stand &= stands;
    }
    if (!all_stand) written = true;
  });
  return written;
}

/// The same by operators, a piece at a time: they want five bytes an element for themselves, and 30 of traffic.
void follow_by_operators(const at::Tensor& master, const at::Tensor& weight) {
  constexpr int64_t kPiece = int64_t{1} << 25;
  const auto follow_piece = [](at::Tensor piece, const at::Tensor& values) {
    const at::Tensor written = piece.to(values.scalar_type()).ne(values);
    at::where_out(piece, written, values.to(at::kFloat), piece);
  };
  if (!master.is_contiguous() || !weight.is_contiguous()) return follow_piece(master, weight);
  const at::Tensor masters = master.view(-1), weights = weight.view(-1);
  kernels::in_pieces(master.numel(), kPiece, /*on_meta=*/false,
                     [&](int64_t begin, int64_t count) { follow_piece(masters.narrow(0, begin, count), weights.narrow(0, begin, count)); });
}

void follow(const at::Tensor& master, const at::Tensor& weight) {
  if (master.is_meta()) return;  // also of a device's step: a plan does not count what these want for themselves
  if (!master.is_cpu() || !master.is_contiguous() || !weight.is_contiguous()) return follow_by_operators(master, weight);
  const bool written = AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, weight.scalar_type(), "follow_weights",
                                                       [&] { return follow(master.data_ptr<float>(), weight.const_data_ptr<scalar_t>(), master.numel()); });
  if (written) master.unsafeGetTensorImpl()->bump_version();  // by which who keeps copies of masters sees it (HostOptimizer)
}

}  // namespace

void MasterWeights::follow_weights(const std::vector<Batch>& batches) {
  for (const Batch& batch : batches) {
    for (const size_t index : batch.indices) make_master(index);
    const bool one_pass = goes_in_one_pass(batch);  // its kernel follows what it writes along
    for (const size_t index : batch.indices) {
      if (!one_pass || !is_written_along(index)) follow(masters_[index].tensor, parameters_[index].tensor.detach());
    }
  }
}

bool MasterWeights::goes_in_one_pass(const Batch& batch) const { return inner_->writes_rounded() && std::ranges::all_of(batch.parameters, is_on_host); }

void MasterWeights::prepare(const std::vector<Batch>& batches) {
  follow_weights(batches);
  if (inner_->needs_begin()) begin_inner(batches);
}

/// It may give masters an update of the step before (HostOptimizer, delayed), also those that sit this one out: their weights get it here. Otherwise these are
/// not looked at, for the memory of their masters may wait elsewhere (PagedOptimizer).
void MasterWeights::begin_inner(const std::vector<Batch>& batches) {
  std::vector<nn::WriteMark> idle(masters_.size());
  for (size_t i = 0; inner_->updates_late() && i < masters_.size(); ++i) {
    if (!is_master(masters_[i].tensor) || parameters_[i].tensor.grad().defined()) continue;
    follow(masters_[i].tensor, parameters_[i].tensor);  // what was written since is seen before an update is shown
    idle[i] = nn::WriteMark(masters_[i].tensor);
  }
  for (const Batch& batch : batches) {
    for (size_t i = 0; i < batch.indices.size(); ++i) masters_[batch.indices[i]].tensor.mutable_grad() = batch.gradients[i];
  }
  inner_->begin(batches.front().lr);
  for (const Batch& batch : batches) {
    for (const size_t index : batch.indices) masters_[index].tensor.mutable_grad() = at::Tensor();
  }
  for (size_t i = 0; i < masters_.size(); ++i) {
    if (idle[i] == nn::WriteMark() || idle[i] == nn::WriteMark(masters_[i].tensor)) continue;
    at::Tensor(parameters_[i].tensor).copy_(masters_[i].tensor);
    nn::note_late_update(parameters_[i].tensor);
  }
}

bool MasterWeights::is_written_along(size_t index) const {
  const at::Tensor &weight = parameters_[index].tensor, &master = masters_[index].tensor;
  return is_on_host(weight) && (weight.scalar_type() == at::kBFloat16 || weight.scalar_type() == at::kHalf) && weight.is_non_overlapping_and_dense() &&
         weight.strides() == master.strides();
}

void MasterWeights::update_in_one_pass(const Batch& batch) {
  optim::RoundedWeights rounded;
  for (size_t i = 0; i < batch.indices.size(); ++i) {
    const at::Tensor& master = masters_[batch.indices[i]].tensor;
    master.mutable_grad() = batch.gradients[i];
    if (is_written_along(batch.indices[i])) rounded.emplace(master.unsafeGetTensorImpl(), batch.parameters[i].detach());
  }
  inner_->apply({.lr = batch.lr, .skip = batch.skip, .gradient_scale = batch.gradient_scale, .rounded = &rounded});
  for (size_t i = 0; i < batch.indices.size(); ++i) {
    const at::Tensor& master = masters_[batch.indices[i]].tensor;
    master.mutable_grad() = at::Tensor();
    if (rounded.contains(master.unsafeGetTensorImpl())) {
      batch.parameters[i].unsafeGetTensorImpl()->bump_version();  // written as memory, past libtorch
    } else {
      batch.parameters[i].copy_(master);
    }
  }
}

void MasterWeights::update(const Batch& batch) {
  if (goes_in_one_pass(batch)) return update_in_one_pass(batch);
  for (size_t begin = 0; begin < batch.indices.size();) {
    const size_t end = staged_end(batch, begin);
    {
      const MemoryScope staging(MemoryCategory::Other);
      for (size_t i = begin; i < end; ++i) masters_[batch.indices[i]].tensor.mutable_grad() = batch.gradients[i].to(at::kFloat);
    }
    inner_->apply({.lr = batch.lr, .skip = batch.skip, .gradient_scale = batch.gradient_scale});  // parameters without a gradient, all others, are left alone
    for (size_t i = begin; i < end; ++i) {
      const at::Tensor& master = masters_[batch.indices[i]].tensor;
      batch.parameters[i].copy_(master);
      master.mutable_grad() = at::Tensor();
    }
    begin = end;
  }
}

void MasterWeights::counts_changed() { inner_->set_update_counts(update_counts()); }

std::unique_ptr<optim::Optimizer> make_optimizer(const OptimConfig& config, const Policy& policy, uint64_t seed,
                                                 const std::vector<nn::NamedParameter>& parameters, optim::WholeModel model) {
  if (policy.rounds_stochastically()) {
    OptimConfig narrow = config;
    narrow.state_dtype = "bf16";
    return optim::make_optimizer(narrow, parameters, std::move(model), seed);
  }
  if (!policy.has_masters()) return optim::make_optimizer(config, parameters, std::move(model), seed);
  return std::make_unique<MasterWeights>(
      parameters, [&](const std::vector<nn::NamedParameter>& masters) { return optim::make_optimizer(config, masters, std::move(model), seed); });
}

}  // namespace tessera::precision
