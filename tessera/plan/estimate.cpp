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

double bytes_of(const std::string& format) { return format == "bf16" || format == "fp16" ? 2 : 4; }

}  // namespace

Estimator::Estimator(const Config& config, int world, const Machine& machine) : config_(config), world_(world), machine_(machine) {
  precision::settle_compute(config_, at::kMeta, precision::Saying::Silent);  // of a caller who has not
  active_ = static_cast<double>(num_active_parameters(config.model));
  const CountedElements counted = count_elements(config);
  quantized_ = counted.quantized_bytes;
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

Estimate Estimator::operator()(const LayoutChoice& c) const {
  const Config& config = config_;
  const Machine& machine = machine_;
  const int world = world_;
  const ModelConfig& model = config.model;
  const auto layers = static_cast<double>(model.layers), dim = static_cast<double>(model.dim), seq = static_cast<double>(config.data.seq_len);
  const auto ffn = static_cast<double>(model.ffn_dim.value_or(model.dim * 8 / 3)) * (model.experts > 0 ? static_cast<double>(model.experts_per_token) : 1);
  const double parts_of_experts = c.ep * config.mesh.expert_tp;
  const double trained = trained_.held(c, parts_of_experts), frozen = frozen_.held(c, parts_of_experts);
  const double element = bytes_of(config.precision.compute);

  const double shards = c.shard * c.cp;
  Estimate found;
  // Whatever deals experts, what is sharded of them is so over all ranks of dp_shard, cp and tp; and nothing shards what is in fewer bits.
  const auto dense = kept_per_parameter(kept_of_dense_, c.stage, c.shard * c.cp),
             experts = kept_per_parameter(kept_of_experts_, c.stage, c.shard * c.cp, c.tp / parts_of_experts);
  const double state = (dense.state + experts.state) / c.tp / c.pp;
  found.state_bytes = (dense.weight + dense.gradient + experts.weight + experts.gradient + quantized_) / c.tp / c.pp + (c.host_optimizer ? 0 : state);
  if (c.offload) found.state_bytes = 0;

  const auto m = static_cast<double>(c.micro_batches(world));
  const double tokens = static_cast<double>(c.micro_size) * seq / c.cp;  // of a micro-batch on a rank
  // Of a mixture, what each chosen expert takes, makes of it in three products of its width, and gives back.
  const double elements =
      model.experts > 0 ? (9 + 2 * static_cast<double>(model.experts_per_token)) * dim + 3 * ffn : 17 * dim + (model.family == "llama" ? 1 : 0) * ffn;
  const double kept_of_a_layer = tokens * element * (c.recompute == "full" ? dim : elements / c.tp);
  double in_flight = c.pp == 1 ? 1 : std::min<double>(m, c.pp) * (1 + (c.chunks > 1 ? (c.pp - 1.0) / (c.pp * c.chunks) : 0));
  if (c.schedule == "v_half") in_flight /= 2;
  if (c.schedule == "v_min") in_flight /= 3;
  // Where the head makes the last stage hold fewer layers, another holds one more than its share.
  const double most_layers = c.pp == 1 ? layers : layers / c.pp + 1;
  found.bytes = (found.state_bytes + kept_of_a_layer * layers / c.pp * in_flight) * most_layers * c.pp / layers;

  const auto peak = machine.device.flops.find(element == 2 ? at::kBFloat16 : at::kFloat);
  const double rate = (peak == machine.device.flops.end() ? 1e14 : peak->second) * machine.device.product_share;
  const double flops_a_token =
      ((frozen > 0 ? 4 : 6) * active_ + 6 * layers * dim * counted_keys(model, config.data.seq_len)) * (c.recompute == "full"        ? 4.0 / 3
                                                                                                        : c.recompute == "selective" ? 1.03
                                                                                                                                     : 1);
  // What the slowest stage has of the layers, of which the head is some.
  const double head = static_cast<double>(model.vocab_size) * dim / ((active_ - 2 * static_cast<double>(model.vocab_size) * dim) / layers);
  const double parts = static_cast<double>(c.pp) * c.chunks;
  const double share = c.pp == 1 ? 1 : std::max(std::ceil(layers / parts) * c.chunks, (layers + head) / c.pp) / (layers + head);
  const double computing = flops_a_token * tokens * m / c.tp * share / rate;
  const double idle = c.pp == 1 ? 0 : (c.pp - 1.0) / (c.chunks * m) * (c.schedule.starts_with("zb") ? 0.4 : 1);

  // Ranks of a group lie `stride` apart; those on one host share its links to others.
  const auto link = [&](double ranks, double stride) {
    const double on_a_host = std::clamp(machine.devices_per_host / stride, 1.0, ranks);
    const double across = machine.across.bandwidth * on_a_host;
    return LinkRates{.bandwidth = on_a_host < ranks ? std::min(machine.inside.bandwidth, across) : machine.inside.bandwidth,
                     .latency = on_a_host < ranks ? machine.across.latency : machine.inside.latency};
  };
  // What products leave over: some forty passes over a layer's stream, and a hundred operators that the host asks for, forward and backward.
  const double stream = tokens * dim * element;
  const double passes = layers / c.pp * m * (c.recompute == "full" ? 4.0 / 3 : 1);
  const double elsewhere =
      passes * std::max(40 * stream / c.tp / (machine.device.memory_bandwidth * machine.device.memory_share) + 100 * machine.device.kernel_gap, 0.0);
  const double asked = passes * (100 * machine.device.launch + (c.tp > 1 ? 8 : 0) * machine.device.collective_launch +
                                 (c.cp > 1 ? 4 * c.cp : 0) * machine.device.collective_launch);
  const LinkRates within = link(c.tp, 1);
  const double reductions = (c.recompute == "full" ? 6 : 4) * layers / c.pp * m;
  const double tensor = c.tp == 1 ? 0 : reductions * (2 * stream * (c.tp - 1) / c.tp / within.bandwidth + 2 * within.latency);

  const double data = static_cast<double>(c.data_ranks(world)) * c.cp;
  const double apart = static_cast<double>(c.tp) * c.pp, between = link(data, apart).bandwidth;
  const double gradient = trained * bytes_of(config.precision.reduce) * (data - 1) / data / between;
  const double gathers = (trained + frozen) * element * (data - 1) / data / link(shards, apart).bandwidth;
  double sharded = data == 1 ? 0 : 2 * gradient;
  if (c.stage >= 3) sharded = m * (gradient + 2 * gathers);
  if (c.stage == 2) sharded = m * gradient + gathers;
  const double exchange =
      c.ep == 1 ? 0 : 4 * m * layers / c.pp * stream * static_cast<double>(model.experts_per_token) * (c.ep - 1) / c.ep / link(c.ep, c.tp).bandwidth;
  const double hidden = c.stage >= 3 ? 0.7 * computing : 0.7 * computing / m;  // gradients of the last micro-batch alone go while another is computed
  const double ring = c.cp == 1 ? 0
                                : 6 * passes * stream * static_cast<double>(model.kv_heads.value_or(model.heads)) / static_cast<double>(model.heads) / c.tp *
                                      (c.cp - 1) / link(c.cp, c.tp).bandwidth;
  found.seconds = std::max(computing + elsewhere + tensor + exchange + 0.5 * ring, asked) * (1 + idle) + std::max(0.3 * sharded, sharded - hidden);
  // The update reads and writes the state, a copy and a gradient; then the parameters come back.
  if (c.host_optimizer) {
    const double copy = trained * bytes_of(config.precision.params);
    found.seconds += (2 * state + 3 * copy) / machine.device.host_memory + 2 * copy / machine.device.host_link;
  }
  return found;
}

}  // namespace tessera::plan
