#include "tessera/nn/flat_gradients.h"

#include <algorithm>
#include <array>
#include <ranges>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/strides.h>
#include <torch/nn/modules/embedding.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/engine.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/hash_tensor.h"
#include "tessera/core/log.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/sharing.h"

// A gradient that lies in its bucket is not copied before the collective nor after it. It must not be a view in autograd's eyes, which refuses to detach views
// in place as zero_grad does: it is a tensor of its own on the bucket's storage. A program may replace it at any time, so nothing is assumed: each use looks
// whether the gradient still is that memory, and brings it back.

namespace tessera {

std::vector<nn::NamedParameter> floating_parameters(const std::string& technique, const torch::nn::Module& module, const nn::ParameterFilter& only) {
  std::vector<nn::NamedParameter> parameters = nn::unique_parameters(module, only);
  std::erase_if(parameters, [](const auto& parameter) { return !parameter.tensor.is_floating_point() && !parameter.tensor.is_complex(); });
  require(std::ranges::any_of(parameters, [](const auto& parameter) { return parameter.tensor.requires_grad(); }), technique, ": module '", module.name(),
          "' has no parameter that requires a gradient", only ? ", among those that `only` picks" : "", "; there is nothing to keep equal");
  return parameters;
}

void warn_of_tied(const std::string& technique, const std::vector<nn::NamedParameter>& parameters) {
  std::string tied;
  for (const auto& [name, tensor, aliases] : parameters) {
    if (!tensor.requires_grad() || aliases.empty()) continue;
    tied += (tied.empty() ? "'" : ", '") + name + "' ('" + aliases.front() + "')";
  }
  if (tied.empty()) return;
  log().warn(
      "{}: registered under two names or more: {}. An optimizer of torch::optim over model.parameters(), which lists such a tensor by each name, updates it as "
      "often in a step, and torch::nn::utils::clip_grad_norm_ counts it so; give them the tensors of tessera::nn::unique_parameters(model)",
      technique, tied);
}

void require_disjoint(const char* technique, const comm::Group& shard, const comm::Group& replicate) {
  const auto is_numbered = [](const comm::Group& group) {  // one that was made without its ranks in the world does not know them
    for (int member = 0; member < group.size(); ++member) {
      if (group.world_rank(member) != member) return true;
    }
    return false;
  };
  if (shard.name() != replicate.name() && !is_numbered(shard) && !is_numbered(replicate)) return;
  const int own = shard.world_rank(shard.rank());
  for (int member = 0; member < shard.size() && replicate.size() > 1; ++member) {
    for (int other = 0; other < replicate.size(); ++other) {
      const int rank = shard.world_rank(member);
      require(rank == own || rank != replicate.world_rank(other), technique, ": rank ", rank, " is in '", shard.name(),
              "', whose ranks hold different slices, and in '", replicate.name(),
              "', whose ranks hold the same: their slices would be added up; shard and replicate have this rank alone in common, as two axes of a mesh, and "
              "replicate is left out where all ranks shard");
    }
  }
}

std::vector<bool> trained_parameters(const std::vector<nn::NamedParameter>& parameters, const GradientSynchronizer* owner) {
  std::vector<bool> trained;
  for (const auto& [name, tensor, aliases] : parameters) trained.push_back(tensor.requires_grad() && nn::GradientDispatcher::of(tensor).owner() == owner);
  return trained;
}

at::Tensor gradient_view(const at::Tensor& flat, int64_t offset, at::IntArrayRef sizes) {
  at::Tensor piece = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(flat.storage()), flat.key_set(), flat.dtype());
  c10::TensorImpl* const impl = piece.unsafeGetTensorImpl();
  impl->set_storage_offset(flat.storage_offset() + offset);
  impl->set_sizes_contiguous(sizes);
  return piece;
}

at::Tensor gradient_view(const at::Tensor& flat, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::Tensor piece = gradient_view(flat, offset, sizes);
  piece.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, piece.storage_offset());
  return piece;
}

