// README's table "What runs where", made from what attention::explain says of machines that need not be this one:
//
//   feature_matrix README.md            checks that the table says what the kernels say
//   feature_matrix README.md --write    writes it
//
// A build without CUDA's kernels knows nothing of GPUs, nor one for Arm of x86-64: these columns are left unchecked
// there, and the last line says so. Such a build does not write.
#include <algorithm>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "attention/kernel_choice.hpp"

namespace folio::attention {
namespace {

constexpr std::string_view kBegin = "<!-- feature matrix -->\n";
constexpr std::string_view kEnd = "<!-- end of feature matrix -->\n";

#if defined(__x86_64__)
constexpr bool kHasX86Kernels = true;
#else
constexpr bool kHasX86Kernels = false;
#endif

std::span<const kernels::cuda::AttentionKernel* const> gpu_kernels() {
#if defined(FOLIO_MATRIX_HAS_CUDA)
  return kernels::cuda::attention_kernels();
#else
  return {};
#endif
}

/// A kind of machine: a cell holds what is true of all of them.
struct Column {
  std::string heading;
  std::vector<Machine> machines;
  bool known;                           ///< this build has the kernels of these machines
  std::vector<std::string_view> older;  ///< kernels that are not these machines' own
};

std::vector<Column> columns() {
  platform::CpuFeatures any;
  platform::CpuFeatures avx2;
  avx2.avx = avx2.avx2 = avx2.fma = avx2.f16c = avx2.bmi1 = avx2.bmi2 = avx2.lzcnt = avx2.movbe = true;
  platform::CpuFeatures avx512 = avx2;
  avx512.avx512f = avx512.avx512bw = avx512.avx512cd = avx512.avx512dq = avx512.avx512vl = true;
  avx512.avx512vbmi = avx512.avx512_vbmi2 = avx512.avx512_vnni = true;
  platform::CpuFeatures zen4 = avx512;
  zen4.avx512_bf16 = true;
  platform::CpuFeatures amx = zen4;
  amx.avx512_fp16 = amx.amx_tile = amx.amx_bf16 = amx.amx_int8 = true;
  const auto cpu = [](const platform::CpuFeatures& features) { return Machine{.features = features}; };
  const auto gpu = [](int32_t capability) {
    return Machine{.compute_capability = capability, .gpu_kernels = gpu_kernels()};
  };
  const bool has_gpus = !gpu_kernels().empty();
  const std::vector<std::string_view> portable = {"generic", "generic-v3", "generic-v4", "generic-bf16"};
  return {
      {"any x86-64 or Arm CPU", {cpu(any)}, true, portable},
      {"AVX2, AVX-512, AMX", {cpu(avx2), cpu(avx512), cpu(zen4), cpu(amx)}, kHasX86Kernels, portable},
      {"`sm_80` and newer", {gpu(80), gpu(86), gpu(89), gpu(90), gpu(100), gpu(120)}, has_gpus, {"cuda-plain"}},
      {"Hopper", {gpu(90)}, has_gpus, {"cuda-plain", "cuda-sm80"}},
  };
}

struct Row {
  std::string name;
  std::vector<AttentionConfig> configs;
};

AttentionConfig base_config() {
  AttentionConfig config;
  config.num_q_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim_qk = config.head_dim_v = 128;
  return config;
}

template <typename Change>
AttentionConfig with(const Change& change, AttentionConfig config = base_config()) {
  change(config);
  return config;
}

AttentionConfig of_dims(int32_t qk, int32_t v) {
  return with([&](AttentionConfig& c) {
    c.head_dim_qk = qk;
    c.head_dim_v = v;
  });
}

AttentionConfig of_cache(DType kv, KvFormat format = KvFormat::kStrided, int32_t page_size = 16) {
  return with([&](AttentionConfig& c) {
    c.kv = kv;
    c.q = kv == DType::kFloat16 || kv == DType::kFloat32 ? kv : DType::kBFloat16;
    c.kv_format = format;
    c.page_size = page_size;
  });
}

AttentionConfig mla(DType kv, KvFormat format) {
  return with(
      [&](AttentionConfig& c) {
        c.num_q_heads = 128;
        c.num_kv_heads = 1;
        c.head_dim_qk = 576;
        c.head_dim_v = 512;
      },
      of_cache(kv, format, 64));
}

AttentionConfig of_output(DType out) {
  return with([&](AttentionConfig& c) { c.out = out; });
}

/// Every set of features but the rotary embedding, under every mask, with and without a window and chunks.
std::vector<AttentionConfig> masks() {
  constexpr uint32_t kSets = 128;
  const Features of_causal = Feature::kSpans | Feature::kRequestCausal;  // these need MaskKind::kCausal
  std::vector<AttentionConfig> configs;
  for (Features features; features.bits < kSets; ++features.bits) {
    if (features.has(Feature::kRopeLlama)) continue;
    for (const MaskKind mask : {MaskKind::kNone, MaskKind::kCausal, MaskKind::kCustom}) {
      if (mask != MaskKind::kCausal && (features.bits & of_causal.bits) != 0) continue;
      for (const int32_t window : {-1, 1023}) {
        for (const int32_t chunk : {0, 8192}) {
          configs.push_back(with([&](AttentionConfig& c) {
            c.features = features;
            c.mask = mask;
            c.window_left = window;
            c.attention_chunk = chunk;
          }));
        }
      }
    }
  }
  return configs;
}

/// In pages of any size, at each level of determinism.
std::vector<AttentionConfig> plain_caches() {
  std::vector<AttentionConfig> configs = {of_cache(DType::kFloat16)};
  for (const int32_t size : {1, 3, 16, 64, 256, 1024}) {
    for (int32_t level = 0; level <= static_cast<int32_t>(Determinism::kScheduleInvariant); ++level) {
      configs.push_back(with([&](AttentionConfig& c) { c.determinism = static_cast<Determinism>(level); },
                             of_cache(DType::kBFloat16, KvFormat::kStrided, size)));
    }
  }
  return configs;
}

std::vector<Row> rows() {
  constexpr KvFormat kStrided = KvFormat::kStrided;
  constexpr KvFormat kPacked = KvFormat::kCpuPacked;
  return {
      {"decode, prefill, append, mixed batches, cascades: 16-bit caches, any page size, four levels of determinism",
       plain_caches()},
      {"head dims 64, 96, 128, 256, 192/128",
       {of_dims(64, 64), of_dims(96, 96), of_dims(128, 128), of_dims(256, 256), of_dims(192, 128)}},
      {"other multiples of 8, for keys up to 576, for values up to 512",
       {of_dims(8, 8), of_dims(72, 40), of_dims(160, 160), of_dims(320, 320), of_dims(576, 512)}},
      {"windows, chunks, spans, left padding, custom masks, soft cap, ALiBi, sinks, in any combination", masks()},
      {"float32 caches", {of_cache(DType::kFloat32)}},
      {"fp8 caches", {of_cache(DType::kFloat8E4M3), of_cache(DType::kFloat8E5M2)}},
      {"int8 caches with a scale a token and head; packed pages",
       {of_cache(DType::kInt8), of_cache(DType::kBFloat16, kPacked), of_cache(DType::kInt8, kPacked)}},
      {"fp8 and NVFP4 outputs", {of_output(DType::kFloat8E4M3), of_output(DType::kFloat4E2M1x2)}},
      {"MLA 576/512, 16-bit caches", {mla(DType::kBFloat16, kStrided), mla(DType::kFloat16, kStrided)}},
      {"MLA 576/512, fp8 caches", {mla(DType::kFloat8E4M3, kStrided)}},
      {"MLA 576/512, rows of `fp8_ds_mla`", {mla(DType::kFloat8E4M3, KvFormat::kFp8DsMla)}},
  };
}

/// Empty: refused.
std::string chosen_kernel(const Machine& machine, const AttentionConfig& config) {
  return explain(machine, config, {}).chosen;
}

/// "own": every machine runs every configuration by a kernel of its own. "yes": it runs them. "no": it refuses all.
std::string cell(const Column& column, const Row& row) {
  size_t asked = 0;
  size_t taken = 0;
  size_t own = 0;
  for (const Machine& machine : column.machines) {
    for (const AttentionConfig& config : row.configs) {
      const std::string kernel = chosen_kernel(machine, config);
      ++asked;
      if (kernel.empty()) continue;
      ++taken;
      if (std::find(column.older.begin(), column.older.end(), kernel) == column.older.end()) ++own;
    }
  }
  if (taken == 0) return "no";
  if (taken < asked) {
    throw std::runtime_error("\"" + row.name + "\" on " + column.heading + ": " + std::to_string(taken) + " of " +
                             std::to_string(asked) + " are taken; a row holds what is taken or refused together");
  }
  return own == asked ? "own" : "yes";
}

using Table = std::vector<std::vector<std::string>>;

/// Cells of columns that this build does not know are empty.
Table made_table() {
  const std::vector<Column> all = columns();
  Table table(1, {""});
  for (const Column& column : all) table[0].push_back(column.heading);
  for (const Row& row : rows()) {
    std::vector<std::string>& line = table.emplace_back(1, row.name);
    for (const Column& column : all) line.push_back(column.known ? cell(column, row) : "");
  }
  return table;
}

std::string markdown(const Table& table) {
  std::string text;
  for (const std::vector<std::string>& line : table) {
    text += '|';
    for (const std::string& one : line) text += (one.empty() ? "" : " ") + one + " |";
    text += '\n';
    if (&line != &table.front()) continue;
    for (size_t i = 0; i < line.size(); ++i) text += "|---";
    text += "|\n";
  }
  return text;
}

/// The inverse of `markdown`.
Table read_table(const std::string& text) {
  Table table;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("|---", 0) == 0) continue;
    std::vector<std::string>& cells = table.emplace_back();
    for (size_t at = line.find('|'); at != std::string::npos && at + 1 < line.size();) {
      const size_t end = line.find('|', at + 1);
      const std::string part = line.substr(at + 1, end == std::string::npos ? end : end - at - 1);
      const size_t first = part.find_first_not_of(' ');
      cells.push_back(first == std::string::npos ? "" : part.substr(first, part.find_last_not_of(' ') - first + 1));
      at = end;
    }
  }
  return table;
}

