#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/group.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/optimizer.h"

namespace tessera::checkpoint {

/// A rank-local tensor and which part of which logical tensor it holds. The slice's name is the key under which it is saved.
struct SlicedTensor {
  at::Tensor tensor;
  Slice slice;
};

/// A model's parameters under their own names, tied ones once: what dump writes.
std::vector<SlicedTensor> parameter_tensors(const torch::nn::Module& model);

/// The same as targets: with those that follow another (nn::set_follows), under its name. What load_hugging_face fills.
std::vector<SlicedTensor> parameter_targets(const torch::nn::Module& model);

/// The parameter, or buffer, that a stored tensor belongs to: "head.weight" of "model.head.weight", "buffer.head.weight" and "optimizer.exp_avg.head.weight",
/// where the name of a state has no dot; of any other name the name itself.
std::string_view parameter_of(std::string_view stored);

/// Whether a stored tensor is a parameter or a buffer.
bool is_of_model(std::string_view stored);

/// The state that a stored tensor is: "exp_avg" of "optimizer.exp_avg.head.weight"; empty for what is none.
std::string_view state_of(std::string_view stored);

/// Their gradients; undefined where there is none.
std::vector<SlicedTensor> gradient_tensors(const torch::nn::Module& model);

/// The gradients of parameters, or of what a rank holds of each, under the parameters' names.
std::vector<SlicedTensor> gradient_tensors(const std::vector<nn::NamedParameter>& parameters);

/// The tensors of a training state, as views: parameters as "model.<name>" (tied ones once), buffers as "buffer.<name>" and optimizer state as
/// "optimizer.<state>.<name>". `optimizer` may be null (eval, generate).
std::vector<SlicedTensor> training_tensors(const torch::nn::Module& model, const optim::Optimizer* optimizer);

/// The same without an optimizer, as targets of a model that is only read: with those that follow another.
std::vector<SlicedTensor> model_targets(const torch::nn::Module& model);

/// The same as targets for the checkpoint that `source` describes, whose optimizer may hold state of other parameters: it makes room for the state of those
/// that were trained there and are frozen here, and for the masters of those that are trained here, in another type than they are stored in. It leaves out the
/// state of those that have had no update there, which stays zero. Where one of the two has fp32 masters and the other
/// has none, or weights are of another type, masters are filled from the weights, and weights from the masters (LoadOptions::convert).
std::vector<SlicedTensor> training_tensors(const torch::nn::Module& model, optim::Optimizer& optimizer, const Manifest& source);

/// What save() writes.
struct CheckpointState {
  int64_t step = 0;
  std::vector<SlicedTensor> tensors;                          ///< this rank's; read, never changed
  nlohmann::json optimizer;                                   ///< optimizer_json()
  nlohmann::json progress;                                    ///< RNG seed, data cursor, bucket layout, ...; equal on all ranks
  nlohmann::json agreement;                                   ///< agreement_of(); equal on all ranks
  RunIdentity run{};                                          ///< who saves; rank 0's counts
  std::map<std::string, std::function<at::Tensor()>> away{};  ///< by name, of `tensors` that wait elsewhere and have their form alone: brings a copy

  at::Tensor values_of(const SlicedTensor& held) const {
    const auto found = away.find(held.slice.name);
    return found == away.end() ? held.tensor : found->second();
  }
};

/// Puts the tensors of a training state there, as views. Optimizer state that waits elsewhere stays there until it is written
/// (optim::Optimizer::state_to_save).
void add_training_tensors(CheckpointState& state, const torch::nn::Module& model, const optim::Optimizer& optimizer);

/// What load() did.
struct LoadReport {
  std::set<std::string> fresh;                   ///< targets that stay as they were, by stored name; LoadOptions::partial allowed it
  std::set<std::string> unread;                  ///< stored tensors that no target takes, likewise
  std::map<std::string, std::string> converted;  ///< targets that are kept in another dtype than was stored: "F32 -> BF16"; LoadOptions::convert allowed it
  std::vector<std::string> partial;              ///< LoadOptions::partial
  uint64_t read_bytes = 0;                       ///< of the stored slices that were mapped: what the disk is asked for at most
};

/// Kind and update counts of an optimizer, with the kind that updates each parameter, and back. A parameter that load() left fresh counts from 0, and so does
/// one that LoadOptions::partial matches and another kind of optimizer has updated. restore throws ConfigError where kind or parameters differ, or the kind of
/// another parameter (of which checkpoints of before it was kept say nothing).
nlohmann::json optimizer_json(const optim::Optimizer& optimizer);
/// With the update counts of all ranks of `group`, each of which may have a part of the model (stages of a pipeline). Collective.
nlohmann::json optimizer_json(const optim::Optimizer& optimizer, const comm::Group& group);
/// `saved` with the counts of this optimizer's parameters alone: the checkpoint is of a model of which it has a part.
nlohmann::json own_counts(const nlohmann::json& saved, const optim::Optimizer& optimizer);
/// Refuses parameters that an optimizer of another kind has updated, as far as `saved` says so, but for those that `partial` (LoadOptions) matches. Throws
/// ConfigError.
void check_kinds(const nlohmann::json& saved, const optim::Optimizer& optimizer, const std::vector<std::string>& partial);
/// Parameters of which the checkpoint has an update that is not in its weights (optim::kNextState).
std::set<std::string> updates_ahead(const Manifest& manifest);
void restore_optimizer(const nlohmann::json& saved, optim::Optimizer& optimizer, const LoadReport& loaded = {});

/// Collective over `group`: writes `dir`/step-00000010 with one file of slices per rank and manifest.json. A slice that several ranks hold is written by one of
/// them, dealt so that all write about as many bytes. Everything is written to a temporary folder, synced, and renamed last, so `dir` never shows half a
/// checkpoint; a checkpoint of the same step is replaced in one exchange. Where any rank fails, all throw Error naming rank and reason, and nothing of `dir`
/// has changed. Traffic: metadata only (names and boxes, about 200 bytes a slice, all-gathered twice). Returns the folder.
std::filesystem::path save(const std::filesystem::path& dir, const CheckpointState& state, const comm::Group& group);

struct LoadOptions {
  bool verify = true;  ///< check the hash of every stored slice that is read
  /// Stored names that the whole model has, where this rank holds only some (a pipeline stage); empty: the targets' own. What is stored beyond them is
  /// refused, and so is one of them that is not stored.
  std::vector<std::string> expected = {};
  /// Stored names with one of these prefixes may be left unread ("optimizer." when only weights are wanted).
  std::vector<std::string> ignore_prefixes = {};
  /// Parameters, by pattern ("head.*"), whose tensors (weights, buffers, optimizer state) may be missing, extra, mis-shaped or of another dtype: then they are
  /// left as they are. A pattern that matches nothing is refused.
  std::vector<std::string> partial = {};
  /// Floating tensors may be stored in another floating dtype than the targets': they are rounded to nearest, or widened. Weights take the values of their fp32
  /// masters, where the checkpoint has these and they round to what is stored (fill_fullest).
  bool convert = false;
  /// Stored names of which this is so in any case.
  std::set<std::string> converted = {};

