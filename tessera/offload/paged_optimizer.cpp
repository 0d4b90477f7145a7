#include "tessera/offload/paged_optimizer.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include <c10/core/GradMode.h>

#include "tessera/memory/memory.h"
#include "tessera/offload/parked_storage.h"

// The optimizer inside keeps its tensors, and only their memory comes and goes: no optimizer knows that it is paged. It is handed parameters that require no
// gradient, so it makes state when one is first updated, and its step is called once a piece, with the gradients of that piece and none for all others, which
// it leaves alone. What is fetched ahead is what stands behind the piece at hand in the order of construction, which is that of updates.

namespace tessera {

PagedOptimizer::PagedOptimizer(const std::vector<nn::NamedParameter>& parameters, const PagedOptimizerOptions& options, const Build& build)
    : Optimizer(std::vector{optim::ParameterGroup{parameters}}),
      piece_bytes_(options.piece_bytes),
      on_disk_(options.place == OffloadPlace::Disk),
      pages_(parameters_.size()) {
  const at::Device device = parameters_.empty() ? at::Device(at::kCPU) : parameters_.front().tensor.device();
  depot_ = std::make_shared<offload::Depot>(device, /*budget_bytes=*/0, MemoryCategory::Optimizer);
  if (on_disk_) depot_->file = std::make_unique<offload::SpillFile>(options.dir, "offload.dir", options.disk, device.is_meta());
  std::vector<nn::NamedParameter> stand_ins;
  for (const auto& [name, tensor, aliases] : parameters_) {
    const at::Tensor stand_in = tensor.detach();
    nn::set_slice(stand_in, nn::slice_of(tensor));
    stand_ins_.push_back(stand_in);
    stand_ins.push_back({name, stand_in, aliases});
  }
  inner_ = build(stand_ins);
  const std::set<std::string> wholes = inner_->needs_wholes();
  const std::map<std::string, std::string> kinds = inner_->kinds();
  for (const auto& [name, tensor, aliases] : parameters_) {
    const Slice slice = nn::slice_of(tensor);
    // Pieces end elsewhere on each rank, so their collectives would meet others'.
    require(!wholes.contains(name) || slice.is_whole(), "PagedOptimizer: ", kinds.at(name), " looks at whole tensors, and '", name, "' of shape ",
            at::IntArrayRef(slice.shape), " is cut over ranks: its ranks would have to come to the same piece together. Use an optimizer that goes element by ",
            "element (AdamW, SGD, Lion), a wrapper that leaves tensors whole, or leave the state where it is updated (optim::make_optimizer, HostOptimizer)");
  }
  inner_->meet_nobody();
}

PagedOptimizer::~PagedOptimizer() = default;

/// State that was made since. What shares memory with a parameter, or with other state, stays where it is.
void PagedOptimizer::adopt_state() {
  std::map<std::string, size_t> index_of;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (pages_[i].empty()) index_of.emplace(parameters_[i].name, i);
  }
  if (index_of.empty()) return;
  std::map<const c10::StorageImpl*, int> users;
  for (const at::Tensor& stand_in : stand_ins_) ++users[stand_in.storage().unsafeGetStorageImpl()];
  const auto state = inner_->state();
  for (const auto& held : state) ++users[held.tensor.storage().unsafeGetStorageImpl()];
  for (const auto& held : state) {
    const auto found = index_of.find(held.parameter);
    if (found == index_of.end() || users.at(held.tensor.storage().unsafeGetStorageImpl()) > 1) continue;
    pages_[found->second].push_back({.tensor = held.tensor});
  }
}

void PagedOptimizer::bring(size_t index) const {
  for (Page& page : pages_[index]) {
    if (const auto away = std::exchange(page.away, nullptr)) away->refill(page.tensor);
  }
}

/// To whoever loads: what the host has on disk is looked at there.
void PagedOptimizer::bring_all() const {
  for (size_t i = 0; i < pages_.size(); ++i) {
    for (Page& page : pages_[i]) {
      if (page.away && page.away->map_into(page.tensor)) page.away.reset();
    }
    bring(i);
  }
}

