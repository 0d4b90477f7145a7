#pragma once

#include <chrono>
#include <cstdio>
#include <string>

#include "tessera/train/observer.h"

namespace tessera {

/// Loss, tokens/s and time left. On a terminal one line, redrawn in place at most ten times a second; elsewhere plain lines, for the first step, the last, and
/// every `line_every_s` seconds between. Validations are lines of their own on both. What cannot be written
/// there, as on a full disk, is lost, and no error: the run is worth more than what tells of it.
class ProgressBar : public Observer {
 public:
  struct Options {
    std::FILE* out = stderr;
    bool terminal = false;  ///< redraw in place; is_terminal(out) says what `out` is
    int width = 0;          ///< columns; 0 = ask the terminal
    double line_every_s = 5;
  };
  static bool is_terminal(std::FILE* out);

  explicit ProgressBar(Options options);
  void on_start(const RunInfo& run) override;
  void after_step(const StepResult& result) override;
  void after_validation(const ValidationResult& result) override;
  void on_end(const RunEnd& end) override;

 private:
  using Clock = std::chrono::steady_clock;
  std::string numbers(const StepResult& result) const;
  std::string bar(const StepResult& result) const;
  void show(const std::string& text);
  void clear_bar();
  double eta_s(const StepResult& result) const;

  Options options_;
  RunInfo run_;
  Clock::time_point drawn_{};
  bool drawn_any_ = false, bar_on_screen_ = false;
  double smooth_step_s_ = 0;  // exponential mean of step_s, for tokens/s and the time left
};

}  // namespace tessera
