#include <cmath>
#include <cstdlib>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/train/observers/event_record.h"
#include "tessera/train/observers/metrics_file.h"
#include "tessera/train/observers/progress_bar.h"
#include "tessera/train/observers/run_record.h"
#include "tessera/train/observers/tensorboard.h"
#include "tests/data/files.h"
#include "tests/file_limit.h"
#include "tests/file_locks.h"

namespace tessera {
namespace {

using data::Folder;
using data::refusal;
using data::slurp;
using testing::AllOf;
using testing::ContainsRegex;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

StepResult step(int64_t k, double loss = 0) {
  return {.step = k,
          .loss = loss ? loss : 1.0 / static_cast<double>(k),
          .grad_norm = 0.1,
          .lr = 1e-5,
          .tokens = 512,
          .step_s = 0.25,
          .tokens_per_s = 2048,
          .peak_bytes = 1 << 20,
          .memory = {.peak = {4, 8, 16, 32, 64, 128, 256}, .current = {4, 8, 16, 0, 0, 0, 1}, .host = {2, 0, 6, 0, 0, 0, 0}},
          .extras = {}};
}

std::vector<nlohmann::ordered_json> lines(const std::filesystem::path& file) {
  std::vector<nlohmann::ordered_json> out;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) out.push_back(nlohmann::ordered_json::parse(line));
  return out;
}

TEST(MetricsFile, WritesOneObjectAStepAtOnce) {
  Folder folder;
  MetricsFile metrics;
  metrics.on_start({.log_dir = folder.path()});
  EXPECT_EQ(slurp(folder / "metrics.jsonl"), "");
  StepResult first = step(1, 0.1 + 0.2);
  first.extras = {{"loss_scale", 1024}};
  metrics.after_step(first);
  EXPECT_EQ(slurp(folder / "metrics.jsonl"),
            "{\"step\":1,\"loss\":0.30000000000000004,\"grad_norm\":0.1,\"lr\":1e-05,\"tokens\":512,\"step_s\":0.25,\"tokens_per_s\":2048.0,\"peak_bytes\":"
            "1048576,\"peak_by_category\":{\"params\":4,\"gradients\":8,\"optimizer\":16,\"activations\":32,\"outputs\":64,\"comm\":128,\"other\":256},"
            "\"current_by_category\":{\"params\":4,\"gradients\":8,\"optimizer\":16,\"activations\":0,\"outputs\":0,\"comm\":0,\"other\":1},"
            "\"host_by_category\":{\"params\":2,\"gradients\":0,\"optimizer\":6,\"activations\":0,\"outputs\":0,\"comm\":0,\"other\":0},"
            "\"loss_scale\":1024.0}\n");
  metrics.after_validation({.step = 1, .loss = 2.5, .bits_per_byte = 1.25});
  metrics.after_step(step(2, std::numeric_limits<double>::quiet_NaN()));
  EXPECT_TRUE(lines(folder / "metrics.jsonl").at(1)["loss"].is_null());
  EXPECT_EQ(slurp(folder / "validation.jsonl"), "{\"step\":1,\"loss\":2.5,\"bits_per_byte\":1.25}\n");
}

TEST(MetricsFile, ResumedRunKeepsWhatCameBefore) {
  Folder folder;
  {
    MetricsFile metrics;
    metrics.on_start({.log_dir = folder.path()});
    for (int64_t k = 1; k <= 6; ++k) metrics.after_step(step(k));
    metrics.after_validation({.step = 2, .loss = 1, .bits_per_byte = 1});
    metrics.after_validation({.step = 4, .loss = 1, .bits_per_byte = 1});
  }
  const std::string before = slurp(folder / "metrics.jsonl");
  std::ofstream(folder / "metrics.jsonl", std::ios::app) << "{\"step\":7,\"lo";  // the run was killed here
  {
    MetricsFile metrics;
    metrics.on_start({.log_dir = folder.path(), .first_step = 4});
    const std::string kept = slurp(folder / "metrics.jsonl");
    EXPECT_THAT(kept, Not(testing::IsEmpty()));
    EXPECT_TRUE(before.starts_with(kept));
    metrics.after_step(step(4, 9));
  }
  const auto resumed = lines(folder / "metrics.jsonl");
  ASSERT_EQ(resumed.size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(resumed[i]["step"], i + 1);
  EXPECT_EQ(resumed[3]["loss"], 9);
  EXPECT_EQ(lines(folder / "validation.jsonl").size(), 1u);
  {
    MetricsFile metrics;
    metrics.on_start({.log_dir = folder.path(), .first_step = 1});
  }
  EXPECT_EQ(slurp(folder / "metrics.jsonl"), "");
  EXPECT_EQ(slurp(folder / "validation.jsonl"), "");
}

TEST(MetricsFile, KnowsWhetherTheStepBeforeWasValidated) {
  Folder folder;
  {
    MetricsFile metrics;
    metrics.on_start({.log_dir = folder.path()});
    for (int64_t k = 1; k <= 6; ++k) metrics.after_step(step(k));
    metrics.after_validation({.step = 2, .loss = 1, .bits_per_byte = 1});
  }
  for (const auto& [first, lacks] : std::vector<std::pair<int64_t, bool>>{{8, false}, {7, true}, {5, true}, {3, false}}) {  // of step 7 there is no record
    MetricsFile metrics;
    metrics.on_start({.log_dir = folder.path(), .first_step = first});
    EXPECT_EQ(metrics.lacks_validation(first - 1), lacks) << first;
  }
  Folder empty;
  MetricsFile metrics;
  metrics.on_start({.log_dir = empty.path(), .first_step = 3});
  EXPECT_FALSE(metrics.lacks_validation(2));
}

TEST(MetricsFile, ANamedPipeIsRefusedRatherThanWaitedFor) {
  for (const char* name : {"metrics.jsonl", "metrics.jsonl.partial", "validation.jsonl"}) {
    const Folder folder;
    ASSERT_EQ(::mkfifo((folder / name).c_str(), 0600), 0);
    for (const int64_t first : {1, 4}) {
      MetricsFile metrics;
      const std::string said = refusal([&] { metrics.on_start({.log_dir = folder.path(), .first_step = first}); });
      EXPECT_THAT(said, AllOf(HasSubstr("log.dir = " + folder.path().string()), HasSubstr(std::string(name) + " is not a regular file")));
    }
  }
}

TEST(MetricsFile, ADeviceWithoutEndIsNotRead) {
  const Folder folder;
  std::filesystem::create_symlink("/dev/zero", folder / "metrics.jsonl");
  MetricsFile metrics;
  EXPECT_THAT(refusal([&] { metrics.on_start({.log_dir = folder.path(), .first_step = 4}); }), HasSubstr("metrics.jsonl is not a regular file"));
}

TEST(RecordFile, ANamedPipeHoldsNobodyUp) {
  const Folder folder;
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_FALSE(RecordFile().open(pipe)) << "nobody reads";
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  RecordFile records;
  ASSERT_TRUE(records.open(pipe));
  testing::internal::CaptureStderr();
  records.append(std::string(1 << 20, 'a'));  // more than a pipe holds
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("a record could not be written"));
  EXPECT_EQ(records.lost(), 1);
  ::close(reader);
}

TEST(MetricsFile, ASecondLiveRunIsRefused) {
  Folder folder;
  MetricsFile::check_free(folder.path());
  {
    MetricsFile first;
    first.on_start({.log_dir = folder.path()});
    first.after_step(step(1));
    for (const bool early : {true, false}) {
      EXPECT_THAT(refusal([&] { early ? MetricsFile::check_free(folder.path()) : MetricsFile().on_start({.log_dir = folder.path()}); }),
                  AllOf(HasSubstr("log.dir = "), HasSubstr("another run that still trains"), HasSubstr("name another log.dir")));
    }
    EXPECT_EQ(lines(folder / "metrics.jsonl").size(), 1);
  }
  MetricsFile().on_start({.log_dir = folder.path()});
}

/// Between a look and the first line another run may begin.
TEST(MetricsFile, ItsFolderIsTakenBeforeThereAreRecords) {
  const Folder folder;
  const auto begin = [&] { MetricsFile().on_start({.log_dir = folder.path()}); };
  {
    MetricsFile first;
    first.hold(folder.path());
    EXPECT_THAT(refusal(begin), AllOf(HasSubstr("log.dir = "), HasSubstr("another run that still trains writes its records there (process "),
                                      HasSubstr("name another log.dir")));
    EXPECT_FALSE(std::filesystem::exists(folder / "metrics.jsonl"));
    first.on_start({.log_dir = folder.path()});
    first.after_step(step(1));
    EXPECT_EQ(lines(folder / "metrics.jsonl").size(), 1u);
  }
  EXPECT_FALSE(std::filesystem::exists(folder / ".log.lock"));
  RecordFile of_an_older_version;
  ASSERT_TRUE(of_an_older_version.open(folder / "metrics.jsonl"));
  EXPECT_THAT(refusal(begin), HasSubstr("another run that still trains"));
  EXPECT_EQ(lines(folder / "metrics.jsonl").size(), 1u);
}

TEST(MetricsFile, ALiveRunIsFoundWhereLocksAskForADescriptorThatMayWrite) {
  const Folder folder;
  const FileLocks locks(FileLocks::of_nfs);
  MetricsFile first;
  first.on_start({.log_dir = folder.path()});
  EXPECT_THAT(refusal([&] { MetricsFile::check_free(folder.path()); }), HasSubstr("another run that still trains"));
}

TEST(MetricsFile, ALiveRunIsFoundInAFileThatMayNotBeWritten) {
  const Folder folder;
  MetricsFile first;
  first.on_start({.log_dir = folder.path()});
  std::filesystem::permissions(folder / "metrics.jsonl", std::filesystem::perms::owner_read);
  EXPECT_THAT(refusal([&] { MetricsFile::check_free(folder.path()); }), HasSubstr("another run that still trains"));
}

TEST(MetricsFile, ALineThatIsLostIsSaidAtOnceAndAtTheEnd) {
  const Folder folder;
  MetricsFile metrics;
  metrics.on_start({.log_dir = folder.path()});
  metrics.after_step(step(1));
  const auto one = std::filesystem::file_size(folder / "metrics.jsonl");
  testing::internal::CaptureStderr();
  {
    const FileLimit full(one + 100);  // the next line would fit in part
    for (const int64_t k : {2, 3}) metrics.after_step(step(k));
    EXPECT_EQ(std::filesystem::file_size(folder / "metrics.jsonl"), one);
  }
  const std::string at_once = testing::internal::GetCapturedStderr();
  EXPECT_THAT(at_once, AllOf(HasSubstr("metrics.jsonl: a record could not be written: "), HasSubstr("training goes on")));
  EXPECT_EQ(at_once.find("could not"), at_once.rfind("could not")) << "once a row";
  metrics.after_step(step(4));  // there is room again
  testing::internal::CaptureStderr();
  metrics.on_end({.step = 4});
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("metrics.jsonl: 2 of 4 records were lost"));
  const auto kept = lines(folder / "metrics.jsonl");
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[1]["step"], 4);
}

