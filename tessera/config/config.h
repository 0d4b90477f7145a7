#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/config/fields.h"

namespace tessera {

using Betas = std::array<double, 2>;

/// A choice for all of a kind, such as where its tensors live ("host"), or by pattern of a path or name ({ "layers.*" = "host" }), in which case the rest
/// have the first of the choices ("device").
struct ByPattern {
  std::string everywhere = "device";
  std::map<std::string, std::string> by_pattern{};  ///< pattern, choice; where there is one, `everywhere` is the first choice

  ByPattern() = default;
  ByPattern(const char* everywhere) : everywhere(everywhere) {}
  ByPattern(std::string everywhere) : everywhere(std::move(everywhere)) {}

  bool operator==(const ByPattern&) const = default;
  /// Whether `choice` is that of all of them.
  bool is(std::string_view choice) const { return by_pattern.empty() && everywhere == choice; }
  /// Whether any of them does.
  bool uses(std::string_view choice) const {
    return is(choice) || std::ranges::any_of(by_pattern, [&](const auto& one) { return one.second == choice; });
  }
};

/// What a field takes beyond its C++ type; see config_fields.h.
struct FieldRule {
  std::string_view choices = {};  ///< comma-separated strings; empty: any string
  std::string_view unset = {};    ///< what an optional becomes when it is not given
  bool path = false;              ///< relative paths are made absolute; `choices` stand for themselves
  bool number = false;            ///< a number is taken beside `choices`
  std::string_view refused = {};  ///< comma-separated strings that are understood, and that validate() refuses with their reason
  bool per_rank = false;          ///< each rank may have its own, as it is of its host and changes no number; paths are so by themselves
};

namespace field_rules {
constexpr FieldRule any() { return {}; }
constexpr FieldRule one_of(std::string_view choices) { return {.choices = choices}; }
constexpr FieldRule one_of(std::string_view choices, std::string_view refused) { return {.choices = choices, .refused = refused}; }
constexpr FieldRule number_or(std::string_view choices) { return {.choices = choices, .number = true}; }
constexpr FieldRule path() { return {.path = true}; }
constexpr FieldRule path_or(std::string_view choices) { return {.choices = choices, .path = true}; }
constexpr FieldRule unset(std::string_view text) { return {.unset = text}; }
constexpr FieldRule own() { return {.per_rank = true}; }
}  // namespace field_rules

#define TESSERA_DECLARE_FIELD(type, name, value, rule, doc) type name = value;
#define TESSERA_VISIT_FIELD(type, name, value, rule, doc) visit(#name, self.name, rule, std::string_view(doc));
// clang-format off
// for_each_field calls visit(name, field, FieldRule, doc) for each field, in order.
#define TESSERA_DECLARE_SECTION(Struct, member, fields, doc)       \
  struct Struct {                                                  \
    fields(TESSERA_DECLARE_FIELD)                                  \
    template <class Self, class Visit>                             \
    static void for_each_field(Self& self, Visit&& visit) {        \
      using namespace field_rules;                                 \
      fields(TESSERA_VISIT_FIELD)                                  \
    }                                                              \
    bool operator==(const Struct&) const = default;                \
  };
// clang-format on
TESSERA_CONFIG_SECTIONS(TESSERA_DECLARE_SECTION)
#undef TESSERA_DECLARE_SECTION
#undef TESSERA_VISIT_FIELD
#undef TESSERA_DECLARE_FIELD

/// A run's whole configuration: `config.optim.lr` is the key `optim.lr`. Two configurations are equal when all their fields are.
struct Config {
#define TESSERA_DECLARE_MEMBER(Struct, member, fields, doc) Struct member;
  TESSERA_CONFIG_SECTIONS(TESSERA_DECLARE_MEMBER)
#undef TESSERA_DECLARE_MEMBER

  std::string name = "run";     ///< stem of the file it came from; names the default log.dir
  std::set<std::string> given;  ///< keys that the file or --set named ("model.rope_theta"): what from_hf must agree with
  /// What was asked for where a run has settled on something by its machines: precision.compute then holds what it became (precision::settle_compute), this
  /// what stood there ("precision.compute" -> "auto"), and to_toml() writes both.
  std::map<std::string, std::string> asked;

