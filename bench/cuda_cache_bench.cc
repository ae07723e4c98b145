#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cuda_timing.hpp"
#include "folio/backends/dispatch.hpp"
#include "folio/backends/flashinfer/kv_dequant.hpp"
#include "folio/backends/kv_scales.hpp"
#include "folio/backends/merge_attn_states.hpp"
#include "folio/distributed/lse_combine.hpp"
#include "folio/distributed/thread_group.hpp"
#include "folio/folio.hpp"

/// What the cache, merge, quantisation and table functions cost on a GPU: large calls beside a device-to-device copy
/// that moves as many bytes, small ones by their time in a graph. Needs a GPU. Arguments, if any, are parts of names to
/// run.
namespace {

using namespace folio;  // NOLINT(google-build-using-namespace): a program, not a header
using bench::check;

constexpr int32_t kHeads = 8;
constexpr int32_t kDim = 128;
constexpr int32_t kPageSize = 16;
constexpr double kMiB = 1024.0 * 1024.0;
constexpr double kLarge = 64 * kMiB;

/// Memory full of random numbers between 2^-15 and 2, of either sign, in every type; or of values. Constant data would
/// move faster than a cache's does.
class DeviceBytes : public bench::DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes) : bench::DeviceBytes(bytes) {
    static const std::vector<uint8_t> random = random_bytes();
    size_t filled = std::min(bytes, random.size());
    check(cudaMemcpy(as(), random.data(), filled, cudaMemcpyHostToDevice));
    for (; filled < bytes; filled += std::min(filled, bytes - filled)) {
      check(cudaMemcpy(as<std::byte>() + filled, as(), std::min(filled, bytes - filled), cudaMemcpyDeviceToDevice));
    }
    check(cudaDeviceSynchronize());
  }
  using bench::DeviceBytes::DeviceBytes;

 private:
  static std::vector<uint8_t> random_bytes() {
    std::vector<uint8_t> bytes(size_t{8} << 20);
    std::mt19937 random(7);
    for (uint8_t& byte : bytes) {
      const auto bits = static_cast<uint32_t>(random());
      byte = static_cast<uint8_t>(0x38u | (bits & 0x87u));
    }
    return bytes;
  }
};

/// Microseconds of one of `calls` calls in a graph.
double time_of(cudaStream_t stream, int32_t calls, const std::function<void(Stream)>& call) {
  return bench::graph_time(stream, calls, 9, [&] { call(Stream{stream}); });
}

/// Runs cases one after the other and prints a line for each.
class Reporter {
 public:
  Reporter(std::vector<std::string> wanted, cudaStream_t stream, size_t most_bytes)
      : wanted_(std::move(wanted)), stream_(stream), from_(most_bytes), to_(most_bytes) {}

  bool wants(const std::string& name) const {
    return wanted_.empty() || std::any_of(wanted_.begin(), wanted_.end(), [&](const std::string& part) {
             return name.find(part) != std::string::npos;
           });
  }
  /// `bytes`: read and written together.
  void run(const std::string& name, double bytes, const std::function<void(Stream)>& call) {
    if (wants(name)) report(name, bytes, time_of(stream_, bytes >= kLarge ? 10 : 50, call));
  }
  /// A line for a call that took so many microseconds.
  void report(const std::string& name, double bytes, double time) {
    if (bytes < kLarge) {
      std::printf("%-44s %9.3f MiB %9.2f us\n", name.c_str(), bytes / kMiB, time);
      return;
    }
    // Copies of sizes that are no multiple of 2 MiB can be a third slower, and are no yardstick.
    constexpr size_t kUnit = size_t{2} << 20;
    const size_t half = (static_cast<size_t>(bytes / 2) + kUnit - 1) / kUnit * kUnit;
    const double copy = time_of(stream_, 10, [&](Stream stream) {
      check(cudaMemcpyAsync(to_.as(), from_.as(), half, cudaMemcpyDeviceToDevice,
                            static_cast<cudaStream_t>(stream.handle)));
    });
    std::printf("%-44s %9.1f MiB %9.2f us %7.0f GB/s  copy %9.2f us  ratio %.3f\n", name.c_str(), bytes / kMiB, time,
                bytes / time / 1e3, copy, copy / time);
    std::fflush(stdout);
  }

