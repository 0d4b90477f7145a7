#include "tessera/checkpoint/manifest.h"

#include <string_view>
#include <utility>

#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/json_file.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/json_integer.h"
#include "tessera/core/json_reason.h"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kFormat = "tessera checkpoint";

/// The hash is the file's last line, over every byte before it, so no way of writing a number can move it.
std::string hash_line(std::string_view body) { return ",\n\"manifest_hash\": \"" + hash_hex(body.data(), body.size()) + "\"\n}\n"; }
constexpr size_t kHashLineBytes = sizeof(",\n\"manifest_hash\": \"0123456789abcdef\"\n}\n") - 1;

nlohmann::json to_json(const Box& box) { return {box.offset, box.size}; }

Box box_from(const nlohmann::json& json, const std::vector<int64_t>& shape, const std::string& name) {
  Box box{to_integers(json.at(0)), to_integers(json.at(1))};
  bool inside = box.offset.size() == shape.size() && box.size.size() == shape.size();
  for (size_t d = 0; inside && d < shape.size(); ++d) {
    inside = box.size[d] >= 0 && box.size[d] <= shape[d] && box.offset[d] >= 0 && box.offset[d] <= shape[d] - box.size[d];
  }
  require(inside, "tensor '", name, "': a slice leaves the tensor's shape");
  return box;
}

StoredTensor tensor_from(const nlohmann::json& json, const std::string& name, const std::map<std::string, uint64_t>& files) {
  StoredTensor tensor{json.at("dtype").get<std::string>(), to_integers(json.at("shape")), {}};
  require(tensor_bytes(dtype_from_name(tensor.dtype), tensor.shape).has_value(), "tensor '", name, "' has an impossible shape");
  for (const auto& entry : json.at("slices")) {
    StoredSlice slice{entry.at("file").get<std::string>(), entry.at("key").get<std::string>(), {}, entry.at("hash").get<std::string>()};
    require(files.contains(slice.file), "tensor '", name, "' lies in file '", slice.file, "', which is not listed");
    for (const auto& box : entry.at("boxes")) slice.boxes.push_back(box_from(box, tensor.shape, name));
    Slice{name, tensor.shape, slice.boxes}.check();
    tensor.slices.push_back(std::move(slice));
  }
  return tensor;
}

Manifest manifest_from(const nlohmann::json& json) {
  require(json.at("format") == kFormat, "is no manifest of a checkpoint");
  require(json.at("version") == Manifest::kVersion, "has format version ", json.at("version").dump(), "; this program reads version ", Manifest::kVersion);
  Manifest manifest;
  manifest.step = to_integer(json.at("step"));
  for (const auto& [name, bytes] : json.at("files").items()) {
    require(!name.empty() && name.find('/') == std::string::npos && name != "." && name != "..", "file name '", name, "' leaves the checkpoint's folder");
    const int64_t size = to_integer(bytes);
    require(size >= 0, "file '", name, "' has a size of ", size, " bytes");
    manifest.files[name] = static_cast<uint64_t>(size);
  }
  for (const auto& [name, tensor] : json.at("tensors").items()) manifest.tensors[name] = tensor_from(tensor, name, manifest.files);
  manifest.optimizer = json.at("optimizer");
  manifest.progress = json.at("progress");
  manifest.agreement = json.at("agreement");
  if (json.contains("run")) manifest.run = run_identity_from(json.at("run"));
  return manifest;
}

}  // namespace

std::vector<Slice> Manifest::slices(const std::string& name) const {
  const StoredTensor& tensor = tensors.at(name);
  std::vector<Slice> slices;
  for (const auto& stored : tensor.slices) slices.push_back({name, tensor.shape, stored.boxes});
  return slices;
}

std::string to_json(const Manifest& manifest) {
  nlohmann::json json{{"format", kFormat},
                      {"version", Manifest::kVersion},
                      {"step", manifest.step},
                      {"files", manifest.files},
                      {"optimizer", manifest.optimizer},
                      {"progress", manifest.progress},
                      {"agreement", manifest.agreement},
                      {"run", to_json(manifest.run)}};
  auto& tensors = json["tensors"] = nlohmann::json::object();
  for (const auto& [name, tensor] : manifest.tensors) {
    nlohmann::json slices = nlohmann::json::array();
    for (const auto& slice : tensor.slices) {
      nlohmann::json boxes = nlohmann::json::array();
      for (const auto& box : slice.boxes) boxes.push_back(to_json(box));
      slices.push_back({{"file", slice.file}, {"key", slice.key}, {"boxes", std::move(boxes)}, {"hash", slice.hash}});
    }
    tensors[name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"slices", std::move(slices)}};
  }
  std::string body = json.dump();
  body.pop_back();  // the closing brace, which comes after the hash
  return body + hash_line(body);
}

Manifest parse_manifest(const std::string& text, const std::filesystem::path& file) {
  require(text.size() > kHashLineBytes, file.string(), ": has ", text.size(), " bytes, which is no whole manifest");
  const std::string_view body = std::string_view(text).substr(0, text.size() - kHashLineBytes);
  require(std::string_view(text).substr(body.size()) == hash_line(body), file.string(), ": is damaged: its ", body.size(),
          " bytes do not have the hash that it ends with");
  try {
    return manifest_from(parse_json(text, file));
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(detail::concat(file.string(), ": ", json_reason(error)));
  } catch (const Error& error) {
    throw ConfigError(detail::concat(file.string(), ": ", error.what()));
  }
}

Manifest read_manifest(const std::filesystem::path& folder) {
  constexpr uint64_t kMaxBytes = uint64_t{4} << 30;
  require(!folder.empty(), "checkpoint: no folder was given to load from; find_latest(dir).folder is the newest of those in dir");
  const auto file = folder / "manifest.json";
  return parse_manifest(read_text_file(file, kMaxBytes), file);
}

}  // namespace tessera::checkpoint