namespace {
std::vector<int64_t> row_major(at::IntArrayRef sizes) {
  const auto strides = c10::contiguous_strides(sizes);
  return {strides.begin(), strides.end()};
}
}  // namespace

std::vector<int64_t> gradient_strides(const at::Tensor& parameter) {
  return parameter.is_non_overlapping_and_dense() ? parameter.strides().vec() : row_major(parameter.sizes());
}

std::vector<std::vector<int64_t>> gradient_strides(const std::vector<nn::NamedParameter>& parameters, bool alike) {
  std::vector<std::vector<int64_t>> strides;
  for (const auto& [name, tensor, aliases] : parameters) strides.push_back(alike ? gradient_strides(tensor) : row_major(tensor.sizes()));
  return strides;
}

void require_summable(const std::string& technique, const nn::NamedParameter& parameter) {
  const at::Tensor& gradient = parameter.tensor.grad();
  require(
      !gradient.requires_grad(), technique, ": '", parameter.name,
      "' got a gradient that has a history (backward with create_graph), and ranks' gradients are summed outside of autograd: what is made of grad() would "
      "lack its derivative; take gradients of gradients by torch::autograd::grad({loss}, parameters, {}, true, /*create_graph=*/true), and call backward of "
      "the whole loss without create_graph");
  require(!gradient.defined() || gradient.layout() == at::kStrided, technique, ": '", parameter.name, "' got a gradient of layout ", gradient.layout(),
          ", and gradients of ranks are summed in dense memory; leave sparse(true) out of the embedding's options");
}

void refuse_renormalized(const std::string& technique, const torch::nn::Module& module, const std::vector<nn::NamedParameter>& parameters) {
  const auto is_ours = [&](const at::Tensor& weight) {
    return std::ranges::any_of(parameters, [&](const auto& parameter) { return parameter.tensor.is_same(weight); });
  };
  module.apply([&](const std::string& path, const torch::nn::Module& inner) {
    const auto* const embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&inner);
    const auto* const bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&inner);
    const bool renormalizes = (embedding != nullptr && embedding->options.max_norm() && is_ours(embedding->weight)) ||
                              (bag != nullptr && bag->options.max_norm() && is_ours(bag->weight));
    require(!renormalizes, technique, ": '", path, "' is an embedding with max_norm, which writes the rows that this rank's samples look up in forward, ",
            "so that replicas part; leave max_norm out, or renormalize the whole weight between steps, alike on every rank");
  });
}

LeftGradients::LeftGradients(const std::vector<nn::NamedParameter>& parameters) {
  for (const nn::NamedParameter& parameter : parameters) left_.push_back(parameter.tensor.grad());
}

void LeftGradients::refuse(const std::string& technique, const std::vector<nn::NamedParameter>& parameters) {
  for (size_t i = 0; i < left_.size(); ++i) {
    const at::Tensor& gradient = left_[i];
    if (!gradient.defined() || gradient.is_meta() || !parameters[i].tensor.grad().is_same(gradient)) continue;
    require(at::count_nonzero(gradient).item<int64_t>() == 0, technique, ": '", parameters[i].name,
            "' has a gradient from before it was wrapped, which has met no other rank's; call zero_grad() before the first backward pass under the wrapper");
  }
  left_.clear();  // behind the last refusal: a loop that goes on after one still has to clear them
}

at::ScalarType summed_dtype(const at::Tensor& parameter, std::optional<at::ScalarType> dtype) {
  return parameter.is_complex() ? parameter.scalar_type() : dtype.value_or(parameter.scalar_type());
}

GradientSpec spec_of(const nn::NamedParameter& parameter, at::ScalarType dtype) {
  return {parameter.name, parameter.tensor.numel(), dtype, nn::flat_key(parameter.tensor)};
}

void set_gradient(const at::Tensor& parameter, const at::Tensor& view) { parameter.mutable_grad() = view; }