 private:
  std::vector<std::string> wanted_;
  cudaStream_t stream_;
  DeviceBytes from_, to_;
};

/// Pages of a batch of rows of equal length, shuffled.
struct Pages {
  Pages(int32_t rows, int32_t length, int32_t size = kPageSize)
      : rows_(rows),
        length_(length),
        page_size(size),
        per_row((length + size - 1) / size),
        num_pages(int64_t{rows} * per_row) {
    std::vector<int32_t> starts(static_cast<size_t>(rows) + 1), ids(static_cast<size_t>(num_pages));
    for (int32_t r = 0; r <= rows; ++r) starts[static_cast<size_t>(r)] = r * per_row;
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(1));
    std::vector<int64_t> slot_list;
    std::vector<int32_t> rows_list, position_list;
    for (int32_t r = 0; r < rows; ++r) {
      for (int32_t t = 0; t < length; ++t) {
        slot_list.push_back(int64_t{ids[static_cast<size_t>(r * per_row + t / size)]} * size + t % size);
        rows_list.push_back(r);
        position_list.push_back(t);
      }
    }
    kv_len = std::make_unique<DeviceBytes>(std::vector<int32_t>(static_cast<size_t>(rows), length));
    indptr = std::make_unique<DeviceBytes>(starts);
    indices = std::make_unique<DeviceBytes>(ids);
    slots = std::make_unique<DeviceBytes>(slot_list);
    token_row = std::make_unique<DeviceBytes>(rows_list);
    positions = std::make_unique<DeviceBytes>(position_list);
  }
  int64_t tokens() const { return int64_t{rows_} * length_; }
  PageTableView csr() const {
    PageTableView table;
    table.indices = indices->as<int32_t>();
    table.num_indices = num_pages;
    table.indptr = indptr->as<int32_t>();
    table.num_rows = rows_;
    return table;
  }
  PageTableView dense() const { return dense_table(indices->span<int32_t>(num_pages), rows_, per_row); }
  std::span<const int32_t> lengths() const { return kv_len->span<int32_t>(rows_); }

  int32_t rows_, length_, page_size, per_row;
  int64_t num_pages;
  std::unique_ptr<DeviceBytes> kv_len, indptr, indices, slots, token_row, positions;
};

/// Memory for every case, and views of it.
struct Arena {
  explicit Arena(const Pages& pages) : pages_(pages) {
    for (auto* memory : {&a, &b, &c, &d}) *memory = std::make_unique<DeviceBytes>(static_cast<size_t>(4 * elements()));
  }
  int64_t elements() const { return pages_.num_pages * kPageSize * kHeads * kDim; }
  KvCacheView cache(DType dtype, bool hnd, const DeviceBytes& k, const DeviceBytes& v) const {
    const KvCacheShape shape{pages_.num_pages, kPageSize, kHeads, kDim, kDim, dtype};
    return hnd ? make_hnd_view(shape, k.as(), v.as()) : make_nhd_view(shape, k.as(), v.as());
  }
  TensorView tensor(DType dtype, const DeviceBytes& memory, int64_t tokens) const {
    return TensorView(memory.as(), dtype, {tokens, kHeads, kDim});
  }
  const Pages& pages_;
  std::unique_ptr<DeviceBytes> a, b, c, d;
};

std::string label(DType from, DType to) {
  return std::string(to_string(from)) + " to " + std::string(to_string(to));
}

