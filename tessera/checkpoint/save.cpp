#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/deal.h"
#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/save_steps.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/log.h"

// A checkpoint is there whole or not at all, whichever rank ends at whichever moment: files are written and synced in a hidden folder, the manifest comes last,
// and one rename makes it exist. Every step of it is taken together: each rank learns whether all have done theirs, so that the failure of one is everybody's
// and nobody waits for a peer that has given up. Bytes are hashed on their way to the disk, for reading them back would double the traffic and read the cache.

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string dtype_of(const SlicedTensor& held) {
  try {
    return dtype_name(held.tensor.scalar_type());
  } catch (const ConfigError& error) {
    throw ConfigError(detail::concat("checkpoint: '", held.slice.name, "' cannot be saved: ", error.what(), "; of a complex tensor register view_as_real"));
  }
}

nlohmann::json to_json(const SlicedTensor& held) {
  nlohmann::json boxes = nlohmann::json::array();
  for (const auto& box : held.slice.boxes) boxes.push_back({box.offset, box.size});
  return {held.slice.name, dtype_of(held), held.slice.shape, std::move(boxes)};
}

HeldSlice held_from(const nlohmann::json& json) {
  HeldSlice held{{json.at(0), json.at(2), {}}, json.at(1), 0};
  for (const auto& box : json.at(3)) held.slice.boxes.push_back({box.at(0), box.at(1)});
  held.bytes = held.slice.numel() * static_cast<int64_t>(c10::elementSize(dtype_from_name(held.dtype)));
  return held;
}

/// "progress.best = inf" of the first float in `json`, which is `name`, that is not finite; empty where all are.
std::string not_finite_in(const nlohmann::json& json, const std::string& name) {
  if (json.is_number_float() && !std::isfinite(json.get<double>())) return fmt::format("{} = {}", name, json.get<double>());
  if (!json.is_structured()) return "";
  for (const auto& [key, value] : json.items()) {
    if (auto found = not_finite_in(value, name + "." + key); !found.empty()) return found;
  }
  return "";
}

/// What a save would replace: a checkpoint of this step that was written on this line. Others are set aside.
std::optional<Manifest> replaced_by(const fs::path& folder, const CheckpointState& state) {
  if (!is_there(folder / "manifest.json")) return std::nullopt;
  try {
    Manifest there = read_manifest(folder);
    if (state.run.holds(there.run, there.step)) return there;
  } catch (const ConfigError&) {  // damaged, and nobody's; or it cannot be read now, and is set aside (is_of_another)
  }
  return std::nullopt;
}

std::string kind_of(const nlohmann::json& optimizer) {
  const auto kind = optimizer.is_object() ? optimizer.find("kind") : optimizer.end();
  return kind != optimizer.end() && kind->is_string() ? kind->get<std::string>() : "";
}

/// A program that saves two models into one folder, each under the number of the step, would have the second alone. Names are compared in both directions, for
/// one model may be a part of the other: a critic without what an actor has besides, a student of half the layers. Optimizer state comes and goes with what is
/// trained, and a buffer may grow.
void refuse_to_replace_another_model(const fs::path& folder, const Manifest& there, const std::vector<std::vector<HeldSlice>>& held,
                                     const nlohmann::json& optimizer) {
  const auto refuse = [&](const std::string& what) {
    throw ConfigError(detail::concat("checkpoint: ", folder.string(), ": holds another model at this step, ", what,
                                     ", and would be replaced; give each model of several (generator and critic, a model and its average) a folder of its own, "
                                     "and take another folder, or remove this step, where an earlier run wrote it"));
  };
  std::set<std::string_view> here;
  for (const auto& of_rank : held) {
    for (const auto& [slice, dtype, bytes] : of_rank) {
      if (!is_of_model(slice.name)) continue;
      here.insert(slice.name);
      const auto known = there.tensors.find(slice.name);
      if (known == there.tensors.end()) refuse(detail::concat("which has no '", slice.name, "'"));
      if (slice.name.starts_with("model.") && known->second.shape != slice.shape) {
        refuse(detail::concat("whose '", slice.name, "' is ", at::IntArrayRef(known->second.shape), " for ", at::IntArrayRef(slice.shape)));
      }
    }
  }
  for (const auto& [name, stored] : there.tensors) {
    if (is_of_model(name) && !here.contains(name)) refuse(detail::concat("which has '", name, "', where this save has none"));
  }
  if (there.optimizer.empty() != optimizer.empty()) {
    refuse(optimizer.empty() ? "with its optimizer's state, where this save has none" : "without an optimizer's state, where this save has one");
  }
  if (const auto before = kind_of(there.optimizer), now = kind_of(optimizer); before != now) {
    refuse(detail::concat("updated by ", before, ", where this save's is by ", now));
  }
}