void PagedOptimizer::send(size_t index) {
  for (Page& page : pages_[index]) {
    if (page.away || page.tensor.numel() == 0) continue;
    page.away = std::make_shared<offload::ParkedStorage>(depot_, page.tensor, on_disk_);
    offload::free_memory(page.tensor);
  }
}

/// Begins to bring what comes after this parameter, as much as one piece.
void PagedOptimizer::fetch_behind(size_t index) {
  int64_t bytes = 0;
  for (size_t next = index + 1; next < parameters_.size(); ++next) {
    bytes += static_cast<int64_t>(parameters_[next].tensor.nbytes());
    if (next > index + 1 && bytes > piece_bytes_) return;
    for (Page& page : pages_[next]) {
      if (page.away) page.away->fetch();
    }
  }
}

std::vector<optim::StateTensor> PagedOptimizer::state() const {
  const c10::NoGradGuard no_grad;
  bring_all();
  return inner_->state();
}

std::vector<optim::StateTensor> PagedOptimizer::state_to_save() const {
  std::map<const c10::StorageImpl*, std::shared_ptr<offload::ParkedStorage>> away;
  for (const auto& pages : pages_) {
    for (const Page& page : pages) {
      if (page.away) away.emplace(page.tensor.storage().unsafeGetStorageImpl(), page.away);
    }
  }
  auto state = inner_->state();
  for (auto& held : state) {
    const auto found = away.find(held.tensor.storage().unsafeGetStorageImpl());
    if (found != away.end()) held.read = [parked = found->second, form = held.tensor] { return parked->copy_on_host(form); };
  }
  return state;
}

void PagedOptimizer::hold_state(const std::map<std::string, int64_t>& counts) {
  const c10::NoGradGuard no_grad;
  for (size_t begin = 0, end = 0; begin < parameters_.size(); begin = end) {  // what is made on the host goes to disk before there is more of it than a piece
    std::map<std::string, int64_t> of_piece;
    for (int64_t bytes = 0; end < parameters_.size(); ++end) {
      bytes += static_cast<int64_t>(parameters_[end].tensor.nbytes());
      if (end > begin && bytes > piece_bytes_) break;
      const auto found = counts.find(parameters_[end].name);
      if (found != counts.end()) of_piece.insert(*found);
    }
    inner_->hold_state(of_piece);
    adopt_state();
    for (size_t i = begin; i < end; ++i) send(i);
  }
}

void PagedOptimizer::counts_changed() { inner_->set_update_counts(update_counts()); }

void PagedOptimizer::update(const Batch& batch) {
  for (size_t begin = 0; begin < batch.indices.size();) {
    const size_t end = batch.piece_end(begin, piece_bytes_);
    for (size_t i = begin; i < end; ++i) bring(batch.indices[i]);
    fetch_behind(batch.indices[end - 1]);
    for (size_t i = begin; i < end; ++i) {
      const at::Tensor& stand_in = stand_ins_[batch.indices[i]];
      nn::set_data_of_same(stand_in, batch.parameters[i].detach());
      // Parameters may have been given other memory, and a counter of its own, since (pipeline/weight_versions.h): what is written counts there.
      stand_in.unsafeGetTensorImpl()->set_version_counter(batch.parameters[i].unsafeGetTensorImpl()->version_counter());
      stand_in.mutable_grad() = batch.gradients[i];
    }
    inner_->begin(batch.lr);
    inner_->apply({.lr = batch.lr, .skip = batch.skip, .gradient_scale = batch.gradient_scale});  // parameters without a gradient, all others, are left alone
    for (size_t i = begin; i < end; ++i) stand_ins_[batch.indices[i]].mutable_grad() = at::Tensor();
    adopt_state();
    for (size_t i = begin; i < end; ++i) send(batch.indices[i]);
    begin = end;
  }
  for (size_t i = 0; i < pages_.size(); ++i) send(i);  // what a checkpoint has brought in, of parameters that sat this step out
}

}  // namespace tessera
