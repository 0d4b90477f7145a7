#include "tessera/nn/replicas.h"

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/hash_tensor.h"
#include "tessera/nn/expanded.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/parameter.h"

// Equal replicas are the usual case and cost three words a rank: a hash of the structure and one of all values. Only where those differ does a word for each
// parameter say which. Parameters are broadcast one by one, since packing would hold a second copy of a model; buffers are small, and many.

namespace tessera {
namespace {

/// Each rank's `words`, one row per rank, on the host.
at::Tensor gather_words(const std::vector<int64_t>& words, const comm::Group& group, at::Device device) {
  const at::Tensor mine = at::tensor(words, at::kLong).unsqueeze(0).to(device);
  at::Tensor all = at::zeros({group.size(), mine.size(1)}, mine.options());
  comm::all_gather(group, all, mine);
  return all.cpu();
}

int64_t hash_of(const at::Tensor& tensor) { return static_cast<int64_t>(hash_of_values(tensor)); }

std::string ranks_that_differ(const at::Tensor& words, int64_t column) {
  std::string ranks;
  for (int64_t rank = 1; rank < words.size(0); ++rank) {
    if (words[rank][column].item<int64_t>() != words[0][column].item<int64_t>()) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return ranks;
}

/// `strides`: also of how their gradients lie where they lie as the parameters do.
int64_t hash_of_structure(const std::vector<nn::NamedParameter>& parameters, bool strides) {
  Hasher structure;
  for (const auto& [name, tensor, aliases] : parameters) {
    std::string description = detail::concat(name, ' ', tensor.sizes(), ' ', tensor.scalar_type(), ' ', tensor.requires_grad(), ';');
    if (strides) description += detail::concat(at::IntArrayRef(gradient_strides(tensor)), ';');
    structure.update(description.data(), description.size());
  }
  return static_cast<int64_t>(structure.value());
}

/// `summaries`: of each rank how many parameters it has, and the hash of their structure with strides. Refuses another structure, and says whether strides are
/// the same: where something differs, ranks ask once more.
bool have_same_strides(const std::string& technique, const std::vector<nn::NamedParameter>& parameters, const at::Tensor& summaries, const comm::Group& group,
                       at::Device device) {
  if (ranks_that_differ(summaries, 1).empty()) return true;
  const at::Tensor structures = gather_words({summaries[group.rank()][0].item<int64_t>(), hash_of_structure(parameters, /*strides=*/false)}, group, device);
  const std::string other = ranks_that_differ(structures, 1);
  require(other.empty(), technique, ": the module of rank 0 of ", group.name(), " (", summaries[0][0].item<int64_t>(),
          " parameters) differs in names, shapes, dtypes or requires_grad on rank ", other,
          "; every rank has to build the same model, and to wrap parts of one in the same order");
  return false;
}

/// Where a parameter is another one than on rank 0.
struct Difference {
  std::string parameter, ranks;
  bool trained;  ///< it takes gradients
};

struct Comparison {
  std::optional<Difference> difference = std::nullopt;  ///< the first
  bool same_strides = true;
};

/// Nothing is found in a dry run, whose messages are counted, and mean nothing.
Comparison compare_parameters(const std::string& technique, const std::vector<nn::NamedParameter>& parameters, const comm::Group& group) {
  const at::Device device = message_device(parameters.front().tensor, group);
  const bool has_values = !parameters.front().tensor.is_meta();
  Hasher values;
  std::vector<int64_t> hashes;
  for (const auto& [name, tensor, aliases] : parameters) {
    hashes.push_back(has_values ? hash_of(tensor) : 0);
    values.update(&hashes.back(), sizeof(int64_t));
  }
  const at::Tensor summaries =
      gather_words({std::ssize(parameters), hash_of_structure(parameters, /*strides=*/true), static_cast<int64_t>(values.value())}, group, device);
  if (!has_values) return {};

  const bool same_strides = have_same_strides(technique, parameters, summaries, group, device);
  if (ranks_that_differ(summaries, 2).empty()) return {.same_strides = same_strides};
  const at::Tensor all = gather_words(hashes, group, device);
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::string ranks = ranks_that_differ(all, static_cast<int64_t>(i));
    if (!ranks.empty()) return {Difference{parameters[i].name, std::move(ranks), parameters[i].tensor.requires_grad()}, same_strides};
  }
  return {.same_strides = same_strides};
}

void refuse_difference(const std::optional<Difference>& difference, const comm::Group& group, const std::string& technique, const std::string& reason) {
  if (!difference) return;
  constexpr const char* kLoaded =
      "they were equal when the model was wrapped: load the same file on every rank after that, or load on rank 0 before, and wrap "
      "with ReplicaStart::Broadcast (ReplicaStart::Trust: who writes parameters on some ranks alone vouches)";
  // Forward may be what writes one that nobody trains, and ranks see other samples each: a normaliser of observations, a table of codes.
  constexpr const char* kKept =
      "it takes no gradient: if forward writes it, from what each rank sees, make it a buffer (register_buffer), which rank 0 gives out under "
      "BufferBroadcast::EachStep, write it from what all ranks saw, or wrap with ReplicaStart::Trust, under which nobody compares; if not, ";
  throw ConfigError(detail::concat(technique, ": the replicas differ: parameter '", difference->parameter, "' of rank 0 of ", group.name(),
                                   " is another one on rank ", difference->ranks, "; ", difference->trained ? "" : kKept, reason.empty() ? kLoaded : reason));
}

/// One message per dtype and device: small tensors are packed, for a broadcast costs a round trip whatever its size.
/// `before_write` is told what becomes of each.
void broadcast_packed(const std::vector<at::Tensor>& tensors, const comm::Group& group,
                      const std::function<void(const at::Tensor& tensor, const at::Tensor& next)>& before_write = {}) {
  std::map<std::pair<at::ScalarType, std::string>, std::vector<at::Tensor>> packs;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) packs[{tensor.scalar_type(), tensor.device().str()}].push_back(tensor);
  }
  for (const auto& [kind, members] : packs) {
    std::vector<at::Tensor> rows;
    for (const at::Tensor& tensor : members) rows.push_back(tensor.reshape({-1}));
    const at::Tensor packed = at::cat(rows);
    comm::broadcast(group, packed, 0);
    int64_t offset = 0;
    for (at::Tensor tensor : members) {
      const at::Tensor next = packed.narrow(0, offset, tensor.numel()).view(tensor.sizes());
      offset += tensor.numel();
      if (group.rank() == 0) continue;
      if (before_write) before_write(tensor, next);
      nn::written_once(tensor, tensor).copy_(nn::written_once(next, tensor));
    }
  }
}