/// Makes the empty folder on rank 0, and tells every rank what every rank holds.
std::vector<std::vector<HeldSlice>> prepare(const fs::path& folder, const fs::path& temporary, const CheckpointState& state, const comm::Group& group) {
  std::optional<Manifest> replaced;  // as rank 0 finds it
  const auto answers = together(group, [&] {
    const std::string problem = problem_with_progress(state.progress);
    require(problem.empty(), problem);
    if (group.rank() == 0) {
      replaced = replaced_by(folder, state);
      if (const auto foreign = foreign_entries(temporary); !foreign.empty()) {
        throw Error(
            detail::concat(temporary.string(), ": holds what no save writes (", foreign.front(), "), and this step is written there; move it elsewhere"));
      }
      make_empty_directory(temporary);
    }
    nlohmann::json mine = nlohmann::json::array();
    for (const auto& held : state.tensors) {
      require(held.tensor.sizes() == at::IntArrayRef(held.slice.local_shape()), "checkpoint: '", held.slice.name, "' shows shape ", held.tensor.sizes(),
              " where this rank holds ", at::IntArrayRef(held.slice.local_shape()),
              " of it: a forward that recorded gradients is under way, and sharded parameters are whole until its backward pass is over; save after that, or "
              "make a forward that has none under torch::NoGradGuard");
      mine.push_back(to_json(held));
    }
    return nlohmann::json{{"held", std::move(mine)}, {"step", state.step}, {"replaces", replaced.has_value()}};
  });
  std::vector<std::vector<HeldSlice>> held;
  for (const auto& answer : answers) {
    require(answer.at("step") == state.step, "checkpoint: rank ", held.size(), " saves step ", answer.at("step").get<int64_t>(), " where rank ", group.rank(),
            " saves ", state.step, ": all ranks save one step together");
    held.emplace_back();
    for (const auto& json : answer.at("held")) held.back().push_back(held_from(json));
  }
  if (answers.front().at("replaces").get<bool>()) {
    together(group, [&] {
      if (replaced) {
        try {
          refuse_to_replace_another_model(folder, *replaced, held, state.optimizer);
        } catch (...) {
          std::error_code ignored;
          fs::remove_all(temporary, ignored);  // made a moment ago, and empty
          throw;
        }
      }
      return nlohmann::json();
    });
  }
  return held;
}

std::string rank_file(int rank, int size) { return fmt::format("rank-{:05}-of-{:05}.safetensors", rank, size); }

/// Whose bytes follow each other in a rank's file.
std::vector<TensorSpec> specs_of(const SavePlan& plan, int rank) {
  std::vector<TensorSpec> specs;
  for (const size_t i : plan.dealt[rank]) {
    const HeldSlice& held = plan.held[rank][i];
    specs.push_back({held.slice.name, dtype_from_name(held.dtype), held.slice.local_shape()});
  }
  return specs;
}

Manifest make_manifest(const SavePlan& plan, const std::vector<nlohmann::json>& written) {
  const auto& [held, dealt] = std::tie(plan.held, plan.dealt);
  Manifest manifest;
  manifest.step = plan.step;
  manifest.optimizer = plan.optimizer;
  manifest.progress = plan.progress;
  manifest.agreement = plan.agreement;
  manifest.run = plan.run;
  const int size = static_cast<int>(held.size());
  for (int rank = 0; rank < size; ++rank) {
    const std::string file = rank_file(rank, size);
    manifest.files[file] = written[rank].at("bytes").get<uint64_t>();
    for (const auto& slice : held[rank]) manifest.tensors[slice.slice.name] = {slice.dtype, slice.slice.shape, {}};
  }
  for (int rank = 0; rank < size; ++rank) {
    for (size_t n = 0; n < dealt[rank].size(); ++n) {
      const Slice& slice = held[rank][dealt[rank][n]].slice;
      manifest.tensors[slice.name].slices.push_back({rank_file(rank, size), slice.name, slice.boxes, written[rank].at("hashes").at(n).get<std::string>()});
    }
  }
  return manifest;
}