TEST(MetricsFile, KeepsWhatItCannotRead) {
  const Folder folder;
  const auto file = folder / "metrics.jsonl";
  const std::string text = "{\"step\": 1}\n{\"step\": \"2\"}\nmine\n{\"step\": 3";
  std::ofstream(file) << text;
  for (const int64_t first : {2, 1}) {
    MetricsFile metrics;
    testing::internal::CaptureStderr();
    metrics.on_start({.log_dir = folder.path(), .first_step = first});
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(lines(file).size(), first == 2 ? 1u : 0u);
    if (first == 2) EXPECT_THAT(said, AllOf(HasSubstr("metrics.jsonl: 2 of its lines are no records"), HasSubstr("metrics.jsonl.unreadable-1")));
    if (first == 1) EXPECT_THAT(said, Not(HasSubstr("unreadable"))) << "a fresh start takes the place of records, as ever";
  }
  EXPECT_EQ(slurp(folder / "metrics.jsonl.unreadable-1"), text);
}

using checkpoint::RunIdentity;

/// Tells observers of the steps from behind the last of `who`'s to `last`.
template <class... Observers>
void tell(const Folder& folder, const RunIdentity& who, int64_t last, Observers&&... observers) {
  const int64_t first = who.lineage.empty() ? 1 : who.lineage.back().step + 1;
  for (Observer* const observer : {static_cast<Observer*>(&observers)...}) {
    observer->on_start({.log_dir = folder.path(), .first_step = first, .last_step = last, .identity = who});
    for (int64_t k = first; k <= last; ++k) observer->after_step(step(k));
    observer->after_validation({.step = last, .loss = 1, .bits_per_byte = 1});
    observer->on_end({.step = last});
  }
}