void bench_moves(Reporter& reporter, const Context& context, const Pages& pages, const Arena& arena) {
  const int64_t tokens = pages.tokens();
  const auto elements = static_cast<double>(2 * tokens * kHeads * kDim);
  struct Types {
    DType from, to;
  };
  const DeviceBytes by_head(std::vector<float>(kHeads, 0.3f));
  for (const Types& types : {Types{DType::kBFloat16, DType::kBFloat16}, Types{DType::kFloat8E4M3, DType::kFloat8E4M3},
                             Types{DType::kBFloat16, DType::kFloat8E4M3}, Types{DType::kFloat16, DType::kFloat8E5M2},
                             Types{DType::kFloat32, DType::kFloat8E4M3}, Types{DType::kFloat32, DType::kBFloat16}}) {
    for (const bool hnd : {false, true}) {
      CacheWriteArgs args;
      args.k = arena.tensor(types.from, *arena.a, tokens);
      args.v = arena.tensor(types.from, *arena.b, tokens);
      args.slot_mapping = pages.slots->as<int64_t>();
      args.num_slots = tokens;
      args.cache = arena.cache(types.to, hnd, *arena.c, *arena.d);
      if (types.from != types.to && is_fp8(types.to)) {
        args.k_scale.value = 0.3f;
        args.v_scale = {1.0f, by_head.as<float>(), ScaleGranularity::kPerHead};
      }
      reporter.run("write " + std::string(hnd ? "HND " : "NHD ") + label(types.from, types.to),
                   elements * (size_of(types.from) + size_of(types.to)) + 8.0 * static_cast<double>(tokens),
                   [&](Stream stream) { write_kv_cache(context, args, stream); });
    }
  }
  for (const Types& types : {Types{DType::kBFloat16, DType::kBFloat16}, Types{DType::kFloat8E4M3, DType::kBFloat16},
                             Types{DType::kFloat8E5M2, DType::kFloat32}}) {
    for (const bool hnd : {false, true}) {
      reporter.run("gather " + std::string(hnd ? "HND " : "NHD ") + label(types.from, types.to),
                   elements * (size_of(types.from) + size_of(types.to)), [&](Stream stream) {
                     gather_kv(context, arena.cache(types.from, hnd, *arena.a, *arena.b), pages.csr(), pages.lengths(),
                               arena.tensor(types.to, *arena.c, tokens), arena.tensor(types.to, *arena.d, tokens), {},
                               {}, stream);
                   });
    }
  }
  const auto ids = pages.indices->span<int32_t>(pages.num_pages);
  for (const Types& types : {Types{DType::kBFloat16, DType::kBFloat16}, Types{DType::kFloat8E4M3, DType::kBFloat16},
                             Types{DType::kBFloat16, DType::kFloat8E4M3}}) {
    reporter.run("convert pages " + label(types.from, types.to), elements * (size_of(types.from) + size_of(types.to)),
                 [&](Stream stream) {
                   convert_pages(context, arena.cache(types.from, false, *arena.a, *arena.b),
                                 arena.cache(types.to, false, *arena.c, *arena.d), ids, ids, {}, stream);
                 });
  }
  const DeviceBytes new_table(static_cast<size_t>(4 * pages.num_pages));
  KvCacheView mock = arena.cache(DType::kBFloat16, false, *arena.c, *arena.d);
  ++mock.num_pages;  // page 0 stays free; the arena has room
  backends::BlockTableView table;
  table.data = pages.indices->as<int32_t>();
  table.num_rows = pages.rows_;
  table.num_columns = pages.per_row;
  table.row_stride = pages.per_row;
  reporter.run("dequantise used pages fp8_e4m3 to bfloat16", elements * 3, [&](Stream stream) {
    backends::trtllm_prefill_attn_kvfp8_dequant(context, arena.cache(DType::kFloat8E4M3, false, *arena.a, *arena.b),
                                                table, pages.lengths(), 0.5f, 2.0f, mock,
                                                new_table.span<int32_t>(pages.num_pages), stream);
  });
}

