#pragma once

#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/json_file.h"
#include "tessera/core/error.h"
#include "tessera/core/json_integer.h"

namespace tessera::checkpoint {

/// A config.json, read key by key; what it says wrong is refused with file, key and value.
class HuggingFaceConfig {
 public:
  explicit HuggingFaceConfig(std::filesystem::path file);

  /// Nothing where the key is absent or null.
  template <class T>
  std::optional<T> find(const std::string& key) const {
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return std::nullopt;
    try {
      if constexpr (std::is_same_v<T, int64_t>) {
        return to_integer(*found);
      } else {
        return found->get<T>();
      }
    } catch (const std::exception&) {
      throw ConfigError(detail::concat(file_.string(), ": ", key, " = ", found->dump(), " is of the wrong type"));
    }
  }

  std::vector<std::string> keys() const {
    std::vector<std::string> keys;
    for (const auto& [key, value] : json_.items()) keys.push_back(key);
    return keys;
  }

  /// Whether the key is there, be it null.
  bool contains(const std::string& key) const { return json_.contains(key); }

  /// A size from 1 to `most`; `absent` is what an absent key means, which is else refused.
  int64_t size(const std::string& key, int64_t most = 1'000'000'000, std::optional<int64_t> absent = std::nullopt) const;
  /// The same under `key`, or under `alias`, as their class calls it, too; refused where the two contradict each other.
  int64_t size_by(const std::string& key, const std::string& alias, int64_t most = 1'000'000'000, std::optional<int64_t> absent = std::nullopt) const;

  /// Refuses null under a key that, left out, means something that holds: where their classes take null at all, they take it for false.
  void refuse_null(const std::string& key) const {
    require(!contains(key) || !json_.at(key).is_null(), file_.string(), ": ", key, " = null is not supported; write what it is, or leave the key out");
  }

  /// Refuses any other value than `only`, and those that are `other_names` of it, under `key`; `absent` is what an absent key means.
  template <class T>
  void expect(const std::string& key, const T& only, const T& absent, const std::vector<T>& other_names = {}) const {
    if (absent != T()) refuse_null(key);
    const T value = find<T>(key).value_or(absent);
    require(value == only || std::ranges::find(other_names, value) != other_names.end(), file_.string(), ": ", key, " = ", nlohmann::json(value).dump(),
            " is not supported; only ", nlohmann::json(only).dump(), " is");
  }

  const std::filesystem::path& file() const { return file_; }

 private:
  std::filesystem::path file_;
  nlohmann::json json_;
};

/// More layers than any model has, and few enough for a table of them.
inline constexpr int64_t kMostLayers = 10'000;

/// The file of weights, or their index, that `transformers_weights` names in place of the usual ones; nothing where it names none. Throws ConfigError for a
/// name of another kind.
std::optional<std::string> named_weights(const HuggingFaceConfig& config);

/// The ids under `key`: a number, or a list of them. Throws ConfigError.
std::set<int64_t> read_ids(const HuggingFaceConfig& file, const std::string& key);

/// What there is to know about a family of Hugging Face models.
struct HuggingFaceFamily {
  std::string family;        ///< ours; of several, the first that can compute a model writes it
  std::string model_type;    ///< theirs
  std::string architecture;  ///< theirs, with a language-model head
  std::string prefix;        ///< of all names but the head's, which files saved without the head lack; empty: none do
  ModelConfig (*read_config)(const HuggingFaceConfig&);
  nlohmann::json (*write_config)(const ModelConfig&);  ///< what config.json says of the shape
  std::vector<HuggingFaceTensor> (*table)(const ModelConfig&);
  bool (*ignorable)(const std::string& name);                                   ///< tensors of some files that hold no parameter
  std::string (*refusal)(const ModelConfig&) = nullptr;                         ///< why their class cannot compute such a model; empty: it can. Null: all
  std::vector<HuggingFaceTensor> (*fused_table)(const ModelConfig&) = nullptr;  ///< of files that store some tensors as one; null: there are none
  std::string fused{};                                                          ///< how the name of one of those tensors ends
};

const HuggingFaceFamily& llama_family();
const HuggingFaceFamily& mistral_family();
const HuggingFaceFamily& gpt2_family();
const HuggingFaceFamily& mixtral_family();

/// Refuses a folder that is not there, as one that a checkpoint names and that was moved since.
void require_model_folder(const std::filesystem::path& dir);

inline constexpr int64_t kMistralPositions = 131072;  ///< Mistral's and Mixtral's, where the file has no max_position_embeddings

/// What a class of theirs takes for keys that a file leaves out.
struct LlamaDefaults {
  double rope_theta = 10000, norm_eps = 1e-6;
  int64_t max_seq_len = 2048;
  std::optional<int64_t> kv_heads{};  ///< nothing: as many as heads, which null says, too
};

/// What LLaMA and the families that share its blocks have in common: the keys of config.json, and the rows of the table but for the feed-forward layers, which
/// `feed_forward(layer, table)` adds in their place.
ModelConfig read_llama_config(const HuggingFaceConfig& config, const LlamaDefaults& absent = {});
/// Positions that attention sees, as `sliding_window` says: null is none, and an absent one `absent`. Refuses layers of which some see all of them.
int64_t read_sliding_window(const HuggingFaceConfig& config, int64_t absent);
/// For families whose class sees the whole sequence, whatever the file says.
void refuse_sliding_window(const HuggingFaceConfig& config, const std::string& architecture);
nlohmann::json write_llama_config(const ModelConfig& model);
std::vector<HuggingFaceTensor> make_llama_rows(const ModelConfig& model, const std::function<void(int64_t, std::vector<HuggingFaceTensor>&)>& feed_forward);
bool is_ignorable_in_llama(const std::string& name);

/// All of them.
std::vector<HuggingFaceFamily> hugging_face_families();
/// The one that can compute the model. Where none can the refusal says why, and ends with `consequence` ("... cannot be converted").
HuggingFaceFamily require_family(const ModelConfig& model, const std::string& consequence);

/// One tensor of their files and the rows that it is made of, in table order.
struct FileTensor {
  std::string name;
  std::vector<int64_t> shape;
  bool leading = false;
  std::vector<HuggingFaceTensor> parts;
};
std::vector<FileTensor> file_tensors(const std::vector<HuggingFaceTensor>& table);

/// Our logical tensor as a view of theirs.
at::Tensor view_of(const HuggingFaceTensor& row, const at::Tensor& theirs);

}  // namespace tessera::checkpoint