/// The first and the last step there, and how many.
std::vector<int64_t> steps_in(const std::filesystem::path& file) {
  const auto records = lines(file);
  if (records.empty()) return {};
  return {records.front()["step"].get<int64_t>(), records.back()["step"].get<int64_t>(), std::ssize(records)};
}

TEST(RunRecord, StepsAreSharedAsFarAsTwoLinesFollowOneStart) {
  const auto a = RunIdentity::fresh(), b = RunIdentity::fresh();
  const auto later = a.continued(500), rewound = a.continued(200), next = rewound.continued(300);
  EXPECT_EQ(shared_steps(a, b), 0);
  EXPECT_EQ(shared_steps(later, a), 500);
  EXPECT_EQ(shared_steps(a, later), 500);
  EXPECT_EQ(shared_steps(rewound, later), 200);
  EXPECT_EQ(shared_steps(next, rewound), 300);
  EXPECT_EQ(shared_steps(next, a), 200);
  EXPECT_EQ(shared_steps(a.continued(500), later), 500) << "an attempt that has saved nothing";
}

TEST(MetricsFile, TheLinesOfAnotherRunInTheSameFolderAreSetAside) {
  const Folder folder;
  const auto file = folder / "metrics.jsonl", aside = folder / "metrics.jsonl.another-run-1";
  const auto write = [&](const RunIdentity& who, int64_t last) {
    MetricsFile metrics;
    testing::internal::CaptureStderr();
    tell(folder, who, last, metrics);
    return testing::internal::GetCapturedStderr();
  };
  const auto a = RunIdentity::fresh(), b = RunIdentity::fresh();
  EXPECT_EQ(write(a, 6), "");
  EXPECT_EQ(write(a.continued(4), 8), "") << "a restart";
  EXPECT_THAT(steps_in(file), testing::ElementsAre(1, 8, 8));
  EXPECT_EQ(write(a.continued(2), 6), "") << "a rewind";
  EXPECT_THAT(steps_in(file), testing::ElementsAre(1, 6, 6));
  EXPECT_EQ(write(b, 5), "") << "a fresh start takes the place of records, as ever";
  const auto back = a.continued(6);
  EXPECT_THAT(write(back, 8), AllOf(HasSubstr("metrics.jsonl: 5 of its lines are of another run"), HasSubstr("goes on from step 6"),
                                    HasSubstr("kept in metrics.jsonl.another-run-1"), HasSubstr("kept in validation.jsonl.another-run-1")));
  EXPECT_THAT(steps_in(file), testing::ElementsAre(7, 8, 2));
  EXPECT_THAT(steps_in(aside), testing::ElementsAre(1, 5, 5));
  EXPECT_EQ(write(back.continued(8), 9), "") << "and goes on with its own from then on";
  EXPECT_THAT(steps_in(file), testing::ElementsAre(7, 9, 3));
}

