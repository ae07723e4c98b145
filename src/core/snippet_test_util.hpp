#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <string>
#include <vector>

namespace folio::testing {

/// The lines of a file between the first one that holds `begin` and the next that holds `end`, without their first
/// `indent` characters. Fails the test if there are none such.
inline std::vector<std::string> lines_between(const std::string& path, const std::string& begin, const std::string& end,
                                              size_t indent) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (inside && line.find(end) != std::string::npos) return lines;
    if (inside) lines.push_back(line.substr(std::min(indent, line.size())));
    inside = inside || line.find(begin) != std::string::npos;
  }
  ADD_FAILURE() << path << " has no " << begin << " ... " << end;
  return {};
}

/// Expects that a document's C++ block is the code between `// [snippet]` and `// [/snippet]` in a test, which runs it.
inline void expect_document_shows_snippet(const std::string& document, const std::string& test) {
  EXPECT_EQ(lines_between(FOLIO_SOURCE_DIR "/" + document, "```cpp", "```", 0),
            lines_between(FOLIO_SOURCE_DIR "/" + test, "// [snippet]", "// [/snippet]", 2));
}

}  // namespace folio::testing
