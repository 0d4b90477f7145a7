#include "tessera/train/observers/run_record.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <system_error>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/log.h"
#include "tessera/core/system_reason.h"
#include "tessera/core/text_file.h"

namespace tessera {
namespace {

/// Its starts, the oldest first, each with the step at which the next one left it.
std::vector<checkpoint::RunIdentity::Ancestor> line_of(const checkpoint::RunIdentity& run) {
  auto line = run.lineage;
  line.push_back({run.start, std::numeric_limits<int64_t>::max()});
  return line;
}

std::optional<checkpoint::RunIdentity> read(const std::filesystem::path& file) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(file, error)) return std::nullopt;  // opening a pipe would wait
  std::ifstream in(file);
  try {
    return checkpoint::run_identity_from(nlohmann::json::parse(in));
  } catch (const nlohmann::json::exception&) {
  } catch (const Error&) {
  }
  return std::nullopt;
}

}  // namespace

int64_t shared_steps(const checkpoint::RunIdentity& run, const checkpoint::RunIdentity& writer) {
  if (run.run != writer.run) return 0;
  const auto ours = line_of(run), theirs = line_of(writer);
  int64_t shared = 0;
  for (size_t i = 0; i < std::min(ours.size(), theirs.size()) && ours[i].start == theirs[i].start; ++i) {
    shared = std::min(ours[i].step, theirs[i].step);  // where these differ, the next starts do
  }
  return shared;
}

RunRecord::RunRecord(const std::filesystem::path& folder) : file_(folder / "written_by.json"), writer_(read(file_)) {}

int64_t RunRecord::own_steps(const RunInfo& run) const {
  const int64_t before = run.first_step - 1;
  return writer_ && !run.identity.start.empty() ? std::min(before, shared_steps(run.identity, *writer_)) : before;
}

void RunRecord::write(const RunInfo& run) const {
  std::error_code error, ignored;
  if (!writer_ && std::filesystem::exists(std::filesystem::symlink_status(file_, ignored))) {
    const auto aside = name_aside(file_, "kept");
    std::filesystem::rename(file_, aside, error);
    if (!error) log().warn("{}: is no run's; it is kept in {}", file_.string(), aside.filename().string());
  }
  const std::filesystem::path place = target_of(file_);  // a link stays one
  const std::filesystem::path partial = place.string() + ".partial";
  if (!run.identity.start.empty()) {
    const int reason = try_to_replace(place, partial, to_json(run.identity).dump() + '\n');
    if (reason == 0) return;
    log().warn("{}: cannot be written: {}; a run that goes on in this folder will not know another's records from its own", file_.string(),
               reason_of_writing(reason));
  }
  for (const auto& path : {partial, file_}) std::filesystem::remove(path, ignored);
}

}  // namespace tessera
