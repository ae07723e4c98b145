#pragma once

#include <cstddef>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace folio::testing {

/// The document tests/golden/<name>.json. Each has a "source": where its cases come from. Throws std::runtime_error.
inline nlohmann::json golden(const std::string& name) {
  const std::string path = FOLIO_SOURCE_DIR "/tests/golden/" + name + ".json";
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  nlohmann::json document = nlohmann::json::parse(file);
  if (!document.contains("source")) throw std::runtime_error(path + " does not say where its cases come from");
  return document;
}

/// One entry of a document's "cases" (or of another array of it), for tests with parameters.
struct GoldenCase {
  std::string name;
  nlohmann::json data;

  /// The field, or `otherwise` where the case leaves it out.
  template <typename T>
  T value(const char* field, T otherwise) const {
    return data.value(field, otherwise);
  }
  template <typename T>
  T at(const char* field) const {
    return data.at(field).get<T>();
  }
  std::vector<int32_t> ints(const char* field) const { return at<std::vector<int32_t>>(field); }
  friend std::ostream& operator<<(std::ostream& out, const GoldenCase& golden_case) { return out << golden_case.data; }
};

/// The entries, named by their "name" or by their place.
inline std::vector<GoldenCase> golden_cases(const std::string& name, const char* array = "cases") {
  std::vector<GoldenCase> cases;
  const nlohmann::json document = golden(name);
  for (const nlohmann::json& entry : document.at(array)) {
    std::string label = entry.value("name", "case_" + std::to_string(cases.size()));
    for (char& character : label) {
      const bool plain = (character >= 'a' && character <= 'z') || (character >= 'A' && character <= 'Z') ||
                         (character >= '0' && character <= '9');
      if (!plain) character = '_';
    }
    cases.push_back({label, entry});
  }
  if (cases.empty()) throw std::runtime_error("no cases in " + name);
  return cases;
}

/// For INSTANTIATE_TEST_SUITE_P.
inline constexpr auto golden_case_name = [](const auto& param_info) { return param_info.param.name; };

}  // namespace folio::testing
