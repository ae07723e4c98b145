#include "folio/verify.hpp"

#include <nanobind/stl/pair.h>

#include <string>
#include <utility>
#include <vector>

#include "fields.hpp"
#include "gil.hpp"
#include "views.hpp"

/// Conformance: generated attention problems against the oracle. Cases are the strings that reproduce them.
namespace folio::python {
namespace {

std::vector<std::string> texts_of(const std::vector<verify::ConformanceCase>& cases) {
  std::vector<std::string> texts;
  for (const verify::ConformanceCase& one : cases) texts.push_back(verify::to_string(one));
  return texts;
}

nb::dict factors() {
  nb::dict all;
  for (const verify::FactorInfo& factor : verify::factors()) {
    nb::list levels;
    for (const std::string_view level : factor.levels) levels.append(std::string(level));
    all[std::string(factor.name).c_str()] = levels;
  }
  return all;
}

void bind_reports(nb::module_& m) {
  using R = verify::CaseReport;
  fields_of<R>("CaseReport", "What became of a conformance case. Its fields:",
               field("passed", &R::passed, "whether it agrees with the oracle and touched nothing else"),
               field("failure", &R::failure, "what differed, where, and by how much; empty if it passed"),
               field("values", &R::values, "output and LSE values that were compared"),
               field("worst_share", &R::worst_share, "the largest error as a share of what was allowed"))
      .bind_answer(m);
  using C = verify::Coverage;
  fields_of<C>("Coverage",
               "What a covering array covers; a tuple is a choice of levels of `strength` factors. Its fields:",
               field("strength", &C::strength, "factors of a tuple"), field("tuples", &C::tuples, "all combinations"),
               field("valid", &C::valid, "those that some valid case has"),
               field("covered", &C::covered, "those that some case of the array has"))
      .bind_answer(m);
}

}  // namespace

void bind_verify(nb::module_& m) {
  bind_reports(m);
  m.def("conformance_factors", &factors, nb::sig("def conformance_factors() -> dict[str, list[str]]"),
        "The factors of conformance cases with their levels; the first one is what a case's text leaves out.");
  m.def(
      "runnable_kernels",
      [](const Context* context) {
        return context == nullptr ? verify::runnable_kernels() : verify::runnable_kernels(*context);
      },
      nb::arg("context") = nb::none(),
      "The kernels that this machine can run on a context's device, the preferred first; without one: the CPU's.");
  m.def(
      "random_cases",
      [](const std::vector<std::string>& kernels, int64_t count, uint64_t seed) {
        const auto cases = [&] {
          const ReleasedGil released;
          return verify::random_cases(kernels, count, seed);
        }();
        return texts_of(cases);
      },
      nb::arg("kernels"), nb::arg("count"), nb::arg("seed") = 1,
      "So many valid cases drawn at random, \"kernel=generic-v4 seed=7 dtypes=bf16/e4m3/bf16\": the same every time.");
  m.def(
      "covering_array",
      [](const std::vector<std::string>& kernels, int32_t strength, uint64_t seed) {
        const verify::CoveringArray array = [&] {
          const ReleasedGil released;
          return verify::covering_array(kernels, strength, seed);
        }();
        return std::pair(texts_of(array.cases), array.coverage);
      },
      nb::arg("kernels"), nb::arg("strength") = 3, nb::arg("seed") = 1,
      "(cases, Coverage): every valid combination of levels of `strength` (1 to 3) factors occurs in one. Seconds.");
  m.def(
      "run_case",
      [](const std::string& text) {
        const ReleasedGil released;
        return verify::run_case(verify::parse_case(text));
      },
      nb::arg("case"),
      "Builds a case, runs it and checks it against the float64 oracle, with poisoned and guarded memory around it: a "
      "stray access crashes. Raises InvalidArgument for a text that it cannot use, saying what it could have been.");
  m.def(
      "check_refusals",
      [](const std::string& kernel) {
        const ReleasedGil released;
        return verify::check_refusals(kernel);
      },
      nb::arg("kernel"), "Calls that one kernel must refuse: a line for each that it did not refuse; empty: all well.");
}

}  // namespace folio::python
