#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

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

}  // namespace tessera::testing_support
