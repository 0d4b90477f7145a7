#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include "tessera/core/error.h"

namespace tessera::data {

/// A folder of the running test, gone with it.
class Folder {
 public:
  Folder() {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    path_ = std::filesystem::temp_directory_path() / ("tessera_data_" + std::to_string(getpid()) + "_" + test->name());
    for (auto& c : const_cast<std::string&>(path_.native())) c = c == '\\' ? '_' : c;
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

  std::filesystem::path write(const std::string& name, std::string_view bytes) const {
    std::ofstream(path_ / name, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

inline std::string slurp(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// One gzip member; with `index`, a header with the extra field that dictzip writes.
inline std::string gzip(std::string_view text, bool index = false) {
  z_stream stream{};
  deflateInit2(&stream, 9, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  gz_header header{};
  unsigned char extra[] = {'R', 'A', 6, 0, 1, 0, 0x10, 0, 0, 0};
  if (index) {
    header.extra = extra;
    header.extra_len = sizeof extra;
    deflateSetHeader(&stream, &header);
  }
  std::string out(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<unsigned char*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<unsigned char*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

/// The refusal that `body` ends in; fails the test where there is none.
template <class Body>
std::string refusal(Body&& body) {
  try {
    body();
  } catch (const ConfigError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no ConfigError";
  return "";
}

inline std::vector<int64_t> values(const at::Tensor& tensor) { return {tensor.const_data_ptr<int64_t>(), tensor.const_data_ptr<int64_t>() + tensor.numel()}; }

/// English-like text: lines of words drawn from a small vocabulary of their own.
inline std::string words(int lines, uint32_t seed = 1) {
  std::string text;
  uint32_t state = seed;
  const auto draw = [&](uint32_t n) { return (state = state * 1664525 + 1013904223) / 65536 % n; };
  static constexpr const char* syllables[] = {"ta", "re", "mi", "on", "the", "ing", "st", "al", "qu", "er", "lo", "ch", "en", "us", "or", "pa"};
  for (int l = 0; l < lines; ++l) {
    for (uint32_t w = 0, n = 3 + draw(9); w < n; ++w) {
      if (w) text += ' ';
      for (uint32_t s = 0, m = 1 + draw(4); s < m; ++s) text += syllables[draw(16)];
    }
    text += draw(5) ? "\n" : ".\n\n";
  }
  return text;
}

}  // namespace tessera::data