void bench_combines(Reporter& reporter, const Context& context, const Arena& arena, int64_t tokens) {
  const auto elements = static_cast<double>(tokens * kHeads * kDim);
  const DeviceBytes lse(std::vector<float>(static_cast<size_t>(8 * tokens * kHeads), 1.5f));
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const AttentionStateView a{arena.tensor(dtype, *arena.a, tokens), lse.as<float>(), kHeads, 1, LseBase::kE};
    const AttentionStateView b{arena.tensor(dtype, *arena.b, tokens), lse.as<float>(), kHeads, 1, LseBase::kE};
    reporter.run("merge_state " + std::string(to_string(dtype)), elements * 3 * size_of(dtype), [&](Stream stream) {
      merge_state(context, a, b, arena.tensor(dtype, *arena.c, tokens), {}, {}, stream);
    });
    reporter.run("merge_attn_states " + std::string(to_string(dtype)), elements * 3 * size_of(dtype),
                 [&](Stream stream) {
                   backends::merge_attn_states(context, arena.tensor(dtype, *arena.c, tokens), a.out, lse.as<float>(),
                                               b.out, lse.as<float>(), nullptr, tokens / 2, {}, stream);
                 });
  }
  AttentionStatesView states;
  const int64_t few = std::max<int64_t>(tokens / 8, 1);
  states.out = ConstTensorView(arena.a->as(), DType::kFloat32, {few, 8, kHeads, kDim});
  states.lse = lse.as<float>();
  states.lse_token_stride = 8 * kHeads;
  states.lse_state_stride = kHeads;
  states.lse_head_stride = 1;
  reporter.run("merge_states of 8, float32 to bfloat16", static_cast<double>(few * kHeads * kDim) * (8 * 4 + 2),
               [&](Stream stream) {
                 merge_states(context, states, arena.tensor(DType::kBFloat16, *arena.c, few), {}, {}, stream);
               });
}

