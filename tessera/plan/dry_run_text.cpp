#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "tessera/core/format.h"
#include "tessera/plan/dry_run.h"

// What is said of a dry run: to people, and to programs.

namespace tessera::plan {

namespace {

nlohmann::json to_json(const CollectiveSum& sum) {
  return {{"op", sum.op}, {"axis", sum.axis}, {"dtype", sum.dtype}, {"count", sum.count}, {"bytes", sum.bytes}, {"sent_bytes", sum.sent_bytes}};
}

nlohmann::json to_json(const MemoryByCategory& bytes) {
  nlohmann::json json;
  for (int c = 0; c < num_memory_categories; ++c) json[std::string(to_string(static_cast<MemoryCategory>(c)))] = bytes[c];
  json["total"] = total_of(bytes);
  return json;
}

nlohmann::json to_json(const GuessedOperator& guess) {
  return {{"name", guess.name}, {"count", guess.count}, {"bytes", guess.bytes}, {"seconds", guess.seconds}, {"has_meta_kernel", guess.has_meta_kernel}};
}

nlohmann::json to_json(const RankClass& ranks, const PipelinePlan& pipeline) {
  nlohmann::json guessed = nlohmann::json::array();
  for (const auto& guess : ranks.guessed) guessed.push_back(to_json(guess));
  nlohmann::json collectives = nlohmann::json::array();
  for (const auto& c : ranks.collectives) collectives.push_back(to_json(c));
  nlohmann::json json = {{"count", ranks.count},
                         {"examples", ranks.examples},
                         {"micro_batches", ranks.micro_batches},
                         {"parameters", ranks.parameters},
                         {"peak_bytes", to_json(ranks.peak_bytes)},
                         {"reserved_bytes", ranks.reserved_bytes},
                         {"host_bytes", to_json(ranks.host_bytes)},
                         {"disk_bytes", ranks.disk_bytes},
                         {"collectives", collectives},
                         {"flops", ranks.flops},
                         {"hardware_flops", ranks.hardware_flops},
                         {"recomputed_flops", ranks.recomputed_flops},
                         {"flops_beside", ranks.flops_beside},
                         {"guessed", guessed}};
  if (pipeline.stages.size() > 1) {
    json["stages"] = pipeline.stages_of(ranks.pipeline_rank);
    json["kept_alive"] = pipeline.kept_alive.at(static_cast<size_t>(ranks.pipeline_rank));
  }
  if (!ranks.events.empty()) json["events"] = plan::to_json(ranks.events);
  return json;
}

nlohmann::json to_json(const EffectiveBatch& batch) {
  return {{"per_rank", batch.per_rank}, {"data_ranks", batch.data_ranks}, {"accumulation", batch.accumulation}, {"global", batch.global}};
}

std::string to_string(const EffectiveBatch& batch) {
  const bool even = batch.per_rank * batch.data_ranks * batch.accumulation == batch.global;
  return fmt::format("a step: {} sequence{}, {} a rank x {} data rank{} x {} micro-batch{}{}\n", batch.global, batch.global == 1 ? "" : "s", batch.per_rank,
                     batch.data_ranks, batch.data_ranks == 1 ? "" : "s", batch.accumulation, batch.accumulation == 1 ? "" : "es",
                     even ? "" : ", some of them empty on the ranks that have fewer");
}

/// "fp32", of libtorch's "Float"; what has no name among our formats keeps its own.
std::string format_name(const std::string& dtype) {
  static const std::map<std::string, std::string> names{{"Float", "fp32"}, {"BFloat16", "bf16"},      {"Half", "fp16"}, {"Double", "fp64"},
                                                        {"Long", "int64"}, {"Float8_e4m3fn", "e4m3"}, {"Int", "int32"}, {"Byte", "uint8"}};
  const auto known = names.find(dtype);
  return known == names.end() ? dtype : known->second;
}

/// What a rank does and needs, without saying which ranks these are.
std::string text_of(const RankClass& ranks, const PipelinePlan& pipeline) {
  const std::string again = ranks.recomputed_flops > 0 ? fmt::format(", {}FLOP of them again", format_count(ranks.recomputed_flops)) : std::string();
  std::string out = fmt::format("{} micro-batch{} a step, {}FLOP of the model ({}FLOP are run{})\n", ranks.micro_batches, ranks.micro_batches == 1 ? "" : "es",
                                format_count(ranks.flops), format_count(ranks.hardware_flops), again);
  if (pipeline.stages.size() > 1) out += fmt::format("  {}\n", holding_of(pipeline, ranks.pipeline_rank));
  const bool beside = total_of(ranks.host_bytes) > 0;
  const auto row = [&](std::string_view name, int64_t device, int64_t host, std::string_view remark) {
    return fmt::format("  {:<12}{:>12}{}{}\n", name, format_bytes(device), beside ? fmt::format("{:>12}", format_bytes(host)) : "", remark);
  };
  for (int c = 0; c < num_memory_categories; ++c) out += row(to_string(static_cast<MemoryCategory>(c)), ranks.peak_bytes[c], ranks.host_bytes[c], "");
  out += row("total", total_of(ranks.peak_bytes), total_of(ranks.host_bytes), beside ? "  at the peak, and on the host" : "  at the peak");
  if (ranks.reserved_bytes > 0) out += fmt::format("  {:<12}{:>12}  by the device's allocator, for those\n", "reserved", format_bytes(ranks.reserved_bytes));
  if (ranks.disk_bytes > 0) out += fmt::format("  {:<12}{:>12}  on disk, in offload.dir\n", "files", format_bytes(ranks.disk_bytes));
  if (!ranks.collectives.empty()) {
    out += fmt::format("  {:<16}{:<24}{:>6}   {:<7}{:>12}  {:>12}\n", "collectives", "over", "calls", "format", "of tensors", "sent");
  }
  for (const CollectiveSum& c : ranks.collectives) {
    out += fmt::format("  {:<16}{:<24}{:>6} x {:<7}{:>12}  {:>12}\n", c.op, c.axis, c.count, format_name(c.dtype), format_bytes(c.bytes),
                       format_bytes(c.sent_bytes));
  }
  return out;
}

/// Whether it fits, and by how much.
std::string verdict_text(const DryRun& run) {
  const RankClass& most = largest_class(run);
  const std::string verdict = run.fits() ? "fits" : "does not fit", limit = format_bytes(run.memory_limit);
  if (most.reserved_bytes == 0) {
    return fmt::format("{} run.memory_limit_bytes = {}: {} of {} on the rank that needs most", verdict, run.memory_limit, format_bytes(needed_bytes(most)),
                       limit);
  }
  return fmt::format(
      "{}: {} of the {} {}, on the rank that needs most ({} of tensors, the rest held by its allocator)", verdict, format_bytes(needed_bytes(most)), limit,
      !run.allocator || run.allocator->all ? "that the device has beside its context" : "of run.memory_limit_bytes", format_bytes(total_of(most.peak_bytes)));
}

}  // namespace

std::string guesses_of(const DryRun& run) {
  std::map<std::string, GuessedOperator> most;  // of the class that runs it most often
  for (const RankClass& ranks : run.ranks) {
    for (const GuessedOperator& guess : ranks.guessed) {
      GuessedOperator& known = most[guess.name];
      if (guess.count > known.count) known = guess;
    }
  }
  if (most.empty()) return "";
  std::string names;
  for (const auto& [name, guess] : most) {
    names += fmt::format("{}{} ({} x, {}{})", names.empty() ? "" : ", ", name, guess.count, format_bytes(guess.bytes),
                         guess.has_meta_kernel ? "" : "; no meta kernel: shapes are those that a CPU's kernel makes of zeros");
  }
  const std::string share = run.time ? fmt::format("{:.2g}% of the step is a guess: ", 100 * run.time->guessed / run.time->seconds) : "";
  return share + "what these operators take is not known, and counted as the bytes that they read and write: " + names;
}

nlohmann::json to_json(const DryRun& run) {
  nlohmann::json ranks = nlohmann::json::array();
  for (const auto& r : run.ranks) ranks.push_back(to_json(r, run.pipeline));
  nlohmann::json json = {{"world", run.world},
                         {"batch", to_json(run.batch)},
                         {"tokens_per_step", run.tokens_per_step},
                         {"parameters", run.parameters},
                         {"active_parameters", run.active_parameters},
                         {"ranks", ranks},
                         {"remarks", run.remarks}};
  if (run.memory_limit > 0) json["fits"] = run.fits();
  if (run.time) {
    json["step_s"] = run.time->seconds;
    json["tokens_per_s"] = static_cast<double>(run.tokens_per_step) / run.time->seconds;
    json["tflops_per_device"] = run.time->model_flops / 1e12;
    json["mfu"] = run.time->mfu;
    json["hfu"] = run.time->hfu;
    json["time"] = to_json(*run.time);
  }
  const bool pipelined = run.pipeline.stages.size() > 1;
  json["bubble_fraction"] = pipelined ? run.pipeline.bubble_fraction : 0;
  if (pipelined) json["pipeline"] = to_json(run.pipeline);
  return json;
}

std::string to_string(const DryRun& run) {
  const auto count = [](int64_t number) { return format_count(static_cast<double>(number)); };
  const std::string active = run.active_parameters == run.parameters ? "" : fmt::format(" ({} active for a token)", count(run.active_parameters));
  std::string out = fmt::format("{} rank{}, {} parameters{}, {} tokens a step\n", run.world, run.world == 1 ? "" : "s", count(run.parameters), active,
                                count(run.tokens_per_step));
  out += to_string(run.batch);
  for (const auto& remark : run.remarks) out += fmt::format("train would refuse this: {}\n", remark);
  if (run.memory_limit > 0) out += verdict_text(run) + "\n";
  if (run.time) out += to_string(*run.time);
  if (const std::string guesses = guesses_of(run); !guesses.empty()) out += guesses + "\n";
  out += to_string(run.pipeline);
  struct Shown {
    std::string text;
    int first;
    int64_t ranks;  ///< of all classes that read alike
  };
  std::vector<Shown> shown;
  for (const RankClass& ranks : run.ranks) {
    std::string text = text_of(ranks, run.pipeline);
    if (const auto known = std::ranges::find(shown, text, &Shown::text); known != shown.end()) {
      known->ranks += ranks.count;
    } else {
      shown.push_back({std::move(text), ranks.examples.front(), ranks.count});
    }
  }
  for (const auto& [text, first, ranks] : shown) out += fmt::format("\n{} rank{} like rank {}: {}", ranks, ranks == 1 ? "" : "s", first, text);
  return out;
}

}  // namespace tessera::plan