/// What normalisations update by themselves in training, and do not differentiate by then.
std::set<const c10::TensorImpl*> kept_by_norms(const torch::nn::Module& module) {
  std::set<const c10::TensorImpl*> kept;
  module.apply([&](const torch::nn::Module& inner) {
    if (!inner.is_training()) return;
    for (const auto& buffer : inner.named_buffers(/*recurse=*/false)) {
      const std::string& name = buffer.key();
      const bool is_statistic = name.ends_with("running_mean") || name.ends_with("running_var") || name.ends_with("num_batches_tracked");
      if (is_statistic) kept.insert(buffer.value().unsafeGetTensorImpl());
    }
  });
  return kept;
}

/// A buffer as messages see it.
struct BufferForm {
  std::string name, form;
};

std::vector<BufferForm> forms_of_buffers(const torch::nn::Module& module) {
  std::vector<BufferForm> forms;
  for (const auto& buffer : module.named_buffers()) {
    if (buffer.value().defined()) forms.push_back({buffer.key(), detail::concat(buffer.value().sizes(), ", ", buffer.value().scalar_type())});
  }
  return forms;
}

int64_t hash_of(const BufferForm& buffer) {
  const std::string text = buffer.name + ' ' + buffer.form + ';';
  return static_cast<int64_t>(hash_bytes(text.data(), text.size()));
}

/// What is to be said of the first that differs over `group`, where any does. As many on every rank, or `even` is false.
std::string unlike_buffer(const std::vector<BufferForm>& forms, const comm::Group& group, at::Device device, bool even) {
  if (!even) return detail::concat("are ", forms.size(), " on this rank, and not as many on every rank of ", group.name());
  std::vector<int64_t> hashes;
  for (const BufferForm& buffer : forms) hashes.push_back(hash_of(buffer));
  const at::Tensor all = gather_words(hashes, group, device);
  for (size_t i = 0; i < forms.size(); ++i) {
    const std::string ranks = ranks_that_differ(all, static_cast<int64_t>(i));
    if (!ranks.empty()) {
      return detail::concat("differ: '", forms[i].name, "', here ", forms[i].form, ", has another shape, dtype or name on rank 0 of ", group.name(),
                            " than on rank ", ranks);
    }
  }
  return "";
}

}  // namespace

