#include "tessera/checkpoint/safetensors.h"

#include "tests/fuzz/target.h"

/// A file whose header is accepted gives every tensor it lists, byte for byte.
TESSERA_FUZZ_TARGET(safetensors) {
  using namespace tessera;
  const auto path = fuzz::scratch_file("model.safetensors", input);
  fuzz::accepts(path.string(), [&] {
    const checkpoint::SafetensorsFile file(path);
    for (const auto& [name, entry] : file.entries()) {
      const at::Tensor tensor = file.tensor(name);
      const auto stored = file.bytes(name);
      fuzz::expect(tensor.nbytes() == stored.size() && tensor.sizes() == at::IntArrayRef(entry.shape), "tensor '", name, "' is not what its entry says");
      if (tensor.nbytes() == 0) continue;
      fuzz::expect(std::memcmp(tensor.const_data_ptr(), stored.data(), stored.size()) == 0, "tensor '", name, "' has other bytes");
    }
  });
}
