#include "tessera/checkpoint/folders.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <regex>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/fault_point.h"
#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/hash.h"

// What is removed is renamed first: a removal may be killed half way, and half a checkpoint under its name would be found by the next run. What replaces others
// has to be good: the newest is read back and hashed before anything older goes, unless this process hashed it while writing. And a folder that holds what no
// save makes holds somebody's work: it is never deleted.

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kTemporary = ".tmp-step-";

uint64_t stored_bytes(const StoredTensor& tensor, const StoredSlice& slice) {
  return static_cast<uint64_t>(Slice{{}, tensor.shape, slice.boxes}.numel()) * c10::elementSize(dtype_from_name(tensor.dtype));
}

/// The slices of the share: those whose middle byte, all slices one after the other, lies in it.
void check_hashes(const std::filesystem::path& folder, const Manifest& manifest, const HashShare& share) {
  uint64_t whole = 0, before = 0;
  for (const auto& [name, tensor] : manifest.tensors) {
    for (const auto& slice : tensor.slices) whole += stored_bytes(tensor, slice);
  }
  const auto parts = static_cast<uint64_t>(share.parts), index = static_cast<uint64_t>(share.index);
  std::map<std::string, SafetensorsFile> files;
  for (const auto& [name, tensor] : manifest.tensors) {
    for (const auto& slice : tensor.slices) {
      const uint64_t bytes = stored_bytes(tensor, slice), middle = std::exchange(before, before + bytes) + bytes / 2;
      if (std::min(middle * parts / std::max<uint64_t>(whole, 1), parts - 1) != index) continue;
      auto file = files.find(slice.file);
      if (file == files.end()) file = files.emplace(slice.file, SafetensorsFile(folder / slice.file)).first;
      check_stored(file->second, name, tensor, slice, /*hash=*/true);
    }
  }
}

constexpr std::string_view kGone = ".gone";  // what is being removed, beside any that is being written

bool is_gone(const std::filesystem::path& path) { return path.extension() == kGone; }

/// manifest.json, rank-00000-of-00002.safetensors, whole or not; and how NFS names a file that is gone and still open.
bool is_name_of_a_save(const std::string& name) {
  static const std::regex ours(R"(manifest\.json|rank-[0-9]+-of-[0-9]+\.safetensors(\.partial)?|\.nfs[0-9a-f]+)");
  return std::regex_match(name, ours);
}

/// What saves that were killed left in `dir`, by their names.
std::vector<std::filesystem::path> leftovers_in(const std::filesystem::path& dir) {
  std::vector<std::filesystem::path> leftovers;
  for (const auto& entry : entries_of(dir)) {
    if (entry.path().filename().string().starts_with(kTemporary)) leftovers.push_back(entry.path());
  }
  std::ranges::sort(leftovers);
  return leftovers;
}

/// "<path>: holds mine.txt, which no save writes", where it does.
std::optional<std::string> foreign_text(const std::filesystem::path& folder) {
  const auto foreign = foreign_entries(folder);
  if (foreign.empty()) return std::nullopt;
  if (foreign.front() == ".") return folder.string() + ": is no folder that a save has made";
  return fmt::format("{}: holds {}{}, which no save writes", folder.string(), foreign.front(),
                     foreign.size() > 1 ? fmt::format(" and {} more", foreign.size() - 1) : "");
}

/// Renames `from` to a name that nothing has, made of `name`; the next prune() removes what is left of it.
std::filesystem::path out_of_sight(const std::filesystem::path& from, const std::filesystem::path& name) {
  auto gone = name;
  gone += kGone;
  for (int n = 1; is_there(gone); ++n) gone = name.string() + fmt::format(".{}{}", n, kGone);
  rename_to(from, gone);
  return gone;
}

}  // namespace

bool makes_numbers(const nlohmann::json& progress) {
  const auto replay = progress.is_object() ? progress.find("replay") : progress.end();
  if (replay == progress.end() || !replay->is_object()) return true;  // a program of somebody's own puts there what it likes
  if (const auto mark = replay->find("not_finite"); mark != replay->end()) return *mark != true;
  // Of a build that did not mark it.
  const auto losses = replay->find("losses");
  if (losses == replay->end() || !losses->is_array() || losses->empty()) return true;
  return std::ranges::any_of(*losses, [](const nlohmann::json& loss) {
    const auto bits = loss.is_object() ? loss.find("bits") : loss.end();
    return bits == loss.end() || !bits->is_number_integer() || std::isfinite(std::bit_cast<double>(bits->get<uint64_t>()));
  });
}