bool occupies(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.defined() && gradient.is_alias_of(view) && gradient.scalar_type() == view.scalar_type() &&
         gradient.storage_offset() == view.storage_offset() && gradient.sizes() == view.sizes() && gradient.strides() == view.strides();
}

bool is_place_awaited(const at::Tensor& parameter, const at::Tensor& view) {
  return nn::GradientDispatcher::of(parameter).is_place_taken() && !occupies(parameter.grad(), view);
}

void recover_gradient(const at::Tensor& parameter, const at::Tensor& view) {
  const at::Tensor& gradient = parameter.grad();
  if (gradient.is_same(view)) return;
  const at::NoGradGuard no_grad;
  at::Tensor target = view;
  if (!gradient.defined()) {
    target.zero_();
  } else if (!occupies(gradient, view)) {
    target.copy_(gradient);
  }
  set_gradient(parameter, view);
}

void release_scratch(at::Tensor& scratch) {
  scratch.storage().unsafeGetStorageImpl()->reset();
  scratch.reset();
}

at::Device message_device(const at::Tensor& parameter, const comm::Group& group) {
  const bool devices_alone = group.size() > 1 && group.engine()->name().starts_with("nccl");
  return devices_alone && !parameter.is_meta() ? parameter.device() : at::Device(at::kCPU);
}

bool drop_zeros(std::vector<at::Tensor>& given) {
  std::vector<at::Tensor> any;
  for (const at::Tensor& gradient : given) {
    if (gradient.defined() && !gradient.is_meta()) any.push_back(gradient.detach().any().reshape({1}));
  }
  if (any.empty()) return false;
  const at::Tensor flags = at::cat(any).to(at::kCPU);
  bool found = false;
  for (int64_t next = 0; at::Tensor & gradient : given) {
    if (!gradient.defined() || gradient.is_meta()) continue;
    const bool adds = flags.const_data_ptr<bool>()[next++];
    found |= adds;
    if (!adds) gradient.reset();
  }
  return found;
}

void refuse_given_apart(const std::string& technique, const std::vector<nn::NamedParameter>& parameters, const std::vector<at::Tensor>& given,
                        const std::vector<comm::Group>& groups) {
  auto first = static_cast<int64_t>(parameters.size());
  Hasher hasher;
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i].defined() || given[i].is_meta()) continue;
    const std::array<uint64_t, 2> told{i, hash_of_values(given[i].detach())};
    hasher.update(told.data(), sizeof told);
    first = std::min(first, static_cast<int64_t>(i));
  }
  const auto hash = static_cast<int64_t>(hasher.value() >> 1);  // which may change its sign
  at::Tensor largest = at::tensor({hash, -hash, -first}, at::kLong);
  for (const comm::Group& group : groups) {
    if (group.size() == 1) continue;
    largest = largest.to(message_device(parameters.front().tensor, group));
    comm::all_reduce(group, largest, comm::Op::Max);
  }
  if (parameters.front().tensor.is_meta()) return;  // a dry run
  largest = largest.to(at::kCPU);
  const int64_t* const told = largest.const_data_ptr<int64_t>();
  require(
      told[0] == -told[1], technique, ": the program has put a gradient on '", parameters[std::min(static_cast<size_t>(-told[2]), parameters.size() - 1)].name,
      "' (mutable_grad(), of torch::autograd::grad) that is not the same on all ranks: it has met no other rank's, and replicas would part by it. Clear it by "
      "zero_grad(), and let backward bring gradients, or sum it over the ranks (comm::all_reduce) before it is put there");
}

std::string gradient_that_waits(const std::string& who, const std::string& name) {
  return detail::concat(
      who, ": the gradient of '", name,
      "' waits whole on this rank, where no_sync() left it or the program put it (mutable_grad()), and has met no other rank's; call backward "
      "once without no_sync() before, or give it up by zero_grad()");
}

