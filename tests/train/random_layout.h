// Draws recipes in layouts: all axes of the mesh in any order, stages of sharding, schedules, number formats, recomputation, optimizers, terms of the loss, on
// small models of odd sizes.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tests/dice.h"

namespace tessera::testing_support {

/// Of which recipes are to be tried: TESSERA_DRAWN, or all.
inline std::string asked_text() {
  const char* const text = std::getenv("TESSERA_DRAWN");
  return text == nullptr ? "" : text;
}

struct RandomLayout {
  std::string family;
  std::vector<std::string> sets;
  std::vector<size_t> further{};  ///< sizes of `sets` before each of the subjects that were drawn on top, which may not fit to the rest
  size_t narrow = 0;              ///< that before the subjects of draw_wide()

  /// Itself, and then without one after the other of those subjects, the last first: the first that is lawful is the one to try. Of these those with
  /// asked_text().
  std::vector<RandomLayout> ever_less() const {
    std::vector<RandomLayout> all{*this};
    for (auto size = further.rbegin(); size != further.rend(); ++size)
      all.push_back({family, {sets.begin(), sets.begin() + static_cast<std::ptrdiff_t>(*size)}});
    std::erase_if(all, [](const RandomLayout& layout) { return layout.text().find(asked_text()) == std::string::npos; });
    return all;
  }

  /// Without the subjects of draw_wide(), before which there were seeds that tests name.
  RandomLayout as_found() const {
    RandomLayout found{.family = family, .sets = {sets.begin(), sets.begin() + static_cast<std::ptrdiff_t>(narrow)}, .narrow = narrow};
    std::ranges::copy_if(further, std::back_inserter(found.further), [&](size_t size) { return size < narrow; });
    return found;
  }

  std::string text() const {
    std::string text = family;
    for (const std::string& set : sets) text += " --set " + set;
    return text;
  }
  /// Whether a setting says how ranks share the work, and not what they compute.
  static bool is_of_layout(const std::string& set) {
    const auto sections = {"mesh.", "zero.", "tensor.", "context.", "pipeline.", "recompute.", "offload.", "comm."};
    return std::ranges::any_of(sections, [&](const char* section) { return set.starts_with(section); });
  }
};

/// Draws a layout, setting by setting. What does not fit together is refused, and drawn again; what follows of what is drawn early keeps that rare.
class LayoutDice : private Dice {
 public:
  LayoutDice(uint64_t seed, std::string lines) : Dice(seed * 7919 + 5), more_(seed * 104729 + 11), wide_(seed * 15485863 + 17), lines_(std::move(lines)) {}

  RandomLayout draw() {
    draw_mesh();
    draw_model();
    draw_batch();
    draw_sharding();
    draw_pipeline();
    draw_tensor_and_columns();
    draw_recomputation();
    draw_precision();
    draw_optimizer();
    draw_rest();
    draw_offload();  // behind what was there before, so that what a seed draws besides is what it was
    draw_window();
    draw_more();
    const size_t narrow = sets_.size();
    draw_wide();
    return {.family = family_, .sets = std::move(sets_), .further = std::move(further_), .narrow = narrow};
  }

 private:
  std::string word(std::initializer_list<const char*> choices) { return one_of(choices); }
  void set(const std::string& key, const std::string& value) { sets_.push_back(key + "=" + value); }
  void set(const std::string& key, int64_t value) { set(key, std::to_string(value)); }
  void set_once_in(int n, const std::string& key, const std::string& value) {
    if (once_in(n)) set(key, value);
  }
  int divisor_of(int n) {
    std::vector<int> all;
    for (int i = 1; i <= n; ++i) {
      if (n % i == 0) all.push_back(i);
    }
    return all[static_cast<size_t>(below(static_cast<int>(all.size())))];
  }

