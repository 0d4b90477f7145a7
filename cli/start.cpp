// What the command is before it is anything else. Loading libtorch takes a third of a second, from a cold disk many; a program that is linked to it has no word
// in what a signal does meanwhile. So this one is linked to nothing, says what becomes of Ctrl-C, and only then loads the rest. Until somebody else takes
// over (a launcher, a run that can stop after a step and save), the answer is one sentence and exit code 1.
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

namespace {

constexpr const char* kCommands = "libtessera_cli.so";
constexpr const char* kEntry = "tessera_command";
constexpr int kBadInput = 2;

// On whichever thread, so nothing here may allocate or lock.
extern "C" void end_here(int signal) {
  const char* const sentence = signal == SIGINT ? "tessera: interrupted by SIGINT (interrupt); what was under way is not finished\n"
                                                : "tessera: interrupted by SIGTERM (terminated); what was under way is not finished\n";
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

}  // namespace

int main(int argc, char** argv) {
  hold_standard_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // then a write beyond `ulimit -f` fails as on a full disk, and whoever writes says so
  if (!is_a_rank()) {
    for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, end_here);
  }
  char folder[PATH_MAX];
  if (getcwd(folder, sizeof folder) == nullptr) {  // which libraries of libtorch do not survive
    std::fprintf(stderr, "tessera: the working directory cannot be found: %s; change to a folder that exists\n", std::strerror(errno));
    return kBadInput;
  }
  // Functions are looked up when first called: libtorch has fifty thousand, of which a command calls few.
  void* const commands = dlopen(kCommands, RTLD_LAZY | RTLD_GLOBAL);
  void* const entry = commands != nullptr ? dlsym(commands, kEntry) : nullptr;
  if (entry == nullptr) {
    std::fprintf(stderr, "tessera: %s; it belongs beside this program, or in ../lib\n", dlerror());
    return EXIT_FAILURE;
  }
  return reinterpret_cast<int (*)(int, char**)>(entry)(argc, argv);
}