int ranks_of(const Manifest& manifest) {
  static const std::regex pattern(R"(rank-[0-9]+-of-([0-9]{1,8})\.safetensors)");
  std::smatch parts;
  return !manifest.files.empty() && std::regex_match(manifest.files.begin()->first, parts, pattern) ? std::stoi(parts[1]) : 0;
}

std::string folder_name(int64_t step) { return fmt::format("{}{:08}", kPrefix, step); }
std::string temporary_name(int64_t step) { return fmt::format("{}{:08}", kTemporary, step); }

bool is_of_saves(const std::filesystem::path& name) {
  static const std::regex ours(R"((\.tmp-)?step-[0-9]+(\.gone)?|set-aside-[0-9]+)");
  return std::regex_match(name.string(), ours);
}

std::map<int64_t, std::filesystem::path> checkpoint_folders(const std::filesystem::path& dir) {
  std::map<int64_t, std::filesystem::path> folders;
  if (!is_folder(dir)) return folders;
  for (const auto& entry : entries_of(dir)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    int64_t step = 0;
    const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
    if (error == std::errc() && end == name.data() + name.size() && name == folder_name(step)) folders.emplace(step, entry.path());
  }
  return folders;
}

std::vector<WrittenCheckpoint> written_checkpoints(const std::filesystem::path& dir) {
  std::vector<WrittenCheckpoint> written;
  for (const auto& [step, folder] : checkpoint_folders(dir)) {
    written.push_back({.step = step, .folder = folder, .writer = std::nullopt});
    try {
      const Manifest manifest = read_manifest(folder);
      if (manifest.step == step) written.back().writer = manifest.run;  // nobody wrote it under this name
      written.back().makes_numbers = makes_numbers(manifest.progress);
    } catch (const ConfigError&) {  // whoever loads it says what is wrong
    }
  }
  return written;
}

std::vector<std::string> foreign_entries(const std::filesystem::path& folder) {
  if (!is_there(folder)) return {};
  if (!is_folder(folder)) return {"."};
  std::vector<std::string> foreign;
  for (const auto& entry : entries_of(folder)) {
    std::error_code ignored;
    const std::string name = entry.path().filename().string();
    if (!is_name_of_a_save(name) || entry.is_directory(ignored)) foreign.push_back(name);
  }
  std::ranges::sort(foreign);
  return foreign;
}

std::optional<std::string> foreign_leftover(const std::filesystem::path& dir) {
  if (!is_folder(dir)) return std::nullopt;
  for (const auto& path : leftovers_in(dir)) {
    if (auto held = foreign_text(path)) return held;
  }
  return std::nullopt;
}

std::filesystem::path set_aside(const std::filesystem::path& dir, const std::vector<std::filesystem::path>& folders) {
  int number = 1;
  while (is_there(dir / fmt::format("set-aside-{}", number))) ++number;
  const auto aside = dir / fmt::format("set-aside-{}", number);
  make_empty_directory(aside);
  for (const auto& folder : folders) rename_to(folder, aside / folder.filename());
  sync_directory(dir);
  return aside;
}

void check_stored(const SafetensorsFile& file, const std::string& name, const StoredTensor& tensor, const StoredSlice& slice, bool hash) {
  const TensorEntry& entry = file.entry(slice.key);
  const auto shape = Slice{name, tensor.shape, slice.boxes}.local_shape();
  require(dtype_name(entry.dtype) == tensor.dtype && entry.shape == shape, file.path().string(), ": tensor '", slice.key, "' at offset ", entry.offset,
          " is not of the dtype and shape that the manifest gives");
  if (!hash) return;
  fault_point("hash", file.path());
  const auto bytes = file.bytes(slice.key);
  require(hash_hex(bytes.data(), bytes.size()) == slice.hash, file.path().string(), ": tensor '", slice.key, "' at offset ", entry.offset, ", ", entry.bytes,
          " bytes, is damaged: its hash is not the manifest's");
}