  /// At most eight ranks, over a few axes.
  void draw_mesh() {
    std::vector<std::pair<std::string, int*>> axes{{"dp_replicate", &replicate_}, {"dp_shard", &shard_}, {"pp", &pp_}, {"cp", &cp_}, {"tp", &tp_}};
    std::shuffle(axes.begin(), axes.end(), engine_);
    int left = 8;
    for (auto& [name, size] : axes) {
      *size = std::min(left, one_of({1, 1, 2, 2, 3, 4, 5}));
      left /= *size;
    }
    stage_ = shard_ > 1 ? 1 + below(3) : below(4);
    for (const auto& [name, size] : axes) {
      if (*size > 1 || name == "dp_shard") set("mesh." + name, *size);
    }
    if (once_in(3)) {
      std::string order;
      for (const auto& [name, size] : axes) order += (order.empty() ? "\"" : ", \"") + name + "\"";
      set("mesh.order", "[" + order + "]");
    }
  }

  void draw_model() {
    family_ = cp_ > 1 ? word({"llama", "llama", "gpt2", "mixtral"}) : word({"llama", "llama", "gpt2", "mixtral", "mixtral", "mlp"});
    const int heads = std::max(one_of({1, 2, 3, 4, 6, 8}), tp_);
    set("model.heads", heads);
    set("model.dim", heads * (family_ == "gpt2" ? one_of({3, 4, 5}) : one_of({2, 4, 6})));
    if (family_ == "llama" || family_ == "mixtral") set("model.kv_heads", divisor_of(heads));
    ffn_ = one_of({8, 11, 24, 36, 40});
    set("model.ffn_dim", ffn_);
    set("model.vocab_size", 256 + below(14));
    chunks_ = pp_ > 1 ? one_of({1, 1, 2, 2, 3}) : 1;
    const int stages = pp_ * chunks_;
    layers_ = std::max(1, stages - one_of({0, 1, 2})) + below(3);  // the embedding and the head may be stages by themselves
    set("model.layers", layers_);
    set_once_in(3, "model.tie_embeddings", "true");
    set_once_in(3, "model.dropout", "0.1");
    set_once_in(6, "model.norm_eps", "1e-3");
    if (family_ != "mixtral") return;
    const int experts = one_of({1, 2, 3, 4, 6, 8});
    const std::string router = cp_ > 1 ? word({"softmax", "sigmoid"}) : word({"softmax", "softmax", "sigmoid", "expert_choice"});
    const int each = std::min(experts, 1 + below(3));
    set("model.experts", experts);
    set("model.experts_per_token", each);
    set("model.router", router);
    if (each == 1 || once_in(4)) set("model.norm_topk", "false");
    if (once_in(3)) set("model.shared_ffn_dim", one_of({5, 12}));
    if (sets_.back().starts_with("model.shared")) set_once_in(2, "model.shared_gate", "true");
    set_once_in(4, "moe.balance_loss", "0");
    set_once_in(4, "moe.z_loss", "0.1");
    if (cp_ == 1) set_once_in(4, "moe.capacity_factor", "1");
    const int over = stage_ > 0 ? shard_ * cp_ * tp_ : tp_;
    const int ep = std::gcd(divisor_of(over), experts);
    if (ep > 1) set("mesh.ep", ep);
    const int expert_tp = std::gcd(divisor_of(over / ep), ffn_);
    if (expert_tp > 1) set("mesh.expert_tp", expert_tp);
  }

  void draw_batch() {
    const bool packed = once_in(5);
    const int micro = one_of({1, 1, 2, 3}), data = replicate_ * shard_;
    micro_batches_ = pp_ > 1 && once_in(2) ? data * pp_ * (1 + below(2)) : data + below(2 * data + 2);
    set("batch.micro_size", micro);
    set("batch.global_size", micro * micro_batches_);
    set("data.seq_len", packed ? 28 + below(6) : std::max(cp_, one_of({1, 2, 7, 13, 16})));
    if (packed) {
      sets_.push_back(lines_);
      set("data.documents", "lines");
    }
    set_once_in(6, "data.shuffle", "false");
  }

  void draw_sharding() {
    set("zero.stage", stage_);
    if (once_in(2)) set("zero.bucket_bytes", one_of({1, 3000, 8000}));
    if (stage_ >= 2) set_once_in(2, "zero.accumulate", "whole");
    if (stage_ < 3) return;
    if (once_in(3)) set("zero.wrap", word({"**", "layers.*.*", "layers.0"}));
    if (once_in(2)) set("zero.prefetch", below(4));
    set_once_in(5, "zero.prefetch_bytes", "4000");
    set_once_in(3, "zero.reshard_after_forward", "false");
    if (!once_in(4)) return;
    const std::string place = word({"host", "disk"});
    const bool all = once_in(2) || std::ranges::find(sets_, "zero.wrap=layers.0") != sets_.end();  // whose other layers are of the head's unit
    for (const char* what : {"offload.params", "offload.gradients", "offload.optimizer"}) set(what, all ? place : "{ \"layers.*\" = \"" + place + "\" }");
  }

