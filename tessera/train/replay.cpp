#include "tessera/train/replay.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <map>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/version.h>

#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/gather_json.h"
#include "tessera/comm/algorithms/choice.h"
#include "tessera/comm/backends/host_identity.h"
#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/engine.h"
#include "tessera/core/devices.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/host_name.h"
#include "tessera/core/host_read.h"
#include "tessera/core/json_reason.h"
#include "tessera/core/version.h"
#include "tessera/kernels/products.h"
#include "tessera/layout/slice.h"
#include "tessera/mesh/roles.h"
#include "tessera/train/compose.h"
#include "tessera/train/ranks_agree.h"

// Hashes guard bytes; one forward pass guards their meaning. A micro-batch's loss depends on weights, data position and arithmetic, and on nothing of how the
// rest is dealt, so it is the same number in any layout. Whether it has to be the same bits is decided by comparing a description of the arithmetic as a whole:
// whatever differs in it, also what an older build did not record, turns the comparison into one within bounds, never into a false alarm. It is one rank's, and
// hosts may be of several kinds: where ranks compute otherwise than each other, a micro-batch may meet another kind than computed it, and no bits are compared.

namespace tessera {

namespace {

/// Libraries choose their kernels, and with them the order of sums, by the processor. The space before its name is in checkpoints that exist.
std::string processor() {
  const std::string name = processor_name();
  return name.empty() ? "unknown" : " " + name;
}

/// In the arithmetic: whether it is that of all ranks.
constexpr const char* kOfAllRanks = "of_all_ranks";
constexpr const char* kPadding = "padding";

/// In a record with losses that are no numbers: whether there are none at all.
constexpr const char* kNotFinite = "not_finite";
constexpr int64_t kLooksAhead = 2;  // further steps, whose losses tell

bool is_finite(double loss) { return std::isfinite(loss); }

struct Recorded {
  int64_t micro_size = 0;
  std::vector<int64_t> indices;
  std::vector<double> losses;
  nlohmann::json arithmetic;
  std::vector<std::string> formats;  ///< in it
};

std::vector<std::string> formats_in(const nlohmann::json& arithmetic) {
  const auto precision = arithmetic.value("precision", nlohmann::json::object());
  return {precision.value("params", std::string("fp32")), precision.value("compute", std::string("fp32"))};
}

Recorded read_record(const nlohmann::json& record, int64_t global_size, const std::string& source) {
  const auto refuse = [&](const std::string& what) {
    throw ConfigError(
        detail::concat(source, ": progress.replay in manifest.json cannot be read (", what, "); the checkpoint is damaged or of another version, use another"));
  };
  Recorded read;
  try {
    read.micro_size = record.at("micro_size").get<int64_t>();
    for (const auto& entry : record.at("losses")) {
      read.indices.push_back(entry.at("index").get<int64_t>());
      read.losses.push_back(std::bit_cast<double>(entry.at("bits").get<uint64_t>()));
    }
    read.arithmetic = record.at("arithmetic");
    read.formats = formats_in(read.arithmetic);
  } catch (const nlohmann::json::exception& error) {
    refuse(json_reason(error));
  }
  if (read.micro_size < 1 || global_size % read.micro_size != 0) refuse("micro_size does not divide batch.global_size");
  if (read.losses.empty()) refuse("no losses");
  for (const int64_t index : read.indices) {
    if (index < 0 || index >= global_size / read.micro_size) refuse("no such micro-batch");
  }
  return read;
}

/// What orders the sums over the ranks of a group, as a checkpoint can tell it: hosts by number, in the order in which they appear.
nlohmann::json order_in(const comm::Group& group, const comm::WorldOptions& options) {
  const comm::CallSite site("start");
  std::vector<std::string> hosts;
  nlohmann::json numbers = nlohmann::json::array();
  for (const auto& host : checkpoint::gather_json(group, options.host.empty() ? comm::host_identity() : options.host)) {
    const auto known = std::ranges::find(hosts, host.get<std::string>());
    numbers.push_back(known - hosts.begin());
    if (known == hosts.end()) hosts.push_back(host.get<std::string>());
  }
  return {{"engine", group.engine()->name()}, {"algorithms", comm::recorded_choice(options)}, {"hosts", std::move(numbers)}};
}

/// Over ranks that layers or sequences are cut over.
nlohmann::json order_of_sums(const Config& config, const comm::Group& tensor, const comm::Group& columns, const comm::WorldOptions& options) {
  nlohmann::json sums;
  if (tensor.size() > 1) {
    sums = order_in(tensor, options);
    sums["sequence_parallel"] = config.tensor.sequence_parallel;
    sums["overlap"] = config.tensor.overlap;
  }
  if (columns.size() > 1) {
    auto& context = sums["context"] = order_in(columns, options);
    context["method"] = config.context.method;
    context["ulysses"] = config.context.ulysses;
    context["balance"] = holds_one_part(config, columns.size()) ? "contiguous" : "head_tail";
  }
  if (config.mesh.ep > 1) sums["experts"] = config.mesh.ep;                  // rows of several ranks in one product
  if (config.mesh.expert_tp > 1) sums["expert_tp"] = config.mesh.expert_tp;  // and products that are terms of a sum
  return sums;
}

bool within(double loss, double recorded, double bound) {
  if (!is_finite(loss) || !is_finite(recorded)) return !is_finite(loss) && !is_finite(recorded);
  return std::abs(loss - recorded) <= bound * std::abs(recorded);
}

/// What experts make of packed windows' ends: nothing; empty where no window has one, or nobody would see it.
std::string padding_of(const Config& config) { return config.model.experts > 0 && config.data.documents != "none" ? "no tokens" : ""; }

}  // namespace

Replay::Replay(const Config& config, const Mesh& mesh, std::shared_ptr<const data::Corpus> corpus, const comm::WorldOptions& options)
    : config_(config),
      mesh_(mesh),
      corpus_(std::move(corpus)),
      sums_(order_of_sums(config, mesh[mesh_roles(config).layers], mesh[mesh_roles(config).columns], options)) {}

nlohmann::json Replay::record(ForwardEngine& engine, const data::Cursor& cursor) const {
  const int64_t micro_batches = config_.batch.global_size / config_.batch.micro_size;
  const int ranks = mesh_.size(mesh_roles(config_).batch);
  const auto index_of = [&](int rank) { return chunk(micro_batches, ranks, rank).first; };
  const auto losses = losses_of(engine, cursor, config_.batch.micro_size, index_of(mesh_.rank(mesh_roles(config_).batch)));
  nlohmann::json entries = nlohmann::json::array();
  for (int rank = 0; rank < ranks; ++rank) entries.push_back({{"index", index_of(rank)}, {"bits", std::bit_cast<uint64_t>(losses[static_cast<size_t>(rank)])}});
  nlohmann::json record{{"micro_size", config_.batch.micro_size}, {"losses", std::move(entries)}, {"arithmetic", arithmetic(engine.device())}};
  if (std::ranges::all_of(losses, is_finite)) return record;
  // Weights that give any text a number are good: in fp16 a forward may overflow where the next does not, which training passes over, too.
  bool lost = std::ranges::none_of(losses, is_finite);
  for (int64_t later = 1; lost && later <= kLooksAhead; ++later) {
    lost = std::ranges::none_of(losses_of(engine, cursor, config_.batch.micro_size, index_of(mesh_.rank(mesh_roles(config_).batch)), later), is_finite);
  }
  record[kNotFinite] = lost;
  return record;
}

Replay::Result Replay::check(ForwardEngine& engine, const data::Cursor& cursor, const nlohmann::json& progress, const std::string& source) const {
  const auto found = progress.find("replay");
  if (found == progress.end() || found->is_null()) return {};
  const Recorded recorded = read_record(*found, cursor.global_size, source);
  const auto entry_of = [&](int rank) { return static_cast<size_t>(rank) % recorded.losses.size(); };
  // NaN equals itself, bit for bit.
  require(checkpoint::makes_numbers(progress), source, ": micro-batch ", recorded.indices.front(), " of step ", cursor.step + 1, " had a loss of ",
          format_float(recorded.losses.front()), " when it was saved, so that no step goes on from its weights: resume from an older checkpoint, ",
          "or set checkpoint.verify = false to go on all the same");
  // What experts choose depends on which rows are padding, which builds that say nothing of it took for tokens.
  if (config_.model.router == "expert_choice" && recorded.arithmetic.value(kPadding, "") != padding_of(config_)) return {};
  const auto losses = losses_of(engine, cursor, recorded.micro_size, recorded.indices[entry_of(mesh_.rank(mesh_roles(config_).batch))]);

  const auto here = arithmetic(engine.device());
  const bool bits = here.at(kOfAllRanks).get<bool>() && here == recorded.arithmetic;
  auto formats = recorded.formats;
  for (auto& format : formats_in(here)) formats.push_back(std::move(format));
  const double bound = replay_bound(formats);
  // Of numbers that end at 65,504 one arithmetic may overflow where another does not, with the same weights.
  const bool may_overflow = !bits && std::ranges::find(formats, "fp16") != formats.end();
  Result result{.bits = bits};
  for (size_t rank = 0; rank < losses.size(); ++rank) {
    const double before = recorded.losses[entry_of(static_cast<int>(rank))], now = losses[rank];
    const bool overflowed = may_overflow && (!is_finite(before) || !is_finite(now));
    if (rank < recorded.losses.size()) ++(overflowed ? result.overflowed : result.micro_batches);  // those beyond are the same again
    if (overflowed) continue;
    const bool same = bits ? std::bit_cast<uint64_t>(before) == std::bit_cast<uint64_t>(now) : within(now, before, bound);
    require(same, source, ": the step that it recorded does not replay: micro-batch ", recorded.indices[entry_of(static_cast<int>(rank))], " of step ",
            cursor.step + 1, " has a loss of ", format_float(now), ", and had ", format_float(before), " when it was saved (compared ",
            bits ? "bit for bit" : detail::concat("within ", format_float(bound), ", as the arithmetic is another"),
            "); its weights are not those that were trained, or the text was another for a while (a file that was written over while that run read it): resume "
            "from an older checkpoint, or set checkpoint.verify = false to go on all the same");
  }
  return result;
}

std::vector<double> Replay::losses_of(ForwardEngine& engine, const data::Cursor& cursor, int64_t micro_size, int64_t index, int64_t later) const {
  const comm::CallSite site("replay");
  // Dealt over as many ranks as there are micro-batches, each has one: the loader gives any of them without the rest.
  data::Loader loader(corpus_, {.seq_len = cursor.seq_len,
                                .global_size = cursor.global_size,
                                .micro_size = micro_size,
                                .shuffle = cursor.shuffle,
                                .seed = cursor.seed,
                                .rank = static_cast<int>(index),
                                .ranks = static_cast<int>(cursor.global_size / micro_size),
                                .reads = engine.reads(),
                                .columns = engine.columns().share()});
  loader.seek(cursor);
  for (int64_t passed = 0; passed < later; ++passed) loader.next();
  const data::StepBatch batch = loader.next();
  const at::Tensor own = engine.loss_sums(batch.micro_batches);
  engine.share(own);
  comm::all_reduce(engine.columns().group, own);
  const double loss = host_read(own, 0.0);

  const comm::Group group = mesh_[mesh_roles(config_).batch];
  const at::Tensor mine = at::full({1}, loss, at::dtype(at::kDouble)), all = at::empty({group.size()}, mine.options());
  comm::all_gather(group, all, mine);
  return host_read_all(all, 0.0);
}

nlohmann::json Replay::arithmetic(at::Device device) const {
  nlohmann::json precision = nlohmann::json::object(), axes = nlohmann::json::object();
  PrecisionConfig::for_each_field(config_.precision, [&](const char* key, const auto& value, const FieldRule&, std::string_view) { precision[key] = value; });
  precision.erase("reduce");  // gradients' alone
  precision.erase("loss_scale");
  const ByPattern& chosen = config_.run.kernels;
  const nlohmann::json kernels = chosen.by_pattern.empty() ? nlohmann::json(chosen.everywhere) : nlohmann::json(chosen.by_pattern);
  const bool widened = config_.precision.compute == "bf16" && kernels::is_widened(at::kBFloat16, device);
  const auto batch = mesh_roles(config_).batch.names;
  for (const auto& [axis, size] : mesh_.shape()) {
    if (size > 1 && std::ranges::find(batch, axis) == batch.end()) axes[axis] = size;
  }
  nlohmann::json arithmetic = {{"threads", at::get_num_threads()}, {"kernels", kernels},     {"precision", precision}, {"mesh", axes},
                               {"processor", processor()},         {"torch", TORCH_VERSION}, {"tessera", version()}};
  if (config_.recompute.ffn_tile > 0) arithmetic["ffn_tile"] = config_.recompute.ffn_tile;  // products of fewer rows
  if (const std::string padding = padding_of(config_); !padding.empty()) arithmetic[kPadding] = padding;
  if (widened) arithmetic["products"] = "widened";
  if (!device.is_cpu())
    arithmetic["device"] = device_facts(device).model.empty() ? c10::DeviceTypeName(device.type(), /*lower_case=*/true) : device_facts(device).model;
  if (!sums_.is_null()) arithmetic["sums"] = sums_;
  const comm::CallSite site("replay");
  const bool of_all = same_on_all(mesh_[mesh_roles(config_).world], arithmetic);
  arithmetic[kOfAllRanks] = of_all;
  return arithmetic;
}

std::string in_words(const Replay::Result& result) {
  const std::string overflows = "one arithmetic overflows in fp16 where another does not", hashes = "only its hashes say that it is what was trained";
  if (result.micro_batches == 0 && result.overflowed == 0) return "records no step to replay; " + hashes;
  if (result.micro_batches == 0) {
    return detail::concat("not replayed: of the ", result.overflowed, " micro-batches that it recorded none has a finite loss both then and now, and ",
                          overflows, "; ", hashes);
  }
  const std::string how = result.bits ? "bit for bit" : "within bounds (the arithmetic is another)";
  const std::string left_out =
      result.overflowed == 0 ? "" : detail::concat("; on ", result.overflowed, " more the loss then or now is not finite, and ", overflows);
  return detail::concat("replays ", how, ", on ", result.micro_batches, " micro-batches", left_out);
}

std::optional<std::string> recorded_compute(const nlohmann::json& progress) {
  const nlohmann::json::json_pointer place("/replay/arithmetic/precision/compute");
  if (!progress.contains(place) || !progress.at(place).is_string()) return std::nullopt;
  return progress.at(place).get<std::string>();
}

double replay_bound(const std::vector<std::string>& formats) {
  static const std::map<std::string, double> bounds{{"fp32", 5e-6}, {"tf32", 1e-3}, {"fp16", 2e-3}, {"bf16", 1e-2}, {"fp8", 5e-2}};
  double bound = 0;
  for (const auto& format : formats) {
    const auto found = bounds.find(format);
    bound = std::max(bound, found == bounds.end() ? bounds.at("fp8") : found->second);
  }
  return bound;
}

}  // namespace tessera
