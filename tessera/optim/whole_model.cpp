#include "tessera/optim/whole_model.h"

#include <unordered_map>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/modules/embedding.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/head.h"
#include "tessera/nn/sharing.h"

namespace tessera::optim {

void WholeModel::meet(const at::Tensor& numbers, Meeting meeting) const {
  const comm::CallSite site("optimizer");
  const at::Tensor message = numbers.to(device.value_or(numbers.device()));
  comm::all_reduce(ranks, message, meeting == Meeting::Sum ? comm::Op::Sum : comm::Op::Max);
  if (!message.is_same(numbers)) at::Tensor(numbers).copy_(message);
}

void WholeModel::collect(const at::Tensor& all, const at::Tensor& mine) const {
  const comm::CallSite site("optimizer");
  const at::Device there = device.value_or(all.device());
  const at::Tensor message = mine.to(there);
  comm::reduce_scatter(ranks, message, all.view({-1}).to(there));
  if (!message.is_same(mine)) at::Tensor(mine).copy_(message);
}

void WholeModel::spread(const at::Tensor& mine, const at::Tensor& all) const {
  const comm::CallSite site("optimizer");
  const at::Device there = device.value_or(all.device());
  const at::Tensor message = all.view({-1}).to(there);
  comm::all_gather(ranks, message, mine.to(there));
  if (there != all.device()) at::Tensor(all).view({-1}).copy_(message);
}

void add_parameter(WholeModel& model, const nn::NamedParameter& parameter) {
  model.parameters.push_back(Slice::whole(parameter.name, nn::slice_of(parameter.tensor).shape));
  if (!parameter.tensor.requires_grad()) model.frozen.push_back(parameter);
}

void note_uses(WholeModel& model, const torch::nn::Module& root) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& parameter : nn::unique_parameters(root)) names.emplace(parameter.tensor.unsafeGetTensorImpl(), parameter.name);
  const auto name_of = [&](const at::Tensor& weight) {
    const auto found = names.find(weight.unsafeGetTensorImpl());
    return found == names.end() ? nn::slice_of(weight).name : found->second;  // of one that follows another
  };
  root.apply([&](const std::string& /*name*/, const torch::nn::Module& module) {
    if (const auto* embedding = dynamic_cast<const nn::EmbeddingImpl*>(&module)) model.looked_up.insert(name_of(embedding->weight));
    if (const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module)) model.looked_up.insert(name_of(embedding->weight));
    if (const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&module)) model.looked_up.insert(name_of(bag->weight));
    if (const auto* head = dynamic_cast<const nn::LanguageModelHeadImpl*>(&module)) model.heads.insert(name_of(head->weight));
    if (const auto* experts = dynamic_cast<const nn::GroupedExpertsImpl*>(&module)) {
      for (const at::Tensor& weight : {experts->w1, experts->w2, experts->w3}) model.stacks[name_of(weight)] = experts->experts();
    }
  });
}

void note_held_elsewhere(WholeModel& model, const std::vector<nn::NamedParameter>& updated) {
  std::set<std::string> counted;
  for (const auto& parameter : nn::counted_once(updated)) counted.insert(parameter.name);
  for (const auto& parameter : updated) {
    if (!counted.contains(parameter.name)) model.held_elsewhere.insert(parameter.name);
  }
}

WholeModel whole_model(const torch::nn::Module& root) {
  WholeModel model;
  for (const auto& parameter : nn::unique_parameters(root)) add_parameter(model, parameter);
  note_uses(model, root);
  return model;
}

