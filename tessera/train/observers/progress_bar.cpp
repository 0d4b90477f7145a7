#include "tessera/train/observers/progress_bar.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "tessera/core/format.h"

namespace tessera {

bool ProgressBar::is_terminal(std::FILE* out) { return ::isatty(::fileno(out)) == 1; }

ProgressBar::ProgressBar(Options options) : options_(options) {}

void ProgressBar::on_start(const RunInfo& run) {
  run_ = run;
  const std::string steps = run.first_step <= run.last_step ? fmt::format("steps {} to {}", run.first_step, run.last_step)
                                                            : fmt::format("step {} of {} is done already, and none is left", run.first_step - 1, run.last_step);
  show(fmt::format("{}: {} parameters, {} rank{}, {}\n", run.name, format_count(static_cast<double>(run.parameters)), run.ranks, run.ranks == 1 ? "" : "s",
                   steps));
}

namespace {

/// A NaN has no sign that says anything.
double unsigned_nan(double value) { return std::isnan(value) ? std::abs(value) : value; }

}  // namespace

double ProgressBar::eta_s(const StepResult& result) const { return smooth_step_s_ * static_cast<double>(std::max<int64_t>(0, run_.last_step - result.step)); }

std::string ProgressBar::numbers(const StepResult& result) const {
  const double tokens_per_s = smooth_step_s_ > 0 ? static_cast<double>(result.tokens) / smooth_step_s_ : 0;
  std::string out = fmt::format("loss {:.4f}  {} tok/s", unsigned_nan(result.loss), format_count(tokens_per_s));
  if (const auto busiest = result.extras.find("busiest_expert"); busiest != result.extras.end())
    out += fmt::format("  busiest expert {:.2f}x", busiest->second);
  if (result.step < run_.last_step) out += "  ETA " + format_duration(eta_s(result) < 1 ? eta_s(result) : std::round(eta_s(result)));
  return out;
}

std::string ProgressBar::bar(const StepResult& result) const {
  int width = options_.width;
  if (width == 0) {
    winsize size{};
    width = ::ioctl(::fileno(options_.out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
  }
  const std::string last = std::to_string(run_.last_step);
  const std::string before = fmt::format("step {:>{}}/{} [", result.step, last.size(), last), after = "] " + numbers(result);
  const int room = width - 1 - static_cast<int>(before.size() + after.size());  // a full line would wrap
  if (room < 4) return (before.substr(0, before.size() - 1) + after.substr(2)).substr(0, static_cast<size_t>(std::max(1, width - 1)));
  const int length = std::min(room, 40);
  const int done = run_.last_step > 0 ? static_cast<int>(length * std::min(result.step, run_.last_step) / run_.last_step) : 0;
  return before + std::string(static_cast<size_t>(done), '#') + std::string(static_cast<size_t>(length - done), '.') + after;
}

void ProgressBar::after_step(const StepResult& result) {
  // A mean over about ten steps: steady to the eye, and quick to follow a change.
  smooth_step_s_ = smooth_step_s_ == 0 ? result.step_s : 0.9 * smooth_step_s_ + 0.1 * result.step_s;
  const auto now = Clock::now();
  const double interval = options_.terminal ? 0.1 : options_.line_every_s;
  const bool due = !drawn_any_ || result.step >= run_.last_step || std::chrono::duration<double>(now - drawn_).count() >= interval;
  if (!due) return;
  drawn_any_ = true;
  drawn_ = now;
  if (options_.terminal) {
    show(fmt::format("\r{}\x1b[K", bar(result)));  // ESC [ K: clear to the end of the line
    bar_on_screen_ = true;
  } else {
    show(fmt::format("step {}/{}  {}\n", result.step, run_.last_step, numbers(result)));
  }
}

// What cannot be written is lost, and the run goes on: fmt::print would throw on a full disk.
void ProgressBar::show(const std::string& text) {
  std::fputs(text.c_str(), options_.out);
  std::fflush(options_.out);
}

void ProgressBar::clear_bar() {
  if (bar_on_screen_) show("\r\x1b[K");
  bar_on_screen_ = false;
}

void ProgressBar::after_validation(const ValidationResult& result) {
  clear_bar();
  show(fmt::format("step {}/{}  validation loss {:.4f}  {:.4f} bits per byte\n", result.step, run_.last_step, unsigned_nan(result.loss),
                   unsigned_nan(result.bits_per_byte)));
}

void ProgressBar::on_end(const RunEnd& end) {
  if (bar_on_screen_) show("\n");
  bar_on_screen_ = false;
  show(fmt::format("{} step {} in {}{}{}\n", end.finished ? "finished at" : "stopped after", end.step, format_duration(end.seconds),
                   end.reason.empty() ? "" : ": ", end.reason));
}

}  // namespace tessera
