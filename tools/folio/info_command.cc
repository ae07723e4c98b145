#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "attention_flags.hpp"
#include "commands.hpp"
#include "folio/folio.hpp"
#include "json_output.hpp"
#include "replay/model_shape.hpp"
#include "replay/report.hpp"
#include "replay/yardstick.hpp"

namespace folio::cli {
namespace {

struct InfoFlags {
  AttentionFlags attention;
  WorkloadMix mix;
  bool explain = false;
  bool models = false;
  std::string json;
};

AttentionConfig config_of(const InfoFlags& info, const Context& context) {
  const replay::StackConfig stack = info.attention.stack(1);
  AttentionConfig config;
  config.num_q_heads = stack.num_q_heads;
  config.num_kv_heads = stack.num_kv_heads;
  config.head_dim_qk = stack.head_dim_qk;
  config.head_dim_v = stack.head_dim_v;
  config.q = stack.q;
  config.kv = stack.kv;
  config.page_size = stack.page_size;
  config.window_left = stack.window_left;
  config.determinism = stack.determinism;
  if (stack.logits_soft_cap != 0.0f) config.features = Feature::kSoftCap;
  config.kv_format = replay::choose_format(stack.layout, config, context, info.mix);
  return config;
}

/// What --model takes.
int show_models(const InfoFlags& flags) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  std::FILE* out = flags.json == "-" ? stderr : stdout;
  fmt::print(out, "{:<24}{:>7}{:>8}{:>4}{:>9}{:>8}{:>6}  {:<30}{}\n", "model", "layers", "q heads", "kv", "head dim",
             "window", "full", "config.json of", "");
  for (const replay::ModelShape& shape : replay::model_shapes()) {
    const std::string dims = shape.head_dim_qk == shape.head_dim_v
                                 ? fmt::format("{}", shape.head_dim_qk)
                                 : fmt::format("{}/{}", shape.head_dim_qk, shape.head_dim_v);
    fmt::print(out, "{:<24}{:>7}{:>8}{:>4}{:>9}{:>8}{:>6}  {:<30}{}\n", shape.name, shape.num_layers, shape.num_q_heads,
               shape.num_kv_heads, dims, shape.window_left < 0 ? "-" : fmt::format("{}", shape.window_left + 1),
               shape.full_every == 0 ? "-" : fmt::format("1/{}", shape.full_every), shape.source, shape.note);
    json.push_back({{"name", shape.name},
                    {"num_layers", shape.num_layers},
                    {"num_q_heads", shape.num_q_heads},
                    {"num_kv_heads", shape.num_kv_heads},
                    {"head_dim_qk", shape.head_dim_qk},
                    {"head_dim_v", shape.head_dim_v},
                    {"window_left", shape.window_left},
                    {"full_every", shape.full_every},
                    {"logits_soft_cap", shape.logits_soft_cap},
                    {"mla", shape.latent},
                    {"note", shape.note},
                    {"source", shape.source}});
  }
  if (std::optional<replay::OutputFile> json_file = replay::output_file(flags.json)) write_json(json, *json_file);
  return kSuccess;
}

int show_info(const InfoFlags& flags) {
  if (flags.models) return show_models(flags);
  const Context context = flags.attention.context();
  const AttentionConfig config = config_of(flags, context);
  const KvFormatAdvice advice = recommended_kv_format(config, context, flags.mix);
  const std::vector<KernelAnswer> answers = explain(context, config, flags.mix);
  const bool taken = std::any_of(answers.begin(), answers.end(),
                                 [](const KernelAnswer& answer) { return answer.available && answer.refusal.empty(); });
  std::string chosen;
  bool fp8_mma = false;
  if (taken) {  // the choice is prepare's: on a GPU not always the first kernel that takes the configuration
    PrepareOptions options;
    options.mix = flags.mix;
    const AttentionOp op = prepare(context, config, options);
    chosen = op.kernel_name();
    fp8_mma = op.fp8_mma();
  }
  if (std::optional<replay::OutputFile> json_file = replay::output_file(flags.json)) {
    nlohmann::ordered_json json = {
        {"version", version()},
        {"cpu_features", cpu_features()},
        {"device", flags.attention.device},
        {"threads", context.concurrency()},
        {"yardstick_isa", replay::yardstick_isa()},
        {"kernel", chosen},
        {"fp8_mma", fp8_mma},
        {"mix", {{"decode_tokens", flags.mix.decode_tokens}, {"prefill_tokens", flags.mix.prefill_tokens}}},
        {"recommended", {{"kv_format", to_string(advice.format)}, {"page_size", advice.page_size}}}};
    for (const KernelAnswer& answer : answers) {
      json["kernels"].push_back({{"name", answer.name}, {"available", answer.available}, {"refusal", answer.refusal}});
    }
    write_json(json, *json_file);
    if (flags.json == "-") return kSuccess;
  }
  fmt::print("folio {}\n", version());
  fmt::print("  cpu         {}\n", fmt::join(cpu_features(), " "));
  if (context.device().type == DeviceType::kCuda) {
    fmt::print("  device      CUDA {}, {} SMs\n", context.device().index, context.concurrency());
  } else {
    fmt::print("  threads     {}\n", context.concurrency());
  }
  fmt::print("  asked for   {} q heads, {} kv heads, head dim {}/{}, q {}, kv {} {}, page {}, {}\n", config.num_q_heads,
             config.num_kv_heads, config.head_dim_qk, config.head_dim_v, to_string(config.q), to_string(config.kv),
             to_string(config.kv_format), config.page_size, replay::to_string(config.determinism));
  if (flags.mix != WorkloadMix{}) {
    fmt::print("  for         {} decode and {} prefill tokens\n", flags.mix.decode_tokens, flags.mix.prefill_tokens);
  }
  fmt::print("  recommended {} pages of {} tokens\n", to_string(advice.format), advice.page_size);
  fmt::print("  kernel      {}{}\n", chosen.empty() ? "none takes this" : chosen, fp8_mma ? ", FP8 MMA" : "");
  if (flags.explain) {
    for (const KernelAnswer& answer : answers) {
      fmt::print("    {:<20}{}{}\n", answer.name, answer.available ? "" : "(not on this machine) ",
                 answer.refusal.empty() ? "takes it" : "refuses: " + answer.refusal);
    }
  } else {
    fmt::print("  (--explain: what every kernel says to this; the options choose what is asked for)\n");
  }
  return kSuccess;
}

}  // namespace

Command add_info_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "Version, CPU features, kernels, and which one runs a configuration");
  auto flags = std::make_shared<InfoFlags>();
  command->add_flag("--explain", flags->explain, "list every kernel and why it refuses");
  command->add_flag("--models", flags->models, "list the models that --model takes, with their shapes and sources")
      ->excludes(command->get_option("--explain"));
  flags->attention.add_to(*command, false);
  command->add_option("--decode-tokens", flags->mix.decode_tokens,
                      "tokens of decode in the engine's work, in any unit; with --prefill-tokens: what is ranked by");
  command->add_option("--prefill-tokens", flags->mix.prefill_tokens, "tokens of prefill in the same unit");
  command->add_option("--json", flags->json, "write as JSON; '-' = standard output")->type_name("FILE");
  return {command, [flags] { return show_info(*flags); }};
}

}  // namespace folio::cli
