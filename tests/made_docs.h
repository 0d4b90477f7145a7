#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

/// What of docs/ is made from the code: tests hold the committed files against what would be made now. Needs TESSERA_SOURCE_DIR (tests/CMakeLists.txt).
namespace tessera::testing_support {

inline std::string text_of_docs(const std::string& name) {
  std::ifstream file(std::filesystem::path(TESSERA_SOURCE_DIR) / "docs" / name);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

/// The file `name` of docs/ has to be `made`. With TESSERA_UPDATE_DOCS in the environment it is written first.
inline void expect_in_docs(const std::string& name, const std::string& made) {
  if (std::getenv("TESSERA_UPDATE_DOCS")) {
    const auto file = std::filesystem::path(TESSERA_SOURCE_DIR) / "docs" / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << made;
  }
  EXPECT_TRUE(text_of_docs(name) == made) << "docs/" << name << " is not what the code makes now: run this test with TESSERA_UPDATE_DOCS=1";
}

/// The same of a picture, which `page` has to show.
inline void expect_picture_in_docs(const std::string& name, const std::string& svg, const std::string& page) {
  expect_in_docs("pictures/" + name, svg);
  EXPECT_NE(text_of_docs(page).find("pictures/" + name), std::string::npos) << page << " does not show " << name;
}

/// What stands between `//: name` and `//:` in `source`, by name, without the indentation its lines share.
inline std::map<std::string, std::string> snippets_of(const std::string& source) {
  std::ifstream file(std::filesystem::path(TESSERA_SOURCE_DIR) / source);
  std::map<std::string, std::string> found;
  std::string line, name;
  size_t indent = 0;
  while (std::getline(file, line)) {
    const size_t text = line.find_first_not_of(' ');
    const std::string trimmed = text == std::string::npos ? "" : line.substr(text);
    if (trimmed == "//:") {
      name.clear();
    } else if (trimmed.starts_with("//: ")) {
      name = trimmed.substr(4);
      indent = text;
      EXPECT_TRUE(found.emplace(name, "").second) << name;
    } else if (!name.empty()) {
      found[name] += (line.size() > indent ? line.substr(indent) : "") + "\n";
    }
  }
  return found;
}

/// Blocks of C++ on a page.
inline std::vector<std::string> code_of(const std::string& text) {
  std::istringstream lines(text);
  std::vector<std::string> blocks;
  std::string line;
  bool inside = false;
  while (std::getline(lines, line)) {
    if (line == "```cpp") {
      inside = true;
      blocks.emplace_back();
    } else if (line == "```") {
      inside = false;
    } else if (inside) {
      blocks.back() += line + "\n";
    }
  }
  return blocks;
}

/// All C++ on the page `name` of docs/ has to be a snippet of `source`, and all snippets have to be on the page; of a source for several pages those whose
/// names begin with `prefix`.
inline void expect_page_shows(const std::string& name, const std::string& source, const std::string& prefix = "") {
  auto left = snippets_of(source);
  std::erase_if(left, [&](const auto& snippet) { return !snippet.first.starts_with(prefix); });
  for (const std::string& block : code_of(text_of_docs(name))) {
    const auto shown = std::find_if(left.begin(), left.end(), [&](const auto& snippet) { return snippet.second == block; });
    EXPECT_NE(shown, left.end()) << "docs/" << name << " shows code that " << source << " does not run:\n" << block;
    if (shown != left.end()) left.erase(shown);
  }
  for (const auto& [snippet, text] : left) ADD_FAILURE() << "docs/" << name << " does not show the snippet " << snippet << ":\n" << text;
}

}  // namespace tessera::testing_support