/// One that went on from another's checkpoint has the steps up to there in common with it.
TEST(MetricsFile, OfTwoLinesOfARunInOneFolderEachKeepsItsOwn) {
  const Folder folder;
  const auto file = folder / "metrics.jsonl";
  const auto write = [&](const RunIdentity& who, int64_t last) {
    MetricsFile metrics;
    tell(folder, who, last, metrics);
  };
  const auto a = RunIdentity::fresh(), fork = a.continued(3);
  write(a, 6);
  write(fork, 5);
  EXPECT_THAT(steps_in(file), testing::ElementsAre(1, 5, 5));
  testing::internal::CaptureStderr();
  write(a.continued(6), 7);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("metrics.jsonl: 2 of its lines are of another run, or of another line of it"));
  const auto kept = lines(file);
  ASSERT_EQ(kept.size(), 4u) << "1 to 3, and 7: what was 4 to 6 the fork has replaced";
  EXPECT_EQ(kept[2]["step"], 3);
  EXPECT_EQ(kept[3]["step"], 7);
}

TEST(MetricsFile, WithoutAWordOfWhoWroteItStepsDecide) {
  const Folder folder;
  {
    MetricsFile metrics;
    metrics.on_start({.log_dir = folder.path()});
    for (int64_t k = 1; k <= 6; ++k) metrics.after_step(step(k));
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "written_by.json"));
  {
    MetricsFile metrics;
    tell(folder, RunIdentity::fresh().continued(4), 5, metrics);
  }
  EXPECT_THAT(steps_in(folder / "metrics.jsonl"), testing::ElementsAre(1, 5, 5));
  EXPECT_TRUE(std::filesystem::exists(folder / "written_by.json"));
  std::ofstream(folder / "written_by.json") << "mine";
  testing::internal::CaptureStderr();
  {
    MetricsFile metrics;
    tell(folder, RunIdentity::fresh().continued(5), 6, metrics);
  }
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("written_by.json: is no run's; it is kept in written_by.json.kept-1"));
  EXPECT_EQ(slurp(folder / "written_by.json.kept-1"), "mine");
  EXPECT_THAT(steps_in(folder / "metrics.jsonl"), testing::ElementsAre(1, 6, 6));
}

