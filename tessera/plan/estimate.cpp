#include "tessera/plan/estimate.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "tessera/models/flops.h"
#include "tessera/precision/compute_format.h"
#include "tessera/train/places.h"
#include "tessera/train/state_bytes.h"

// The textbook's sums: 6 FLOPs a parameter and token, a bubble of (p-1)/(v m), tensor parallelism's four reductions of the stream a layer, data parallelism's
// two shares of the gradients (three gathers at stage 3), 34 bytes an element of the stream and layer (Korthikanti et al., arXiv:2205.05198). Which layout is
// best the dry runs decide, whose order this is; the one bound taken from here as a refusal is that of the state, which is exact.

namespace tessera::plan {
namespace {

// Those without a source are guesses, and good enough for an order: no machine was measured for them.

// Numbers that a layer keeps for backward, for each of the stream's dim: 34 bytes of two-byte numbers (Korthikanti et al.), whose scores fused attention does
// not keep. LLaMA's third product keeps one more of its width.
constexpr double kKeptOfLayer = 17;
constexpr double kKeptOfGate = 1;
// Of a mixture: without the feed-forward network; what each chosen expert takes and gives back; and of its width, in three products.
constexpr double kKeptOutsideOfExperts = 9;
constexpr double kKeptOfExpert = 2;
constexpr double kKeptOfExpertWidth = 3;
// What V schedules keep of 1F1B's micro-batches in flight (Qi et al., arXiv:2405.15362).
constexpr double kVHalf = 2;
constexpr double kVMin = 3;

// FLOPs of a parameter and token: two in forward, two for its input's gradient, two for its own.
constexpr double kFlops = 6;
constexpr double kFlopsWhereFrozen = 4;
constexpr double kFlopsOfAttention = 6;    // of a layer, dim and counted key: half of 12, for a query sees half of these
constexpr double kForwardTwice = 4.0 / 3;  // recompute = full: forward is a third
constexpr double kCoresTwice = 1.03;       // selective: 2.7% of GPT-3 (Korthikanti et al.)
constexpr double kFlopsOfNoSheet = 1e14;   // a second, of a device whose data sheet does not name the format
constexpr double kIdleOfZeroBubble = 0.4;  // of 1F1B's bubble: a third where the halves take equal times (Qi et al., arXiv:2401.10241), and some
constexpr double kPassesOverStream = 40;   // a layer's, forward and backward, for what is not a product
constexpr double kOperatorsOfLayer = 100;  // that the host asks for, forward and backward

// Of a layer, forward and backward, and of a tensor of the stream.
constexpr double kReductions = 4;          // of tensor parallelism
constexpr double kReductionsTwice = 6;     // with recompute = full, which repeats forward's two
constexpr double kCallsOfTensor = 8;       // a reduction may be two: a scatter and a gather
constexpr double kCallsOfRing = 4;         // for each of its ranks
constexpr double kAllReduce = 2;           // times what a reduce-scatter moves, and its messages
constexpr double kExchangesOfExperts = 4;  // out and back, in forward and in backward
constexpr double kTensorsOfRing = 6;       // keys and values in forward; these and their gradients in backward

constexpr double kHiddenBehindCompute = 0.7;  // of the time of computing: what gradients and gathers have to go in
constexpr double kNeverHidden = 0.3;          // of theirs: nothing is computed beside the first gather and the last reduction
constexpr double kRingNotHidden = 0.5;        // of its messages, which go beside the attention of the tile before

// An update on the host: reads and writes the state and a copy, and reads a gradient; the gradient comes and the parameters go.
constexpr double kTimesState = 2;
constexpr double kTimesCopy = 3;
constexpr double kTimesLink = 2;

double bytes_of(const std::string& format) { return format == "bf16" || format == "fp16" ? 2 : 4; }

}  // namespace

Estimator::Estimator(const Config& config, int world, const Machine& machine) : config_(config), world_(world), machine_(machine) {
  precision::settle_compute(config_, at::kMeta, precision::Saying::Silent);  // of a caller who has not
  active_ = static_cast<double>(num_active_parameters(config.model));
  const CountedElements counted = count_elements(config);
  kept_of_dense_.quantized = counted.quantized_bytes;
  for (const PlacedElements& kind : counted.elements) {
    Elements& elements = kind.trained ? trained_ : frozen_;
    (kind.expert ? elements.experts : elements.dense) += kind.count;
    const BytesPerParameter one = bytes_of(kind, config_);
    BytesPerParameter& whole = kind.expert ? kept_of_experts_ : kept_of_dense_;
    whole.weight += kind.count * one.weight;
    whole.gradient += kind.count * one.gradient;
    whole.state += kind.count * one.state;
  }
}

/// What the sums below share.
struct Estimator::Work {
  double layers, dim;    ///< of the model
  double element;        ///< bytes of a number that is computed with
  double micro_batches;  ///< of a step
  double tokens;         ///< of a micro-batch, on a rank
  double stream;         ///< bytes of what they take from layer to layer
  double passes;         ///< of a micro-batch through a layer, forward and backward: of a stage and step
};

Estimator::Work Estimator::work_of(const LayoutChoice& choice) const {
  Work work{.layers = static_cast<double>(config_.model.layers),
            .dim = static_cast<double>(config_.model.dim),
            .element = bytes_of(config_.precision.compute),
            .micro_batches = static_cast<double>(choice.micro_batches(world_)),
            .tokens = static_cast<double>(choice.micro_size) * static_cast<double>(config_.data.seq_len) / choice.cp,
            .stream = 0,
            .passes = 0};
  work.stream = work.tokens * work.dim * work.element;
  work.passes = work.layers / choice.pp * work.micro_batches * (choice.recompute == "full" ? kForwardTwice : 1);
  return work;
}

/// Bytes of a rank.
struct Estimator::Memory {
  double optimizer;         ///< the optimizer's state, wherever it is
  double state;             ///< Estimate::state_bytes
  double with_activations;  ///< Estimate::bytes
};

Estimator::Memory Estimator::memory_of(const LayoutChoice& choice, const Work& work) const {
  const ModelConfig& model = config_.model;
  // Whatever deals experts, what is sharded of them is so over all ranks of dp_shard, cp and tp.
  const auto dense = kept_per_parameter(kept_of_dense_, choice.stage, choice.shard * choice.cp),
             experts = kept_per_parameter(kept_of_experts_, choice.stage, choice.shard * choice.cp, choice.tp / parts_of_experts(choice));
  const double optimizer = (dense.state + experts.state) / choice.tp / choice.pp;
  double state =
      (dense.weight + dense.gradient + dense.quantized + experts.weight + experts.gradient) / choice.tp / choice.pp + (choice.host_optimizer ? 0 : optimizer);
  if (choice.offload) state = 0;

  const auto per_token = static_cast<double>(model.experts_per_token);
  const auto ffn = static_cast<double>(model.ffn_dim.value_or(model.dim * 8 / 3)) * (model.experts > 0 ? per_token : 1);
  const double elements = model.experts > 0 ? (kKeptOutsideOfExperts + kKeptOfExpert * per_token) * work.dim + kKeptOfExpertWidth * ffn
                                            : kKeptOfLayer * work.dim + (model.family == "llama" ? kKeptOfGate : 0) * ffn;
  const double kept_of_a_layer = work.tokens * work.element * (choice.recompute == "full" ? work.dim : elements / choice.tp);
  double in_flight =
      choice.pp == 1 ? 1 : std::min<double>(work.micro_batches, choice.pp) * (1 + (choice.chunks > 1 ? (choice.pp - 1.0) / (choice.pp * choice.chunks) : 0));
  if (choice.schedule == "v_half") in_flight /= kVHalf;
  if (choice.schedule == "v_min") in_flight /= kVMin;
  // Where the head makes the last stage hold fewer layers, another holds one more than its share.
  const double most_layers = choice.pp == 1 ? work.layers : work.layers / choice.pp + 1;
  return {.optimizer = optimizer,
          .state = state,
          .with_activations = (state + kept_of_a_layer * work.layers / choice.pp * in_flight) * most_layers * choice.pp / work.layers};
}

/// Seconds of a step.
struct Estimator::Compute {
  double products;
  double elsewhere;  ///< what products leave over
  double asked;      ///< in which the host asks for all of it
  double idle;       ///< as a share of the rest: the bubble
};

Estimator::Compute Estimator::compute_of(const LayoutChoice& choice, const Work& work) const {
  const ModelConfig& model = config_.model;
  const DeviceRates& device = machine_.device;
  const auto peak = device.flops.find(work.element == 2 ? at::kBFloat16 : at::kFloat);
  const double rate = (peak == device.flops.end() ? kFlopsOfNoSheet : peak->second) * device.product_share;
  const bool some_frozen = frozen_.held(choice, parts_of_experts(choice)) > 0;
  const double again = choice.recompute == "full" ? kForwardTwice : choice.recompute == "selective" ? kCoresTwice : 1;
  const double flops_a_token =
      ((some_frozen ? kFlopsWhereFrozen : kFlops) * active_ + kFlopsOfAttention * work.layers * work.dim * counted_keys(model, config_.data.seq_len)) * again;
  // What the slowest stage has of the layers, of which the head is some.
  const auto vocabulary = static_cast<double>(model.vocab_size);
  const double head = vocabulary * work.dim / ((active_ - 2 * vocabulary * work.dim) / work.layers);
  const double parts = static_cast<double>(choice.pp) * choice.chunks;
  const double share = choice.pp == 1 ? 1 : std::max(std::ceil(work.layers / parts) * choice.chunks, (work.layers + head) / choice.pp) / (work.layers + head);

  const double moved = kPassesOverStream * work.stream / choice.tp / (device.memory_bandwidth * device.memory_share);
  return {.products = flops_a_token * work.tokens * work.micro_batches / choice.tp * share / rate,
          .elsewhere = work.passes * std::max(moved + kOperatorsOfLayer * device.kernel_gap, 0.0),
          .asked = work.passes * (kOperatorsOfLayer * device.launch + (choice.tp > 1 ? kCallsOfTensor : 0) * device.collective_launch +
                                  (choice.cp > 1 ? kCallsOfRing * choice.cp : 0) * device.collective_launch),
          .idle = choice.pp == 1 ? 0 : (choice.pp - 1.0) / (choice.chunks * work.micro_batches) * (choice.schedule.starts_with("zb") ? kIdleOfZeroBubble : 1)};
}

/// Ranks of a group lie `stride` apart; those on one host share its links to others.
LinkRates Estimator::link_of(double ranks, double stride) const {
  const double on_a_host = std::clamp(machine_.devices_per_host / stride, 1.0, ranks);
  const double across = machine_.across.bandwidth * on_a_host;
  return {.bandwidth = on_a_host < ranks ? std::min(machine_.inside.bandwidth, across) : machine_.inside.bandwidth,
          .latency = on_a_host < ranks ? machine_.across.latency : machine_.inside.latency};
}

/// Seconds in which each of such ranks sends `bytes` to each other: those for other hosts over its own link.
double Estimator::exchange_of(double bytes, double ranks, double stride) const {
  const double on_a_host = std::clamp(machine_.devices_per_host / stride, 1.0, ranks);
  return bytes * std::max((on_a_host - 1) / machine_.inside.bandwidth, (ranks - on_a_host) / machine_.across.bandwidth);
}

/// Seconds of a step, by what brings it about.
struct Estimator::Traffic {
  double tensor;   ///< mesh.tp
  double experts;  ///< mesh.ep
  double ring;     ///< mesh.cp
  double data;     ///< gradients, and what is gathered of what is sharded
};

Estimator::Traffic Estimator::traffic_of(const LayoutChoice& choice, const Work& work) const {
  const ModelConfig& model = config_.model;
  const double m = work.micro_batches, parts = parts_of_experts(choice);
  const double trained = trained_.held(choice, parts), frozen = frozen_.held(choice, parts);
  const LinkRates within = link_of(choice.tp, 1);
  const double reductions = (choice.recompute == "full" ? kReductionsTwice : kReductions) * work.layers / choice.pp * m;
  const double one = kAllReduce * work.stream * (choice.tp - 1) / choice.tp / within.bandwidth + kAllReduce * within.latency;

  const double ranks = static_cast<double>(choice.data_ranks(world_)) * choice.cp, shards = choice.shard * choice.cp;
  const double stride = static_cast<double>(choice.tp) * choice.pp;
  const double gradient = trained * bytes_of(config_.precision.reduce) * (ranks - 1) / ranks / link_of(ranks, stride).bandwidth;
  const double gathers = (trained + frozen) * work.element * (ranks - 1) / ranks / link_of(shards, stride).bandwidth;
  double data = ranks == 1 ? 0 : kAllReduce * gradient;
  if (choice.stage >= 3) data = m * (gradient + 2 * gathers);
  if (choice.stage == 2) data = m * gradient + gathers;

  const double heads = static_cast<double>(model.kv_heads.value_or(model.heads));
  return {.tensor = choice.tp == 1 ? 0 : reductions * one,
          .experts = parts == 1 ? 0
                                : kExchangesOfExperts * m * work.layers / choice.pp *
                                      exchange_of(work.stream * static_cast<double>(model.experts_per_token) / choice.ep, parts,
                                                  choice.expert_tp > 1 ? 1 : choice.tp),  // each part of an expert takes its tokens
          .ring = choice.cp == 1 ? 0
                                 : kTensorsOfRing * work.passes * work.stream * heads / static_cast<double>(model.heads) / choice.tp * (choice.cp - 1) /
                                       link_of(choice.cp, choice.tp).bandwidth,
          .data = data};
}

/// Seconds of the optimizer's, where it is worth a word.
double Estimator::update_of(const LayoutChoice& choice, const Memory& memory) const {
  if (!choice.host_optimizer) return 0;
  const double copy = trained_.held(choice, parts_of_experts(choice)) * bytes_of(config_.precision.params);
  return (kTimesState * memory.optimizer + kTimesCopy * copy) / machine_.device.host_memory + kTimesLink * copy / machine_.device.host_link;
}

Estimate Estimator::operator()(const LayoutChoice& choice) const {
  const Work work = work_of(choice);
  const Memory memory = memory_of(choice, work);
  const Compute compute = compute_of(choice, work);
  const Traffic traffic = traffic_of(choice, work);
  const double within = compute.products + compute.elsewhere + traffic.tensor + traffic.experts + kRingNotHidden * traffic.ring;
  // Below stage 3 gradients of the last micro-batch alone go while another is computed.
  const double hidden = kHiddenBehindCompute * compute.products / (choice.stage >= 3 ? 1 : work.micro_batches);
  const double beside = std::max(kNeverHidden * traffic.data, traffic.data - hidden);
  return {.seconds = std::max(within, compute.asked) * (1 + compute.idle) + beside + update_of(choice, memory),
          .state_bytes = memory.state,
          .bytes = memory.with_activations};
}

}  // namespace tessera::plan
