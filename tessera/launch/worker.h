#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include <sys/types.h>

/// One local process of a launch. Not part of the public surface.
namespace tessera::launch {

using Variables = std::map<std::string, std::string>;

/// The environment of this process.
Variables inherited_variables();

/// A file that exists in memory only and that other processes of this user open by `path()`, for as long as this object lives.
class MemoryFile {
 public:
  explicit MemoryFile(const char* name);
  ~MemoryFile();
  MemoryFile(MemoryFile&& other) noexcept;
  MemoryFile& operator=(MemoryFile&&) = delete;

  std::string path() const;
  std::string contents() const;

 private:
  int descriptor_;
};

/// Starts `command` in a process group of its own, so that a terminal's Ctrl-C reaches it through us, once; with standard input empty, `output` as standard
/// output and error (-1: ours), and a kernel's promise to kill it when the calling thread ends. Throws ConfigError naming the program and the error where it
/// cannot be started.
pid_t start_worker(const std::vector<std::string>& command, const Variables& variables, std::array<int, 2> output = {-1, -1});

}  // namespace tessera::launch