/// Both ranks of a group over one GPU, whose kernels share it: microseconds of a call of both, by the host's clock, and
/// what they move together. `row_bytes`: of a token and head, of one rank.
void bench_rank_combines(Reporter& reporter, int64_t tokens) {
  using namespace folio::distributed;  // NOLINT(google-build-using-namespace): a program, not a header
  constexpr int32_t kWorld = 2, kCalls = 20;
  const auto rows = static_cast<double>(tokens * kHeads);
  struct Form {
    const char* name;
    decltype(&cp_lse_ag_out_rs) call;
    double row_bytes;
  };
  // Weighed, added by one rank, rounded; packed, sent, merged. Besides, LSEs.
  for (const Form& form :
       {Form{"cp_lse_ag_out_rs of 2 ranks, bfloat16", cp_lse_ag_out_rs, kDim * (10.0 + 10.0 / 2)},
        Form{"dcp_a2a_lse_reduce of 2 ranks, bfloat16", dcp_a2a_lse_reduce, kDim * (10.0 + 2.0 / 2)}}) {
    if (!reporter.wants(form.name)) continue;
    ThreadGroupOptions options;
    options.context = Context::cuda(0);
    std::array<double, kWorld> times{};
    run_ranks(
        kWorld,
        [&](ProcessGroup& group) {
          const Context context = Context::cuda(0);
          cudaStream_t stream = nullptr;
          check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
          const auto elements = static_cast<size_t>(tokens * kHeads * kDim);
          const DeviceBytes partial(2 * elements), out(elements);
          const DeviceBytes lse(std::vector<float>(elements / kDim, 1.5f)), lse_out(4 * elements / kDim);
          const DeviceBytes workspace(combine_workspace_size(kWorld, tokens, kHeads, kDim));
          const AttentionStateView state{ConstTensorView(partial.as(), DType::kBFloat16, {tokens, kHeads, kDim}),
                                         lse.as<float>(), kHeads, 1, LseBase::kE};
          const TensorView to(out.as(), DType::kBFloat16, {tokens, kHeads / kWorld, kDim});
          std::vector<double> rounds;
          for (int32_t round = 0; round < 5; ++round) {
            check(cudaStreamSynchronize(stream));
            group.barrier();
            const auto begin = std::chrono::steady_clock::now();
            for (int32_t i = 0; i < kCalls; ++i) {
              form.call(context, group, state, to, {lse_out.as<float>(), kHeads / kWorld, 1, LseBase::kE},
                        {workspace.as(), workspace.size()}, {}, Stream{stream});
            }
            check(cudaStreamSynchronize(stream));
            group.barrier();
            rounds.push_back(
                std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
          }
          std::sort(rounds.begin(), rounds.end());
          times[static_cast<size_t>(group.rank())] = rounds[rounds.size() / 2] / kCalls;
          check(cudaStreamDestroy(stream));
        },
        options);
    reporter.report(form.name, kWorld * rows * form.row_bytes, times[0]);
  }
}

void bench_quantisation(Reporter& reporter, const Context& context, const Arena& arena, int64_t tokens) {
  const auto elements = static_cast<double>(tokens * kHeads * kDim);
  Scale third;
  third.value = 0.3f;
  const ConstTensorView in = arena.tensor(DType::kBFloat16, *arena.a, tokens);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    reporter.run("quantize_fp8 " + std::string(to_string(dtype)), elements * (1 + size_of(dtype)), [&](Stream stream) {
      quantize_fp8(context, arena.tensor(dtype, *arena.a, tokens), arena.tensor(DType::kFloat8E4M3, *arena.c, tokens),
                   third, stream);
    });
  }
  const TensorView codes(arena.c->as(), DType::kFloat4E2M1x2, {tokens, kHeads, kDim / 2});
  const BlockScaleArgs block_scale{arena.d->as(), 0};
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    reporter.run("quantize_nvfp4 " + std::string(to_string(dtype)), elements * (size_of(dtype) + 0.5 + 1.0 / 16),
                 [&](Stream stream) {
                   quantize_nvfp4(context, arena.tensor(dtype, *arena.a, tokens), codes, block_scale, 3.0f, stream);
                 });
  }
  reporter.run("dequantize_nvfp4 to float32", elements * (4 + 0.5 + 1.0 / 16), [&](Stream stream) {
    dequantize_nvfp4(context, codes, block_scale, 3.0f, arena.tensor(DType::kFloat32, *arena.a, tokens), stream);
  });
  const DeviceBytes scales(std::vector<float>(3, 0.0f));
  reporter.run("calculate_kv_scales bfloat16", elements * 6, [&](Stream stream) {
    backends::calculate_kv_scales(context, in, arena.tensor(DType::kBFloat16, *arena.b, tokens),
                                  arena.tensor(DType::kBFloat16, *arena.c, tokens), scales.span<float>(3), {}, stream);
  });
  constexpr int64_t kMlaHeads = 128, kNope = 128, kRope = 64;
  const int64_t mla_tokens = std::max<int64_t>(tokens * kHeads * kDim / (kMlaHeads * (kNope + kRope)), 1);
  reporter.run("concat_mla_k bfloat16",
               2.0 * static_cast<double>(mla_tokens * (kMlaHeads * (2 * kNope + kRope) + kRope)), [&](Stream stream) {
                 backends::concat_mla_k(
                     context, TensorView(arena.a->as(), DType::kBFloat16, {mla_tokens, kMlaHeads, kNope + kRope}),
                     ConstTensorView(arena.b->as(), DType::kBFloat16, {mla_tokens, kMlaHeads, kNope}),
                     ConstTensorView(arena.c->as(), DType::kBFloat16, {mla_tokens, 1, kRope}), stream);
               });
}

