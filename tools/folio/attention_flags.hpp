#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "folio/context.hpp"
#include "replay/stack_config.hpp"

namespace folio::cli {

/// The options that describe attention, shared by the subcommands.
struct AttentionFlags {
  std::string model = "llama3-8b";
  int32_t num_q_heads = 0;  ///< 0 = the model's
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t head_dim_v = 0;
  int32_t window = -2;            ///< -2 = the model's, -1 = none
  std::optional<float> soft_cap;  ///< none = the model's
  int32_t layers = 2;             ///< 0 = the model's
  int32_t page_size = 16;
  DType q = DType::kBFloat16;
  DType kv = DType::kBFloat16;
  replay::KvLayout layout = replay::KvLayout::kRecommended;
  Determinism determinism = Determinism::kRunToRun;
  int32_t threads = 0;
  std::string device = "cpu";
  std::string kernel;
  bool allow_fp8_mma = false;
  std::string log;  ///< "debug" or "info": the library's lines on standard error; empty: none
  bool nvtx = false;

  /// Adds them to a subcommand. `with_layers`: also --layers.
  void add_to(CLI::App& app, bool with_layers);

  /// A stack without its pool and budget. A model's window is divided by `scale`, an explicit one is taken as it is.
  /// Throws folio::Error(kInvalidArgument).
  replay::StackConfig stack(int32_t scale) const;

  /// The context, and what the process is to tell of it. Throws what Context::cpu and Context::cuda throw.
  Context context() const;
};

/// Adds an option that takes one of the names of an enumeration.
void add_dtype_option(CLI::App& app, const std::string& name, DType& value, const std::string& help);

}  // namespace folio::cli
