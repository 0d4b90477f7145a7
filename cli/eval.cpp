#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/isfinite.h>

#include "cli/commands.h"
#include "cli/common.h"
#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/log.h"
#include "tessera/data/corpus.h"
#include "tessera/data/sequential_loader.h"
#include "tessera/data/tokenizer.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/precision/compute_format.h"
#include "tessera/train/evaluate.h"
#include "tessera/train/load_model.h"
#include "tessera/train/ranks_agree.h"
#include "tessera/train/reading.h"
#include "tessera/train/stepper.h"

namespace tessera::cli {

namespace {

struct EvalFlags {
  std::string from_hf, checkpoint, file, tokenizer, dump_logits;
  int64_t seq_len = 0;
  std::optional<int64_t> micro_size;
  std::vector<std::string> sets;
  int nproc = 1;
  bool json = false;
};

// The oracle of `make parity`: logits of the first windows, as one fp32 tensor [windows, seq_len, vocabulary]; of packed documents, each as if it were alone,
// windows as PackedWindows has them. All ranks that the model is cut over compute them.
void write_logits(ForwardEngine& engine, std::shared_ptr<const data::Corpus> corpus, const EvalFlags& flags, const std::string& file, int64_t micro_size,
                  bool writes) {
  data::SequentialLoader loader(std::move(corpus), flags.seq_len, micro_size, /*rank=*/0, /*ranks=*/1, engine.reads(), engine.columns().share());
  const at::Tensor rows = engine.logits(*loader.next());
  const at::Tensor logits = rows.view({micro_size, flags.seq_len, rows.size(-1)});
  if (!writes) return;
  checkpoint::SafetensorsWriter writer(file, {{"logits", at::kFloat, logits.sizes().vec()}});
  writer.write(logits);
  writer.finish();
}

/// JSON has no word for a number that is not finite.
std::string json_number(double value) { return std::isfinite(value) ? format_float(value) : "null"; }

/// Of all parts of the model. Collective over `group`.
std::string first_not_finite(const LanguageModel& model, const comm::Group& group) {
  nlohmann::json mine;
  for (const auto& parameter : model.named_parameters()) {
    if (mine.is_null() && !at::isfinite(parameter.value()).all().item<bool>()) mine = parameter.key();
  }
  for (const auto& name : checkpoint::gather_json(group, mine)) {
    if (!name.is_null()) return name.get<std::string>() + " holds weights that are not; the model is damaged";
  }
  return "its weights are, and what it makes of them for this text is not; compute in a wider type (precision.compute), or take another checkpoint";
}

int eval(const EvalFlags& flags) {
  require(flags.seq_len > 0, "--seq-len = ", flags.seq_len, ": give the tokens of a window, at least 1");
  require(flags.micro_size.value_or(1) > 0, "--micro-size = ", flags.micro_size.value_or(1), ": give the windows of a forward pass, at least 1");
  auto source = find_model({.from_hf = flags.from_hf, .checkpoint = flags.checkpoint}, flags.sets);
  const Config& config = source.config;
  const auto& model = config.model;
  const std::string dump =
      check_output_file("--dump-logits", flags.dump_logits,
                        {flags.file, flags.tokenizer, config.data.tokenizer, source.checkpoint ? source.checkpoint->folder.string() : config.model.from_hf});
  require(!model.max_seq_len || *model.max_seq_len == 0 || flags.seq_len <= *model.max_seq_len, "--seq-len = ", flags.seq_len, ": the model takes at most ",
          model.max_seq_len.value_or(0), " tokens; give that or less");
  const FoundTokenizer text = find_tokenizer(source, flags.tokenizer);
  const auto remarks = reading_remarks(source, flags.sets);
  const auto corpus =
      data::Corpus::open_or_build({flags.file}, *text.tokenizer, config.data.cache_dir, 0, "--file", data::documents_named(config.data.documents), text.bos);
  data::check_windows(*corpus, flags.seq_len, 1, "an evaluation", "--seq-len");
  const bool experts_choose = model.router == "expert_choice";  // among the tokens of a forward pass
  const int64_t usual = windows_of_a_pass(source), asked = flags.micro_size.value_or(usual);
  const int64_t micro_size = std::min(asked, corpus->windows(flags.seq_len));  // rows beyond the windows would be padding alone
  const int ranks = world_size(flags.nproc);
  const auto layout = reading_layout(config, ranks);
  require(layout.copies <= corpus->windows(flags.seq_len), "mesh.dp_replicate = ", layout.copies, ": so many copies of the model would share ",
          corpus->windows(flags.seq_len), " windows of --file; start fewer ranks (--nproc), or cut the model over them by --set mesh.tp=N or mesh.pp=N");
  validate_context(config, flags.seq_len, "--seq-len", layout.column_ranks, layout.tensor_ranks);
  const at::Device device = device_for(config.run.device, flags.nproc);
  if (starts_copies(flags.nproc)) return run_copies(flags.nproc);

  say_once(remarks);
  say_once(text.remarks);
  if (experts_choose && micro_size != usual) {
    say_once({detail::concat("model.router = expert_choice: experts choose among the tokens of a forward pass, so the loss is that of passes of ", micro_size,
                             " windows; it was trained, and validated, with batch.micro_size = ", usual)});
  }
  const auto unknown = data::unknown_among_targets(*corpus, *text.tokenizer, flags.seq_len);
  if (auto remark = data::unknown_remark(unknown, "the tokens of --file"); !remark.empty()) say_once({std::move(remark)});
  const int64_t left_out = data::targets_left_out(*corpus, flags.seq_len);
  if (left_out > 0 && comm::read_environment().rank == 0)
    log().info("the last {} of the tokens of --file make no whole window of --seq-len = {} and are left out", left_out, flags.seq_len);
  auto options = comm::world_options(config.comm);
  options.device = device;
  auto world = comm::World::from_environment(options);
  Evaluation found;
  std::string damaged;
  world.guard([&] {
    choose_together(source, world.group());
    Settings settings = reading_settings(source, text);
    settings.emplace_back("--file", "content " + corpus->content());
    settings.emplace_back("--seq-len", std::to_string(flags.seq_len));
    settings.emplace_back("--micro-size", std::to_string(asked));
    settings.emplace_back("--dump-logits", dump.empty() ? "not given" : "given");
    check_ranks_agree(world.group(), settings);
    precision::settle_compute(source.config, device, world.group());
    RankScope scope(config, world.local_size());
    scope.compute_on(device);
    const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, ranks));
    const MeshRoles roles = mesh_roles(config);
    const std::string smaller =
        micro_size == 1 ? "give a smaller --seq-len" : detail::concat("give a smaller --micro-size (now ", micro_size, ") or --seq-len");
    within_memory(config, smaller, [&] {
      const auto loaded = load_newest(source, reading_groups(config, mesh), device, world.group());
      ForwardEngine engine(loaded);
      found = evaluate(engine, corpus, flags.seq_len, micro_size, mesh[roles.batch]);
      const std::string changed = corpus->changed();
      require(changed.empty(), "--file: ", changed, "; the loss may be of another text: run this again when whoever writes it is done");
      if (!flags.dump_logits.empty() && mesh.rank(roles.batch) == 0) write_logits(engine, corpus, flags, dump, micro_size, world.rank() == 0);
      if (!std::isfinite(found.loss)) damaged = first_not_finite(*loaded.model, world.group());
    });
  });
  if (world.rank() == 0 && flags.json) {
    std::string rest;  // what there is none of is not named
    if (unknown.unknown > 0) rest += detail::concat(", \"unknown_tokens\": ", unknown.unknown);
    if (left_out > 0) rest += detail::concat(", \"tokens_left_out\": ", left_out);
    std::printf("{\"loss\": %s, \"tokens\": %lld, \"bits_per_byte\": %s%s}\n", json_number(found.loss).c_str(), static_cast<long long>(found.tokens),
                json_number(found.bits_per_byte).c_str(), rest.c_str());
  } else if (world.rank() == 0 && std::isfinite(found.loss)) {
    std::printf("loss %.4f nats per token over %lld tokens, %.4f bits per byte\n", found.loss, static_cast<long long>(found.tokens), found.bits_per_byte);
  }
  require(std::isfinite(found.loss), "the model's loss on ", flags.file, " is not finite: ", damaged);
  return 0;
}

}  // namespace

