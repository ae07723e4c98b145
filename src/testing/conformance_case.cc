#include <charconv>
#include <iterator>

#include "core/error.hpp"
#include "folio/verify.hpp"

namespace folio::inline v0::verify {
namespace {

std::string joined(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) text.append(text.empty() ? "" : ", ").append(name);
  return text;
}

uint64_t parse_seed(std::string_view value) {
  uint64_t seed = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), seed);
  core::require(error == std::errc() && end == value.data() + value.size() && !value.empty(), "seed is \"", value,
                "\"; it must be a number from 0 to 2^64 - 1");
  return seed;
}

void parse_factor(std::string_view name, std::string_view value, ConformanceCase& out) {
  const std::span<const FactorInfo> all = factors();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].name != name) continue;
    for (size_t l = 0; l < all[i].levels.size(); ++l) {
      if (all[i].levels[l] != value) continue;
      out.levels[i] = static_cast<uint8_t>(l);
      return;
    }
    core::fail(ErrorCode::kInvalidArgument, name, " is \"", value, "\"; it can be: ", joined(all[i].levels));
  }
  std::string names = "kernel, seed";
  for (const FactorInfo& factor : all) names.append(", ").append(factor.name);
  core::fail(ErrorCode::kInvalidArgument, "a case has no \"", name, "\"; it has: ", names);
}

}  // namespace

std::string to_string(const ConformanceCase& conformance_case) {
  std::string text;
  if (!conformance_case.kernel.empty()) text += "kernel=" + conformance_case.kernel + " ";
  text += "seed=" + std::to_string(conformance_case.seed);
  const std::span<const FactorInfo> all = factors();
  for (size_t i = 0; i < all.size(); ++i) {
    const uint8_t level = conformance_case.levels[i];
    if (level != 0) text.append(" ").append(all[i].name).append("=").append(all[i].levels[level]);
  }
  return text;
}

ConformanceCase parse_case(std::string_view text) {
  ConformanceCase out;
  while (!text.empty()) {
    const size_t begin = text.find_first_not_of(" \t\n");
    if (begin == std::string_view::npos) break;
    text.remove_prefix(begin);
    const std::string_view word = text.substr(0, text.find_first_of(" \t\n"));
    text.remove_prefix(word.size());
    const size_t equals = word.find('=');
    core::require(equals != std::string_view::npos, "\"", word, "\" is not of the form factor=level");
    const std::string_view name = word.substr(0, equals);
    const std::string_view value = word.substr(equals + 1);
    if (name == "kernel") {
      out.kernel = value;
    } else if (name == "seed") {
      out.seed = parse_seed(value);
    } else {
      parse_factor(name, value, out);
    }
  }
  return out;
}

}  // namespace folio::inline v0::verify