namespace {

/// What this rank updates of each parameter, whoever wraps it.
std::vector<nn::NamedParameter> updated_of(const torch::nn::Module& root) {
  std::vector<nn::NamedParameter> updated;
  std::set<const GradientSynchronizer*> seen;
  for (auto& parameter : nn::unique_parameters(root)) {
    const GradientSynchronizer* const owner = nn::owner_of(parameter.tensor);
    if (owner == nullptr) {
      updated.push_back(std::move(parameter));
    } else if (seen.insert(owner).second) {
      const auto theirs = nn::owned_by(*owner);
      updated.insert(updated.end(), theirs.begin(), theirs.end());
    }
  }
  return updated;
}

/// Which part it is; 0: none.
int64_t hash_of_part(const at::Tensor& updated) {
  const Slice& slice = nn::slice_of(updated);
  if (slice.numel() == 0) return 0;
  Hasher hash;
  for (const Box& box : slice.boxes) {
    for (const auto* numbers : {&box.offset, &box.size}) hash.update(numbers->data(), numbers->size() * sizeof(int64_t));
  }
  return static_cast<int64_t>(hash.value() | 1);
}

/// Of those who have the same part of a parameter the first answers for it.
void note_alike(WholeModel& model, const std::vector<nn::NamedParameter>& updated) {
  std::unordered_map<std::string, int64_t> parts;
  for (const auto& parameter : updated) {
    if (parameter.tensor.is_meta()) return;
    if (!model.held_elsewhere.contains(parameter.name)) parts[parameter.name] = hash_of_part(parameter.tensor);
  }
  std::vector<int64_t> words;
  for (const Slice& whole : model.parameters) words.push_back(parts[whole.name]);
  const at::Tensor mine = at::tensor(words, at::kLong).to(message_device(updated.front().tensor, model.ranks));
  const at::Tensor all = at::empty({model.ranks.size(), mine.size(0)}, mine.options());
  comm::all_gather(model.ranks, all, mine);
  const at::Tensor on_host = all.cpu();
  const auto of = on_host.accessor<int64_t, 2>();
  for (size_t i = 0; i < words.size(); ++i) {
    for (int rank = 0; words[i] != 0 && rank < model.ranks.rank(); ++rank) {
      if (of[rank][static_cast<int64_t>(i)] == words[i]) model.held_elsewhere.insert(model.parameters[i].name);
    }
  }
}

}  // namespace

WholeModel whole_model(const torch::nn::Module& root, const comm::Group& ranks) {
  WholeModel model = whole_model(root);
  model.ranks = ranks;
  const auto updated = updated_of(root);
  note_held_elsewhere(model, updated);
  if (ranks.size() > 1 && !updated.empty()) note_alike(model, updated);
  return model;
}

WholeModel whole_model(const torch::nn::Module& root, const GradientSynchronizer& wrapper, const std::optional<comm::Group>& ranks) {
  return whole_model(root, ranks.value_or(wrapper.norm_group()));
}

Places::Places(const std::vector<Slice>& parameters, const std::function<int64_t(const Slice&)>& numbers) {
  for (const Slice& whole : parameters) {
    const bool added = first_.emplace(whole.name, size_).second;
    invariant(added, "two parameters of one name, '", whole.name, "', in an update over ranks");
    size_ += numbers(whole);
  }
}

int64_t Places::of(const std::string& name) const {
  const auto found = first_.find(name);
  invariant(found != first_.end(), "'", name, "' is updated, and not among the parameters that ranks meet over");
  return found->second;
}

WholeModel settled(WholeModel model, const std::vector<nn::NamedParameter>& parameters, const char* name) {
  for (const auto& parameter : parameters) {
    const Slice& slice = nn::slice_of(parameter.tensor);
    require(model.meets() || slice.is_whole() || slice.logical_numel() == 0, "optim.name = ", name, ": '", parameter.name, "' is a part of a tensor ",
            at::IntArrayRef(slice.shape), ", and its update needs sums over the whole; pass optim::WholeModel with the ranks that hold the rest, or use adamw");
  }
  if (!model.parameters.empty()) return model;
  for (const auto& parameter : parameters) model.parameters.push_back(Slice::whole(parameter.name, nn::slice_of(parameter.tensor).shape));
  return model;
}

at::Tensor box_of(const at::Tensor& local, const Slice& slice, size_t index) {
  const Box place = slice.local_box(index);
  invariant(local.is_contiguous(), "a box of '", slice.name, "' is taken of a tensor with gaps");
  if (slice.concat_dim() < 0) return local.view({-1}).narrow(0, place.offset[0], place.size[0]).view(slice.boxes[index].size);
  at::Tensor part = local;
  for (size_t d = 0; d < place.offset.size(); ++d) part = part.narrow(static_cast<int64_t>(d), place.offset[d], place.size[d]);
  return part;
}

}  // namespace tessera::optim
