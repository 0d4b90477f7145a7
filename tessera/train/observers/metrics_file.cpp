#include "tessera/train/observers/metrics_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/json_text.h"
#include "tessera/core/log.h"
#include "tessera/core/poll.h"
#include "tessera/core/system_reason.h"
#include "tessera/core/text_file.h"
#include "tessera/train/observers/run_record.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

// One sentence, whichever of the two locks says so.
constexpr const char* kHeld = "another run that still trains writes its records there";
constexpr const char* kWayOut = ", and would lose them to this one; wait for its end, end it, or name another log.dir";

/// What a file of records holds; nothing where there is none.
struct Records {
  std::string kept;     ///< the lines that tell of the run's own steps
  int64_t others = 0;   ///< lines that tell of later ones
  int64_t unknown = 0;  ///< lines that are no records, but for a last one that was cut
  int64_t last = 0;     ///< the latest step of what is kept
  bool first = true;    ///< what is kept is what the file begins with, as it stands there
};

/// How sentences about it begin.
std::string named(const std::filesystem::path& file) { return detail::concat("log.dir = ", file.parent_path().string(), ": ", file.filename().string()); }

Records read_records(const std::filesystem::path& file, int64_t own_steps) {
  constexpr const char* way_out = "; what it holds would be lost, so choose another log.dir";
  errno = 0;
  std::ifstream in(file);
  require(in.is_open() || errno == ENOENT, named(file), ": cannot be read: ", std::strerror(errno), way_out);
  Records records;
  bool left_out = false;
  for (std::string line; std::getline(in, line);) {
    const Json object = Json::parse(line, nullptr, false);
    const auto step = object.is_object() ? object.find("step") : object.end();
    const bool known = object.is_object() && step != object.end() && step->is_number_integer();
    const bool cut = in.eof() && line.starts_with('{');
    if (!known && !cut) ++records.unknown;
    const bool keeps = known && step->get<int64_t>() <= own_steps;
    if (known && !keeps) ++records.others;
    if (keeps) records.first &= !left_out && !in.eof();
    if (keeps) records.kept += line + '\n';
    if (keeps) records.last = std::max(records.last, step->get<int64_t>());
    left_out |= !keeps;
  }
  require(!in.bad(), named(file), ": cannot be read to its end: ", std::strerror(errno), way_out);  // to the loop an error is an end
  return records;
}

/// What is none of this run's: a copy (not by copy_file, which says EIO of a full disk) stays beside what takes its place, under a name that nothing has.
/// `what` of its lines are so. Returns 0, or an errno where there is no room for a copy.
int keep_aside(const std::filesystem::path& file, const std::string& suffix, int64_t lines, const std::string& what) {
  const auto aside = name_aside(file, suffix);
  const int reason = try_to_write(aside, read_text_file(named(file), file.string()));
  if (is_full(reason)) return reason;
  require(reason == 0, named(file), ": ", lines, " of its lines are ", what, ", and a copy of it cannot be kept: ", reason_of_writing(reason),
          "; move it elsewhere, or choose another log.dir");
  log().warn("{}: {} of its lines are {}; as it was it is kept in {}", file.string(), lines, what, aside.filename().string());
  return 0;
}

/// Where a disk is full a file can still become shorter, and have another name. Returns 0, or an errno.
int continue_without_room(const std::filesystem::path& file, const Records& held, bool as_it_stands, int reason) {
  std::error_code error;
  if (!std::filesystem::exists(file, error)) return 0;
  if (as_it_stands && held.first) {
    std::filesystem::resize_file(file, held.kept.size(), error);
    return error.value();
  }
  const auto aside = name_aside(file, held.unknown > 0 ? "unreadable" : "another-run");
  std::filesystem::rename(file, aside, error);
  if (error) return error.value();
  log().warn(
      "{}: cannot be written: {}; there are lines in it that are none of this run's, so as it was, with those that are, it is kept in {}, and this run's "
      "begin anew with this start",
      file.string(), reason_of_writing(reason), aside.filename().string());
  return 0;
}

Json by_name(const MemoryByCategory& bytes) {
  Json object;
  for (int c = 0; c < num_memory_categories; ++c) object[std::string(to_string(static_cast<MemoryCategory>(c)))] = bytes[static_cast<size_t>(c)];
  return object;
}