void bench_tables(Reporter& reporter, const Context& context, const Pages& pages, const Arena& arena) {
  const auto tokens = static_cast<double>(pages.tokens());
  const auto num_pages = static_cast<double>(pages.num_pages);
  const DeviceBytes indptr(static_cast<size_t>(4 * (pages.rows_ + 1))), last(static_cast<size_t>(4 * pages.rows_));
  const auto starts = indptr.span<int32_t>(pages.rows_ + 1);
  const auto lasts = last.span<int32_t>(pages.rows_);
  const auto lens = pages.lengths();
  reporter.run("slot_mapping", tokens * 16 + num_pages * 4, [&](Stream stream) {
    slot_mapping(context, pages.csr(), pages.token_row->span<int32_t>(pages.tokens()),
                 pages.positions->span<int32_t>(pages.tokens()), pages.page_size,
                 arena.a->span<int64_t>(pages.tokens()), {}, stream);
  });
  reporter.run("token_indices", tokens * 4 + num_pages * 4, [&](Stream stream) {
    token_indices(context, pages.csr(), lens, pages.page_size, starts, arena.a->span<int32_t>(pages.tokens()), stream);
  });
  reporter.run("token_offsets", tokens * 8 + num_pages * 4, [&](Stream stream) {
    token_offsets(context, pages.csr(), lens, pages.page_size, 1 << 14, 1 << 10, starts,
                  arena.a->span<int64_t>(pages.tokens()), stream);
  });
  reporter.run("to_csr", num_pages * 8, [&](Stream stream) {
    to_csr(context, pages.dense(), lens, pages.page_size, starts, arena.a->span<int32_t>(pages.num_pages), lasts,
           stream);
  });
  reporter.run("to_dense", num_pages * 8, [&](Stream stream) {
    to_dense(context, pages.csr(), lens, pages.page_size, pages.per_row, 0, arena.a->span<int32_t>(pages.num_pages),
             stream);
  });
  reporter.run("paged_indptr", pages.rows_ * 12.0,
               [&](Stream stream) { paged_indptr(context, lens, pages.page_size, starts, lasts, stream); });
  reporter.run("shard_lens", pages.rows_ * 8.0, [&](Stream stream) {
    shard_lens(context, lens, {2, 1, 1}, lasts, stream);
  });
  reporter.run("seq_lens_from_paged", pages.rows_ * 12.0, [&](Stream stream) {
    seq_lens_from_paged(context, starts, lasts, pages.page_size, arena.a->span<int32_t>(pages.rows_), stream);
  });
  reporter.run("expand_pages by 4", num_pages * 20, [&](Stream stream) {
    expand_pages(context, pages.indices->span<int32_t>(pages.num_pages), 4, arena.a->span<int32_t>(4 * pages.num_pages),
                 stream);
  });
}

void measure(std::vector<std::string> wanted) {
  const Context context = Context::cuda(0);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Reporter reporter(std::move(wanted), stream, size_t{1} << 30);
  for (const bool large : {true, false}) {
    std::printf("%s\n", large ? "large: 64 rows of 2,000 tokens" : "small: 64 rows of 4 tokens");
    const Pages pages(64, large ? 2000 : 4);
    const Arena arena(pages);
    bench_moves(reporter, context, pages, arena);
    bench_combines(reporter, context, arena, pages.tokens());
    bench_rank_combines(reporter, std::min<int64_t>(pages.tokens(), 64000));
    bench_quantisation(reporter, context, arena, pages.tokens());
    bench_tables(reporter, context, pages, arena);
  }
  // Lists beyond 64 MiB.
  const Pages few(64, 2048);
  const Arena arena(few);
  for (const int32_t rows : {2048, 4096}) {
    std::printf("lists: %d rows of 8,192 tokens\n", rows);
    bench_tables(reporter, context, Pages(rows, 8192), arena);
  }
  const Pages small_pages(2048, 4352, 1);
  std::printf("lists: 2,048 rows of 4,352 pages of one token\n");
  bench_tables(reporter, context, small_pages, arena);
  check(cudaStreamDestroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    measure(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
