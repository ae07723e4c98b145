#include "attention_flags.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <map>
#include <vector>

#include "folio/log.hpp"
#include "replay/model_shape.hpp"

namespace folio::cli {
namespace {

using replay::KvLayout;

const std::map<std::string, DType> kDTypes = {
    {"float32", DType::kFloat32},     {"fp32", DType::kFloat32},      {"float16", DType::kFloat16},
    {"fp16", DType::kFloat16},        {"bfloat16", DType::kBFloat16}, {"bf16", DType::kBFloat16},
    {"fp8_e4m3", DType::kFloat8E4M3}, {"e4m3", DType::kFloat8E4M3},   {"fp8_e5m2", DType::kFloat8E5M2},
    {"e5m2", DType::kFloat8E5M2},     {"int8", DType::kInt8}};
const std::map<std::string, KvLayout> kLayouts = {{"recommended", KvLayout::kRecommended},
                                                  {"strided-nhd", KvLayout::kStridedNhd},
                                                  {"strided-hnd", KvLayout::kStridedHnd},
                                                  {"cpu-packed", KvLayout::kCpuPacked}};
const std::map<std::string, Determinism> kDeterminism = {{"none", Determinism::kNone},
                                                         {"run-to-run", Determinism::kRunToRun},
                                                         {"batch-invariant", Determinism::kBatchInvariant},
                                                         {"schedule-invariant", Determinism::kScheduleInvariant}};

template <typename Value>
std::vector<std::string> names_of(const std::map<std::string, Value>& values) {
  std::vector<std::string> names;
  names.reserve(values.size());
  for (const auto& entry : values) names.push_back(entry.first);
  return names;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const replay::ModelShape& shape : replay::model_shapes()) names.emplace_back(shape.name);
  return names;
}

/// Reads a name of `names`; otherwise the error lists them.
template <typename Value>
void add_named_option(CLI::App& app, const std::string& flag, Value& value, const std::map<std::string, Value>& names,
                      const std::string& type, const std::string& help) {
  app.add_option_function<std::string>(
         flag,
         [&value, &names, flag](const std::string& name) {
           const auto found = names.find(name);
           if (found != names.end()) {
             value = found->second;
             return;
           }
           throw CLI::ValidationError(flag, fmt::format("'{}' is none of {}", name, fmt::join(names_of(names), ", ")));
         },
         help)
      ->type_name(fmt::format("{}:{{{}}}", type, fmt::join(names_of(names), ",")));
}

}  // namespace

void add_dtype_option(CLI::App& app, const std::string& name, DType& value, const std::string& help) {
  add_named_option(app, name, value, kDTypes, "DTYPE", help);
}

void AttentionFlags::add_to(CLI::App& app, bool with_layers) {
  app.add_option("--model", model,
                 "a model's shape by name, of which the options below override parts; folio info --models tells more")
      ->type_name(fmt::format("MODEL:{{{}}}", fmt::join(model_names(), ",")))
      ->capture_default_str();
  app.add_option("--num-q-heads", num_q_heads, "query heads: a multiple of the KV heads");
  app.add_option("--num-kv-heads", num_kv_heads, "KV heads");
  app.add_option("--head-dim", head_dim, "components of a query and a key: a multiple of 8");
  app.add_option("--head-dim-v", head_dim_v, "components of a value, if different");
  app.add_option("--window", window, "sliding window: keys seen to the left of the query, besides itself; -1 = none");
  app.add_option("--soft-cap", soft_cap, "cap on logits, c * tanh(x / c); 0 = none");
  if (with_layers)
    app.add_option("--layers", layers, "attention layers; 0 = as many as the model has")
        ->check(CLI::Range(0, 1024))
        ->capture_default_str();
  app.add_option("--page-size", page_size, "tokens per page")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  add_dtype_option(app, "--q-dtype", q, "queries (outputs are the same, bf16 for fp8 queries)");
  add_dtype_option(app, "--kv-dtype", kv, "KV cache (also int8, with a scale a token and KV head)");
  add_named_option(app, "--kv-format", layout, kLayouts, "FORMAT",
                   "KV cache layout: recommended (what runs fastest here), strided-nhd, strided-hnd, cpu-packed");
  add_named_option(
      app, "--determinism", determinism, kDeterminism, "LEVEL",
      "what must not change a result's bits: none, run-to-run (default), batch-invariant, schedule-invariant");
  app.add_option("--threads", threads, "threads; 0 = as many as the process may run on")->check(CLI::Range(0, 1024));
  app.add_option("--device", device, "where attention runs: cpu, or cuda for the first GPU")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--kernel", kernel,
                 "the attention kernel to use, by name (see folio info --explain); refused if it cannot");
  app.add_flag("--allow-fp8-mma", allow_fp8_mma,
               "speed before accuracy: kernels that can multiply fp8 queries, keys, values and p as they are");
  app.add_option("--log", log, "what the library tells of itself, on standard error: info (kernels), debug (plans too)")
      ->check(CLI::IsMember({"info", "debug"}));
  app.add_flag("--nvtx", nvtx, "NVTX ranges around plan and run, for Nsight Systems");
}

