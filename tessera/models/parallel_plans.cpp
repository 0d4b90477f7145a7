#include "tessera/models/parallel_plans.h"

#include "tessera/core/error.h"

namespace tessera {
namespace {

/// Writes plans for one layout of the residual stream.
class Planner {
 public:
  Planner(const ModelConfig& config, bool sequence_parallel, bool keep_gathered)
      : config_(config), stream_(sequence_parallel ? TensorLayout::Sequence : TensorLayout::Replicated), keep_gathered_(keep_gathered) {}

  void embedding() { add("embed_tokens", VocabParallelEmbedding{.output = stream_}); }
  void head() { add("head", VocabParallelHead{.input = stream_}); }

  /// Learned positions: each rank looks up those of its part.
  void positions(const std::string& path) {
    on_stream(path);
    if (stream_ == TensorLayout::Sequence) add(path, PrepareInput{.from = TensorLayout::Replicated, .to = TensorLayout::Sequence});
  }

  /// What works on the residual stream, position by position.
  void on_stream(const std::string& pattern) {
    if (stream_ == TensorLayout::Sequence) add(pattern, SequenceParallel{});
  }

  void attention(const std::string& path) {
    const int64_t heads = config_.heads, kv_heads = config_.kv_heads.value_or(config_.heads);
    const FeatureCut queries = FeatureCut::query_heads(heads, kv_heads), keys = FeatureCut::key_value_heads(heads, kv_heads);
    take_stream(path, {"wq", "wk", "wv"});
    gives_stream(path);
    add(path + ".core", Gives{.layout = TensorLayout::Features, .cut = queries, .dim = 2});
    add(path + ".wq", ColumnParallel{.input = TensorLayout::Copied, .cut = queries});
    add(path + ".wk", ColumnParallel{.input = TensorLayout::Copied, .cut = keys});
    add(path + ".wv", ColumnParallel{.input = TensorLayout::Copied, .cut = keys});
    add(path + ".wo", RowParallel{.output = stream_, .cut = queries});
  }

  void feed_forward(const std::string& path, bool gated) {
    take_stream(path, gated ? std::vector<std::string>{"w1", "w3"} : std::vector<std::string>{"w1"});
    gives_stream(path);
    add(path + ".w1", ColumnParallel{.input = TensorLayout::Copied});
    if (gated) add(path + ".w3", ColumnParallel{.input = TensorLayout::Copied});
    add(path + ".w2", RowParallel{.output = stream_});
  }

  /// Experts are dealt by who deals experts; router and shared experts go with the stream.
  void mixture(const std::string& path) {
    if (stream_ == TensorLayout::Sequence) add(path, Gives{.layout = stream_, .by_position = true});
    on_stream(path + ".router");
    if (config_.shared_ffn_dim > 0) feed_forward(path + ".shared", /*gated=*/true);
    if (config_.shared_gate) on_stream(path + ".shared_gate");
  }

  /// Modules made of others, whose result is the residual stream's.
  void gives_stream(const std::string& pattern) {
    if (stream_ == TensorLayout::Sequence) add(pattern, Gives{.layout = stream_});
  }

  ParallelPlan take() { return std::move(plan_); }

 private:
  void take_stream(const std::string& path, std::vector<std::string> layers) {
    add(path, PrepareInput{.from = stream_, .to = TensorLayout::Copied, .keep_gathered = keep_gathered_, .layers = std::move(layers)});
  }
  void add(std::string pattern, ParallelStyle style) { plan_.emplace_back(std::move(pattern), std::move(style)); }

  const ModelConfig& config_;
  TensorLayout stream_;
  bool keep_gathered_;
  ParallelPlan plan_;
};

/// LLaMA, or with experts Mixtral.
void llama(Planner& plan, bool experts) {
  plan.embedding();
  plan.on_stream("dropout");
  plan.on_stream("layers.*.attention_norm");
  plan.attention("layers.*.attention");
  plan.on_stream("layers.*.attention_dropout");
  plan.on_stream("layers.*.ffn_norm");
  experts ? plan.mixture("layers.*.feed_forward") : plan.feed_forward("layers.*.feed_forward", /*gated=*/true);
  plan.on_stream("layers.*.ffn_dropout");
  plan.gives_stream("layers.*");
  plan.on_stream("norm");
  plan.head();
}

void gpt2(Planner& plan) {
  plan.embedding();
  plan.positions("embed_positions");
  plan.on_stream("dropout");
  plan.on_stream("layers.*.attention_norm");
  plan.attention("layers.*.attention");
  plan.on_stream("layers.*.attention_dropout");
  plan.on_stream("layers.*.ffn_norm");
  plan.feed_forward("layers.*.feed_forward", /*gated=*/false);
  plan.on_stream("layers.*.ffn_dropout");
  plan.gives_stream("layers.*");
  plan.on_stream("norm");
  plan.head();
}

void mlp(Planner& plan) {
  plan.embedding();
  plan.on_stream("layers.*.ffn_norm");
  plan.feed_forward("layers.*.feed_forward", /*gated=*/false);
  plan.on_stream("layers.*.ffn_dropout");
  plan.gives_stream("layers.*");
  plan.on_stream("norm");
  plan.head();
}

}  // namespace

ParallelPlan parallel_plan(const LanguageModel& model, bool sequence_parallel, bool keep_gathered) {
  Planner plan(model.config(), sequence_parallel, keep_gathered);
  const std::string& family = model.config().family;
  if (family == "llama" || family == "mixtral") {
    llama(plan, family == "mixtral");
  } else if (family == "gpt2") {
    gpt2(plan);
  } else {
    require(family == "mlp", "mesh.tp: model.family = ", family, " has no tensor-parallel plan; give parallelize_module one of your own");
    mlp(plan);
  }
  return plan.take();
}

}  // namespace tessera