  void draw_pipeline() {
    if (pp_ == 1) return;
    set("pipeline.virtual_stages", chunks_);
    set("pipeline.schedule", chunks_ == 1   ? word({"gpipe", "1f1b", "zb_h1", "zb_h2", "naive", "zb_1p", "zb_2p", "zb_auto"})
                             : chunks_ == 2 ? word({"interleaved", "breadth_first", "zb_v", "dualpipev", "v_half", "v_min"})
                                            : word({"interleaved", "breadth_first"}));
    if (sets_.back().ends_with("zb_auto")) set("pipeline.memory_limit", pp_ + below(4));
    set_once_in(5, "pipeline.split", "[\"cost\"]");
    set_once_in(4, "pipeline.post_validate", "true");
  }

  void draw_tensor_and_columns() {
    if (tp_ > 1 && once_in(2)) {
      set("tensor.sequence_parallel", "true");
      set_once_in(3, "tensor.keep_gathered", "true");
    }
    if (tp_ > 1) set_once_in(2, "tensor.overlap", "true");
    if (cp_ == 1) return;
    set("context.method", word({"ring", "ring_full", "ulysses", "ulysses_ring", "all_gather"}));
    set_once_in(3, "context.balance", "contiguous");
  }

  void draw_recomputation() {
    switch (below(8)) {
      case 0:
        set("recompute.mode", "full");
        set_once_in(3, "recompute.every", "2");
        break;
      case 1:
        set("recompute.mode", "full");
        set("recompute.modules", word({"layers.*.feed_forward", "layers.0", "layers.*.*"}));
        break;
      case 2:
        set("recompute.mode", "selective");
        if (once_in(2) || family_ == "mlp") set("recompute.keep", "[\"aten::mm\", \"aten::addmm\"]");
        break;
      case 3:
        set("recompute.mode", "full");
        set("recompute.budget_bytes", one_of({1, 20000, 100000}));
        break;
      default:
        break;
    }
    if (family_ != "mixtral") set_once_in(6, "recompute.ffn_tile", "3");
  }

  /// Every second one is fp32, where least hides.
  void draw_precision() {
    const auto types = [&](const char* params, const char* compute, const char* more = "") {
      set("precision.params", params);
      set("precision.compute", compute);
      if (*more != '\0') sets_.emplace_back(more);
    };
    switch (below(18)) {
      case 0:
        return types("fp32", "bf16");
      case 1:
        return types("bf16", "bf16", once_in(2) ? "precision.reduce=bf16" : "");
      case 2:
        return types("fp16", "fp16", "precision.loss_scale=8192");
      case 3:
        return types("fp32", "fp16", "precision.loss_scale=8192");
      case 4:
        return types("fp32", "fp8", once_in(2) ? "precision.fp8_scales=row" : "");
      case 5:
        return types("bf16", "bf16", "precision.master=bf16");
      case 6:
        return types("bf16", "fp32");
      case 7:
        return types("fp32", "fp32", once_in(2) ? "precision.reduce=bf16" : "comm.compression=bf16");
      case 8:
        return types("fp32", "tf32");
      default:
        return;
    }
  }

  void draw_optimizer() {
    const std::string name = word({"adamw", "adamw", "sgd", "lion", "adafactor", "adam8bit", "muon"});
    set("optim.name", name);
    if (name == "adamw" || name == "lion" || name == "sgd") set_once_in(6, "optim.state_dtype", "bf16");
    if (name == "muon") set_once_in(2, "optim.split_heads", "true");
    if (once_in(4)) set("optim.groups", word({R"(["*norm*: weight_decay = 0"])", R"(["embed_tokens: lr_factor = 0.5", "layers.0: name = sgd, lr = 0.01"])"}));
    if (name == "sgd" || name == "adafactor") set_once_in(2, "optim.momentum", "0.8");
    set_once_in(3, "optim.weight_decay", "0.1");
    set_once_in(3, "optim.decay_on", "matrices");
    if (once_in(2)) set("optim.max_grad_norm", word({"0", "0.05"}));
    if (once_in(4)) set("optim.schedule", word({"linear", "cosine"}));
    set_once_in(4, "optim.betas", "[0.8, 0.95]");
  }