replay::StackConfig AttentionFlags::stack(int32_t scale) const {
  const replay::ModelShape& shape = replay::find_model(model);
  replay::StackConfig stack;
  stack.num_layers = layers != 0 ? layers : shape.num_layers;
  stack.num_q_heads = num_q_heads != 0 ? num_q_heads : shape.num_q_heads;
  stack.num_kv_heads = num_kv_heads != 0 ? num_kv_heads : shape.num_kv_heads;
  stack.head_dim_qk = head_dim != 0 ? head_dim : shape.head_dim_qk;
  stack.head_dim_v = head_dim_v != 0 ? head_dim_v : (head_dim != 0 ? head_dim : shape.head_dim_v);
  if (stack.num_q_heads < 1 || stack.num_kv_heads < 1 || stack.num_q_heads % stack.num_kv_heads != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} query heads over {} KV heads: the first must be a multiple of the second",
                            stack.num_q_heads, stack.num_kv_heads));
  }
  if (stack.head_dim_qk < 8 || stack.head_dim_qk % 8 != 0 || stack.head_dim_v < 8 || stack.head_dim_v % 8 != 0) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("head dims are {} and {}: both must be multiples of 8",
                                                         stack.head_dim_qk, stack.head_dim_v));
  }
  if (window == -2) {
    // window_left + 1 tokens are seen: those are divided, rounded up.
    stack.window_left = shape.window_left < 0 ? -1 : (shape.window_left + scale) / scale - 1;
    stack.full_every = shape.full_every;
  } else if (window >= -1) {
    stack.window_left = window;
  } else {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("--window is {}; expected -1 (none) or more", window));
  }
  if (soft_cap && !(*soft_cap >= 0.0f && std::isfinite(*soft_cap))) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("--soft-cap is {}; expected 0 (none) or above", *soft_cap));
  }
  // Heads of other sizes are no longer that model's: their values have a cache of their own.
  stack.latent = shape.latent && head_dim == 0 && head_dim_v == 0 && num_kv_heads == 0;
  stack.logits_soft_cap = soft_cap.value_or(shape.logits_soft_cap);
  stack.q = q;
  stack.kv = kv;
  // Only strided caches can have values inside keys; what is recommended might be another format.
  stack.layout = stack.latent && layout == KvLayout::kRecommended ? KvLayout::kStridedNhd : layout;
  stack.page_size = page_size;
  stack.determinism = determinism;
  return stack;
}

Context AttentionFlags::context() const {
  if (!log.empty()) {
    set_log_callback([](LogLevel, std::string_view line) { fmt::print(stderr, "folio: {}\n", line); },
                     log == "debug" ? LogLevel::kDebug : LogLevel::kInfo);
  }
  if (nvtx) set_nvtx_ranges(true);
  ContextOptions options;
  options.num_threads = threads;
  options.force_kernel = kernel;
  options.allow_fp8_mma = allow_fp8_mma;
  if (device == "cuda") return Context::cuda(0, options);
  return Context::cpu(options);
}

}  // namespace folio::cli