/// A disk that fails in the midst of the records is not their end: what is behind it would be lost when they are written anew.
TEST(MetricsFile, WhatCannotBeReadToItsEndIsLeftAsItIs) {
  Folder folder;
  std::filesystem::create_symlink("/proc/self/mem", folder / "metrics.jsonl");  // a regular file whose first read fails
  MetricsFile metrics;
  EXPECT_THAT(refusal([&] { metrics.on_start({.log_dir = folder.path(), .first_step = 11}); }),
              AllOf(HasSubstr("metrics.jsonl: cannot be read to its end: Input/output error"), HasSubstr("choose another log.dir")));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "metrics.jsonl"));
}

/// On a full disk a file can become shorter, and have another name.
TEST(MetricsFile, AFullDiskEndsNoRunThatGoesOn) {
  const Folder folder;
  constexpr rlim_t kRoom = 700;  // for what is said, and not for two lines
  const auto start = [&](int64_t first_step, bool strict) {
    const FileLimit full(kRoom);
    MetricsFile metrics(strict);
    metrics.on_start({.log_dir = folder.path(), .first_step = first_step});
  };
  {
    MetricsFile metrics;
    metrics.on_start({.log_dir = folder.path()});
    for (int64_t k = 1; k <= 6; ++k) metrics.after_step(step(k));
  }
  const std::string before = slurp(folder / "metrics.jsonl");
  for (const bool strict : {false, true}) {  // which loses nothing
    start(7, strict);
    EXPECT_EQ(slurp(folder / "metrics.jsonl"), before);
  }
  std::ofstream(folder / "metrics.jsonl", std::ios::app) << "{\"step\":7,\"lo";
  start(4, /*strict=*/true);
  EXPECT_EQ(lines(folder / "metrics.jsonl").size(), 3u);
  EXPECT_TRUE(before.starts_with(slurp(folder / "metrics.jsonl")));
  {
    MetricsFile metrics;
    metrics.on_start({.log_dir = folder.path(), .first_step = 4});
    metrics.after_step(step(4));
  }
  EXPECT_EQ(lines(folder / "metrics.jsonl").back()["step"], 4);

  // Two that wrote into one file; what is this run's is not where it begins.
  std::ofstream(folder / "metrics.jsonl") << before + before;
  testing::internal::CaptureStderr();
  start(3, /*strict=*/false);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("kept in metrics.jsonl.another-run-1"));
  EXPECT_EQ(slurp(folder / "metrics.jsonl.another-run-1"), before + before);
  std::ofstream(folder / "metrics.jsonl") << before;

  const std::string mixed = "somebody's own\n" + slurp(folder / "metrics.jsonl");
  std::ofstream(folder / "metrics.jsonl") << mixed;
  EXPECT_THAT([&] { start(5, /*strict=*/true); },
              testing::Throws<Error>(
                  testing::AllOf(testing::Property(&Error::what, HasSubstr("metrics.jsonl cannot be written: File too large (ulimit -f); make room there")),
                                 testing::Not(testing::WhenDynamicCastTo<const ConfigError&>(testing::_)))));
  EXPECT_EQ(slurp(folder / "metrics.jsonl"), mixed);
  testing::internal::CaptureStderr();
  start(5, /*strict=*/false);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("metrics.jsonl: cannot be written: File too large"), HasSubstr("kept in metrics.jsonl.unreadable-1")));
  EXPECT_EQ(slurp(folder / "metrics.jsonl.unreadable-1"), mixed);
  EXPECT_EQ(slurp(folder / "metrics.jsonl"), "");
  EXPECT_FALSE(std::filesystem::exists(folder / "metrics.jsonl.partial"));
  EXPECT_FALSE(std::filesystem::exists(folder / "metrics.jsonl.unreadable-2"));
}

