#include "tessera/data/text.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <zlib.h>

#include "tessera/core/error.h"
#include "tessera/core/file_type.h"

namespace tessera::data {

struct TextReader::State {
  std::filesystem::path file;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> in{nullptr, std::fclose};
  std::array<unsigned char, 1 << 16> buffer;
  bool compressed = false, inflating = false, in_member = false;
  int64_t read_bytes = 0;  // of the file, what lies in the buffer included
  z_stream stream{};

  ~State() {
    if (inflating) inflateEnd(&stream);
  }

  int64_t offset() const { return read_bytes - stream.avail_in; }

  /// Refills the empty buffer; false at the end of the file.
  bool refill() {
    stream.next_in = buffer.data();
    stream.avail_in = static_cast<uInt>(std::fread(buffer.data(), 1, buffer.size(), in.get()));
    read_bytes += stream.avail_in;
    require(!std::ferror(in.get()), file.string(), ": cannot be read at offset ", read_bytes, ": ", std::strerror(errno));
    return stream.avail_in > 0;
  }

  size_t read_plain(char* out, size_t bytes) {
    size_t done = 0;
    while (done < bytes && (stream.avail_in > 0 || refill())) {
      const size_t n = std::min<size_t>(bytes - done, stream.avail_in);
      std::memcpy(out + done, stream.next_in, n);
      stream.next_in += n;
      stream.avail_in -= static_cast<uInt>(n);
      done += n;
    }
    return done;
  }

  size_t read_compressed(char* out, size_t bytes) {
    stream.next_out = reinterpret_cast<unsigned char*>(out);
    stream.avail_out = static_cast<uInt>(bytes);
    while (stream.avail_out > 0) {
      if (stream.avail_in == 0 && !refill()) {
        require(!in_member, file.string(), ": truncated at offset ", offset(), ": the compressed data goes on; copy the file again");
        break;
      }
      // A gzip file is members one after another; what follows the last is a new member or nothing.
      if (!in_member) {
        inflateReset(&stream);
        in_member = true;
      }
      const int result = inflate(&stream, Z_NO_FLUSH);
      require(result == Z_OK || result == Z_STREAM_END || result == Z_BUF_ERROR, file.string(), ": damaged at offset ", offset(), ": ",
              stream.msg ? stream.msg : "no gzip data", "; copy the file again");
      if (result == Z_STREAM_END) in_member = false;
    }
    return bytes - stream.avail_out;
  }
};

TextReader::TextReader(std::filesystem::path file) : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.file = std::move(file);
  std::error_code error;
  require(is_there(s.file), s.file.string(), ": no such file");
  require(!std::filesystem::is_directory(s.file, error), s.file.string(), ": is a folder, not a text file");
  require(std::filesystem::is_regular_file(s.file, error), s.file.string(), ": is not a regular file; name a text");  // or it might never end, or never begin
  s.in.reset(std::fopen(s.file.c_str(), "rb"));
  require(s.in != nullptr, s.file.string(), ": cannot be opened: ", std::strerror(errno));
  const std::string extension = s.file.extension().string();
  s.compressed = extension == ".gz" || extension == ".dz";
  if (s.compressed) {
    invariant(inflateInit2(&s.stream, 15 + 16) == Z_OK, "inflateInit2");  // 15: any window; 16: gzip headers only
    s.inflating = s.in_member = true;
  }
}

TextReader::~TextReader() = default;

size_t TextReader::read(std::string& text, size_t bytes) {
  const size_t before = text.size();
  text.resize(before + bytes);
  const size_t got = state_->compressed ? state_->read_compressed(text.data() + before, bytes) : state_->read_plain(text.data() + before, bytes);
  text.resize(before + got);
  return got;
}

std::string read_text(const std::filesystem::path& file) {
  TextReader reader(file);
  std::string text;
  while (reader.read(text, 4 << 20) > 0) {
  }
  return text;
}

}  // namespace tessera::data