  void draw_rest() {
    set_once_in(4, "loss.label_smoothing", "0.1");
    set_once_in(4, "loss.z_loss", "0.01");
    if (once_in(6))
      set("run.kernels", word({"reference", R"({ attention = "reference", rope = "reference" })", R"({ "*" = "reference", rms_norm = "auto" })"}));
    if (stage_ == 0) set_once_in(4, "run.deterministic", "true");
    set_once_in(5, "comm.backend", "gloo");
    set_once_in(5, "comm.check", "true");
    if (once_in(6)) set("comm.algorithm", word({"all_reduce=ring", "all_reduce=binomial_tree", "all_gather=ring,reduce_scatter=ring"}));
    set("run.seed", below(100));
  }

  /// Not of 1: a query that sees itself alone has no gradient but rounding.
  void draw_window() {
    if (family_ != "mlp" && once_in(4)) set("model.sliding_window", one_of({2, 3, 8}));
  }

  /// Bits stay what they are. State on disk lies in a file without a name.
  void draw_offload() {
    if (once_in(6)) {
      set("offload.activations", word({"host", "disk"}));
      set("offload.min_bytes", 256);
      set_once_in(2, "offload.prefetch", "0");
    }
    if (pp_ == 1 && once_in(6)) {
      set("pipeline.virtual_stages", 2 + below(2));
      set("pipeline.schedule", "breadth_first");
    }
    const bool decided = std::ranges::any_of(sets_, [](const std::string& set) { return set.starts_with("offload.optimizer"); });
    if (!decided && once_in(3)) {
      set("offload.optimizer", word({"host", "disk"}));
      if (once_in(3)) {
        set("offload.update", "device");
      } else if (stage_ < 3 && once_in(2)) {
        set("offload.gradients", "host");
      }
    }
    set("offload.dir", std::filesystem::temp_directory_path().string());
  }

  /// With dice of their own, on what the others have left open: a seed still draws all that it drew before there were these.
  void draw_more() { draw_subjects({&LayoutDice::draw_kept, &LayoutDice::draw_adapters, &LayoutDice::draw_groups, &LayoutDice::draw_places}); }

  /// On top of all these, with dice of their own once more. What is set here takes the place of what was drawn before.
  void draw_wide() {
    draw_subjects({&LayoutDice::draw_dealt_experts, &LayoutDice::draw_what_learns, &LayoutDice::draw_quantized, &LayoutDice::draw_named_places,
                   &LayoutDice::draw_moved_activations, &LayoutDice::draw_group_keys, &LayoutDice::draw_tiles, &LayoutDice::draw_crossing,
                   &LayoutDice::draw_stages, &LayoutDice::draw_columns, &LayoutDice::draw_rates, &LayoutDice::draw_text});
  }

  void draw_subjects(std::initializer_list<void (LayoutDice::*)()> subjects) {
    for (const auto subject : subjects) {
      const size_t before = sets_.size();
      (this->*subject)();
      if (sets_.size() > before) further_.push_back(before);
    }
  }

  bool has(const std::string& text) const {
    return std::ranges::any_of(sets_, [&](const std::string& set) { return set.find(text) != std::string::npos; });
  }

  /// Operators that are everywhere, in a pass and beside it; segments; and every third block.
  void draw_kept() {
    if (has("recompute.mode") || !more_.once_in(3)) return;
    const int form = more_.below(4);
    set("recompute.mode", form < 2 ? "full" : "selective");
    if (form == 0 && stage_ < 3) return set("recompute.segment", 2 + more_.below(2));
    if (form < 2) return set("recompute.every", 3);
    std::string kept;
    for (const char* name : {"add", "mul", "_to_copy", "tessera::swiglu", "mm"}) {
      if (more_.once_in(2)) kept += (kept.empty() ? "\"" : ", \"") + std::string(name) + "\"";
    }
    // In 16 bits those of a block take up the stream, in place, and are refused.
    if (kept.find("_to_copy") != std::string::npos) set("recompute.modules", "layers.*.feed_forward");
    set("recompute.keep", "[" + (kept.empty() ? "\"mul\"" : kept) + "]");
  }