  /// Calls visit(name, section, doc) for each section, in order.
  template <class Self, class Visit>
  static void for_each_section(Self& self, Visit&& visit) {
#define TESSERA_VISIT_SECTION(Struct, member, fields, doc) visit(#member, self.member, std::string_view(doc));
    TESSERA_CONFIG_SECTIONS(TESSERA_VISIT_SECTION)
#undef TESSERA_VISIT_SECTION
  }
  bool operator==(const Config& other) const;
};

/// Whether weights change in the midst of a step: a pipeline of several ranks, by a schedule that never flushes within it (PipeDream, PipeDream-2BW).
bool updates_within_steps(const Config& config, int pipeline_ranks);

/// Of `cp` ranks that share sequences, how many neighbours exchange columns for heads (context.method): all, some with a ring across them, or 1, none.
int ulysses_ranks(const Config& config, int cp, int tp);

/// Whether each of `cp` ranks holds one part of a sequence (context.balance); else one of its head and one of its tail.
bool holds_one_part(const Config& config, int cp);

/// What context.* asks of a model whose sequences of `seq_len` tokens, which `knob` gave, are cut over `cp` ranks. Throws ConfigError.
void validate_context(const Config& config, int64_t seq_len, const std::string& knob, int cp, int tp);

/// Reads a TOML file, then applies `sets` ("optim.lr=1e-3") in order. Relative paths in the file become absolute from the file's folder, those in
/// `sets` from the working directory. Throws ConfigError: the file is missing, unreadable or no TOML (line and column), an unknown section or
/// key (names the nearest), a wrong type (names key and expected type), a string that is none of the allowed ones (lists them).
Config load_config(const std::filesystem::path& file, const std::vector<std::string>& sets = {});

/// The same for TOML text. `origin` stands for the file in messages.
Config parse_config(std::string_view text, const std::filesystem::path& base_dir, const std::vector<std::string>& sets = {},
                    const std::string& origin = "configuration");

/// Every field as TOML; parse_config() gives an equal Config back. A field that is not set is a comment.
std::string to_toml(const Config& config);

/// Whether a file is what a run saves: the text that to_toml() gives of what it says.
bool is_saved_config(const std::filesystem::path& file);

/// docs/configuration.md: every section, key, type, default and meaning.
std::string configuration_markdown();

/// Fills what depends on other fields and was not given: model.kv_heads, ffn_dim, max_seq_len, vocab_size of `byte`, data.seed, data.cache_dir, log.dir.
/// What depends on the machine or the world size (mesh, run.threads) stays unset. Idempotent. Throws ConfigError on a size above 10^9, in [model] or of the
/// batch.
void resolve(Config& config);

/// What a configuration is checked for: a plan needs no text, and may be asked for more data ranks than there are micro-batches.
enum class Purpose { Train, Plan };

/// Of a rank. More than any host has cores; what the thread pool cannot start ends the process.
inline constexpr int most_threads = 1024;

/// Every rule between fields, and the techniques that this build lacks; throws ConfigError naming knob, value, rule and way out. Expects a resolved
/// configuration (from_hf already read into it). Opens no file and starts no process group.
void validate(const Config& config, int world_size, Purpose purpose = Purpose::Train);

/// The rules that hold where a model is only read (`eval`, `generate`): of its shape, and of the process that computes with it.
void validate_reading(const Config& config);

/// The settings that somebody gave ("optim.momentum = 0.9: has no effect with optim.name = adamw"), other than their defaults, and that say nothing beside the
/// others, each with the reason: to be said aloud. Expects a validated configuration.
std::vector<std::string> settings_without_effect(const Config& config, int world_size);

/// Settings by key, each as to_toml() writes it ("unset" where it is not), in the order of the fields.
using Settings = std::vector<std::pair<std::string, std::string>>;

/// What all ranks of a run must have alike: every setting but paths, whose content may be compared instead, and those that each rank may have of its own
/// (FieldRule::per_rank).
Settings shared_settings(const Config& config);

/// The settings of `sets` ("optim.lr=1") that say nothing where a model is only read (`eval`, `generate`), each with the reason: to be said aloud.
std::vector<std::string> settings_without_effect_on_reading(const Config& config, const std::vector<std::string>& sets);

/// Sizes of the axes in `mesh.order`, slowest first, with -1 and unset replaced: their product is `world_size`.
/// Throws ConfigError naming the knob, or printing the whole product.
std::vector<std::pair<std::string, int>> resolve_mesh(const MeshConfig& mesh, int zero_stage, int world_size);

/// The entry of `known` with the smallest edit distance to `word`, the first of equals; empty where `known` is.
std::string nearest(const std::string& word, const std::vector<std::string>& known);

}  // namespace tessera