/// What README says otherwise, one line each.
std::vector<std::string> differences(const Table& written, const Table& made) {
  if (written.size() != made.size()) {
    return {"the table has " + std::to_string(written.size()) + " lines; it should have " +
            std::to_string(made.size())};
  }
  const std::vector<Column> all = columns();
  std::vector<std::string> problems;
  for (size_t i = 0; i < made.size(); ++i) {
    if (written[i].size() != made[i].size()) {
      problems.push_back("\"" + made[i][0] + "\" has " + std::to_string(written[i].size()) + " cells");
      continue;
    }
    for (size_t j = 0; j < made[i].size(); ++j) {
      const bool known = i == 0 || j == 0 || all[j - 1].known;
      if (!known || written[i][j] == made[i][j]) continue;
      problems.push_back("\"" + made[i][0] + "\", column \"" + made[0][j] + "\": README says \"" + written[i][j] +
                         "\", explain \"" + made[i][j] + "\"");
    }
  }
  return problems;
}

std::string read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string(path) + " cannot be opened");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

int check_or_write(const char* path, bool write) {
  std::string page = read_file(path);
  const size_t marker = page.find(kBegin);
  const size_t end = page.find(kEnd);
  if (marker == std::string::npos || end == std::string::npos || end < marker) {
    throw std::runtime_error(std::string(path) + " lacks the lines " + std::string(kBegin) + "and " +
                             std::string(kEnd));
  }
  const size_t begin = marker + kBegin.size();
  const Table made = made_table();
  const std::vector<Column> all = columns();
  const auto known =
      static_cast<size_t>(std::count_if(all.begin(), all.end(), [](const Column& column) { return column.known; }));
  if (write) {
    if (known < all.size()) throw std::runtime_error("this build lacks kernels of some columns: configure with CUDA");
    page.replace(begin, end - begin, markdown(made));
    std::ofstream file(path, std::ios::binary);
    if (!(file << page << std::flush)) throw std::runtime_error(std::string(path) + " cannot be written");
    return 0;
  }
  const std::vector<std::string> problems = differences(read_table(page.substr(begin, end - begin)), made);
  for (const std::string& problem : problems) std::cout << problem << '\n';
  std::cout << "feature matrix: " << (problems.empty() ? "ok" : std::to_string(problems.size()) + " problem(s)") << ", "
            << known << " of " << all.size() << " columns compared";
  if (known < all.size()) std::cout << "; this build lacks the kernels of the others";
  std::cout << '\n';
  return problems.empty() ? 0 : 1;
}

}  // namespace
}  // namespace folio::attention

int main(int argc, char** argv) {
  const bool write = argc == 3 && std::strcmp(argv[2], "--write") == 0;
  if (argc != 2 && !write) {
    std::cerr << "usage: feature_matrix README.md [--write]\n";
    return 2;
  }
  try {
    return folio::attention::check_or_write(argv[1], write);
  } catch (const std::exception& error) {
    std::cerr << "feature matrix: " << error.what() << '\n';
    return 1;
  }
}