  void draw_adapters() {
    if (!more_.once_in(6)) return;
    const bool attention = family_ == "mixtral" || more_.once_in(2);
    const std::string modules = family_ == "mlp" ? "layers.*" : attention ? "layers.*.attention.*" : "layers.*.attention.w*,layers.*.feed_forward.*";
    set("lora.modules", modules);
    set("lora.rank", 1 + more_.below(4));
    if (more_.once_in(2)) set("lora.dropout", "0.3");
    if (more_.once_in(3)) set("lora.trained", "[\"norm.weight\"]");
    if (!more_.once_in(3)) return;
    set("quantize.modules", modules);
    set("quantize.format", more_.one_of({"nf4", "int8"}));
    set("quantize.block", more_.one_of({16, 17, 64}));
  }

  void draw_groups() {
    if (has("optim.groups") || !more_.once_in(5)) return;
    const std::string name = more_.one_of({"muon", "adafactor", "adam8bit", "lion", "adamw"});
    set("optim.groups", "[\"" + std::string(more_.one_of({"layers.*", "layers.0", "*norm*", "embed_tokens"})) + ": name = " + name + ", lr = 0.001\"]");
  }

  void draw_places() {
    const char* const in_two = layers_ > 1 ? R"({ "layers.0" = "disk", "layers.1" = "host" })" : R"({ "layers.0" = "disk" })";
    if (!has("offload.optimizer") && more_.once_in(3)) {
      const bool whole = !has("muon") && !has("adafactor") && !has("adam8bit") && !has("loss_scale") && more_.once_in(2);
      set("offload.optimizer", whole ? more_.one_of({"host", "disk"}) : in_two);
      if (whole) {
        set("offload.delayed_update", "true");
      } else if (more_.once_in(2)) {
        set("offload.fraction", "0.5");
      } else if (more_.once_in(2)) {
        set("offload.update", "device");
      }
    }
    if (!has("offload.activations") && more_.once_in(5)) {
      set("offload.activations", in_two);
      set("offload.min_bytes", 256);
    }
  }

  /// Experts over data ranks, which a fixed order deals over what is not sharded. Only what updates element by element may update them.
  void draw_dealt_experts() {
    if (family_ != "mixtral" || shard_ * tp_ * cp_ > 1 || replicate_ == 1 || wide_.once_in(3)) return;
    const auto ep = std::gcd(replicate_, number("model.experts"));
    const auto expert_tp = wide_.once_in(2) ? std::gcd(replicate_ / ep, ffn_) : 1;
    if (ep * expert_tp == 1) return;
    if (stage_ > 0) set("zero.stage", 0);
    set("run.deterministic", "true");
    set("mesh.ep", ep);
    set("mesh.expert_tp", expert_tp);
    const std::string name = wide_.one_of({"adamw", "sgd", "lion"});
    if (wide_.once_in(2)) return set("optim.groups", "[\"**.experts: name = " + name + ", lr = 0.001\"]");
    set("optim.name", name);
    if (has("optim.groups")) set("optim.groups", "[]");
  }

  /// What is trained whole beside adapters, and adapters of some layers alone, so that nothing learns before them.
  void draw_what_learns() {
    if (!wide_.once_in(has("lora.modules") ? 2 : 12)) return;
    if (!has("lora.modules")) set("lora.rank", 1 + wide_.below(3));
    const bool shared = has("model.shared_ffn_dim") && wide_.once_in(2), late = !shared && pp_ == 1 && layers_ > 1;
    const std::string layers = "layers." + (late ? std::to_string(layers_ - 1) : "*");
    set("lora.modules", layers + (shared ? ".feed_forward.shared.*" : family_ == "mlp" ? "" : ".attention.*"));
    const bool experts = family_ == "mixtral" && !wide_.once_in(3);
    set("lora.trained", experts ? wide_.one_of({R"(["**.experts.*"])", R"(["layers.*.feed_forward.experts.w1"])", R"(["layers.0.feed_forward.experts.w3"])",
                                                R"(["**.router.*"])", R"(["layers.0.**"])"})
                                : wide_.one_of({R"(["embed_tokens.weight"])", R"(["layers.0.**"])", R"(["**.norm.weight", "norm.weight"])"}));
    if (has("quantize.modules")) set("quantize.modules", wide_.one_of({"layers.*.attention.*", "layers.*.attention.wo", ""}));
  }