/// Opens `file` for appending behind the lines it keeps, those up to `own_steps`; returns the latest step among them, or 0. A full disk ends no run whose log
/// is not strict.
int64_t continue_file(const std::filesystem::path& file, int64_t first_step, int64_t own_steps, RecordFile& records) {
  const std::filesystem::path place = target_of(file);  // a link stays one
  const std::filesystem::path partial = place.string() + ".partial";
  for (const auto& path : {file, partial}) {
    std::error_code ignored;
    const auto found = std::filesystem::status(path, ignored);  // opening a pipe would wait for whoever is at its other end
    require(!std::filesystem::exists(found) || std::filesystem::is_regular_file(found), named(path),
            " is not a regular file, and keeps no records; remove it, or choose another log.dir");
  }
  const Records held = read_records(file, own_steps);
  const bool another_runs = held.others > 0 && own_steps + 1 < first_step;
  int reason = 0;
  if (held.unknown > 0) reason = keep_aside(file, "unreadable", held.unknown, "no records of a run");
  if (reason == 0 && another_runs) {
    reason = keep_aside(file, "another-run", held.others,
                        detail::concat("of another run, or of another line of it, than the one that goes on from step ", first_step - 1));
  }
  if (reason == 0) reason = try_to_replace(place, partial, held.kept);
  const bool as_it_stands = held.unknown == 0 && !another_runs;
  if (is_full(reason) && (!records.strict() || (as_it_stands && held.first))) reason = continue_without_room(place, held, as_it_stands, reason);
  if (reason == 0 && !records.open(file)) reason = errno;
  if (reason != 0) fail_to_write(named(file) + " cannot be written", reason, "choose another log.dir");
  return held.last;
}

}  // namespace

void MetricsFile::check_free(const std::filesystem::path& log_dir, std::chrono::milliseconds patience) {
  const auto free = [&] { return !RecordFile::is_being_written(log_dir / "metrics.jsonl"); };
  const auto held = [&] { return detail::concat("log.dir = ", log_dir.string(), ": ", kHeld); };
  require(poll_until(patience, free, held), held(), kWayOut);
}

void MetricsFile::hold(const std::filesystem::path& log_dir, std::chrono::milliseconds patience) {
  if (lock_) return;
  // checkpoint.dir may be the same folder, and has a lock of its own.
  lock_ = std::make_unique<checkpoint::RunLock>(
      log_dir, patience,
      checkpoint::LockedFolder{
          .knob = "log.dir", .file = ".log.lock", .before = detail::concat(kHeld, " ("), .after = ")", .way_out = kWayOut, .needed = false});
}

void MetricsFile::on_start(const RunInfo& run) {
  hold(run.log_dir);
  check_free(run.log_dir);  // of a version that held its records alone
  const RunRecord writer(run.log_dir);
  run_ = run;
  own_steps_ = writer.own_steps(run);
  last_step_ = continue_file(run.log_dir / "metrics.jsonl", run.first_step, own_steps_, metrics_);
  last_validation_ = continue_file(run.log_dir / "validation.jsonl", run.first_step, own_steps_, validation_);
  std::error_code ignored;
  if (std::filesystem::exists(run.log_dir / "timeline.jsonl", ignored)) open_timeline();  // an earlier run's are none of this one
  writer.write(run);                                                                      // last, for who ends before has taken nothing over
}

void MetricsFile::open_timeline() {
  continue_file(run_.log_dir / "timeline.jsonl", run_.first_step, own_steps_, timeline_);
  timed_ = true;
}

void MetricsFile::after_step(const StepResult& r) {
  Json line = {{"step", r.step},     {"loss", r.loss},     {"grad_norm", r.grad_norm},       {"lr", r.lr},
               {"tokens", r.tokens}, {"step_s", r.step_s}, {"tokens_per_s", r.tokens_per_s}, {"peak_bytes", r.peak_bytes}};
  line["peak_by_category"] = by_name(r.memory.peak);
  line["current_by_category"] = by_name(r.memory.current);
  line["host_by_category"] = by_name(r.memory.host);
  for (const auto& [name, value] : r.extras) line[name] = value;
  for (const ExpertLoad& load : r.experts) line["expert_load"].push_back(load.share);
  metrics_.append(json_text(line) + '\n');
  if (!r.timelines) return;
  if (!timed_) open_timeline();
  for (const auto& timeline : *r.timelines) timeline_.append(json_text(to_json(timeline)) + '\n');
}

void MetricsFile::after_validation(const ValidationResult& r) {
  validation_.append(Json{{"step", r.step}, {"loss", r.loss}, {"bits_per_byte", r.bits_per_byte}}.dump() + '\n');
}

void MetricsFile::on_end(const RunEnd&) {
  metrics_.close();
  validation_.close();
  timeline_.close();
  lock_.reset();
}

}  // namespace tessera