bool equalize_replicas(torch::nn::Module& module, const comm::Group& group, ReplicaStart start, const nn::ParameterFilter& only, const std::string& technique) {
  const std::vector<nn::NamedParameter> parameters = nn::unique_parameters(module, only);
  if (group.size() == 1 || parameters.empty() || start == ReplicaStart::Trust) return true;
  const at::NoGradGuard no_grad;
  if (start == ReplicaStart::Check) {
    const auto [difference, same_strides] = compare_parameters(technique, parameters, group);
    refuse_difference(difference, group, technique,
                      "build the model from the same seed on every rank, load the same file on all of them, or start from rank 0's with "
                      "ReplicaStart::Broadcast");
    return same_strides;
  }
  const at::Device device = message_device(parameters.front().tensor, group);
  const at::Tensor summaries = gather_words({std::ssize(parameters), hash_of_structure(parameters, /*strides=*/true)}, group, device);
  const bool same_strides = parameters.front().tensor.is_meta() || have_same_strides(technique, parameters, summaries, group, device);
  for (const nn::NamedParameter& parameter : parameters) broadcast_packed({parameter.tensor.detach()}, group);
  return same_strides;
}

void compare_replicas(const std::vector<nn::NamedParameter>& parameters, const comm::Group& group, const std::string& technique, const std::string& reason) {
  if (group.size() == 1 || parameters.empty()) return;
  const at::NoGradGuard no_grad;
  refuse_difference(compare_parameters(technique, parameters, group).difference, group, technique, reason);
}

uint64_t hash_of_buffers(const torch::nn::Module& module) {
  Hasher hasher;
  for (const BufferForm& buffer : forms_of_buffers(module)) {
    const int64_t hash = hash_of(buffer);
    hasher.update(&hash, sizeof hash);
  }
  return hasher.value();
}

void require_same_buffers(const torch::nn::Module& module, const std::vector<comm::Group>& groups, bool found) {
  const std::vector<BufferForm> forms = forms_of_buffers(module);
  if (forms.empty() && !found) return;
  const at::NoGradGuard no_grad;
  const at::Tensor first = module.parameters().front();
  std::vector<bool> unlike, even;
  for (const comm::Group& group : groups) {
    unlike.push_back(false);
    even.push_back(true);
    if (group.size() == 1) continue;
    const at::Tensor words = gather_words({std::ssize(forms), static_cast<int64_t>(hash_of_buffers(module)), found}, group, message_device(first, group));
    if (first.is_meta()) continue;  // a dry run
    even.back() = ranks_that_differ(words, 0).empty();
    unlike.back() = !ranks_that_differ(words, 1).empty();
    found |= unlike.back() || words.select(1, 2).any().item<bool>();
  }
  if (!found || first.is_meta()) return;
  std::string what;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (!unlike[i]) continue;
    const std::string of_group = unlike_buffer(forms, groups[i], message_device(first, groups[i]), even[i]);
    if (what.empty()) what = of_group;
  }
  throw ConfigError(detail::concat(
      "data parallelism: buffers of the module ", what.empty() ? "differ between other ranks" : what,
      ": rank 0's become every rank's, so each has to be as large everywhere. Make it of one size on all ranks (a mask of the longest sequence of all), "
      "set buffers = BufferBroadcast::AtStart or Never in the options of the wrapper, with which each rank goes on with its own, or keep it as a plain member "
      "of the module in place of a buffer"));
}

void broadcast_buffers(torch::nn::Module& module, const comm::Group& group) {
  if (group.size() == 1) return;
  std::vector<at::Tensor> buffers;
  const std::set<const c10::TensorImpl*> quiet = kept_by_norms(module);
  std::set<const c10::TensorImpl*> watched;
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& buffer = item.value();
    if (!buffer.defined()) continue;
    require(
        buffer.layout() == at::kStrided, "data parallelism: buffer '", item.key(), "' is of layout ", buffer.layout(),
        ", and buffers are brought from rank 0 in dense memory; make it alike on every rank and set buffers = BufferBroadcast::Never in the options of the ",
        "wrapper, or keep it as a plain member of the module in place of a buffer");
    buffers.push_back(buffer);
    if (!buffer.is_meta() && !quiet.contains(buffer.unsafeGetTensorImpl())) watched.insert(buffer.unsafeGetTensorImpl());
  }
  // Quietly: a graph whose backward pass is still to come may hold a buffer (BatchNorm's statistics), and does not mind, as it does not when forward updates
  // one. Any other may be a factor of what the graph computed, as the statistics are in evaluation: if it becomes another one now, that pass has to say so.
  const at::AutoDispatchBelowADInplaceOrView below;
  broadcast_packed(buffers, group, [&](const at::Tensor& buffer, const at::Tensor& next) {
    if (watched.contains(buffer.unsafeGetTensorImpl()) && !at::equal(buffer, next)) buffer.unsafeGetTensorImpl()->bump_version();
  });
}

}  // namespace tessera
