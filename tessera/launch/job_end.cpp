#include "tessera/launch/job_end.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>
#include <signal.h>
#include <sys/wait.h>

#include "tessera/core/error.h"

// The first failure that is seen need not be the cause: a rank that dies of a signal takes a moment to be reaped, and by then its peers have failed of the
// broken connection. So endings are ordered by how likely their kind causes others, and by time only within a kind.

namespace tessera::launch {
namespace {

constexpr int bad_input = 2;
constexpr std::array<std::pair<Failure, std::string_view>, 3> kind_names{{{Failure::Config, "config"}, {Failure::Comm, "comm"}, {Failure::Other, "other"}}};

/// The higher, the likelier this is the cause and not a consequence.
int likelihood(const Ending& ending) {
  if (WIFSIGNALED(ending.wait_status) && WTERMSIG(ending.wait_status) != SIGABRT) return 3;
  if (WIFEXITED(ending.wait_status) && WEXITSTATUS(ending.wait_status) == bad_input) return 2;
  return ending.is_consequence() ? 0 : 1;
}

/// torch's: {"message": {"message": "ValueError: ...", "extraInfo": ...}}, or with a plain string as its message.
std::optional<Report> read_torch_report(const std::string& contents) {
  const auto json = nlohmann::json::parse(contents, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("message")) return std::nullopt;
  const auto& message = json["message"].is_object() ? json["message"].value("message", nlohmann::json()) : json["message"];
  if (!message.is_string()) return std::nullopt;
  Report report{Failure::Other, message.get<std::string>()};
  for (const char* sign : {"DistBackendError", "DistNetworkError", "Connection closed by peer", "Connection reset by peer"}) {
    if (report.reason.find(sign) != std::string::npos) report.kind = Failure::Comm;
  }
  if (report.reason.empty()) return std::nullopt;
  std::ranges::replace(report.reason, '\n', ' ');
  return report;
}

/// Whether the end of `ending` says that `other` was before it.
bool blames(const Ending& ending, const Ending& other) {
  const std::optional<Report> said = read_report(ending.report), first = read_report(other.report);
  return said && first && said->reason.find(detail::concat("rank ", other.rank, " failed: ", first->reason)) != std::string::npos;
}

JobEnd describe(const Ending& cause) {
  const std::optional<Report> report = read_report(cause.report);
  if (WIFSIGNALED(cause.wait_status)) {
    const int signal = WTERMSIG(cause.wait_status);
    const char* const usual =
        signal == SIGBUS
            ? ": it read a mapped file beyond its end; one that it uses (in data.cache_dir, or of a checkpoint) was cut or overwritten, or /dev/shm is full"
            : "";
    return {1, detail::concat("rank ", cause.rank, " was ended by ", describe_signal(signal), report ? ": " + report->reason : usual)};
  }
  const int code = WEXITSTATUS(cause.wait_status);
  if (code == bad_input) return {bad_input, report ? report->reason : detail::concat("rank ", cause.rank, " refused its input (exit code 2)")};
  return {1, detail::concat("rank ", cause.rank, " failed with exit code ", code, report ? ": " + report->reason : "")};
}

}  // namespace

bool Ending::failed() const { return !WIFEXITED(wait_status) || WEXITSTATUS(wait_status) != 0; }

bool Ending::is_consequence() const {
  if (WIFSIGNALED(wait_status) && WTERMSIG(wait_status) != SIGABRT) return false;
  if (WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == bad_input) return false;
  const std::optional<Report> said = read_report(report);
  return said && said->kind == Failure::Comm;
}

std::string write_report(const Report& report) {
  const auto* name = std::ranges::find(kind_names, report.kind, &std::pair<Failure, std::string_view>::first);
  std::string text = detail::concat(name->second, ' ', report.reason);
  std::ranges::replace(text, '\n', ' ');
  return text + '\n';
}

std::optional<Report> read_report(const std::string& contents) {
  if (contents.starts_with('{')) return read_torch_report(contents);
  const std::string line = contents.substr(0, contents.find('\n'));
  for (const auto& [kind, name] : kind_names) {
    if (line.starts_with(name) && line.size() > name.size() + 1) return Report{kind, line.substr(name.size() + 1)};
  }
  return std::nullopt;
}

std::string describe_signal(int signal) {
  const char* name = sigabbrev_np(signal);
  std::string meaning = sigdescr_np(signal) != nullptr ? sigdescr_np(signal) : "unknown";
  std::ranges::transform(meaning, meaning.begin(), [](unsigned char c) { return std::tolower(c); });
  return name != nullptr ? detail::concat("SIG", name, " (", meaning, ")") : detail::concat("signal ", signal);
}

JobEnd judge(const std::vector<Ending>& endings) {
  const Ending* cause = nullptr;
  for (const Ending& ending : endings) {
    if (!ending.failed()) continue;
    const int order = cause == nullptr ? 1 : likelihood(ending) - likelihood(*cause);
    if (order > 0 || (order == 0 && blames(*cause, ending))) cause = &ending;
  }
  if (cause == nullptr) return {};

  JobEnd job_end = describe(*cause);
  job_end.rank = cause->rank;
  job_end.consequence = cause->is_consequence();
  return job_end;
}

}  // namespace tessera::launch
