// What the command is before it is anything else. Loading libtorch takes a third of a second, from a cold disk many; a program that is linked to it has no word
// in what a signal does meanwhile. So this one is linked to nothing, says what becomes of Ctrl-C, and only then loads the rest. Until somebody else takes
// over (a launcher, a run that can stop after a step and save), the answer is one sentence and exit code 1.
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <new>

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include "cli/memory_limit.h"

namespace {

constexpr const char* kCommands = "libtessera_cli.so";
constexpr const char* kEntry = "tessera_command";
constexpr int kBadInput = 2;

// On whichever thread, so nothing here may allocate or lock.
extern "C" void end_here(int signal) {
  const char* const sentence = signal == SIGINT    ? "tessera: interrupted by SIGINT (interrupt); what was under way is not finished\n"
                               : signal == SIGTERM ? "tessera: interrupted by SIGTERM (terminated); what was under way is not finished\n"
                                                   : "tessera: interrupted by SIGHUP (hangup); what was under way is not finished\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, sentence, std::strlen(sentence));
  _exit(EXIT_FAILURE);
}

// Then whoever started us says what ended us, once for all ranks.
bool is_a_rank() {
  for (const char* variable : {"TESSERA_ERROR_FILE", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}) {
    if (std::getenv(variable) != nullptr) return true;
  }
  return false;
}

// A standard stream that is closed gives its number to the next file that is opened: a checkpoint or a packed text would take what is meant for the console.
// What stands in for standard output takes nothing, so that a result is not lost without a word.
void hold_standard_streams() {
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream) {
    if (fcntl(stream, F_GETFD) >= 0) continue;
    open("/dev/null", stream == STDERR_FILENO ? O_WRONLY : O_RDONLY);  // the lowest number that is free: this one
  }
}

// libtorch takes its stack for granted, and where that is small ends by a segmentation fault. Threads that are to come take the limit as it was when the
// process began, unless they are told.
bool has_a_stack() {
  constexpr rlim_t kLeast = rlim_t{256} << 10, kUsual = rlim_t{8} << 20;
  rlimit stack{};
  if (getrlimit(RLIMIT_STACK, &stack) != 0 || stack.rlim_cur >= kUsual) return true;
  if (stack.rlim_max < kLeast) {
    std::fprintf(stderr, "tessera: the stack is limited to %llu KiB (ulimit -s), and libtorch takes %llu at least: allow more, such as ulimit -s 8192\n",
                 static_cast<unsigned long long>(stack.rlim_max >> 10), static_cast<unsigned long long>(kLeast >> 10));
    return false;
  }
  stack.rlim_cur = stack.rlim_max < kUsual ? stack.rlim_max : kUsual;
  setrlimit(RLIMIT_STACK, &stack);
  pthread_attr_t threads;
  if (pthread_attr_init(&threads) == 0) {
    if (pthread_attr_setstacksize(&threads, stack.rlim_cur) == 0) pthread_setattr_default_np(&threads);
    pthread_attr_destroy(&threads);
  }
  return true;
}

// The OpenMP library of libtorch reads it before anybody can ask, and ends by a segmentation fault where it cannot start so many; what is no number it says so
// of in a sentence of its own, and ignores. Behind a comma stand those of threads of threads.
bool has_countable_threads() {
  constexpr long kMost = 1024;  // as run.threads
  const char* const text = std::getenv("OMP_NUM_THREADS");
  if (text == nullptr) return true;
  if (*text == '\0') return unsetenv("OMP_NUM_THREADS") == 0;  // as a script unsets it
  char* end = nullptr;
  const long threads = std::strtol(text, &end, 10);
  if (threads >= 1 && threads <= kMost && (*end == '\0' || *end == ',')) return true;
  std::fprintf(stderr, "tessera: OMP_NUM_THREADS = %s: expected at least 1 and at most %ld threads a rank; unset it, or set run.threads\n", text, kMost);
  return false;
}

constexpr size_t kSentence = 512;

std::terminate_handler usual_end = std::abort;

bool has_memory_limit() {
  rlimit limit{};
  return getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
}

// Libraries of libtorch allocate before anybody could catch what they throw, and so does a thread of anybody's.
[[noreturn]] void end_without_memory() {
  try {
    if (const auto thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::bad_alloc&) {
    char why[kSentence];
    tessera::cli::describe_memory_limit(why, sizeof why);
    std::fprintf(stderr, "tessera: out of memory: %s\n", why);
    _exit(EXIT_FAILURE);
  } catch (...) {
  }
  usual_end();
  std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  hold_standard_streams();
  if (!has_a_stack() || !has_countable_threads()) return kBadInput;
  std::signal(SIGXFSZ, SIG_IGN);  // then a write beyond `ulimit -f` fails as on a full disk, and whoever writes says so
  if (!is_a_rank()) {
    for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, end_here);
    struct sigaction hangup{};
    sigaction(SIGHUP, nullptr, &hangup);
    if (hangup.sa_handler != SIG_IGN) std::signal(SIGHUP, end_here);  // nohup means what it says, at every moment
  }
  char folder[PATH_MAX];
  if (getcwd(folder, sizeof folder) == nullptr) {  // which libraries of libtorch do not survive
    std::fprintf(stderr, "tessera: the working directory cannot be found: %s; change to a folder that exists\n", std::strerror(errno));
    return kBadInput;
  }
  usual_end = std::set_terminate(end_without_memory);
  // Functions are looked up when first called: libtorch has fifty thousand, of which a command calls few.
  void* const commands = dlopen(kCommands, RTLD_LAZY | RTLD_GLOBAL);
  void* const entry = commands != nullptr ? dlsym(commands, kEntry) : nullptr;
  if (entry == nullptr) {
    const char* const problem = dlerror();
    if (has_memory_limit() && std::strstr(problem, "failed to map segment") != nullptr) {
      char why[kSentence];
      tessera::cli::describe_memory_limit(why, sizeof why);
      std::fprintf(stderr, "tessera: out of memory: %s (%s)\n", why, problem);
      return EXIT_FAILURE;
    }
    std::fprintf(stderr, "tessera: %s; it belongs beside this program, or in ../lib\n", problem);
    return EXIT_FAILURE;
  }
  return reinterpret_cast<int (*)(int, char**)>(entry)(argc, argv);
}
