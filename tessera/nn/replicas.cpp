#include "tessera/nn/replicas.h"

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
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

int64_t hash_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().cpu().contiguous();
  return static_cast<int64_t>(hash_bytes(values.const_data_ptr(), values.nbytes()));
}

std::string ranks_that_differ(const at::Tensor& words, int64_t column) {
  std::string ranks;
  for (int64_t rank = 1; rank < words.size(0); ++rank) {
    if (words[rank][column].item<int64_t>() != words[0][column].item<int64_t>()) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return ranks;
}

int64_t hash_of_structure(const std::vector<nn::NamedParameter>& parameters) {
  Hasher structure;
  for (const auto& [name, tensor, aliases] : parameters) {
    const std::string description = detail::concat(name, ' ', tensor.sizes(), ' ', tensor.scalar_type(), ' ', tensor.requires_grad(), ';');
    structure.update(description.data(), description.size());
  }
  return static_cast<int64_t>(structure.value());
}

/// `summaries`: of each rank how many parameters it has, and the hash of their structure.
void refuse_other_structure(const std::string& technique, const at::Tensor& summaries, const comm::Group& group) {
  const std::string other = ranks_that_differ(summaries, 1);
  require(other.empty(), technique, ": the module of rank 0 of ", group.name(), " (", summaries[0][0].item<int64_t>(),
          " parameters) differs in names, shapes, dtypes or requires_grad on rank ", other,
          "; every rank has to build the same model, and to wrap parts of one in the same order");
}

void check_replicas(const std::string& technique, const std::vector<nn::NamedParameter>& parameters, const comm::Group& group) {
  const at::Device device = message_device(parameters.front().tensor, group);
  const bool has_values = !parameters.front().tensor.is_meta();
  Hasher values;
  std::vector<int64_t> hashes;
  for (const auto& [name, tensor, aliases] : parameters) {
    hashes.push_back(has_values ? hash_of(tensor) : 0);
    values.update(&hashes.back(), sizeof(int64_t));
  }
  const at::Tensor summaries =
      gather_words({static_cast<int64_t>(parameters.size()), hash_of_structure(parameters), static_cast<int64_t>(values.value())}, group, device);
  if (!has_values) return;  // a dry run: the message was counted, its contents mean nothing

  refuse_other_structure(technique, summaries, group);
  if (ranks_that_differ(summaries, 2).empty()) return;
  const at::Tensor all = gather_words(hashes, group, device);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string ranks = ranks_that_differ(all, static_cast<int64_t>(i));
    require(ranks.empty(), technique, ": the replicas differ: parameter '", parameters[i].name, "' of rank 0 of ", group.name(), " is another one on rank ",
            ranks, "; build the model from the same seed on every rank, or start from rank 0's with ReplicaStart::Broadcast");
  }
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

/// What a normalisation in training updates by itself, and does not differentiate by.
bool is_kept_by_a_norm(const std::string& name) {
  return name.ends_with("running_mean") || name.ends_with("running_var") || name.ends_with("num_batches_tracked");
}

}  // namespace

void equalize_replicas(torch::nn::Module& module, const comm::Group& group, ReplicaStart start, const nn::ParameterFilter& only, const std::string& technique) {
  const std::vector<nn::NamedParameter> parameters = nn::unique_parameters(module, only);
  if (group.size() == 1 || parameters.empty() || start == ReplicaStart::Trust) return;
  const at::NoGradGuard no_grad;
  if (start == ReplicaStart::Check) return check_replicas(technique, parameters, group);
  const at::Tensor summaries =
      gather_words({static_cast<int64_t>(parameters.size()), hash_of_structure(parameters)}, group, message_device(parameters.front().tensor, group));
  if (!parameters.front().tensor.is_meta()) refuse_other_structure(technique, summaries, group);
  for (const nn::NamedParameter& parameter : parameters) broadcast_packed({parameter.tensor.detach()}, group);
}

void broadcast_buffers(torch::nn::Module& module, const comm::Group& group) {
  if (group.size() == 1) return;
  std::vector<at::Tensor> buffers;
  std::set<const c10::TensorImpl*> watched;
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& buffer = item.value();
    if (!buffer.defined()) continue;
    require(
        buffer.layout() == at::kStrided, "data parallelism: buffer '", item.key(), "' is of layout ", buffer.layout(),
        ", and buffers are brought from rank 0 in dense memory; make it alike on every rank and set buffers = BufferBroadcast::Never in the options of the ",
        "wrapper, or keep it as a plain member of the module in place of a buffer");
    buffers.push_back(buffer);
    if (!buffer.is_meta() && !is_kept_by_a_norm(item.key())) watched.insert(buffer.unsafeGetTensorImpl());
  }
  // Quietly: a graph whose backward pass is still to come may hold a buffer (BatchNorm's statistics), and does not mind, as it does not when forward updates
  // one. Any other may be a factor of what the graph computed: if it becomes another one now, that pass has to say so.
  const at::AutoDispatchBelowADInplaceOrView below;
  broadcast_packed(buffers, group, [&](const at::Tensor& buffer, const at::Tensor& next) {
    if (watched.contains(buffer.unsafeGetTensorImpl()) && !at::equal(buffer, next)) buffer.unsafeGetTensorImpl()->bump_version();
  });
}

}  // namespace tessera