UsedParameters::UsedParameters(std::string technique, const std::vector<nn::NamedParameter>& parameters)
    : technique_(std::move(technique)), parameters_(parameters), wanted_(parameters.size(), true), forgiven_(parameters.size()), used_(parameters.size(), 0) {}

void UsedParameters::clear() {
  std::ranges::fill(used_, 0);
  forgiven_.assign(forgiven_.size(), false);
}

void UsedParameters::want(std::vector<bool> wanted) { wanted_ = std::move(wanted); }

int64_t UsedParameters::first_missing() const {
  for (size_t i = 0; i < used_.size(); ++i) {
    if (is_missing(i)) return static_cast<int64_t>(i);
  }
  return -1;
}

int64_t UsedParameters::count_missing() const {
  int64_t count = 0;
  for (size_t i = 0; i < used_.size(); ++i) count += is_missing(i);
  return count;
}

std::string UsedParameters::missing_gradients(int64_t rank, const std::string& group, int64_t missing, const std::string& names) const {
  return detail::concat(
      technique_, ": on rank ", rank, " of ", group, ", ", missing, " of ", std::ranges::count(wanted_, true),
      " parameters got no gradient in this step: ", names,
      "; use them in the loss, set requires_grad to false, or set find_unused_parameters in the options of the wrapper (no key of a configuration: "
      "the models of the command use all of theirs). A tie by assignment (decoder->weight = word->weight) leaves the registered 'decoder.weight' behind, which "
      "nothing uses: tie it by weight = register_parameter(\"weight\", word->weight), in a module of your own in the decoder's place. Gradients that a "
      "pipeline's schedule leaves for later (zb_h1, zb_v) come behind the backward: tell the wrapper of each action, through "
      "pipeline::ExecutorOptions::around (docs/pipeline-modules.md)");
}

void UsedParameters::refuse_unused(const comm::Group& group) const {
  if (all()) return;
  constexpr int64_t max_named = 10;
  const int64_t missing = count_missing();
  std::string names;
  for (size_t i = 0, named = 0; i < used_.size() && named < max_named; ++i) {
    if (!is_missing(i)) continue;
    names += (named++ > 0 ? ", '" : "'") + parameters_[i].name + "'";
  }
  if (missing > max_named) names += detail::concat(" and ", missing - max_named, " more");
  throw ConfigError(missing_gradients(group.rank(), group.name(), missing, names));
}

