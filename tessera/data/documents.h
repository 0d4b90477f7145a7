#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// What a text is taken for: one stream, or documents that are told apart. Files: each is one. Paragraphs: lines in a row that are not blank. Lines: those that
/// are not blank. A document keeps its line ends, and ends with the tokenizer's end-of-text id where it has one; blank lines belong to none.
enum class Documents { None, Files, Paragraphs, Lines };
std::string_view to_string(Documents documents);  ///< as data.documents names them
/// Throws ConfigError for another name; `knob` gave it.
Documents documents_named(const std::string& name, const std::string& knob = "data.documents");

/// Where the first document (lines or paragraphs) of `text` lies, blank lines before it left out: [begin, end). `whole`: nothing follows the text. End 0: none
/// is known to be complete, and blank lines end at `begin`.
struct FoundDocument {
  size_t begin = 0, end = 0;
};
FoundDocument find_document(std::string_view text, Documents documents, bool whole);

/// Tokens that lie beside each other in a window and in the text, each to predict the next: column `column + i` holds token `first + i`, and its label is token
/// `first + i + 1`.
struct Piece {
  int64_t column = 0, size = 0, first = 0;
  bool operator==(const Piece&) const = default;
};

/// Whole documents in windows, several in one: a document of d tokens takes d - 1 columns, for its last token is a label alone, and one of a single token
/// predicts nothing and takes none. Best fit, the longest documents first (arXiv:2404.10830): each goes to the fullest window that has room for it. In a window
/// documents lie in the order of the text, and so do windows, by their first one. A pure function of the lengths. Memory: 24 bytes a document, 8 a window;
/// time: a sort, and a look-up in a tree of at most seq_len nodes for each document.
class PackedWindows {
 public:
  /// `ends`: of each document, the token behind it. Throws ConfigError where one does not fit into `seq_len` columns, naming the longest, and how many.
  PackedWindows(const std::vector<int64_t>& ends, int64_t seq_len, const std::string& seq_len_knob = "data.seq_len");

  int64_t count() const { return static_cast<int64_t>(begins_.size()) - 1; }
  std::vector<Piece> window(int64_t window) const { return {pieces_.begin() + begins_[at(window)], pieces_.begin() + begins_[at(window) + 1]}; }
  int64_t targets(int64_t window) const;  ///< labels in it

 private:
  static size_t at(int64_t window) { return static_cast<size_t>(window); }

  std::vector<Piece> pieces_;
  std::vector<int64_t> begins_{0};  ///< of each window's pieces, and one past the last
};

}  // namespace tessera::data
