#include "tessera/data/text.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>

#include <zlib.h>

#include "tessera/core/error.h"
#include "tessera/core/file_type.h"

// Tokenizers take any bytes: what is no text would be trained on as it stands, with a loss that looks like one. So a file that begins as no text does is
// refused, and so is one that unfolds to such a beginning. Only what cannot begin a text counts: each mark has a byte that is not UTF-8 or a control
// character, beside its letters.

namespace tessera::data {
namespace {

using namespace std::string_view_literals;

constexpr std::string_view gzip_mark = "\x1f\x8b"sv;

struct Mark {
  std::string_view bytes, what;
};
constexpr Mark compressed_marks[] = {{"\x28\xb5\x2f\xfd"sv, "zstd data"},
                                     {"\xfd"
                                      "7zXZ\0"sv,
                                      "xz data"},
                                     {"PK\x03\x04"sv, "a zip archive"},
                                     {"7z\xbc\xaf\x27\x1c"sv, "a 7z archive"},
                                     {"\x04\x22\x4d\x18"sv, "lz4 data"},
                                     {"PAR1\x15"sv, "a Parquet file"}};
constexpr std::string_view utf16_marks[] = {"\xff\xfe"sv, "\xfe\xff"sv, "\0\0\xfe\xff"sv};

/// Behind the letters "BZh", which may begin a text, a digit and the mark of a block, or of the end.
bool is_bzip2(std::string_view begin) {
  constexpr std::string_view letters = "BZh";
  const size_t digit = letters.size();
  if (!begin.starts_with(letters) || begin.size() <= digit || begin[digit] < '1' || begin[digit] > '9') return false;
  const std::string_view block = begin.substr(digit + 1);
  return block.starts_with("\x31\x41\x59\x26\x53\x59"sv) || block.starts_with("\x17\x72\x45\x38\x50\x90"sv);
}

/// Behind the mark, a version of two bytes at most.
bool is_packed_corpus(std::string_view begin) { return begin.starts_with("TESSCORP") && begin.size() >= 12 && begin.substr(10, 2) == "\0\0"sv; }

/// In the first entry's header, as POSIX and GNU write it.
bool is_tar(std::string_view begin) {
  constexpr size_t place = 257;
  if (begin.size() < place) return false;
  const std::string_view mark = begin.substr(place);
  return mark.starts_with("ustar\0"sv) || mark.starts_with("ustar  \0"sv);
}

/// What a file that begins so is, by the programs that write it; empty: it may be text.
std::string_view packed_as(std::string_view begin) {
  for (const auto& [bytes, what] : compressed_marks) {
    if (begin.starts_with(bytes)) return what;
  }
  return is_bzip2(begin) ? "bzip2 data" : "";
}

/// `begin`: the first bytes of what is read as text, in which `is` says how they lie in the file ("is", "holds").
void check_text(const std::string& file, std::string_view begin, std::string_view is) {
  require(!is_packed_corpus(begin), file, ": ", is, " a packed corpus; name the text it was made from");
  require(!is_tar(begin), file, ": ", is, " a tar archive, whose names and sizes are no text; unpack it, and name the texts in it");
  const std::string_view packed = packed_as(begin);
  require(packed.empty(), file, ": ", is, " ", packed, ", and a text is plain, or gzip data in a .gz; unpack it, or compress it as .gz");
  for (const std::string_view bytes : utf16_marks) {
    require(!begin.starts_with(bytes), file, ": ", is, " UTF-16 or UTF-32, by its first bytes, and a text is UTF-8; convert it (iconv -t UTF-8)");
  }
}

/// `begin`: the first bytes of a file. `zipped`: its name ends in .gz or .dz.
void check_begin(const std::string& file, std::string_view begin, bool zipped) {
  const bool gzip = begin.starts_with(gzip_mark);
  if (zipped) {
    require(gzip || begin.size() < gzip_mark.size(), file, ": is no gzip data, which its name says; name it as what it is, or copy the file again");
    return;
  }
  require(!gzip, file, ": is gzip data, which is read as such where its name ends in .gz or .dz; name it so, or unpack it");
  check_text(file, begin, "is");
}

/// `begin`: the first bytes that a .gz or .dz unfolds to.
void check_inflated(const std::string& file, std::string_view begin) {
  require(!begin.starts_with(gzip_mark), file, ": holds gzip data once more, and is unpacked once; unpack it, and name what it holds");
  check_text(file, begin, "holds");
}

}  // namespace

struct TextReader::State {
  std::string name;  // for messages
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> in{nullptr, std::fclose};
  std::array<unsigned char, 1 << 16> buffer;
  bool compressed = false, inflating = false, in_member = false;
  int64_t read_bytes = 0;  // of the file, what lies in the buffer included
  std::string begin;       // of what the compressed data unfolds to, looked at already and not yet given
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
    require(!std::ferror(in.get()), name, ": cannot be read at offset ", read_bytes, ": ", std::strerror(errno));
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
    const size_t seen = std::min(bytes, begin.size());
    std::memcpy(out, begin.data(), seen);
    begin.erase(0, seen);
    return seen + inflate_into(out + seen, bytes - seen);
  }

