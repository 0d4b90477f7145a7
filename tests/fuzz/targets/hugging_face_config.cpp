#include "tessera/checkpoint/hugging_face.h"
#include "tests/fuzz/target.h"

/// A config.json, and the table of weights of the model that it describes. The model may still break rules of validate().
TESSERA_FUZZ_TARGET(hugging_face_config) {
  using namespace tessera;
  const auto file = fuzz::scratch_file("config.json", input);
  Config config;
  config.data.seq_len = config.batch.global_size = config.run.steps = 1;
  config.optim.lr = 1;
  config.model.from_hf = file.parent_path().string();
  if (!fuzz::accepts(file.string(), [&] { config.model = checkpoint::read_hugging_face_config(config); })) return;
  fuzz::accepts("", [&] {
    resolve(config);
    if (config.model.layers > 16) config.model.layers = 16;  // tables of many layers repeat themselves
    fuzz::expect(checkpoint::hugging_face_table(config.model).value().size() > 2, "a table without rows");
    validate(config, 1, Purpose::Plan);
  });
}
