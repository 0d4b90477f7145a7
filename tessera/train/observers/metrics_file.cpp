#include "tessera/train/observers/metrics_file.h"

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
#include "tessera/train/observers/run_record.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

/// What a file of records holds; nothing where there is none.
struct Records {
  std::string kept;     ///< the lines that tell of the run's own steps
  int64_t others = 0;   ///< lines that tell of later ones
  int64_t unknown = 0;  ///< lines that are no records, but for a last one that was cut
};

/// How sentences about it begin.
std::string named(const std::filesystem::path& file) { return detail::concat("log.dir = ", file.parent_path().string(), ": ", file.filename().string()); }

Records read_records(const std::filesystem::path& file, int64_t own_steps) {
  constexpr const char* way_out = "; what it holds would be lost, so choose another log.dir";
  errno = 0;
  std::ifstream in(file);
  require(in.is_open() || errno == ENOENT, named(file), ": cannot be read: ", std::strerror(errno), way_out);
  Records records;
  for (std::string line; std::getline(in, line);) {
    const Json object = Json::parse(line, nullptr, false);
    const auto step = object.is_object() ? object.find("step") : object.end();
    const bool known = object.is_object() && step != object.end() && step->is_number_integer();
    const bool cut = in.eof() && line.starts_with('{');
    if (!known && !cut) ++records.unknown;
    if (!known) continue;
    if (step->get<int64_t>() <= own_steps) {
      records.kept += line + '\n';
    } else {
      ++records.others;
    }
  }
  require(!in.bad(), named(file), ": cannot be read to its end: ", std::strerror(errno), way_out);  // to the loop an error is an end
  return records;
}

/// What is none of this run's: a copy stays beside what takes its place, under a name that nothing has. `what` of its lines are so.
void keep_aside(const std::filesystem::path& file, const std::string& suffix, int64_t lines, const std::string& what) {
  const auto aside = name_aside(file, suffix);
  std::error_code error;
  std::filesystem::copy_file(file, aside, error);
  require(!error, named(file), ": ", lines, " of its lines are ", what, ", and a copy of it cannot be kept: ", error.message(),
          "; move it elsewhere, or choose another log.dir");
  log().warn("{}: {} of its lines are {}; as it was it is kept in {}", file.string(), lines, what, aside.filename().string());
}

Json by_name(const MemoryByCategory& bytes) {
  Json object;
  for (int c = 0; c < num_memory_categories; ++c) object[std::string(to_string(static_cast<MemoryCategory>(c)))] = bytes[static_cast<size_t>(c)];
  return object;
}

/// Opens `file` for appending behind the lines it keeps, those up to `own_steps`. They are replaced by a rename, so that no crash loses them.
void continue_file(const std::filesystem::path& file, int64_t first_step, int64_t own_steps, RecordFile& records) {
  const std::filesystem::path partial = file.string() + ".partial";
  for (const auto& path : {file, partial}) {
    std::error_code ignored;
    const auto found = std::filesystem::status(path, ignored);  // opening a pipe would wait for whoever is at its other end
    require(!std::filesystem::exists(found) || std::filesystem::is_regular_file(found), named(path),
            " is not a regular file, and keeps no records; remove it, or choose another log.dir");
  }
  const auto [kept, others, unknown] = read_records(file, own_steps);
  if (unknown > 0) keep_aside(file, "unreadable", unknown, "no records of a run");
  if (others > 0 && own_steps + 1 < first_step) {
    keep_aside(file, "another-run", others, detail::concat("of another run, or of another line of it, than the one that goes on from step ", first_step - 1));
  }
  errno = 0;
  std::error_code error;
  std::ofstream out(partial, std::ios::trunc);
  out << kept;
  out.close();
  if (out.good()) {
    std::filesystem::rename(partial, file, error);
    if (!error && records.open(file)) return;
  }
  throw ConfigError(detail::concat(named(file), " cannot be written: ", reason_of_writing(error ? error.value() : errno), "; choose another log.dir"));
}

}  // namespace

void MetricsFile::check_free(const std::filesystem::path& log_dir, std::chrono::milliseconds patience) {
  const auto free = [&] { return !RecordFile::is_being_written(log_dir / "metrics.jsonl"); };
  const auto held = [&] { return detail::concat("log.dir = ", log_dir.string(), ": another run that still trains writes its records there"); };
  require(poll_until(patience, free, held), held(), ", and would lose them to this one; wait for its end, end it, or name another log.dir");
}

void MetricsFile::on_start(const RunInfo& run) {
  check_free(run.log_dir);
  const RunRecord writer(run.log_dir);
  run_ = run;
  own_steps_ = writer.own_steps(run);
  continue_file(run.log_dir / "metrics.jsonl", run.first_step, own_steps_, metrics_);
  continue_file(run.log_dir / "validation.jsonl", run.first_step, own_steps_, validation_);
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
}

}  // namespace tessera
