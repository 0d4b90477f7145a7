#include "tessera/comm/algorithms/choice.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "tessera/comm/algorithms/program.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/comm/call.h"
#include "tessera/config/detail.h"
#include "tessera/core/error.h"

// Ranks choose without asking each other, so a choice may look only at what is the same on all of them: options, op, root, bytes of the whole, group, hosts. It
// is part of the arithmetic, for the algorithm orders the sums: the table is read once, when the world is made, and a checkpoint records the rows that were in
// use.

namespace tessera::comm {
namespace {

constexpr int64_t kSegmentBytes = 128 << 10;
constexpr int64_t kMostSegments = 32;

bool is_two_level(const std::string& algorithm) { return algorithm.starts_with("two_level"); }

bool on_host(const Call& call) {
  const auto is_host = [](const at::Tensor& tensor) { return tensor.is_cpu() || tensor.is_meta(); };  // meta stands for the CPU
  return std::all_of(call.inputs.begin(), call.inputs.end(), is_host) && std::all_of(call.outputs.begin(), call.outputs.end(), is_host);
}

}  // namespace

int segments_for(int64_t bytes) { return static_cast<int>(std::clamp<int64_t>((bytes + kSegmentBytes - 1) / kSegmentBytes, 1, kMostSegments)); }

AlgorithmChoice::AlgorithmChoice(const WorldOptions& options) {
  const auto& text = options.algorithm;
  require(!text.empty(), "comm.algorithm is empty: expected auto, an algorithm, or op=algorithm,...");
  require(text == "auto" || text == kEngineAlgorithm || options.backend != "nccl", "comm.algorithm = ", text,
          ": comm.backend = nccl has algorithms of its own and runs no other; set comm.algorithm = auto");
  const bool for_each = text.find('=') != std::string::npos;
  if (for_each || text == "auto") {
    rows_ = winners(!options.rows.empty() || options.table.empty() ? options.rows : read_table(options.table));
  } else if (text != kEngineAlgorithm) {
    check_algorithm("comm.algorithm", text);
    everywhere_ = text;
  }
  if (!for_each) return;
  for (size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(',', begin), text.size());
    const auto item = text.substr(begin, end - begin);
    const auto equals = item.find('=');
    require(equals != std::string::npos, "comm.algorithm = ", text, ": \"", item, "\" is not op=algorithm; such as all_reduce=ring,broadcast=binomial_tree");
    const auto op = detail::trimmed(item.substr(0, equals)), name = detail::trimmed(item.substr(equals + 1));
    check_algorithm("comm.algorithm", name == kEngineAlgorithm && !algorithms_for(op).empty() ? algorithms_for(op)[0] : name, op);
    require(fixed_.emplace(op, name).second, "comm.algorithm = ", text, ": ", op, " is named twice");
    begin = end + 1;
  }
}

void check_choice(const WorldOptions& options) { const AlgorithmChoice readable(options); }

WorldOptions with_table_read(WorldOptions options) {
  options.rows = AlgorithmChoice(options).rows();
  options.table.clear();
  return options;
}

bool AlgorithmChoice::needs_hosts() const {
  return is_two_level(everywhere_) || std::any_of(fixed_.begin(), fixed_.end(), [](const auto& entry) { return is_two_level(entry.second); }) ||
         std::any_of(rows_.begin(), rows_.end(), [](const TableRow& row) { return is_two_level(row.algorithm); });
}

std::string AlgorithmChoice::algorithm_for(const Call& call, const GroupInfo& group, const std::string& backend, int64_t bytes) const {
  const std::string op(to_string(call.op)), engine(kEngineAlgorithm);
  if (!everywhere_.empty()) return has_algorithm(op, everywhere_) ? everywhere_ : engine;
  if (const auto fixed = fixed_.find(op); fixed != fixed_.end()) return fixed->second;
  const auto* row = call.has_splits() ? nullptr : best(rows_, op, backend, group.size, bytes);
  return row ? row->algorithm : engine;
}

std::optional<MessagePlanRequest> AlgorithmChoice::plan_for(const Call& call, const GroupInfo& group, const std::string& backend,
                                                            const std::vector<int>& hosts) const {
  if (group.size == 1 || call.is_message() || !on_host(call)) return std::nullopt;
  // As rows of a table count them. What ranks give each other in uneven parts has another size on each of them, and none that a table could know.
  const int64_t bytes = call.has_splits() ? 0 : call.bytes(group.size);
  MessagePlanRequest request{
      .op = std::string(to_string(call.op)), .algorithm = algorithm_for(call, group, backend, bytes), .ranks = group.size, .root = std::max(call.peer, 0)};
  if (request.algorithm == kEngineAlgorithm) return std::nullopt;
  if (request.algorithm == "bruck" && call.has_splits()) return std::nullopt;  // what passes through a rank would be of a size it does not know
  if (request.op == "reduce" || request.op == "broadcast" || request.op == "all_reduce") request.segments = segments_for(bytes);
  if (is_two_level(request.algorithm)) request.hosts = hosts;
  return request;
}

ScratchOf::ScratchOf(const WorldOptions& options)
    : backend_(options.backend),
      name_(options.backend != "auto" ? options.backend
            : has_engine("shm")       ? "shm"
                                      : "gloo"),
      choice_(options) {}

int64_t ScratchOf::operator()(const Call& call, const GroupInfo& group) const {
  const auto plan = choice_.plan_for(call, group, name_);
  if (!plan) return scratch_bytes(backend_, call);
  if (call.dtype() == c10::ScalarType::Undefined) return 0;
  return make_program(*plan, group.rank, call).scratch_elements * static_cast<int64_t>(c10::elementSize(call.dtype()));
}

nlohmann::json recorded_choice(const WorldOptions& options) { return {{"algorithm", options.algorithm}, {"rows", AlgorithmChoice(options).rows()}}; }

WorldOptions with_recorded_choice(WorldOptions options, const nlohmann::json& recorded, const std::string& source) {
  try {
    options.algorithm = recorded.at("algorithm").get<std::string>();
    options.rows = recorded.at("rows").get<std::vector<TableRow>>();
    options.table.clear();
    check_choice(options);
  } catch (const std::exception& error) {
    throw ConfigError(detail::concat(source, ": progress.comm in manifest.json cannot be read (", error.what(),
                                     "); the checkpoint is damaged or of another version; use another, or set comm.algorithm to start anew with a choice"));
  }
  return options;
}

}  // namespace tessera::comm
