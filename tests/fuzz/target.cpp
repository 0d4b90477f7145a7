#include "tests/fuzz/target.h"

#include <cstdlib>
#include <fstream>
#include <system_error>

namespace tessera::fuzz {
namespace {

class ScratchFolder {
 public:
  ScratchFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tessera_fuzz_XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error(pattern + ": cannot be made");
    path_ = pattern;
  }
  ~ScratchFolder() {
    std::error_code ignored;  // at the end of the process, nobody is left to tell
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace

std::filesystem::path scratch_file(const std::string& name, std::string_view bytes) {
  static const ScratchFolder folder;
  const auto path = folder.path() / name;
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  if (!out.good()) throw std::runtime_error(path.string() + ": cannot be written");
  return path;
}

std::map<std::string, Target>& targets() {
  static std::map<std::string, Target> all;
  return all;
}

}  // namespace tessera::fuzz