TEST(RunRecord, SaysWhyItCannotBeWritten) {
  const Folder folder;
  const RunRecord record(folder.path());
  const FileLimit full(700);
  testing::internal::CaptureStderr();  // into a file
  record.write({.log_dir = folder.path(), .identity = {.run = std::string(1000, 'a'), .start = "b"}});
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("written_by.json: cannot be written: File too large (ulimit -f); "));
}

TEST(MetricsFile, AStrictLogEndsTheRun) {
  const Folder folder;
  MetricsFile metrics(/*strict=*/true);
  TensorBoard board(/*strict=*/true);
  metrics.on_start({.log_dir = folder.path()});
  board.on_start({.log_dir = folder.path()});
  const FileLimit full(10);
  EXPECT_THAT([&] { metrics.after_step(step(1)); }, testing::ThrowsMessage<Error>(AllOf(HasSubstr("metrics.jsonl"), HasSubstr("--strict-log"))));
  EXPECT_THAT([&] { board.after_step(step(1)); }, testing::ThrowsMessage<Error>(AllOf(HasSubstr("events.out.tfevents"), HasSubstr("--strict-log"))));
}

TEST(RecordFile, TellsOfADeviceThatTakesNothing) {
  RecordFile file;
  ASSERT_TRUE(file.open("/dev/full"));
  testing::internal::CaptureStderr();
  file.append("line\n");
  file.close();
  EXPECT_EQ(file.lost(), 1);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), AllOf(HasSubstr("No space left"), HasSubstr("1 of 1 records were lost")));
  EXPECT_FALSE(RecordFile().open("/none/of/these"));
}

TEST(MetricsFile, RefusesAFolderThatCannotBeWritten) {
  Folder folder;
  MetricsFile metrics;
  std::ofstream(folder / "file") << "in its place";
  EXPECT_THAT(refusal([&] { metrics.on_start({.log_dir = folder / "file" / "none"}); }),
              AllOf(HasSubstr("log.dir"), HasSubstr("none"), HasSubstr("Not a directory")));
}

/// Tells a bar of a run of `last` steps.
void run_bar(const ProgressBar::Options& options, int64_t last, double seconds_a_step) {
  ProgressBar bar(options);
  bar.on_start({.name = "demo", .last_step = last, .ranks = 2, .parameters = 1234567});
  for (int64_t k = 1; k <= last; ++k) {
    StepResult result = step(k);
    result.step_s = seconds_a_step;
    bar.after_step(result);
    if (k == last / 2) bar.after_validation({.step = k, .loss = 2, .bits_per_byte = 1.5});
  }
  bar.on_end({.step = last, .finished = true, .seconds = 61});
}

