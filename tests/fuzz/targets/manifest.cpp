#include "tessera/checkpoint/manifest.h"

#include "tessera/core/hash.h"
#include "tests/fuzz/target.h"

namespace {

const std::filesystem::path kPlace = "step_3/manifest.json";

/// What is read_manifest_text is written and read_manifest_text again as the same.
void read_manifest_text(const std::string& text) {
  using namespace tessera::checkpoint;
  tessera::fuzz::accepts(kPlace.string(), [&] {
    const Manifest manifest = parse_manifest(text, kPlace);
    for (const auto& [name, tensor] : manifest.tensors) tessera::fuzz::expect(manifest.slices(name).size() == tensor.slices.size(), "slices of ", name);
    const std::string written = to_json(manifest);
    tessera::fuzz::expect(to_json(parse_manifest(written, kPlace)) == written, "a manifest changes when it is written");
  });
}

}  // namespace

/// The text as it is, and with the hash that lets it past the first check.
TESSERA_FUZZ_TARGET(manifest) {
  std::string body(input);
  read_manifest_text(body);
  if (const size_t hash = body.find(",\n\"manifest_hash\""); hash != std::string::npos) body.resize(hash);
  read_manifest_text(body + ",\n\"manifest_hash\": \"" + tessera::hash_hex(body.data(), body.size()) + "\"\n}\n");
}