/// Whether a checkpoint that is about to be replaced was written by somebody else, or holds what somebody else put there. One that is damaged is nobody's; one
/// that cannot be read now may be.
bool is_of_another(const fs::path& folder, const RunIdentity& run) {
  if (!foreign_entries(folder).empty()) return true;
  try {
    const Manifest there = read_manifest(folder);
    return !run.holds(there.run, there.step);
  } catch (const UnreadableFile&) {
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

/// On rank 0: the manifest, then the one rename that makes the checkpoint exist.
void commit(const fs::path& temporary, const fs::path& folder, const Manifest& manifest) {
  for (const auto& [name, bytes] : manifest.files) {
    std::error_code missing;
    const auto size = fs::file_size(temporary / name, missing);
    if (missing || size != bytes) {
      throw Error(detail::concat((temporary / name).string(),
                                 ": written by another rank, but rank 0 does not see it whole; checkpoint.dir must be a folder that all ranks share"));
    }
  }
  write_file(temporary / "manifest.json", to_json(manifest));
  sync_directory(temporary);
  if (is_of_another(folder, manifest.run)) {
    const auto aside = set_aside(folder.parent_path(), {folder});
    log().warn("{}: is not of the run that saves this step now, or holds what no save writes: set aside in {}", folder.string(), aside.string());
  }
  rename_or_exchange(temporary, folder);
  sync_directory(folder.parent_path());
  std::error_code ignored;  // the checkpoint exists; an older one of this step, now under the temporary name, is prune()'s if it cannot go now
  fs::remove_all(temporary, ignored);
}

/// What stays is never read, and the next save or prune() removes it.
void clean_up(const fs::path& temporary, const comm::Group& group) {
  std::error_code ignored;
  if (group.rank() == 0 && foreign_entries(temporary).empty()) fs::remove_all(temporary, ignored);
}

}  // namespace

std::string problem_with_progress(const nlohmann::json& progress) {
  const std::string found = not_finite_in(progress, "progress");
  return found.empty() ? "" : detail::concat("checkpoint: ", found, " cannot be saved, as JSON has finite numbers alone; leave it out, or save it as text");
}

SavePlan begin_save(const fs::path& dir, const CheckpointState& state, const comm::Group& group) {
  SavePlan plan{.step = state.step, .optimizer = state.optimizer, .progress = state.progress, .agreement = state.agreement, .run = state.run};
  plan.folder = fs::absolute(dir) / folder_name(state.step);
  plan.temporary = plan.folder.parent_path() / temporary_name(state.step);
  try {
    plan.held = prepare(plan.folder, plan.temporary, state, group);
    plan.dealt = deal(plan.held);
  } catch (...) {
    clean_up(plan.temporary, group);
    throw;
  }
  return plan;
}

RankFile::RankFile(const SavePlan& plan, int rank) : writer_(plan.temporary / rank_file(rank, static_cast<int>(plan.held.size())), specs_of(plan, rank)) {
  for (const size_t i : plan.dealt[rank]) sizes_.push_back(static_cast<uint64_t>(plan.held[rank][i].bytes));
}

void RankFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    invariant(written_.hashes.size() < sizes_.size(), "more bytes written than the plan of a save has");
    const uint64_t size = sizes_[written_.hashes.size()];
    const auto part = bytes.first(std::min<uint64_t>(bytes.size(), size - hashed_));
    hasher_.update(part.data(), part.size());
    writer_.write_bytes(part);
    hashed_ += part.size();
    bytes = bytes.subspan(part.size());
    if (hashed_ < size) continue;
    written_.hashes.push_back(std::exchange(hasher_, Hasher()).hex());
    hashed_ = 0;
  }
}

WrittenFile RankFile::finish() {
  written_.bytes = writer_.finish();
  return std::move(written_);
}

WrittenFile write_values(const SavePlan& plan, int rank, const CheckpointState& state) {
  RankFile file(plan, rank);
  for (const size_t i : plan.dealt[rank]) {
    const auto host = state.values_of(state.tensors[i]).detach().to(at::kCPU).contiguous();
    file.write({static_cast<const std::byte*>(host.const_data_ptr()), host.nbytes()});
  }
  return file.finish();
}

void finish_save(const SavePlan& plan, const comm::Group& group, const std::function<WrittenFile()>& write) {
  try {
    const auto written = together(group, [&] {
      WrittenFile file = write();
      return nlohmann::json{{"bytes", file.bytes}, {"hashes", std::move(file.hashes)}};
    });
    together(group, [&] {
      if (group.rank() == 0) commit(plan.temporary, plan.folder, make_manifest(plan, written));
      return nlohmann::json();
    });
  } catch (...) {
    clean_up(plan.temporary, group);
    throw;
  }
}

fs::path save(const fs::path& dir, const CheckpointState& state, const comm::Group& group) {
  const SavePlan plan = begin_save(dir, state, group);
  finish_save(plan, group, [&] { return write_values(plan, group.rank(), state); });
  return plan.folder;
}

}  // namespace tessera::checkpoint