void add_eval(Command app, int& exit_code) {
  auto flags = std::make_shared<EvalFlags>();
  auto command = app.add_command("eval", "Mean loss of a model on a text, in whole windows");
  command.add_option("--from-hf", flags->from_hf, "Folder of a Hugging Face model");
  command.add_option("--checkpoint", flags->checkpoint, "A checkpoint, or a folder of checkpoints (the newest valid one)");
  command.add_option("--file", flags->file, "Text: plain, .gz or .dz").required();
  command.add_option("--tokenizer", flags->tokenizer, "byte, or a SentencePiece .model; default: the checkpoint's");
  command.add_option("--seq-len", flags->seq_len, "Tokens of a window").required();
  command.add_option("--micro-size", flags->micro_size,
                     "Windows of a forward pass; default: 1, or batch.micro_size of the checkpoint where experts choose tokens (expert_choice)");
  command
      .add_option("--nproc", flags->nproc, "Ranks to start on this machine: copies of the model, or, with --set mesh.tp=N, mesh.pp=N or mesh.cp=N, parts of it")
      .shows_default();
  command.add_option("--set", flags->sets, "key=value, over the model's configuration").one_at_a_time();
  add_device_option(command, flags->sets);
  command.add_option("--dump-logits", flags->dump_logits, "Write the logits of the first windows (--micro-size of them) as safetensors");
  command.add_flag("--json", flags->json, "Print one line of JSON");
  command.when_chosen([flags, &exit_code] { exit_code = eval(*flags); });
}

}  // namespace tessera::cli
