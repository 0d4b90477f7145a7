#include "tessera/launch/output.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/core/log.h"

// A worker whose pipe is full stops in the middle of a print, so one thread reads all pipes as they fill, a bounded amount from each in turn. Of each stream
// the end is kept, for the sentence about a rank that failed. With a prefix, lines are held back until they are whole, or those of several ranks would mix.
//
// Nor may the console stop us: whoever reads it may stand still (a pager, Ctrl-S) for as long as he likes, and the job has to end at a signal all the same. So
// it is written to when it takes something, in pieces that it then takes at once, and a stream with text that waits for it is read no further, which slows its
// rank down as a console of its own would.

namespace tessera::launch {
namespace {

constexpr size_t kept_bytes = 8192;
constexpr int kept_lines = 20;
constexpr int most_chunks = 64;              ///< in a row from one stream, so that a rank that floods it does not silence the others
constexpr std::chrono::seconds patience{5};  ///< with a console that takes nothing, while a job is being ended

/// Whether all of it went out; otherwise errno says why not.
bool write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t size = write(descriptor, text.data(), text.size());
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) {  // somebody made our terminal or pipe non-blocking
      pollfd ready{.fd = descriptor, .events = POLLOUT, .revents = 0};
      poll(&ready, 1, 100);
      continue;
    }
    if (size < 0) return false;  // a closed console or a full disk must not end the run
    text.remove_prefix(static_cast<size_t>(size));
  }
  return true;
}

/// At least a piece of PIPE_BUF bytes, without a wait; also where the write will say why it cannot.
bool takes_text(int descriptor) {
  pollfd ready{.fd = descriptor, .events = POLLOUT, .revents = 0};
  return poll(&ready, 1, 0) > 0;
}

int open_log(const std::string& file) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(file).parent_path(), error);
  const int descriptor = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  require(descriptor >= 0, "--log-dir: ", file, " cannot be written (", std::strerror(errno), "); name a folder that can");
  return descriptor;
}

std::string last_lines_of(const std::string& text) {
  size_t begin = text.size();
  for (int lines = 0; begin > 0; --begin) {
    if (text[begin - 1] == '\n' && begin != text.size() && ++lines == kept_lines) break;
  }
  return text.substr(begin);
}

}  // namespace

struct Output::Stream {
  int rank;
  bool is_error;
  int pipe;  ///< our end; -1 once it is closed
  int console;
  int log;
  std::string file;
  std::string prefix;
  std::string line{};  ///< what came after the last end of line, where lines are kept whole
  Speakers& speakers;
  std::string unshown{};  ///< what waits for the console
  std::string tail{};
  bool lost = false;     ///< some of it is not in the file, which has been said
  bool dropped = false;  ///< some of it is not on the console, which has been said

  ~Stream() {
    if (pipe >= 0) close(pipe);
    if (log >= 0) close(log);
  }

  void take(std::string_view text) {
    if (log >= 0 && !write_all(log, text)) lose(errno);  // and the next is tried all the same: the disk may have room again
    if (console >= 0) show(text);
    tail.append(text);
    if (tail.size() > 2 * kept_bytes) tail.erase(0, tail.size() - kept_bytes);
  }

  void lose(int error) {
    if (std::exchange(lost, true)) return;
    tessera::log().warn("--log-dir: {}: not all that rank {} writes gets into this file ({}); the job goes on, make room there", file, rank,
                        std::strerror(error));
  }

  void show(std::string_view text) {
    if (prefix.empty()) {
      unshown.append(text);
    } else {
      line.append(text);
      size_t begin = 0;
      for (size_t end; (end = line.find('\n', begin)) != std::string::npos; begin = end + 1) unshown += prefix + line.substr(begin, end + 1 - begin);
      line.erase(0, begin);
    }
    flush();
  }

  /// As much as the console takes at once, but in the midst of another's line; whether it took anything.
  bool flush() {
    const Stream*& speaker = speakers[static_cast<size_t>(console)];
    if (speaker != nullptr && speaker != this) return false;
    size_t done = 0;
    while (done < unshown.size() && takes_text(console)) {
      const ssize_t size = write(console, unshown.data() + done, std::min<size_t>(unshown.size() - done, PIPE_BUF));
      if (size < 0 && errno == EINTR) continue;
      if (size < 0 && errno == EAGAIN) break;
      if (size < 0) {  // a closed console or a full disk must not end the run
        drop(std::strerror(errno));
        return true;
      }
      done += static_cast<size_t>(size);
    }
    if (done > 0) speaker = prefix.empty() || unshown[done - 1] == '\n' ? nullptr : this;
    unshown.erase(0, done);
    return done > 0;
  }