StepWords UsedParameters::refuse_unused_anywhere(const std::vector<comm::Group>& groups, const StepWords& own_words) const {
  const at::Tensor& parameter = parameters_.front().tensor;
  const auto several = std::ranges::find_if(groups, [](const comm::Group& group) { return group.size() > 1; });
  const comm::Group& own = several == groups.end() ? groups.front() : *several;
  enum Word : int64_t { missing, first, rank, wanted, ordered, writes, buffers, written, differs, disorder, unlike_writes, unlike, words };
  Hasher hasher;
  for (size_t i = 0; i < used_.size(); ++i) {
    const std::array<bool, 2> kind{wanted_[i], wanted_[i] && forgiven_[i] && used_[i] == 0};
    hasher.update(kind.data(), sizeof kind);
  }
  std::array<int64_t, words> found{};
  found[missing] = count_missing();
  found[first] = first_missing();
  found[wanted] = static_cast<int64_t>(hasher.value());
  found[ordered] = static_cast<int64_t>(own_words.order);
  found[writes] = static_cast<int64_t>(own_words.writes);
  found[buffers] = static_cast<int64_t>(own_words.buffers);
  constexpr int64_t by_weights = 1, by_gradients = 2;  // what was written
  found[written] = (own_words.written ? by_weights : 0) | (own_words.given ? by_gradients : 0);
  found[rank] = own.world_rank(own.rank());
  found[differs] = found[disorder] = found[unlike_writes] = found[unlike] = -1;
  for (const comm::Group& group : groups | std::views::reverse) {
    if (&group != &groups.back()) found[writes] = 0;
    if (group.size() == 1) continue;
    const at::Tensor mine = at::tensor(found, at::kLong).to(message_device(parameter, group));
    at::Tensor all = at::zeros({words * group.size()}, mine.options());
    comm::all_gather(group, all, mine);
    if (parameter.is_meta()) continue;  // a dry run: the message was counted, its contents mean nothing
    all = all.cpu();
    const int64_t* const rows = all.const_data_ptr<int64_t>();
    for (int64_t r = 0; r < group.size(); ++r) {
      const int64_t* const row = rows + words * r;
      if (found[missing] == 0) std::copy_n(row, rank + 1, found.begin());
      const auto unlike_first = [&](Word word, Word noted) {
        if (found[noted] < 0) found[noted] = row[word] != rows[word] ? group.world_rank(static_cast<int>(r)) : row[noted];
      };
      unlike_first(wanted, differs);
      unlike_first(ordered, disorder);
      unlike_first(writes, unlike_writes);
      unlike_first(buffers, unlike);
      found[written] |= row[written];
    }
  }
  require(
      found[differs] < 0, technique_, ": rank ", found[differs],
      " of world trains other parameters than the first of its group; freeze and unfreeze (requires_grad) the same on every rank, between the same steps. A "
      "pass that adds to gradients leaves out the same ones on every rank, or set find_unused_parameters in the options of the wrapper");
  refuse_unused(own);
  require(
      found[disorder] < 0, technique_, ": on rank ", found[disorder],
      " of world a step comes to the parameters, or to the wrappers over the same ranks, in another order than on the first of its group, so collectives of "
      "other ones have met; use layers in one order on all ranks, or set find_unused_parameters in the options of the wrapper");
  require(found[missing] == 0, missing_gradients(found[rank], "world", found[missing],
                                                 "'" + (found[missing] > 0 ? parameters_.at(static_cast<size_t>(found[first])).name : "") + "'" +
                                                     (found[missing] > 1 ? " and others" : "")));
  StepWords heard = own_words;
  heard.written = (found[written] & by_weights) != 0;
  heard.given = (found[written] & by_gradients) != 0;
  heard.unlike_writes = found[unlike_writes] >= 0;
  heard.unlike_buffers = found[unlike] >= 0;
  return heard;
}

std::vector<bool> UsedParameters::anywhere(const std::vector<comm::Group>& groups, StepWords* words) const {
  constexpr int32_t kGiven = 1, kFailed = 2;  // who hears of a failure hears of nothing else
  auto heard = used_;
  for (const comm::Group& group : groups | std::views::reverse) {
    if (group.size() == 1) continue;
    auto mine = heard;
    if (words != nullptr) {
      const auto hash = static_cast<int32_t>(words->buffers & 0x7fffffff);
      const auto writes = &group == &groups.back() ? static_cast<int32_t>(words->writes & 0x7fffffff) : static_cast<int32_t>(words->unlike_writes);
      mine.insert(mine.end(), {words->failed  ? kFailed
                               : words->given ? kGiven
                                              : 0,
                               words->written, words->unlike_buffers, hash, -hash, writes, -writes});  // the largest of -hash is the smallest hash
    }
    at::Tensor used = at::tensor(mine, at::kInt).to(message_device(parameters_.front().tensor, group));
    comm::all_reduce(group, used, comm::Op::Max);
    used = used.cpu();
    const int32_t* const all = used.const_data_ptr<int32_t>();
    if (words != nullptr) {
      const int32_t* const told = all + used_.size();
      words->failed = told[0] == kFailed;
      words->given = told[0] == kGiven;
      words->written = told[1] != 0;
      words->unlike_buffers = told[2] != 0 || told[3] != -told[4];
      words->unlike_writes |= told[5] != -told[6];
    }
    heard.assign(all, all + used_.size());
  }
  return {heard.begin(), heard.end()};
}

}  // namespace tessera