  void draw_quantized() {
    if (!has("lora.modules") || !wide_.once_in(2)) return;
    if (!has("quantize.modules")) set("quantize.modules", wide_.one_of({"layers.*.attention.*", "layers.*.attention.wq", "layers.*"}));
    set("quantize.double_scales", wide_.one_of({"true", "false"}));
    set("quantize.block", wide_.one_of({2, 5, 7, 30, 100, 1000}));
  }

  /// By names that a stage knows by others: a tied weight's; and of slices of stage 3, with state that waits further away.
  void draw_named_places() {
    if (!wide_.once_in(4)) return;
    if (family_ != "mlp" && wide_.once_in(2)) set("model.tie_embeddings", "true");
    const std::string name = wide_.one_of({"head", "embed_tokens", "**", "layers.*"}), place = wide_.one_of({"host", "disk"});
    const std::string table = "{ \"" + name + "\" = \"" + place + "\" }";
    if (stage_ == 3 && !has("zero.stage=0") && wide_.once_in(2)) {
      if (name != "layers.*") set("zero.wrap", "**");
      set("offload.params", table);
      set("offload.gradients", table);
      set("offload.optimizer", wide_.once_in(2) ? "disk" : table);
    } else {
      set("offload.optimizer", table);
    }
    set("offload.fraction", wide_.one_of({"1", "0.5", "0.34"}));
  }

  void draw_moved_activations() {
    if (!wide_.once_in(6)) return;
    set("offload.activations", wide_.one_of({"host", "disk", R"({ "layers.*" = "host" })", R"({ "**.feed_forward" = "host", "layers.*" = "disk" })"}));
    set("offload.min_bytes", 256);
    if (wide_.once_in(2)) set("offload.budget_bytes", wide_.one_of({1, 3000, 20000}));
    if (wide_.once_in(2)) set("offload.prefetch", 2);
    if (wide_.once_in(2)) set("offload.fraction", "0.5");
  }

  void draw_group_keys() {
    if (has("optim.groups") || !wide_.once_in(4)) return;
    const auto pattern = family_ == "mixtral" ? wide_.one_of({"**.experts", "**.router", "layers.*.feed_forward"}) : wide_.one_of({"layers.*", "head", "**"});
    const auto keys = wide_.one_of({"name = muon", "name = adafactor, momentum = 0.5", "name = adam8bit, eps = 1e-6", "name = lion, lr = 0.0001",
                                    "name = sgd, momentum = 0.7", "name = adamw, betas = [0.7, 0.9], eps = 1e-5"});
    set("optim.groups", std::string("[\"") + pattern + ": " + keys + "\"]");
  }

  /// A gate's gradient is one sum a token, whose terms cancel: in fp16 another order of what comes to it is all that is left.
  void draw_tiles() {
    const bool cancels = has("model.shared_gate=true") && has("precision.compute=fp16");
    if (family_ == "mixtral" && !cancels && wide_.once_in(6)) set("recompute.ffn_tile", wide_.one_of({2, 3, 5}));
  }

  /// What crosses between ranks in fewer bits.
  void draw_crossing() {
    if (has("precision.compute=bf16") || has("precision.compute=fp16")) {
      if (wide_.once_in(3)) set("comm.compression", wide_.one_of({"bf16", "fp16"}));
      return;
    }
    if (!has("precision.") && wide_.once_in(14)) set(wide_.one_of({"precision.reduce", "comm.compression"}), "fp16");
  }

