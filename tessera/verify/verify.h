#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <nlohmann/json.hpp>

#include "tessera/comm/world.h"
#include "tessera/config/config.h"
#include "tessera/core/attachment.h"
#include "tessera/train/compose.h"

namespace tessera {

/// A bug put into the layout on purpose: every comparison is itself tested with some that it must find. No configuration reaches it.
struct VerifyPlant {
  /// Called on each rank of the layout when its run is composed; what it returns lives until the run ends.
  std::function<Attachment(Composition& run, int rank)> attach{};
  /// Called on each rank in each step when its gradients are final, before they are compared.
  std::function<void(Composition& run, int rank)> gradients{};
  /// Around every engine of the layout: what the network does wrong.
  comm::Decorator network{};
};

struct VerifyOptions {
  int64_t steps = 2;  ///< optimizer steps that are compared: the second is the first in which buckets and prefetch follow what was observed
  int64_t output_bytes = int64_t{1} << 30;  ///< of module outputs of a step that are kept, over all ranks; of what is beyond, only hashes are
  VerifyPlant plant{};
};

/// How far two runs are apart in one number or tensor.
struct Difference {
  std::string name{};  ///< the tensor; empty for a number of the whole step
  double value = 0;    ///< relative (see VerifyReport); infinity where one of the two is not finite, or has no counterpart
  int64_t step = 0;    ///< of the largest value; 0: before the first
  int rank = 0;        ///< of the layout that was the farthest apart
  std::string note{};  ///< what is wrong beside the value: another shape, elements that no rank holds
};

/// One kind of comparison.
struct DifferenceList {
  double bound = 0;                ///< 0: bit for bit
  std::vector<Difference> each{};  ///< the worst of each tensor over steps and ranks, in the order of registration

  const Difference& worst() const;  ///< the largest; a default one where nothing was compared
  bool within() const { return worst().value <= bound; }
};

/// A module whose output, or the gradient of its output, is another one than on one device.
struct Parting {
  std::string module{};  ///< its path; empty: the model itself
  int64_t step = 0;
  int64_t micro_batch = 0;  ///< in the step's global batch
  int rank = 0;
  double value = 0;    ///< of the largest entry of that output
  double allowed = 0;  ///< rounding of so many modules in a row (VerifyBounds)
  std::string note{};
};

/// What the outputs of all modules say, in one direction.
struct OutputComparison {
  int64_t compared = 0;            ///< outputs of ranks that were held against one device's
  int64_t bit_equal = 0;           ///< of those
  int64_t beyond_budget = 0;       ///< other bits, and too many bytes to say how far apart (VerifyOptions::output_bytes)
  int64_t unseen = 0;              ///< outputs of one device that the ranks do not make up: held by none, or in part
  double worst = 0;                ///< of those compared
  std::optional<Parting> first{};  ///< in the first step that has one, in the order of one device's execution, the innermost module first
};

/// What a router's choices gave up over all steps: of each token the scores of what one device would choose less those of what was chosen, by place (where
/// experts choose, of each expert). Rounding gives up little of a few; a router that chooses by something else, a large share of all.
struct GivenUp {
  double scores = 0;  ///< summed, of an average place
  double spread = 0;  ///< between the largest and the smallest score, summed: the most that could be given up

  double share() const;
};

/// Choices of experts (nn::RouterChoice) that were made on both sides. The one device goes on with the layout's, as with its gradients.
struct RoutingComparison {
  int64_t tokens = 0;                         ///< of all routers
  int64_t flipped = 0;                        ///< of those, tokens for which one device would have chosen other experts
  int64_t unseen = 0;                         ///< tokens beside these, of which no rank shows a choice, or not of the whole micro-batch: not compared
  double margin = 0;                          ///< the most that a place gave up, of the largest score that it could have (of those above 1, of 1)
  double bound = 0;                           ///< what rounding explains: see VerifyBounds
  std::map<std::string, GivenUp> given_up{};  ///< by the router's path
  double share_bound = 0;

  /// The router that gave up the largest share; its name is empty where none was compared.
  std::pair<std::string, double> worst() const;
  bool within() const { return margin <= bound && worst().second <= share_bound; }
};

/// The same steps of a configuration in a layout and on one device. Differences are relative: of losses and norms to the value, of gradients and weights to the
/// largest entry of the tensor on one device (of gradients, at least a tenth of the largest of the same module: a bias whose gradient is zero but for rounding
/// is measured by its weight). A gradient beyond its bound is measured by how much farther the layout is from one device's in the next wider format, fp32 or
/// fp64, than one device's own (docs/verify.md).
struct VerifyReport {
  std::vector<std::pair<std::string, int>> mesh{};  ///< axes of the layout, slowest first
  int ranks = 1;
  int64_t first_step = 1, steps = 0;
  int64_t micro_batches = 0;  ///< of a step
  int64_t skipped = 0;        ///< steps whose gradients overflowed on both sides at the loss scale they had: nothing to compare
  bool bit_for_bit = false;   ///< the arithmetic is the same, so the bits have to be
  bool scaled = false;        ///< products in fp16 with a loss scale: what overflows may do so on one side alone
  bool unscaled = false;      ///< products in fp16 without a loss scale: small gradients underflow, and what is left of them depends on the order of sums
  DifferenceList initial_weights{}, losses{}, gradient_norms{}, gradients{}, weights{};
  RoutingComparison routing{};
  OutputComparison forward{}, backward{};  ///< where, not whether: that the lists above say

  /// All within their bounds, and something was compared.
  bool passed() const;
};

/// Runs `config` in the layout `mesh` (see parse_mesh), its ranks as threads of this process, and beside them on one device, from the same weights over the
/// same global batches, and compares. Each rank computes on the device that run.device means to it; autograd has one thread for each, in which two that shared
/// it would wait for each other, so there has to be one for each rank (auto takes the CPU where there are fewer).
///
/// The reference keeps what decides the arithmetic (model, data, batch, optimizer, precision, run) and leaves out what only lays it out: mesh, zero, tensor,
/// context, pipeline, recompute, offload and comm.
/// It follows the layout: after each comparison it goes on with the layout's gradients, and then its weights. So every step is compared from the same weights
/// and every update from the same gradients, and a difference is seen in the step and the tensor where it arises: an optimizer that turns rounding of a
/// gradient near zero into a whole step (Adam) does not blow it up. Everything is read through slices and nn::output_layout; there is no branch on a technique.
///
/// Memory: the layout's ranks, one more copy of the model with its optimizer state, one logical tensor, and output_bytes. Throws ConfigError for what `train`
/// would refuse of the layout, and what the ranks throw.
VerifyReport verify(const Config& config, const MeshConfig& mesh, const VerifyOptions& options = {});

/// "dp_replicate=3,dp_shard=2,ep=2" -> the configuration's mesh with these sizes in its order, and 1 for axes that are not named. Throws ConfigError naming the
/// nearest axis, an axis given twice, or a size below 1.
MeshConfig parse_mesh(const std::string& text, const MeshConfig& base = {});

/// Where the first of those ranks, and the one device, compute: what precision.compute = auto asks. Throws ConfigError as verify() does.
at::Device verify_device(const Config& config, const MeshConfig& mesh);

/// The fields of `tessera verify --json` (docs/verify.md); what is not finite is null.
nlohmann::json to_json(const VerifyReport& report);

/// A table for people.
std::string to_string(const VerifyReport& report);

}  // namespace tessera
