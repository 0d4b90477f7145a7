#include <ATen/ops/zeros.h>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/safetensors.h"
#include "tests/fuzz/target.h"

namespace {

using namespace tessera;

ModelConfig tiny_model() {
  ModelConfig model;
  model.family = "llama";
  model.dim = 4, model.layers = 1, model.heads = 2, model.kv_heads = 1, model.ffn_dim = 6, model.vocab_size = 5, model.max_seq_len = 8;
  return model;
}

/// Two shards that hold the tiny model's weights, beside which the index will lie.
void write_shards(const std::filesystem::path& dir) {
  std::vector<checkpoint::TensorSpec> halves[2];
  const auto table = checkpoint::hugging_face_table(tiny_model()).value();
  for (size_t i = 0; i < table.size(); ++i) halves[i % 2].push_back({table[i].theirs, at::kFloat, table[i].shape});
  for (int half = 0; half < 2; ++half) {
    checkpoint::SafetensorsWriter writer(dir / (half == 0 ? "a.safetensors" : "b.safetensors"), halves[half]);
    for (const auto& spec : halves[half]) writer.write(at::zeros(spec.shape));
    writer.finish();
  }
}

}  // namespace

/// model.safetensors.index.json: weights that it finds fit the model.
TESSERA_FUZZ_TARGET(hugging_face_index) {
  const auto file = fuzz::scratch_file("model.safetensors.index.json", input);
  const auto dir = file.parent_path();
  [[maybe_unused]] static const bool written = (write_shards(dir), true);
  const auto table = checkpoint::hugging_face_table(tiny_model()).value();
  std::vector<checkpoint::SlicedTensor> targets;
  for (const auto& row : table) targets.push_back({at::zeros(row.shape), Slice::whole(row.ours, row.shape)});
  fuzz::accepts(dir.string(), [&] { checkpoint::load_hugging_face(dir, tiny_model(), targets); });
}
