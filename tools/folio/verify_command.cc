#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <memory>
#include <optional>

#include "commands.hpp"
#include "folio/attention.hpp"
#include "folio/context.hpp"
#include "folio/types/error.hpp"
#include "folio/verify.hpp"
#include "json_output.hpp"
#include "progress.hpp"
#include "replay/eta.hpp"

namespace folio::cli {
namespace {

struct VerifyFlags {
  int64_t random = -1;
  int32_t strength = 0;
  uint64_t seed = 1;
  std::vector<std::string> cases;
  std::vector<std::string> kernels;
  std::string device = "cpu";
  bool allow_fp8_mma = false;
  bool list = false;
  bool quiet = false;
  std::string json;
};

constexpr int64_t kMostFailuresShown = 20;

struct Totals {
  int64_t run = 0, failed = 0, values = 0;
  double worst_share = 0.0;
  std::vector<std::pair<std::string, std::string>> failures;  ///< case, what differed
};

bool on_gpu(const VerifyFlags& flags) {
  return flags.device == "cuda";
}

std::vector<std::string> runnable_kernels(const VerifyFlags& flags) {
  return on_gpu(flags) ? verify::runnable_kernels(Context::cuda(0)) : verify::runnable_kernels();
}

void list_factors(const std::vector<std::string>& kernels) {
  fmt::print("kernels that run here: {}\n", fmt::join(kernels, ", "));
  fmt::print("a case names a level of each factor, the first one where it is silent:\n");
  for (const verify::FactorInfo& factor : verify::factors())
    fmt::print("  {:<14}{}\n", factor.name, fmt::join(factor.levels, "  "));
}

/// Throws if a kernel was asked for that does not run here; "" is whichever `prepare` picks.
void check_kernel(const std::string& kernel, const std::vector<std::string>& runnable) {
  if (kernel.empty() || std::find(runnable.begin(), runnable.end(), kernel) != runnable.end()) return;
  throw Error(ErrorCode::kInvalidArgument, fmt::format("kernel '{}': here run {}", kernel, fmt::join(runnable, ", ")));
}

/// Changes the cases of kernels that take e4m3 queries, keys and values at head_dim 128. The others stay.
void allow_fp8_mma(const Context& context, std::vector<verify::ConformanceCase>& cases) {
  AttentionConfig config;
  config.num_q_heads = config.num_kv_heads = 1;
  config.head_dim_qk = config.head_dim_v = 128;
  config.q = config.kv = DType::kFloat8E4M3;
  std::vector<std::string> refusing;
  for (const KernelAnswer& answer : explain(context, config)) {
    if (!answer.refusal.empty()) refusing.push_back(answer.name);
  }
  for (verify::ConformanceCase& one : cases) {
    if (std::find(refusing.begin(), refusing.end(), one.kernel) == refusing.end()) one = verify::with_fp8_mma(one);
  }
}

std::vector<verify::ConformanceCase> cases_of(const VerifyFlags& flags, const std::vector<std::string>& kernels,
                                              const std::vector<std::string>& runnable) {
  std::vector<verify::ConformanceCase> cases;
  for (const std::string& text : flags.cases) {
    cases.push_back(verify::parse_case(text));
    check_kernel(cases.back().kernel, runnable);
    const std::string reason = verify::invalid_reason(cases.back());
    if (!reason.empty()) throw Error(ErrorCode::kInvalidArgument, fmt::format("case '{}': {}", text, reason));
  }
  if (!flags.cases.empty()) return cases;
  if (flags.strength > 0) {
    verify::CoveringArray array = verify::covering_array(kernels, flags.strength, flags.seed);
    if (!flags.quiet) {
      fmt::print(stderr, "covering array: {} cases; {} of {} valid combinations of {} factors covered ({} in all)\n",
                 array.cases.size(), array.coverage.covered, array.coverage.valid, array.coverage.strength,
                 array.coverage.tuples);
    }
    cases = std::move(array.cases);
  }
  // 200 random cases are what a few seconds allow; with a covering array none unless asked for.
  const int64_t random = flags.random >= 0 ? flags.random : (flags.strength > 0 ? 0 : 200);
  std::vector<verify::ConformanceCase> drawn = verify::random_cases(kernels, random, flags.seed);
  cases.insert(cases.end(), std::make_move_iterator(drawn.begin()), std::make_move_iterator(drawn.end()));
  if (flags.allow_fp8_mma) allow_fp8_mma(on_gpu(flags) ? Context::cuda(0) : Context::cpu(), cases);
  return cases;
}

void add_failure(Totals& totals, const std::string& what, const std::string& why) {
  ++totals.failed;
  if (static_cast<int64_t>(totals.failures.size()) < kMostFailuresShown) totals.failures.emplace_back(what, why);
}

Totals run_cases(const VerifyFlags& flags, const std::vector<verify::ConformanceCase>& cases,
                 const std::atomic<bool>& stop) {
  Totals totals;
  Progress progress(flags.quiet);
  const replay::Stopwatch watch;
  for (const verify::ConformanceCase& one : cases) {
    if (stop.load(std::memory_order_relaxed)) break;
    const verify::CaseReport report = verify::run_case(one);
    ++totals.run;
    totals.values += report.values;
    totals.worst_share = std::max(totals.worst_share, report.worst_share);
    if (!report.passed) add_failure(totals, verify::to_string(one), report.failure);
    if (progress.due())
      progress.show(fmt::format(
          "{}/{} cases, {} failed{}", totals.run, cases.size(), totals.failed,
          replay::eta(static_cast<double>(totals.run) / static_cast<double>(cases.size()), watch.elapsed())));
  }
  return totals;
}

nlohmann::ordered_json json_of(const Totals& totals, size_t planned, bool interrupted) {
  nlohmann::ordered_json json = {{"cases", totals.run},
                                 {"planned", planned},
                                 {"failed", totals.failed},
                                 {"values", totals.values},
                                 {"worst_share_of_allowed", totals.worst_share},
                                 {"interrupted", interrupted},
                                 {"failures", nlohmann::ordered_json::array()}};
  for (const auto& [what, why] : totals.failures) json["failures"].push_back({{"case", what}, {"failure", why}});
  return json;
}

int run_verify(const VerifyFlags& flags) {
  const std::vector<std::string> runnable = runnable_kernels(flags);
  if (flags.list) {
    list_factors(runnable);
    return kSuccess;
  }
  const std::atomic<bool>& stop = interrupted_by_user();
  const std::vector<std::string> kernels = flags.kernels.empty() ? runnable : flags.kernels;
  for (const std::string& kernel : kernels) check_kernel(kernel, runnable);
  const std::vector<verify::ConformanceCase> cases = cases_of(flags, kernels, runnable);
  std::optional<replay::OutputFile> json_file = replay::output_file(flags.json);
  Totals totals = run_cases(flags, cases, stop);
  // Calls that must be refused give host memory, which a GPU cannot use where it does not refuse.
  if (flags.cases.empty() && !on_gpu(flags) && !stop.load()) {
    for (const std::string& kernel : kernels) {
      for (const std::string& line : verify::check_refusals(kernel)) add_failure(totals, "refusals of " + kernel, line);
    }
  }
  const bool interrupted = stop.load();
  if (json_file) write_json(json_of(totals, cases.size(), interrupted), *json_file);
  std::FILE* out = flags.json == "-" ? stderr : stdout;
  for (const auto& [what, why] : totals.failures) fmt::print(out, "FAILED {}\n  {}\n", what, why);
  if (!flags.quiet) {
    fmt::print(
        out,
        "{}{} of {} cases, {} failures; {} values compared with the float64 oracle, the worst at {:.0f}% of what "
        "is allowed\n",
        interrupted ? "interrupted: " : "", totals.run, cases.size(), totals.failed, totals.values,
        100.0 * totals.worst_share);
  }
  if (totals.failed > 0) return kCheckFailed;
  return interrupted ? kInterrupted : kSuccess;
}

}  // namespace

Command add_verify_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("verify", "Check this machine's kernels against the float64 oracle");
  auto flags = std::make_shared<VerifyFlags>();
  auto* random =
      command->add_option("--random", flags->random, "so many random cases (default 200, none beside --covering)")
          ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  auto* covering =
      command
          ->add_option("--covering", flags->strength, "cases that cover all combinations of so many factors: 1, 2 or 3")
          ->check(CLI::Range(1, 3));
  auto* cases =
      command->add_option("--case", flags->cases, "this case, as a failure prints it (may be repeated)")->expected(1);
  cases->excludes(random)->excludes(covering);
  cases->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--seed", flags->seed, "seed of random cases and of the covering array")->capture_default_str();
  command->add_option("--kernel", flags->kernels, "only these kernels (may be repeated)")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--device", flags->device, "whose kernels: cpu, or cuda for those of the first GPU")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command
      ->add_flag(
          "--allow-fp8-mma", flags->allow_fp8_mma,
          "allow FP8 MMA in random cases and those of the covering array, changed to have them where the kernel can")
      ->excludes(cases);
  command->add_flag("--list", flags->list, "list the kernels, the factors and their levels");
  command->add_option("--json", flags->json, "write the outcome as JSON; '-' = standard output")->type_name("FILE");
  command->add_flag("-q,--quiet", flags->quiet, "print failures only");
  command->footer("Exit code 1 if a case fails. Example: folio verify --random 500 --seed 7");
  return {command, [flags] { return run_verify(*flags); }};
}

}  // namespace folio::cli