  /// To the end of the file.
  void skip_padding() {
    while (stream.avail_in > 0 || refill()) {
      const size_t zeros = std::string_view(reinterpret_cast<const char*>(stream.next_in), stream.avail_in).find_first_not_of('\0');
      const size_t skipped = std::min<size_t>(zeros, stream.avail_in);
      stream.next_in += skipped;
      stream.avail_in -= static_cast<uInt>(skipped);
      require(stream.avail_in == 0, name, ": damaged at offset ", offset(), ": something follows the zero bytes that pad its end; copy the file again");
    }
  }

  size_t inflate_into(char* out, size_t bytes) {
    stream.next_out = reinterpret_cast<unsigned char*>(out);
    stream.avail_out = static_cast<uInt>(bytes);
    while (stream.avail_out > 0) {
      if (stream.avail_in == 0 && !refill()) {
        require(!in_member, name, ": truncated at offset ", offset(), ": the compressed data goes on; copy the file again");
        break;
      }
      // A gzip file is members one after another; what follows the last is a new member, or nothing but zero bytes (of whoever writes whole blocks).
      if (!in_member) {
        if (*stream.next_in == 0) {
          skip_padding();
          break;
        }
        inflateReset(&stream);
        in_member = true;
      }
      const int result = inflate(&stream, Z_NO_FLUSH);
      require(result == Z_OK || result == Z_STREAM_END || result == Z_BUF_ERROR, name, ": damaged at offset ", offset(), ": ",
              stream.msg ? stream.msg : "no gzip data", "; copy the file again");
      if (result == Z_STREAM_END) in_member = false;
    }
    return bytes - stream.avail_out;
  }
};

TextReader::TextReader(const std::filesystem::path& file, const std::string& knob) : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.name = (knob.empty() ? "" : knob + ": ") + file.string();
  std::error_code error;
  require(is_there(file), s.name, ": no such file");
  require(!std::filesystem::is_directory(file, error), s.name, ": is a folder, not a text file");
  require(std::filesystem::is_regular_file(file, error), s.name, ": is not a regular file; name a text");  // or it might never end, or never begin
  s.in.reset(std::fopen(file.c_str(), "rb"));
  require(s.in != nullptr, s.name, ": cannot be opened: ", std::strerror(errno));
  const std::string extension = file.extension().string();
  s.compressed = extension == ".gz" || extension == ".dz";
  s.refill();
  check_begin(s.name, {reinterpret_cast<const char*>(s.stream.next_in), s.stream.avail_in}, s.compressed);
  if (s.compressed) {
    invariant(inflateInit2(&s.stream, 15 + 16) == Z_OK, "inflateInit2");  // 15: any window; 16: gzip headers only
    s.inflating = s.in_member = true;
    constexpr size_t looked_at = 512;  // a header of tar
    s.begin.resize(looked_at);
    s.begin.resize(s.inflate_into(s.begin.data(), looked_at));
    check_inflated(s.name, s.begin);
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