std::optional<std::string> problem_with(const std::filesystem::path& folder, Thoroughness thoroughness, const HashShare& share) {
  try {
    const Manifest manifest = read_manifest(folder);
    for (const auto& [name, bytes] : manifest.files) {
      const auto file = folder / name;
      require(std::filesystem::is_regular_file(file), file.string(), ": is missing");
      const auto size = std::filesystem::file_size(file);
      require(size == bytes, file.string(), ": has ", size, " bytes, the manifest says ", bytes);
    }
    if (thoroughness == Thoroughness::Hashes) check_hashes(folder, manifest, share);
    return std::nullopt;
  } catch (const UnreadableFile&) {
    throw;
  } catch (const std::filesystem::filesystem_error& error) {
    throw UnreadableFile(detail::concat(error.path1().string(), ": cannot be looked at: ", error.code().message()));
  } catch (const std::exception& error) {
    return error.what();
  }
}

namespace {

/// A folder that somebody copied or renamed says another step than what it holds: going on from there would lose what lies between. And weights that make no
/// number are whole, and no use.
std::optional<std::string> problem_with_named(const std::filesystem::path& folder, int64_t step, Thoroughness thoroughness, bool verify) {
  if (auto problem = problem_with(folder, thoroughness)) return problem;
  const Manifest manifest = read_manifest(folder);
  if (verify && !makes_numbers(manifest.progress)) return fmt::format("{}: {}", folder.string(), kMakesNoNumbers);
  const int64_t held = manifest.step;
  if (held == step) return std::nullopt;
  return fmt::format("{}: holds step {}, whatever its name says; rename it to {}, or move it elsewhere", folder.string(), held, folder_name(held));
}

}  // namespace

Latest find_latest(const std::filesystem::path& dir, Thoroughness thoroughness, int64_t before, bool verify) {
  Latest latest;
  const auto folders = checkpoint_folders(dir);
  for (auto newest = folders.rbegin(); newest != folders.rend(); ++newest) {
    if (newest->first >= before) continue;
    const auto problem = problem_with_named(newest->second, newest->first, thoroughness, verify);
    if (!problem) {
      latest.folder = newest->second;
      break;
    }
    latest.skipped.push_back(*problem);
  }
  return latest;
}

namespace {

/// What cannot be read may be.
bool is_valid(const std::filesystem::path& folder, Thoroughness thoroughness) {
  try {
    return !problem_with(folder, thoroughness);
  } catch (const UnreadableFile&) {
    return false;
  }
}

}  // namespace

Pruned prune(const std::filesystem::path& dir, int64_t keep, const PruneOptions& options) {
  Pruned pruned;
  if (!is_folder(dir)) return pruned;
  // What somebody else put into a folder is not ours to delete, and the folder stays where it is looked for.
  const auto keep_foreign = [&](const std::filesystem::path& path) {
    const auto held = foreign_text(path);
    if (held) pruned.kept.push_back(*held);
    return held.has_value();
  };
  for (const auto& path : leftovers_in(dir)) {
    if (!keep_foreign(path)) pruned.gone.push_back(is_gone(path) ? path : out_of_sight(path, path));
  }

  const auto folders = written_checkpoints(dir);
  const auto counts = [&](const WrittenCheckpoint& written) {
    return written.writer && written.step <= options.newest && options.run.holds(*written.writer, written.step);
  };
  const bool too_many = keep > 0 && std::ranges::count_if(folders, counts) > keep;
  int64_t valid = 0;
  bool lost = false;  // one that makes no number was met
  for (auto written = folders.rbegin(); too_many && written != folders.rend(); ++written) {
    if (!counts(*written)) continue;
    // What is damaged or makes no number does not count, and goes only once enough good ones are newer. Of the latter the newest alone stays, for whoever
    // looks into it: a run may go on to write many.
    const bool stays = valid < keep && (written->makes_numbers || !std::exchange(lost, true));
    if (stays) {
      if (!written->makes_numbers) continue;
      // Sizes would do for a disk that is full or a save that was killed. One that stays is read back whole: what it replaces is gone for good.
      const bool hash = valid == 0 && !options.known.contains(written->step);
      valid += is_valid(written->folder, hash ? Thoroughness::Hashes : Thoroughness::Sizes) ? 1 : 0;
      continue;
    }
    if (keep_foreign(written->folder)) continue;
    // Out of sight first: a removal that is killed half way must not leave half a checkpoint under its name.
    pruned.gone.push_back(out_of_sight(written->folder, dir / temporary_name(written->step)));
  }
  return pruned;
}

void remove_pruned(const std::vector<std::filesystem::path>& folders) {
  for (const auto& folder : folders) remove_tree(folder);
}

}  // namespace tessera::checkpoint