  /// Links of the chain by number, or by name; and what schedules that are solved take a stage to cost.
  void draw_stages() {
    if (pp_ == 1) return;
    const int stages = static_cast<int>(number("mesh.pp") * std::max<int64_t>(1, number("pipeline.virtual_stages"))), links = layers_ + 2;
    if (stages <= links && wide_.once_in(4)) {
      std::vector<int> first(static_cast<size_t>(links - 1));  // links that may begin a stage
      std::iota(first.begin(), first.end(), 1);
      while (std::ssize(first) > stages - 1) first.erase(first.begin() + wide_.below(static_cast<int>(first.size())));
      const bool by_name = wide_.once_in(2);
      std::string split;
      const auto add = [&](const std::string& one) { split += (split.empty() ? "[\"" : ", \"") + one + "\""; };
      for (size_t i = 0; i < first.size(); ++i) {
        if (by_name) add(first[i] == links - 1 ? "head" : "layers." + std::to_string(first[i] - 1));
        if (!by_name) add(std::to_string(first[i] - (i == 0 ? 0 : first[i - 1])));
      }
      if (!by_name) add(std::to_string(links - first.back()));
      set("pipeline.split", split + "]");
    }
    const bool solved = has("pipeline.schedule=zb_1p") || has("pipeline.schedule=zb_2p") || has("pipeline.schedule=zb_auto");
    if (!solved || !wide_.once_in(2)) return;
    set("pipeline.kept", wide_.one_of({"0.1", "0.4", "0.8"}));
    set("pipeline.costs", wide_.one_of({"[1, 1, 1]", "[1, 2, 0.5, 0.3]", "[3, 1, 2, 1]"}));
  }

  void draw_columns() {
    if (cp_ == 1 || !wide_.once_in(3)) return;
    if (wide_.once_in(2)) return set("context.balance", wide_.one_of({"head_tail", "contiguous"}));
    set("context.method", "ulysses_ring");
    set("context.ulysses", wide_.once_in(2) ? cp_ : std::gcd(cp_, 2));
  }

  void draw_rates() {
    if (!wide_.once_in(4)) return;
    set("optim.warmup_steps", 1 + wide_.below(2));
    if (wide_.once_in(2)) return;
    set("optim.schedule", wide_.one_of({"linear", "cosine"}));
    set("optim.min_lr", "0.0005");
  }

  /// Where documents begin, and windows; and positions that no window has.
  void draw_text() {
    if (has("max_seq_len") || wide_.once_in(2)) return;
    if (wide_.once_in(4)) set("data.bos", "true");
    if (wide_.once_in(6)) set("data.seed", wide_.below(50));
    if (family_ == "gpt2" && wide_.once_in(2)) set("model.max_seq_len", number("data.seq_len") + 1 + wide_.below(5));
  }

  /// Of an integer setting, what was drawn last; 0 where there is none.
  int64_t number(const std::string& key) const {
    const auto found = std::ranges::find_if(sets_.rbegin(), sets_.rend(), [&](const std::string& set) { return set.starts_with(key + "="); });
    return found == sets_.rend() ? 0 : std::stoll(found->substr(key.size() + 1));
  }

  Dice more_, wide_;
  const std::string lines_;
  std::string family_;
  std::vector<std::string> sets_;
  std::vector<size_t> further_;
  int replicate_ = 1, shard_ = 1, pp_ = 1, cp_ = 1, tp_ = 1, stage_ = 0, chunks_ = 1, layers_ = 1, ffn_ = 8, micro_batches_ = 1;
};

/// With gradients that are approximated as they cross, once in four where whole ones do: for tests that hold a run against itself.
inline RandomLayout compressed(RandomLayout layout, uint64_t seed) {
  Dice dice(seed * 611953 + 3);
  const auto stage = std::ranges::find_if(layout.sets.rbegin(), layout.sets.rend(), [](const std::string& set) { return set.starts_with("zero.stage="); });
  const bool whole = stage != layout.sets.rend() && *stage == "zero.stage=0" && std::ranges::find(layout.sets, "run.deterministic=true") == layout.sets.end();
  if (!whole || !dice.once_in(4)) return layout;
  layout.sets.emplace_back("comm.compression=powersgd");
  layout.sets.push_back("comm.powersgd_rank=" + std::to_string(1 + dice.below(2)));
  layout.sets.push_back("comm.powersgd_start=" + std::to_string(dice.below(2)));
  return layout;
}

}  // namespace tessera::testing_support
