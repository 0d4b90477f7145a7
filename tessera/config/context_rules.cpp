#include <string>

#include "tessera/config/config.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

/// Query heads of the rank that has the fewest of them, where mesh.tp deals them out (layout/feature_cut.h).
int64_t fewest_heads(const ModelConfig& model, int tp) {
  const int64_t kv_heads = model.kv_heads.value_or(model.heads), queries_of_a_key = model.heads / kv_heads;
  if (tp <= kv_heads) return kv_heads / tp * queries_of_a_key;
  const int64_t holders_of_a_key = (tp + kv_heads - 1) / kv_heads;
  return queries_of_a_key / holders_of_a_key;
}

}  // namespace

int ulysses_ranks(const Config& config, int cp, int tp) {
  if (config.context.method == "ulysses") return cp;
  if (config.context.method != "ulysses_ring") return 1;
  if (config.context.ulysses > 0) return config.context.ulysses;
  int most = 1;
  for (int ranks = 2; ranks < cp; ++ranks) {
    if (cp % ranks == 0 && ranks <= fewest_heads(config.model, tp)) most = ranks;
  }
  return most;
}

bool holds_one_part(const Config& config, int cp) {
  if (config.context.balance != "auto") return config.context.balance == "contiguous";
  // Every query sees as many keys, but the first ones, and those lie with this rank and the one before.
  return config.model.sliding_window > 0 && config.model.sliding_window <= config.data.seq_len / cp;
}

void validate_context(const Config& config, int64_t seq_len, const std::string& knob, int cp, int tp) {
  const ContextConfig& context = config.context;
  require(context.ulysses >= 0, "context.ulysses = ", context.ulysses, ": expected a divisor of mesh.cp, or 0 for the largest below it that has heads");
  if (cp == 1) return;
  require(config.model.family != "mlp", "mesh.cp = ", cp, ": model.family = mlp treats each token by itself, so it has no sequence to cut; set mesh.cp = 1, ",
          "and mesh.dp_replicate or mesh.dp_shard to more");
  require(seq_len >= cp, knob, " = ", seq_len, ": a sequence cannot be cut over more ranks than it has tokens, and mesh.cp is ", cp, "; set mesh.cp to ",
          seq_len, " or less, or ", knob, " to more");
  const int ranks = ulysses_ranks(config, cp, tp);
  if (context.method == "ulysses_ring") {
    require(cp % ranks == 0, "context.ulysses = ", ranks, ": the ring goes across groups of so many ranks, and it does not divide mesh.cp = ", cp,
            "; set context.ulysses to a divisor, or to 0 for the largest that has heads");
  }
  const int64_t heads = fewest_heads(config.model, tp);
  require(ranks <= heads, context.method == "ulysses" ? "mesh.cp" : "context.ulysses", " = ", ranks, ": context.method = ", context.method,
          " gives each of these ranks heads of its own, and ", tp > 1 ? "with mesh.tp = " + std::to_string(tp) + " a rank" : std::string("the model"), " has ",
          heads, "; use at most ", heads, ", or a ring, which cuts no heads: context.method = ",
          context.method == "ulysses" ? "ring, or ulysses_ring with context.ulysses = a divisor of mesh.cp" : "ring");
}

}  // namespace tessera