  bool converts(const std::string& stored) const { return convert || converted.contains(stored); }
};

/// Whether LoadOptions::partial names the parameter.
bool may_differ(const std::vector<std::string>& partial, std::string_view parameter);
/// Refuses a pattern of LoadOptions::partial that matches neither what a checkpoint holds nor any of the whole model's parameters: before there are ranks of
/// which each holds some.
void check_partial(const std::vector<std::string>& patterns, const Manifest& manifest, const std::vector<std::string>& parameters);

/// Fills `targets` from a checkpoint of any layout; not collective. Only the stored slices that overlap a target are mapped, hashed and copied. Throws
/// ConfigError with the full list of missing, extra, mis-shaped and differently typed tensors before anything is touched, or naming file, tensor and offset
/// where a hash differs.
LoadReport load(const std::filesystem::path& folder, const Manifest& manifest, const std::vector<SlicedTensor>& targets, const LoadOptions& options = {});

enum class Thoroughness {
  Sizes,   ///< manifest hash; every file present with the right size
  Hashes,  ///< the hash of every stored slice too
};

/// Part `index` of `parts`, of about as many bytes each, in which the slices of a checkpoint are dealt to those who hash them together.
struct HashShare {
  int index = 0, parts = 1;
};

/// Why the checkpoint in `folder` cannot be used, or nothing. With Hashes, `share` of its bytes are read. Throws UnreadableFile (files.h) where the system does
/// not give what it holds: that may be whole.
std::optional<std::string> problem_with(const std::filesystem::path& folder, Thoroughness thoroughness = Thoroughness::Sizes, const HashShare& share = {});

struct Latest {
  std::optional<std::filesystem::path> folder;  ///< the newest valid checkpoint
  std::vector<std::string> skipped;             ///< newer ones that are not valid, each with its reason: to be said aloud
};

/// Looks through `dir`, newest step below `before` first, and stops at the first valid one whose recorded loss, where it has one and `verify` asks, is finite.
/// A missing `dir` holds none. Throws UnreadableFile where one cannot be read, for an older one is no stand-in for it. Not collective: one rank decides for all.
Latest find_latest(const std::filesystem::path& dir, Thoroughness thoroughness = Thoroughness::Hashes, int64_t before = std::numeric_limits<int64_t>::max(),
                   bool verify = true);

/// Whose checkpoints prune() counts.
struct PruneOptions {
  RunIdentity run{};          ///< only those on its line count, and only those are taken away; what has no readable manifest is nobody's
  std::set<int64_t> known{};  ///< steps whose bytes need not be read back: they were hashed on their way to the disk, or when they were loaded
  /// The step that was written last: later ones are of a start before, which went further. They do not count, and stay.
  int64_t newest = std::numeric_limits<int64_t>::max();
};

struct Pruned {
  std::vector<std::filesystem::path> gone;  ///< what is left to delete, under names that nothing reads: checkpoints, and what killed saves left behind
  std::vector<std::string> kept;            ///< what would have gone, and stays for what somebody else has put there: to be said aloud
};

/// Takes the oldest checkpoints out of sight and leaves the newest `keep` (0: all) that are whole by their sizes. Before any is taken away, the newest is read
/// back and its hashes are checked, unless they are known, so that the last good one stays whatever its successors turn out to be; so does anything newer, and
/// so does a folder that holds what no save writes. For one rank to call, while none saves into `dir`. A matter of names alone where the newest is known: what
/// takes as long as the bytes are many is remove_pruned's.
Pruned prune(const std::filesystem::path& dir, int64_t keep, const PruneOptions& options = {});

/// Deletes what prune() has taken out of sight.
void remove_pruned(const std::vector<std::filesystem::path>& folders);

}  // namespace tessera::checkpoint