/// What it prints.
std::string printed(ProgressBar::Options options, int64_t last, double seconds_a_step) {
  Folder folder;
  options.out = std::fopen((folder / "out").c_str(), "w");
  EXPECT_FALSE(ProgressBar::is_terminal(options.out));
  run_bar(options, last, seconds_a_step);
  std::fclose(options.out);
  return slurp(folder / "out");
}

TEST(ProgressBar, PrintsPlainLinesWithoutATerminal) {
  const std::string every = printed({.line_every_s = 0}, 4, 2);
  EXPECT_THAT(every, AllOf(HasSubstr("demo: 1.23 M parameters, 2 ranks, steps 1 to 4\n"), HasSubstr("step 1/4  loss 1.0000  256 tok/s  ETA 6.00 s\n"),
                           HasSubstr("step 2/4  validation loss 2.0000  1.5000 bits per byte\n"), HasSubstr("step 4/4  loss 0.2500  256 tok/s\n"),
                           EndsWith("finished at step 4 in 1 m 01 s\n"), Not(HasSubstr("\r")), Not(HasSubstr("\x1b"))));
  // The first and the last step appear however rarely lines do.
  const std::string rare = printed({.line_every_s = 1e9}, 100, 1e-3);
  EXPECT_THAT(rare, AllOf(HasSubstr("step 1/100  loss"), HasSubstr("step 100/100  loss"), HasSubstr("step 50/100  validation"), Not(HasSubstr("step 2/100"))));
}

TEST(ProgressBar, ALossThatIsNoNumberHasNoSign) {
  const double none = -std::numeric_limits<double>::quiet_NaN();
  Folder folder;
  std::FILE* const out = std::fopen((folder / "out").c_str(), "w");
  {
    ProgressBar bar({.out = out, .line_every_s = 0});
    bar.on_start({.name = "demo", .last_step = 1});
    bar.after_step(step(1, none));
    bar.after_validation({.step = 1, .loss = none, .bits_per_byte = none});
  }
  std::fclose(out);
  EXPECT_THAT(slurp(folder / "out"), AllOf(HasSubstr("loss nan  "), HasSubstr("validation loss nan  nan bits per byte\n"), Not(HasSubstr("-nan"))));
}

TEST(ProgressBar, RedrawsInPlaceAndNeverWraps) {
  for (int width : {20, 60, 80, 200}) {
    const std::string out = printed({.terminal = true, .width = width}, 50, 1e-3);
    EXPECT_THAT(out, AllOf(HasSubstr("\r"), HasSubstr("50/50"), HasSubstr("validation loss 2.0000  1.5000 bits per byte\n"),
                           EndsWith("finished at step 50 in 1 m 01 s\n")));
    std::string line;
    for (char c : out) {
      if (c != '\r' && c != '\n') {
        line += c;
        continue;
      }
      if (const size_t escape = line.find("\x1b[K"); escape != std::string::npos && line.find("validation") == std::string::npos) {
        EXPECT_LT(escape, static_cast<size_t>(width)) << line;
      }
      line.clear();
    }
  }
  EXPECT_THAT(printed({.terminal = true, .width = 80}, 50, 1e-3), ContainsRegex("\\[#+\\] loss 0.0200"));
}

TEST(ProgressBar, AFullDiskEndsNoRun) {
  for (const bool terminal : {false, true}) {
    std::FILE* out = std::fopen("/dev/full", "w");
    ASSERT_NE(out, nullptr);
    EXPECT_NO_THROW(run_bar({.out = out, .terminal = terminal, .width = 40}, 3, 0.5));
    std::fclose(out);
  }
}

TEST(ProgressBar, ARunThatHasNothingLeftSaysSo) {
  std::FILE* const out = std::tmpfile();
  ProgressBar bar({.out = out});
  bar.on_start({.name = "run", .first_step = 51, .last_step = 50});
  std::string text(static_cast<size_t>(std::ftell(out)), ' ');
  std::rewind(out);
  EXPECT_EQ(std::fread(text.data(), 1, text.size(), out), text.size());
  std::fclose(out);
  EXPECT_THAT(text, AllOf(HasSubstr("step 50 of 50 is done already"), Not(HasSubstr("51"))));
}

