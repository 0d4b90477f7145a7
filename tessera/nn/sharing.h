#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "tessera/comm/group.h"
#include "tessera/nn/parameter.h"

/// What stands beside a parameter's Slice: who else holds its elements, and what a gradient on this rank is. Whoever cuts a model says it; sums of gradients
/// and norms read it, and know no technique.
namespace tessera::nn {

/// What the ranks of a group, which compute one model together, hold of a parameter.
struct Sharing {
  std::string axis;            ///< the group's name
  int rank = 0;                ///< this one, in the group
  int first = 0, holders = 1;  ///< the same elements lie on so many ranks of the group, from `first` on
  int set = 0, sets = 1;       ///< these are set number `set` of `sets`; each holds other elements
  bool is_term = false;        ///< each holder's gradient is one term of the sum; otherwise each has the whole of it
  /// Whether the group's ranks hold parts of one size, of every parameter of the model: then whoever shards these further cuts alike on all of them.
  bool even = true;
  bool watched = false;  ///< whether it is looked now and then that ranks which hold the same still do (require_alike)
};

/// Adds to what is known of the parameter: one Sharing for each axis. Throws InternalError for one that is known.
void add_sharing(const at::Tensor& parameter, Sharing sharing);

/// Of a parameter, or of what is updated in its place (set_updated_for). None: every rank that computes with it has all of it, or there is but one.
std::vector<Sharing> sharings_of(const at::Tensor& tensor);

/// Ranks that hold all of a parameter between them: members `first` .. `first + holders` of `group` what this rank holds, the others other elements.
struct Dealt {
  comm::Group group;
  int first = 0, holders = 1;
  std::string by;  ///< who dealt them, for messages
  int losses = 1;  ///< of so many ranks' losses a gradient here has the terms, when it comes: of all whose tokens come to an expert

  bool counts_here() const { return group.rank() == first; }  ///< as one of the holders has to, in a norm
  bool holds_others(int world_rank) const;                    ///< whether that rank of the world is a member with other elements
};

void note_dealt(const at::Tensor& parameter, Dealt dealt);

/// Of a parameter, or of that of which this is updated in place.
std::vector<Dealt> dealt_of(const at::Tensor& tensor);

/// Whoever sums gradients over ranks, or cuts parameters over them, takes them for holders of the same elements. Throws ConfigError, by name, where one of
/// `groups` has a rank that holds others: a wrapper over the ranks of tensor or expert parallelism would add up what does not belong together.
void require_same_parts(const std::string& technique, const std::vector<NamedParameter>& parameters, const std::vector<comm::Group>& groups);

/// Whether the parameter, as it is now, has a Sharing for the axis: libtorch's set_data of another shape takes away what is known of it.
bool is_shared_over(const at::Tensor& parameter, const std::string& axis);

/// By what a wrapper over `ranks` ranks divides sums of gradients that are to be means over ranks (`average`): by these, times the losses that gradients are of
/// already (Dealt). `sums`: whether it sums and divides at all; a group of one leaves gradients alone. Throws ConfigError, by name, where its parameters differ
/// in that, where it does not divide, and where trained experts of `root` that are left to others are of all the ranks' losses, so that nobody would divide
/// theirs.
int ranks_of_mean(const std::string& technique, const torch::nn::Module& root, const std::vector<NamedParameter>& parameters, int ranks, bool sums);

/// What may lie beside the parameter in a flat buffer: parameters of the same key. Ranks whose parts are uneven hold some parameters alike beside parts of
/// other sizes. Were they in one buffer, the same element would lie at another place of it on each of these ranks, and collectives whose order of additions
/// depends on the place (rings, Gloo's, NCCL's) would round its sum otherwise on each: what is held alike would drift apart. Empty for all else, so where parts
/// are even a buffer holds what it holds without.
std::string flat_key(const at::Tensor& parameter);

/// Of these parameters, those that this rank answers for in a norm: what several ranks of a group hold alike counts on the first of them.
std::vector<NamedParameter> counted_once(const std::vector<NamedParameter>& parameters);

/// Sums, in place, gradients of which several ranks of `group` hold a term each: norms and biases under sequence parallelism, keys and values that ranks share.
/// Once a step, after data parallelism has finished; `updated` are the parameters, or what this rank updates in their place (GradientSynchronizer::updated).
///
/// One all-reduce a dtype: 2 (n-1)/n of their elements sent, of those with several sets all sets'. Where parts are uneven, sharding cuts what only some ranks
/// share (keys and values) in another way on each set of them, and each puts its terms at their place in the logical tensors: an all-reduce of as many numbers
/// over the ranks that share the parameters out, which whoever wraps them names, and one over `group`, in fp32 (or double where a parameter is), held for the
/// while. `everyone`, the ranks of both (mesh[{"dp_shard", "tp"}]), makes one of the two.
void sum_terms(const comm::Group& group, const std::vector<NamedParameter>& updated, const comm::Group& everyone = {});

/// Throws ConfigError, on all ranks of `group` alike and by name, where a parameter that all of them hold whole, each with the whole of its gradient, has other
/// values on one of them: it works on what is cut (a norm of one rank's heads), and a plan that does not name it took it for whole. Differences of rounding
/// pass. Left out are parameters that nobody watches (Sharing). One all-gather of 16 bytes a
/// parameter. sum_terms asks for it at those of its calls that is_due() names, and so do forwards of parallelize_module's layers.
void require_alike(const comm::Group& group, const std::vector<NamedParameter>& updated);
/// Call 2, 4, 8 and so on: what is looked for then costs nothing in the long run.
constexpr bool is_due(int64_t call) { return call >= 2 && (call & (call - 1)) == 0; }

/// Throws ConfigError, by name, where a gradient is one term of a sum over ranks, and sum_terms has never been called for its parameter.
void require_terms_summed(const std::string& caller, const std::vector<NamedParameter>& updated);
void note_terms_summed(const at::Tensor& updated);
/// How often sum_terms has been called for what begins with this parameter, this time included.
int64_t count_sum_of_terms(const at::Tensor& updated);
/// Of a parameter, or of what is updated in its place, of whose gradient ranks have terms that sum_terms has never summed: their group's name.
std::optional<std::string> axis_of_unsummed_term(const at::Tensor& updated);

/// Sums, in place, the gradients of all of `parameters`, of which every rank of `group` holds a term. One all-reduce a dtype, and as many bytes for the while.
void sum_gradients(const comm::Group& group, const std::vector<NamedParameter>& parameters);

}  // namespace tessera::nn
