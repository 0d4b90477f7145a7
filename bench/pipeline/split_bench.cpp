// What a pass through the recorded operators of a model costs beside the model's own forward, and what recording it costs. Layers are so small that the price
// of an operator shows: 12 encoder layers, 4 tokens of width 32.
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include "tessera/pipeline/split/split.h"
#include "tessera/pipeline/split/traced_stage.h"

namespace tessera {
namespace {

struct EncoderImpl : torch::nn::Module {
  EncoderImpl()
      : emb(50, 32),
        enc(torch::nn::TransformerEncoderLayer(torch::nn::TransformerEncoderLayerOptions(32, 4).dim_feedforward(64).dropout(0.0)), 12),
        head(32, 50) {
    register_module("emb", emb);
    register_module("enc", enc);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& mask) { return head(enc(emb(tokens), mask)); }
  torch::nn::Embedding emb;
  torch::nn::TransformerEncoder enc;
  torch::nn::Linear head;
};
TORCH_MODULE(Encoder);

const std::vector<at::Tensor>& inputs() {
  static const std::vector<at::Tensor> made{at::zeros({4, 1}, at::kLong), at::zeros({4, 4})};
  return made;
}

void eager(benchmark::State& state) {
  Encoder model;
  for (auto _ : state) benchmark::DoNotOptimize(model(inputs()[0], inputs()[1]));
}
BENCHMARK(eager)->Unit(benchmark::kMicrosecond);

void replay(benchmark::State& state) {
  Encoder model;
  const auto split = pipeline::split(model, inputs(), {});
  pipeline::TracedStage stage(split, 0, [](int) { return inputs(); }, [](int, const std::vector<at::Tensor>& outputs) { return outputs[0]; });
  for (auto _ : state) benchmark::DoNotOptimize(stage.forward(0, {}));
  state.counters["operators"] = split.recording()->graph->size();
}
BENCHMARK(replay)->Unit(benchmark::kMicrosecond);

void record(benchmark::State& state) {
  Encoder model;
  for (auto _ : state) benchmark::DoNotOptimize(pipeline::split(model, inputs(), {}));
}
BENCHMARK(record)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
