#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/checkpoint/hugging_face_family.h"
#include "tessera/checkpoint/json_file.h"
#include "tessera/checkpoint/narrowing.h"
#include "tessera/checkpoint/problems.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/file_type.h"
#include "tessera/core/hash.h"

// Tensors are read where they lie in the mapped files, as views: transposed, narrowed, and of those this rank's slice, so a rank reads its part from disk and
// holds no whole model. As in our own checkpoints, all that does not fit is told before anything is written.

namespace tessera::checkpoint {
namespace {

/// The file of weights, or their index: the one that config.json names, or else the usual ones in the order in which transformers looks for them.
std::string weights_name(const std::filesystem::path& dir) {
  const std::string single = "model.safetensors", index = "model.safetensors.index.json";
  require_model_folder(dir);
  const auto config = dir / "config.json";
  if (const auto named = is_there(config) ? named_weights(HuggingFaceConfig(config)) : std::nullopt) {
    require(is_there(dir / *named), config.string(), ": transformers_weights = \"", *named, "\": no such file there; copy it beside, or leave the key out");
    return *named;
  }
  if (is_there(dir / single)) return single;
  require(is_there(dir / index), "model.from_hf = ", dir.string(), ": holds neither ", single, " nor ", index,
          "; name the folder that holds them (--set model.from_hf=DIR)");
  return index;
}

/// The tensors of the file of weights, or of those that an index lists, by name.
std::map<std::string, SafetensorsFile> open_files(const std::filesystem::path& dir) {
  std::map<std::string, SafetensorsFile> by_tensor;
  const auto add_all = [&](const std::string& name) {
    const SafetensorsFile file(dir / name);
    for (const auto& [tensor, entry] : file.entries()) {
      const bool first = by_tensor.emplace(tensor, file).second;
      require(first, (dir / name).string(), ": tensor '", tensor, "' is in another file too");
    }
  };
  const std::string index = weights_name(dir);
  if (!index.ends_with(".json")) {
    add_all(index);
    return by_tensor;
  }
  const auto json = read_json(dir / index);
  const auto map = json.find("weight_map");
  require(map != json.end() && map->is_object(), (dir / index).string(), ": has no weight_map");
  std::set<std::string> names;
  for (const auto& [tensor, file] : map->items()) {
    require(file.is_string() && file.get<std::string>().find('/') == std::string::npos, (dir / index).string(), ": tensor '", tensor, "' lies in ", file.dump(),
            ", which is no name of a file beside it");
    names.insert(file.get<std::string>());
  }
  for (const auto& name : names) add_all(name);
  return by_tensor;
}

/// Files that were saved without the head have no prefix: gives them the names that files with one have.
std::map<std::string, SafetensorsFile> with_prefix(std::map<std::string, SafetensorsFile> files, const HuggingFaceFamily& family) {
  if (family.prefix.empty()) return files;
  for (const auto& [name, file] : files) {
    if (name.starts_with(family.prefix)) return files;
  }
  std::map<std::string, SafetensorsFile> renamed;
  for (auto& [name, file] : files) renamed.emplace(name == "lm_head.weight" ? name : family.prefix + name, std::move(file));
  return renamed;
}

bool same_bytes(const SafetensorsFile& a, const std::string& name_in_a, const SafetensorsFile& b, const std::string& name_in_b) {
  const auto x = a.bytes(name_in_a), y = b.bytes(name_in_b);
  return a.entry(name_in_a).dtype == b.entry(name_in_b).dtype && std::ranges::equal(x, y);
}

/// The tensors that the files have to hold: of one whose beginning alone is used, as many rows as the folder's own model has positions.
std::vector<FileTensor> expected_tensors(const std::vector<HuggingFaceTensor>& table, const std::filesystem::path& dir, const HuggingFaceFamily& family) {
  auto tensors = file_tensors(table);
  for (auto& tensor : tensors) {
    if (!tensor.leading) continue;
    const auto own = family.read_config(HuggingFaceConfig(dir / "config.json")).max_seq_len;
    tensor.shape[0] = std::max(tensor.shape[0], own.value());
  }
  return tensors;
}

}  // namespace

std::string hugging_face_fingerprint(const std::filesystem::path& dir) {
  // Of a tensor its beginning, and of each of as many equal parts a piece: a row may hold several weights side by side (GPT-2's q, k and v), so that pieces lie
  // at no multiple of its length.
  constexpr size_t beginning = 4096, parts = 32, piece = 512;
  Hasher hasher;
  for (const auto& [name, file] : open_files(dir)) {
    const TensorEntry& entry = file.entry(name);
    const std::string what = fmt::format("{} {} [{}] ", name, c10::toString(entry.dtype), fmt::join(entry.shape, ", "));
    const auto bytes = file.bytes(name);
    hasher.update(what.data(), what.size()).update(bytes.data(), std::min(bytes.size(), beginning));
    if (bytes.size() <= beginning) continue;
    const size_t part = bytes.size() / parts, length = std::min(part, piece);
    for (size_t i = 0; i < parts; ++i) {
      const size_t moved = hash_bytes(&i, sizeof(i)) % (part - length + 1);
      hasher.update(bytes.data() + i * part + moved, length);
    }
  }
  return hasher.hex();
}

void load_hugging_face(const std::filesystem::path& dir, const ModelConfig& model, const std::vector<SlicedTensor>& targets) {
  const auto families = hugging_face_families();
  const auto family = std::find_if(families.begin(), families.end(), [&](const auto& each) { return each.family == model.family; });
  require(family != families.end(), "model.from_hf = ", dir.string(), ": model.family = ", model.family, " has no Hugging Face files");
  const auto files = with_prefix(open_files(dir), *family);
  // A file's own name of a tensor, where the prefix was added above.
  const auto stored_name = [&](const std::string& name, const SafetensorsFile& file) {
    return file.entries().contains(name) ? name : name.substr(family->prefix.size());
  };

  Problems problems;
  const bool fused = !family->fused.empty() && std::ranges::any_of(files, [&](const auto& file) { return file.first.ends_with(family->fused); });
  const auto table = fused ? family->fused_table(model) : family->table(model);
  std::map<std::string, std::vector<HuggingFaceTensor>> rows;
  std::set<std::string> expected;
  for (const auto& tensor : expected_tensors(table, dir, *family)) {
    for (const auto& row : tensor.parts) rows[row.ours].push_back(row);
    expected.insert(tensor.name);
    const auto file = files.find(tensor.name);
    if (file == files.end()) {
      problems.add("missing ", tensor.name);
      continue;
    }
    const TensorEntry& entry = file->second.entry(stored_name(tensor.name, file->second));
    if (entry.shape != tensor.shape) {
      problems.add("shape of ", tensor.name, ": ", at::IntArrayRef(entry.shape), " in the file, ", at::IntArrayRef(tensor.shape), " in the model");
    } else if (entry.dtype != at::kFloat && entry.dtype != at::kHalf && entry.dtype != at::kBFloat16) {
      problems.add("dtype of ", tensor.name, ": ", dtype_name(entry.dtype), " (F32, F16 and BF16 can be read)");
    }
  }
  for (const auto& [name, file] : files) {
    const bool tied_head = model.tie_embeddings && name == "lm_head.weight";
    if (!expected.contains(name) && !family->ignorable(name) && !tied_head) problems.add("extra ", name);
    // Some tied files repeat the embedding; one that holds another head was not tied.
    const auto embedding = files.find(table.front().theirs);
    if (tied_head && embedding != files.end() && !same_bytes(file, name, embedding->second, stored_name(embedding->first, embedding->second))) {
      problems.add(name, " is not the embedding ", embedding->first, " (config.json says tie_word_embeddings = true, by its own word or its default)");
    }
  }
  for (const auto& target : targets) {
    if (!rows.contains(target.slice.name)) problems.add("nothing for the model's ", target.slice.name);
  }
  problems.refuse("model.from_hf = ", dir.string(), ": the weights do not fit the model of its config.json: ");

  const c10::NoGradGuard no_grad;
  for (const auto& [tensor, slice] : targets) {
    std::vector<Slice> slices;
    std::vector<at::Tensor> views;
    for (const HuggingFaceTensor& row : rows.at(slice.name)) {
      const SafetensorsFile& file = files.at(row.theirs);
      slices.push_back(row.slice_of(slice.name));
      views.push_back(view_of(row, file.tensor(stored_name(row.theirs, file))));
    }
    at::Tensor target = tensor;
    copy_slices(slices, views, slice, target);
    refuse_beyond_params(target, views, "model.from_hf = " + dir.string(), rows.at(slice.name).front().theirs);
  }
}

}  // namespace tessera::checkpoint
