#include "cli/progress_line.h"

#include <chrono>
#include <cstdio>
#include <system_error>
#include <utility>

namespace tessera::cli {

ProgressLine::ProgressLine() {
  try {
    thread_ = std::jthread([this](const std::stop_token& stop) { show(stop); });
  } catch (const std::system_error&) {  // no more threads are to be had: then there is no line
  }
}

ProgressLine::~ProgressLine() {
  thread_.request_stop();
  if (thread_.joinable()) thread_.join();
  if (shown_ && terminal_) std::fputs("\r\033[K", stderr);
}

void ProgressLine::say(std::string text) {
  const std::lock_guard lock(mutex_);
  text_ = std::move(text);
}

void ProgressLine::show(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  for (auto pause = std::chrono::milliseconds(2000); !ended_.wait_for(lock, stop, pause, [&] { return stop.stop_requested(); });) {
    std::fprintf(stderr, "%splan: %s%s", terminal_ ? "\r" : "", text_.c_str(), terminal_ ? "\033[K" : "\n");
    std::fflush(stderr);
    shown_ = true;
    pause = std::chrono::milliseconds(terminal_ ? 500 : 10000);
  }
}

}  // namespace tessera::cli
