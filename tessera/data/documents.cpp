#include "tessera/data/documents.h"

#include <algorithm>
#include <array>
#include <map>

#include "tessera/core/error.h"

// Packing only looks at lengths, so every rank makes the same windows by itself and knows what lies in those that it does not read. Longest first leaves the
// short documents, which fit anywhere, to fill what is left; sorting by the text afterwards keeps an unshuffled epoch in its order.

namespace tessera::data {

namespace {

constexpr std::array<std::string_view, 4> kNames{"none", "files", "paragraphs", "lines"};

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r\n\v\f") == std::string_view::npos; }

}  // namespace

std::string_view to_string(Documents documents) { return kNames[static_cast<size_t>(documents)]; }

Documents documents_named(const std::string& name, const std::string& knob) {
  const auto found = std::ranges::find(kNames, name);
  require(found != kNames.end(), knob, " = ", name, ": expected none, files, paragraphs or lines");
  return static_cast<Documents>(found - kNames.begin());
}

FoundDocument find_document(std::string_view text, Documents documents, bool whole) {
  FoundDocument found;
  for (size_t line = 0; line < text.size();) {
    const size_t newline = text.find('\n', line);
    if (newline == std::string_view::npos && !whole) break;
    const size_t next = newline == std::string_view::npos ? text.size() : newline + 1;
    const bool blank = is_blank(text.substr(line, next - line));
    const bool begun = found.end > 0;
    if (blank && begun) return found;
    if (blank) {
      found.begin = next;
    } else {
      found.end = next;
      if (documents == Documents::Lines) return found;
    }
    line = next;
  }
  if (!whole) found.end = 0;  // a paragraph that may go on
  return found;
}

PackedWindows::PackedWindows(const std::vector<int64_t>& ends, int64_t seq_len, const std::string& seq_len_knob) {
  std::vector<Piece> documents;
  int64_t begin = 0, longest = 0, too_long = 0;
  for (const int64_t end : ends) {
    const Piece piece{.column = 0, .size = end - begin - 1, .first = begin};
    begin = end;
    if (piece.size <= 0) continue;
    longest = std::max(longest, piece.size);
    too_long += piece.size > seq_len ? 1 : 0;
    documents.push_back(piece);
  }
  require(too_long == 0, seq_len_knob, " = ", seq_len, ": a window holds whole documents, and ", too_long, " of ", documents.size(),
          " are longer than it; the longest has ", longest + 1, " tokens, of which the last is only predicted: set ", seq_len_knob, " = ", longest,
          " or more, as far as model.max_seq_len goes, or cut the text into shorter ones (data.documents = paragraphs where it is files, lines where it is "
          "paragraphs)");
  std::ranges::stable_sort(documents, std::greater<>(), &Piece::size);
  std::vector<std::vector<Piece>> windows;
  std::map<int64_t, std::vector<size_t>> by_room;  // windows that still have some
  for (const Piece& document : documents) {
    auto fullest = by_room.lower_bound(document.size);
    if (fullest == by_room.end()) {
      windows.emplace_back();
      fullest = by_room.insert({seq_len, {windows.size() - 1}}).first;
    }
    const auto [room, window] = std::pair(fullest->first, fullest->second.back());
    fullest->second.pop_back();
    if (fullest->second.empty()) by_room.erase(fullest);
    windows[window].push_back(document);
    if (room > document.size) by_room[room - document.size].push_back(window);
  }
  for (auto& window : windows) std::ranges::sort(window, {}, &Piece::first);
  std::ranges::sort(windows, {}, [](const auto& window) { return window.front().first; });
  pieces_.reserve(documents.size());
  for (const auto& window : windows) {
    int64_t column = 0;
    for (Piece piece : window) {
      piece.column = column;
      column += piece.size;
      pieces_.push_back(piece);
    }
    begins_.push_back(static_cast<int64_t>(pieces_.size()));
  }
}

int64_t PackedWindows::targets(int64_t window) const {
  const Piece& last = pieces_[at(begins_[at(window) + 1]) - 1];
  return last.column + last.size;
}

}  // namespace tessera::data