TEST(EventRecord, HasTheChecksumsOfItsFormat) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);            // RFC 3720 and every implementation's own test
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(event_record("abc").size(), 8u + 4 + 3 + 4);
}

TEST(TensorBoardFile, SaysWhyItCannotBeWritten) {
  Folder folder;
  std::ofstream(folder / "tensorboard") << "no folder";
  TensorBoard board;
  EXPECT_THAT(refusal([&] { board.on_start({.log_dir = folder.path()}); }), AllOf(HasSubstr("cannot be written: Not a directory"), HasSubstr("log.dir")));
}

TEST(TensorBoardFile, TheEventsOfAnotherRunAreSetAside) {
  const Folder folder;
  const auto write = [&](const RunIdentity& who, int64_t last) {
    TensorBoard board;
    testing::internal::CaptureStderr();
    tell(folder, who, last, board);
    return testing::internal::GetCapturedStderr();
  };
  const auto events = [](const std::filesystem::path& tensorboard) {
    std::set<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(tensorboard)) {
      if (entry.path().filename() != "written_by.json") files.insert(entry.path());
    }
    return files;
  };
  const auto marked = [&](int64_t step) {
    constexpr size_t behind_the_time = 9;
    return slurp(*events(folder / "tensorboard").rbegin()).find(restart_event(0, step).substr(behind_the_time)) != std::string::npos;
  };
  const auto a = RunIdentity::fresh(), b = RunIdentity::fresh();
  EXPECT_EQ(write(a, 6), "");
  EXPECT_EQ(write(a.continued(4), 6), "");
  EXPECT_EQ(events(folder / "tensorboard").size(), 2u);
  EXPECT_TRUE(marked(5));
  EXPECT_THAT(write(a.continued(6), 7), HasSubstr("events beyond step 4 are of another line of this run"));
  EXPECT_TRUE(marked(5)) << "where they part";
  EXPECT_EQ(write(b, 5), "");
  EXPECT_EQ(events(folder / "tensorboard").size(), 1u) << "a fresh start takes the place of events, as ever";
  EXPECT_THAT(write(a.continued(7), 8), HasSubstr("set aside in tensorboard.another-run-1"));
  EXPECT_EQ(events(folder / "tensorboard").size(), 1u);
  EXPECT_EQ(events(folder / "tensorboard.another-run-1").size(), 1u);
}

// tensorboard_test.py opens what this test writes, with TensorBoard itself.
TEST(TensorBoardFile, TellsOfAStoppedAndResumedRun) {
  Folder folder;
  const char* kept = std::getenv("TESSERA_TEST_LOG_DIR");
  const std::filesystem::path log_dir = kept ? std::filesystem::path(kept) : folder.path();
  const auto run = [&](int64_t first, int64_t last, double scale) {
    TensorBoard board;
    MetricsFile metrics;
    std::vector<Observer*> observers = {&board, &metrics};
    for (Observer* o : observers) o->on_start({.name = "test", .log_dir = log_dir, .first_step = first, .last_step = last});
    for (int64_t k = first; k <= last; ++k) {
      StepResult result = step(k, scale / static_cast<double>(k));
      result.extras = {{"loss_scale", 1024.0 * static_cast<double>(k)}};
      for (Observer* o : observers) o->after_step(result);
      if (k % 3 == 0) {
        for (Observer* o : observers) o->after_validation({.step = k, .loss = scale, .bits_per_byte = scale / 2});
      }
    }
  };
  const auto files = [&] { return std::distance(std::filesystem::directory_iterator(log_dir / "tensorboard"), std::filesystem::directory_iterator()); };
  run(1, 400, 1);
  EXPECT_EQ(files(), 1);
  run(1, 10, 1);
  EXPECT_EQ(files(), 1);  // begun anew
  run(6, 300, 2);
  EXPECT_EQ(files(), 2);  // steps 6 to 10 of the older file do not count
}

}  // namespace
}  // namespace tessera