  void drop(const char* why) {
    unshown.clear();
    speakers[static_cast<size_t>(console)] = nullptr;
    if (std::exchange(dropped, true)) return;
    tessera::log().warn("standard {}: not all that rank {} writes gets there ({})", is_error ? "error" : "output", rank, why);
  }

  void finish() {
    if (!line.empty()) unshown += prefix + line + "\n";
    line.clear();
    flush();
    close(std::exchange(pipe, -1));
    if (log >= 0 && close(std::exchange(log, -1)) != 0) lose(errno);  // where a network's file system says so late
  }
};

Output::Output() : thread_([this] { carry(); }) {}

Output::~Output() {
  ending_ = true;
  wake_.ring();
  thread_.join();
}

void Output::hurry() { hurried_ = true; }

std::array<int, 2> Output::open(int rank, const OutputPlan& plan) {
  std::array<int, 2> ends{-1, -1};
  for (const int which : {0, 1}) {
    const StreamPlan& stream = which == 0 ? plan.out : plan.err;
    if (!stream.captured) continue;
    const int log = stream.file.empty() ? -1 : open_log(stream.file);
    int pipe[2];
    invariant(pipe2(pipe, O_CLOEXEC) == 0, "pipe: ", std::strerror(errno));
    fcntl(pipe[0], F_SETFL, O_NONBLOCK);
    const std::lock_guard lock(mutex_);
    streams_.push_back(std::unique_ptr<Stream>(new Stream{.rank = rank,
                                                          .is_error = which == 1,
                                                          .pipe = pipe[0],
                                                          .console = stream.console ? which + 1 : -1,
                                                          .log = log,
                                                          .file = stream.file,
                                                          .prefix = stream.prefix,
                                                          .speakers = speakers_}));
    ends[which] = pipe[1];
  }
  wake_.ring();
  return ends;
}

std::string Output::last_lines(int rank) {
  const std::lock_guard lock(mutex_);
  std::string lines;
  for (const auto& stream : streams_) {
    if (stream->rank == rank && stream->pipe >= 0) drain(*stream, /*all=*/true);
    if (stream->rank == rank && !stream->tail.empty() && (stream->is_error || lines.empty())) lines = last_lines_of(stream->tail);
  }
  return lines;
}

void Output::carry() {
  for (bool last = false; !last;) {
    last = ending_;
    std::vector<pollfd> ready{{.fd = wake_.descriptor(), .events = POLLIN, .revents = 0}};
    {
      const std::lock_guard lock(mutex_);
      for (const auto& stream : streams_) {
        if (!stream->unshown.empty()) {
          ready.push_back({.fd = stream->console, .events = POLLOUT, .revents = 0});
        } else if (stream->pipe >= 0) {
          ready.push_back({.fd = stream->pipe, .events = POLLIN, .revents = 0});
        }
      }
    }
    if (!last) poll(ready.data(), ready.size(), -1);
    wake_.silence();
    const std::lock_guard lock(mutex_);
    for (const auto& stream : streams_) {
      if (!stream->unshown.empty()) stream->flush();
      if (stream->pipe >= 0 && (last || stream->unshown.empty()) && (drain(*stream, last) || last)) stream->finish();
    }
  }
  show_the_rest();
}

/// What the console has not taken when all ranks have ended. A reader may take his time, unless somebody wants the job to end.
void Output::show_the_rest() {
  const auto waits = [](const auto& stream) { return !stream->unshown.empty(); };
  auto moved = std::chrono::steady_clock::now();
  while (std::ranges::any_of(streams_, waits)) {
    bool any = false;
    for (const auto& stream : streams_) any |= waits(stream) && stream->flush();
    if (any) {
      moved = std::chrono::steady_clock::now();
      continue;
    }
    if (CaughtSignals::one_waits() || (hurried_ && std::chrono::steady_clock::now() - moved > patience)) {
      for (const auto& stream : streams_) {
        if (waits(stream)) stream->drop("nobody reads it");
      }
      return;
    }
    const auto& first = *std::ranges::find_if(streams_, waits);
    pollfd ready{.fd = first->console, .events = POLLOUT, .revents = 0};
    poll(&ready, 1, 100);
  }
}

/// Whether the stream has ended. `all`: also what the console does not take.
bool Output::drain(Stream& stream, bool all) {
  char buffer[16384];
  for (int chunk = 0; chunk < most_chunks; ++chunk) {
    const ssize_t size = read(stream.pipe, buffer, sizeof buffer);
    if (size > 0) {
      stream.take({buffer, static_cast<size_t>(size)});
      if (!all && !stream.unshown.empty()) return false;
    } else if (size == 0) {
      return true;
    } else if (errno != EINTR) {
      return errno != EAGAIN;
    }
  }
  return false;
}

}  // namespace tessera::launch
