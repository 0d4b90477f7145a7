#include "tessera/data/sample.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "tessera/data/text.h"

// How long a compressed text is, is known at its end. So the spacing adapts as it is read: keep every stretch until they are too many, then every other of them
// and of those to come, and so on. What is left at the end is evenly spaced over all of it.

namespace tessera::data {
namespace {

/// Keeps every stride-th stretch, and every other of those whenever they have become too many.
class Thinning {
 public:
  explicit Thinning(int64_t limit) : limit_(limit) {}

  void add(std::string stretch) {
    if (seen_++ % stride_ != 0) return;
    bytes_ += static_cast<int64_t>(stretch.size());
    kept_.push_back(std::move(stretch));
    while (limit_ > 0 && bytes_ > limit_ && kept_.size() > 1) thin();
  }

  std::vector<std::string> take() { return std::move(kept_); }

 private:
  void thin() {
    size_t n = 0;
    bytes_ = 0;
    for (size_t i = 0; i < kept_.size(); i += 2) {
      bytes_ += static_cast<int64_t>(kept_[i].size());
      if (n != i) kept_[n] = std::move(kept_[i]);
      ++n;
    }
    kept_.resize(n);
    stride_ *= 2;
  }

  int64_t limit_, bytes_ = 0, seen_ = 0, stride_ = 1;
  std::vector<std::string> kept_;
};

/// A line may be the whole file: one that goes on beyond `most` bytes of a stretch is cut there, at a character's begin.
struct Stretch {
  size_t least, most;

  /// Where the stretch that `text` begins with ends; nothing where the next block has to tell.
  std::optional<size_t> end(std::string_view text, bool more) const {
    const size_t newline = text.substr(0, most).find('\n', least);
    if (newline != std::string_view::npos) return newline + 1;
    if (text.size() <= most) return more ? std::nullopt : std::optional(text.size());
    size_t cut = most;
    constexpr size_t longest_character = 4;
    while (cut + longest_character > most + 1 && (static_cast<unsigned char>(text[cut]) & 0xc0) == 0x80) --cut;
    return cut;
  }
};

}  // namespace

std::vector<std::string> sample_text(const std::vector<std::filesystem::path>& files, int64_t bytes) {
  // At least 64 stretches make the sample, so that it sees all of the text.
  const size_t stretch_bytes = bytes > 0 ? static_cast<size_t>(std::clamp<int64_t>(bytes / 64, 1, 64 << 10)) : 64 << 10;
  constexpr size_t longest_line = 4096;  // of text that somebody wrote; its lines stay whole however small the sample is
  const Stretch stretch{.least = stretch_bytes, .most = std::max(4 * stretch_bytes, longest_line)};
  Thinning thinning(bytes);
  for (const auto& file : files) {
    TextReader reader(file);
    std::string text;
    for (bool more = true; more;) {
      more = reader.read(text, 1 << 20) > 0;
      size_t begin = 0;
      while (begin < text.size()) {
        const auto size = stretch.end(std::string_view(text).substr(begin), more);
        if (!size) break;
        thinning.add(text.substr(begin, *size));
        begin += *size;
      }
      text.erase(0, begin);
    }
  }
  return thinning.take();
}

}  // namespace tessera::data
