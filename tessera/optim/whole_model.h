#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "tessera/comm/group.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/parameter.h"

namespace tessera {
class GradientSynchronizer;
}

namespace tessera::optim {

enum class Meeting { Sum, Max };

/// What an update has to know beyond a rank's own elements, where it is not made element by element (row and column sums, scales that blocks share): which
/// parameters there are, and how numbers of the ranks that hold other elements of them meet.
struct WholeModel {
  /// All parameters that the ranks hold together, whole, in one order that is the same on all of them. Empty: those that the optimizer is given.
  std::vector<Slice> parameters{};
  /// The model has more than these, on other ranks or for other optimizers (a pipeline's stage), and optim.groups may be of those: whoever says so checks them
  /// (check_groups).
  bool of_more = false;
  /// Of these, by name, those that this rank holds, and another answers for in a sum: what several ranks hold alike counts on one of them.
  std::set<std::string> held_elsewhere{};
  /// Of these, by name, the ones whose rows are looked up: embeddings. And those that make logits: output heads.
  std::set<std::string> looked_up{}, heads{};
  /// Of these, by name, the ones that are several matrices of as many rows, one below the other, and how many: experts.
  std::map<std::string, int64_t> stacks{};
  /// Of these, as the model has them, the ones that required no gradient when this was made, the same on all ranks: Muon leaves them out until they do.
  std::vector<nn::NamedParameter> frozen{};
  /// The ranks that hold other elements, and where their messages lie, unless beside the parameters. Of one rank: it holds all.
  comm::Group ranks{};
  std::optional<at::Device> device{};

  bool meets() const { return ranks.size() > 1; }
  /// Whether anybody said which parameters there are, or what some of them are for.
  bool is_told() const { return meets() || of_more || !(parameters.empty() && looked_up.empty() && heads.empty() && stacks.empty()); }
  /// Adds a tensor up, or takes its largest numbers, element by element and in place, over the ranks: one all-reduce.
  void meet(const at::Tensor& numbers, Meeting meeting) const;
  /// mine [k] <- this rank's row of the sum of the ranks' all [ranks, k]: one reduce_scatter. And back, all <- every rank's mine: one all_gather.
  void collect(const at::Tensor& all, const at::Tensor& mine) const;
  void spread(const at::Tensor& mine, const at::Tensor& all) const;
};

/// Adds a parameter of the model, which some rank may hold a part of.
void add_parameter(WholeModel& model, const nn::NamedParameter& parameter);

/// Notes which of the weights of `root` are looked up (nn::Embedding, libtorch's Embedding and EmbeddingBag), which make logits (nn::LanguageModelHead), and
/// which are stacks (nn::GroupedExperts), under the names that unique_parameters gives them.
void note_uses(WholeModel& model, const torch::nn::Module& root);

/// Notes which of `updated`, of this rank, another answers for in a sum.
void note_held_elsewhere(WholeModel& model, const std::vector<nn::NamedParameter>& updated);

/// `root` as an optimizer on one rank has to know it.
WholeModel whole_model(const torch::nn::Module& root);

/// And where layers are cut over `ranks` between them, by wrappers (fully_shard, ZeRO, one or several), tensor or expert parallelism: which of them has what is
/// compared, and what several have alike counts on the first. Collective over `ranks`: 8 bytes a parameter from each. Call it once the model is wrapped.
/// A linear layer that makes logits looks like any other: add its weight's name to `heads`.
WholeModel whole_model(const torch::nn::Module& root, const comm::Group& ranks);

/// The same over the ranks over which `wrapper` shards, or over those given.
WholeModel whole_model(const torch::nn::Module& root, const GradientSynchronizer& wrapper, const std::optional<comm::Group>& ranks = {});

/// Where each parameter's numbers lie in one flat tensor that ranks meet over: those of all parameters one after another, whichever of them a rank holds.
class Places {
 public:
  /// `numbers(whole)`: how many each parameter has.
  Places(const std::vector<Slice>& parameters, const std::function<int64_t(const Slice&)>& numbers);

  int64_t size() const { return size_; }
  /// First of this parameter's. Throws InternalError for one that is not among `parameters`.
  int64_t of(const std::string& name) const;

 private:
  std::map<std::string, int64_t> first_;
  int64_t size_ = 0;
};

/// `model` with the parameters filled in. Throws ConfigError where one of `parameters` is a part of its logical tensor and nothing says who holds the rest;
/// `name` is that of the optimizer.
WholeModel settled(WholeModel model, const std::vector<nn::NamedParameter>& parameters, const char* name);

/// The part of a local tensor that is box `index` of its slice, shaped like the box: a view. Throws InternalError where the tensor is not contiguous.
at::Tensor box_of(const at::Tensor& local, const Slice& slice, size_t index);

}  // namespace tessera::optim
