#include "tessera/optim/optimizer.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/kernels/fused_updates.h"
#include "tessera/memory/memory.h"
#include "tessera/memory/on_host.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/kept_memory.h"
#include "tessera/nn/sharing.h"
#include "tessera/optim/clip.h"

namespace tessera::optim {

Optimizer::Optimizer(std::vector<ParameterGroup> groups) : groups_(std::move(groups)) {
  std::set<const void*> seen;
  std::set<std::string> names;
  for (auto& group : groups_) {
    // Codes and tables that are registered as parameters have no gradient, and never an update to count: wrappers list them or not.
    std::erase_if(group.parameters, [](const auto& parameter) { return !parameter.tensor.is_floating_point() && !parameter.tensor.is_complex(); });
    for (const auto& parameter : group.parameters) {
      require(!parameter.tensor.is_complex(), "the optimizer was given '", parameter.name,
              "', which is complex: ours update real numbers; give it to one of torch::optim");
      invariant(seen.insert(parameter.tensor.unsafeGetTensorImpl()).second, "the optimizer was given parameter '", parameter.name, "' twice");
      require(parameter.name.empty() || names.insert(parameter.name).second, "the optimizer was given two parameters of one name, '", parameter.name,
              "', under which their state could not be told apart; call tessera::nn::assign_paths(model) for the whole model before its parts are wrapped, or "
              "make one optimizer for each part");
      parameters_.push_back(parameter);
    }
  }
  counts_.resize(parameters_.size(), 0);
  std::set<const GradientSynchronizer*> asked;
  for (const auto& parameter : parameters_) {  // whoever holds them takes in what a program has put in their place (torch::load)
    const GradientSynchronizer* const owner = nn::owner_of(parameter.tensor);
    if (owner != nullptr && asked.insert(owner).second) (void)owner->updated();
  }
  for (const auto& parameter : parameters_) {
    nn::show_part(parameter.tensor);
    shapes_.push_back(parameter.tensor.sizes().vec());
  }
}

std::vector<at::Tensor> Optimizer::Batch::gradients_as_parameters() const {
  std::vector<at::Tensor> own;
  for (size_t i = 0; i < gradients.size(); ++i) own.push_back(gradients[i].to(parameters[i].scalar_type()));
  return own;
}

size_t Optimizer::Batch::piece_end(size_t begin, int64_t bytes) const {
  size_t end = begin;
  for (int64_t taken = 0; end < parameters.size(); ++end) {
    taken += static_cast<int64_t>(parameters[end].nbytes());
    if (end > begin && taken > bytes) break;
  }
  return end;
}

std::vector<Optimizer::Batch> Optimizer::batches(double lr, std::vector<std::pair<at::Tensor, at::Tensor>>& apart) {
  std::vector<Batch> batches;
  size_t index = 0;
  for (const auto& group : groups_) {
    Batch& batch = batches.emplace_back();
    batch.lr = lr * group.lr_factor;
    batch.weight_decay = group.weight_decay;
    for (const auto& parameter : group.parameters) {
      const size_t i = index++;
      at::Tensor gradient = parameter.tensor.grad();
      if (!gradient.defined()) continue;
      // The fused operators walk these memories side by side, from one end to the other.
      at::Tensor updated = parameter.tensor;
      require(updated.sizes() == at::IntArrayRef(shapes_[i]), "optimizer.step: '", parameter.name, "' has the shape ", updated.sizes(), ", and had ",
              at::IntArrayRef(shapes_[i]),
              " when the optimizer was made, for which its state is; make the optimizer behind what shards, unshards or resizes the model, and bring its state "
              "over by a checkpoint");
      if (by_rows() ? !updated.is_contiguous() : !updated.is_non_overlapping_and_dense()) {
        updated = at::empty_like(updated, by_rows() ? at::MemoryFormat::Contiguous : at::MemoryFormat::Preserve).copy_(updated);
        apart.emplace_back(parameter.tensor, updated);
      }
      if (gradient.strides() != updated.strides()) gradient = at::empty_like(updated, gradient.options()).copy_(gradient);
      hold(i);
      lay_state_like(i, updated);
      batch.indices.push_back(i);
      batch.parameters.push_back(std::move(updated));
      batch.gradients.push_back(std::move(gradient));
    }
  }
  return batches;
}

void Optimizer::step(double lr, const at::Tensor& skip, const at::Tensor& scale) {
  if (!terms_summed_) {
    nn::require_terms_summed("optimizer.step", parameters_);
    terms_summed_ = std::ranges::all_of(parameters_, [](const auto& parameter) { return parameter.tensor.grad().defined(); });
  }
  remember_counts();
  at::Tensor undecided = skip.is_meta() ? at::Tensor() : skip;
  if (undecided.defined() && (undecided.is_cpu() || !skips_on_device())) {
    if ((undecided.is_cpu() ? *undecided.const_data_ptr<float>() : host_read(undecided, 0)) != 0) return;
    undecided.reset();
  }
  double gradient_scale = 1;
  if (scale.defined()) {
    const bool as_it_reads = updates_in_one_pass() && is_on_host(scale);
    if (!as_it_reads) {
      scale_gradients(parameters_, scale);
    } else if (scale.is_cpu()) {
      gradient_scale = scale.item<double>();
    }
  }
  begin(lr);
  apply({.lr = lr, .skip = undecided, .gradient_scale = gradient_scale});
}

/// Whatever they do with them: some read parameters, or take what shares their memory, before an operator writes one.
void Optimizer::announce_writes() const {
  for (const auto& parameter : parameters_) {
    if (parameter.tensor.grad().defined() && (writes_memory() || nn::keeps_memory(parameter.tensor))) nn::announce_write(parameter.tensor);
  }
}

void Optimizer::count_writes(const std::vector<at::Tensor>& written) {
  for (const at::Tensor& tensor : written) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void Optimizer::begin(double lr) {
  if (!needs_begin()) return;
  const c10::NoGradGuard no_grad;
  for (const auto& parameter : parameters_) {
    if (parameter.tensor.grad().defined()) nn::show_part(parameter.tensor);  // it is read, and not written: that is no version
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> read;
  prepare(batches(lr, read));
}

void Optimizer::apply(const UpdateTerms& terms) {
  const c10::NoGradGuard no_grad;
  const kernels::UpdatesByElement by_element;
  announce_writes();
  std::vector<std::pair<at::Tensor, at::Tensor>> apart;
  for (Batch& batch : batches(terms.lr, apart)) {
    batch.skip = terms.skip;
    batch.gradient_scale = terms.gradient_scale;
    for (size_t k = 0; terms.rounded != nullptr && k < batch.indices.size(); ++k) {
      const auto found = terms.rounded->find(parameters_[batch.indices[k]].tensor.unsafeGetTensorImpl());
      batch.rounded.push_back(found == terms.rounded->end() ? at::Tensor() : found->second);
    }
    for (const size_t i : batch.indices) ++counts_[i];
    if (batch.indices.empty()) continue;
    update(batch);
  }
  for (auto& [parameter, updated] : apart) parameter.copy_(updated);
}

void Optimizer::remember_counts() { counts_before_ = counts_; }

void Optimizer::take_back_count() {
  if (counts_ == counts_before_) return;  // the host decided, before anything was counted: nothing has changed, and nothing was loaded
  counts_ = counts_before_;
  counts_changed();
}

at::Tensor not_finite(const at::Tensor& norm) {
  const c10::NoGradGuard no_grad;
  return at::isfinite(norm).eq(false).to(at::kFloat).reshape({1});
}

void Optimizer::hold_state(const std::map<std::string, int64_t>& counts) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto found = counts.find(parameters_[i].name);
    if (found != counts.end() && found->second > 0) hold(i);
  }
}

std::map<std::string, int64_t> Optimizer::update_counts() const {
  std::map<std::string, int64_t> counts;
  for (size_t i = 0; i < parameters_.size(); ++i) counts[parameters_[i].name] = counts_[i];
  return counts;
}

std::map<std::string, std::string> Optimizer::kinds() const {
  std::map<std::string, std::string> kinds;
  for (const auto& parameter : parameters_) kinds[parameter.name] = kind();
  return kinds;
}

std::set<std::string> Optimizer::needs_wholes() const {
  std::set<std::string> names;
  if (!needs_begin()) return names;
  for (const auto& parameter : parameters_) names.insert(parameter.name);
  return names;
}

void Optimizer::require_counts_of_all(const std::map<std::string, int64_t>& counts) const {
  std::set<std::string> unknown;
  for (const auto& [name, count] : counts) unknown.insert(name);
  std::string problems;
  for (const auto& parameter : parameters_) {
    if (unknown.erase(parameter.name) == 0) problems += " missing " + parameter.name + ";";
  }
  for (const auto& name : unknown) problems += " unknown " + name + ";";
  require(problems.empty(), "the optimizer state is of another model:", problems, " resume with the same model");
}

void Optimizer::set_update_counts(const std::map<std::string, int64_t>& counts) {
  require_counts_of_all(counts);
  for (size_t i = 0; i < parameters_.size(); ++i) counts_[i] = counts.at(parameters_[i].name);
  counts_changed();
}

std::vector<at::Tensor> Optimizer::zeros_like_parameters() const {
  std::vector<at::Tensor> tensors(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].tensor.requires_grad()) tensors[i] = zeros_like_parameter(i);
  }
  return tensors;
}

at::Tensor Optimizer::zeros_like_parameter(size_t index) const {
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Optimizer);
  const at::Tensor parameter = parameters_[index].tensor.detach();  // which behind an evaluation of the plain loop would be a use of it
  // Strides of dimensions of size 1, which mean nothing, are kept: kernels that compare strides compare all.
  return at::zeros_like(parameter, {}, by_rows() && !parameter.is_contiguous() ? at::MemoryFormat::Contiguous : at::MemoryFormat::Preserve);
}

void Optimizer::lay_like(at::Tensor& state, const at::Tensor& updated) {
  if (!state.defined() || state.strides() == updated.strides()) return;
  const MemoryScope scope(MemoryCategory::Optimizer);
  const at::Tensor laid = at::empty_like(updated, state.options()).copy_(state);
  state.set_data(laid);  // whoever keeps the tensor keeps it
}

std::vector<StateTensor> Optimizer::named_state(const std::string& state, const std::vector<at::Tensor>& tensors) const {
  std::vector<StateTensor> named;
  named.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;  // of a parameter that has had no gradient yet
    named.push_back({parameters_[i].name, state, tensors[i], nn::slice_of(parameters_[i].tensor)});
  }
  return named;
}

}  // namespace tessera::optim
