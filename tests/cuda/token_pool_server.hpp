#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "device_array.hpp"
#include "folio/backends/token_pool.hpp"
#include "folio/page_table.hpp"
#include "folio/pools.hpp"

/// What an engine with a token pool holds, on a CPU or on a GPU, for the tests that compare the two.
namespace folio::cuda_test {

using namespace folio::backends;
using Ints = std::vector<int32_t>;
using Bits = std::vector<uint16_t>;

inline constexpr int32_t kRequests = 8, kContext = 600, kHeads = 8, kKvHeads = 2, kDim = 64, kDrafts = 3;
inline constexpr size_t kTreeBytes = (kDrafts * kDrafts + 7) / 8;  // of a request
inline constexpr int32_t kMaxTokens = kRequests * 40;
inline constexpr int32_t kSlots = (kRequests + 1) * kContext;

/// A step as a scheduler would have it, with its inputs.
struct HostStep {
  ForwardMode mode = ForwardMode::kDecode;
  Ints rows, seq_lens, prefix_lens;
  std::vector<int64_t> slots;
  Bits q, k, v;
  int32_t num_tokens = 0;
  std::vector<uint8_t> tree;    ///< who sees whom among the drafts; empty: chains
  int32_t num_live_tokens = 0;  ///< padding comes behind; what it reads is whatever of it was written last
};

/// A pool, a request table and a backend, on the CPU or on a GPU.
template <typename Memory, typename Slots, typename Lengths, typename Bytes>
struct Server {
  Server(const Context& context, const Ints& table, std::optional<int32_t> window, ExtendPath path)
      : table_memory(table),
        k_pool(size_t{kSlots + 1} * kKvHeads * kDim),
        v_pool(size_t{kSlots + 1} * kKvHeads * kDim),
        q(size_t{kMaxTokens} * kHeads * kDim),
        k(size_t{kMaxTokens} * kKvHeads * kDim),
        v(size_t{kMaxTokens} * kKvHeads * kDim),
        out(size_t{kMaxTokens} * kHeads * kDim),
        slots(kMaxTokens),
        tree(kRequests * kTreeBytes),
        rows(kRequests),
        seq_lens(kRequests),
        prefix_lens(kRequests),
        pool(pool_config(), std::vector<void*>{k_pool.data()}, std::vector<void*>{v_pool.data()}),
        backend(context, config(table_memory.data(), window, path)) {}

  static KvPoolConfig pool_config() {
    KvPoolConfig config;
    config.num_slots = kSlots;
    config.num_layers = 1;
    config.num_kv_heads = kKvHeads;
    config.head_dim_qk = config.head_dim_v = kDim;
    config.dtype = DType::kBFloat16;
    return config;
  }
  static TokenPoolConfig config(const int32_t* table, std::optional<int32_t> window, ExtendPath path) {
    TokenPoolConfig config;
    config.num_heads = kHeads;
    config.num_kv_heads = kKvHeads;
    config.head_dim = kDim;
    config.q_dtype = config.kv_cache_dtype = DType::kBFloat16;
    config.max_context_len = kContext;
    config.req_to_token = dense_table({table, size_t{kRequests + 1} * kContext}, kRequests + 1, kContext);
    config.max_req_pool_size = kRequests;
    config.sliding_window_size = window;
    config.extend_path = path;
    config.determinism = Determinism::kBatchInvariant;
    return config;
  }

  void set(const HostStep& step) {
    const auto padded = [](auto values, size_t size) {
      values.resize(size);
      return values;
    };
    rows.set(padded(step.rows, kRequests));
    seq_lens.set(padded(step.seq_lens, kRequests));
    prefix_lens.set(padded(step.prefix_lens, kRequests));
    slots.set(padded(step.slots, kMaxTokens));
    tree.set(padded(step.tree, kRequests * kTreeBytes));
    q.set(padded(step.q, size_t{kMaxTokens} * kHeads * kDim));
    k.set(padded(step.k, size_t{kMaxTokens} * kKvHeads * kDim));
    v.set(padded(step.v, size_t{kMaxTokens} * kKvHeads * kDim));
  }

  ForwardBatch batch(const HostStep& step) const {
    const auto count = step.rows.size();
    ForwardBatch batch;
    batch.forward_mode = step.mode;
    batch.batch_size = static_cast<int32_t>(count);
    batch.req_pool_indices = {rows.data(), count};
    batch.seq_lens = {seq_lens.data(), count};
    batch.seq_lens_cpu = step.seq_lens;
    batch.out_cache_loc = {slots.data(), step.slots.size()};
    if (is_extend(step.mode)) {
      batch.extend_prefix_lens = {prefix_lens.data(), count};
      batch.extend_prefix_lens_cpu = step.prefix_lens;
    }
    if (is_target_verify(step.mode)) batch.spec_info = spec_info(step);
    batch.token_to_kv_pool = &pool;
    return batch;
  }

  SpecInfo spec_info(const HostStep& step) const {
    SpecInfo spec;
    spec.draft_token_num = kDrafts;
    spec.tree_mask = {tree.data(), step.tree.size()};
    spec.tree_mask_cpu = step.tree;
    return spec;
  }

  void forward(const HostStep& step, std::optional<int32_t> window, Stream stream) {
    RadixAttention layer;
    layer.num_heads = kHeads;
    layer.num_kv_heads = kKvHeads;
    layer.head_dim = kDim;
    layer.sliding_window_size = window.value_or(-1);
    const int64_t tokens = step.num_tokens;
    const auto view = [tokens](uint16_t* data, int64_t heads) {
      return TensorView(data, DType::kBFloat16, {tokens, heads * kDim});
    };
    const auto read = [&](uint16_t* data, int64_t heads) {
      return ConstTensorView(data, DType::kBFloat16, {tokens, heads * kDim});
    };
    layer.forward(backend, read(q.data(), kHeads), read(k.data(), kKvHeads), read(v.data(), kKvHeads), batch(step),
                  view(out.data(), kHeads), true, stream);
  }

  Bits output(const HostStep& step) const {
    Bits values = out.get();
    values.resize(static_cast<size_t>(step.num_live_tokens) * kHeads * kDim);
    return values;
  }

  Lengths table_memory;
  Memory k_pool, v_pool, q, k, v, out;
  Slots slots;
  Bytes tree;
  Lengths rows, seq_lens, prefix_lens;
  KvPool pool;
  TokenPoolBackend backend;
};

/// A host's array with a device array's functions.
template <typename T>
struct HostArray {
  explicit HostArray(size_t size) : values(size) {}
  explicit HostArray(const std::vector<T>& given) : values(given) {}
  T* data() const { return values.data(); }
  void set(const std::vector<T>& given) { std::copy(given.begin(), given.end(), values.begin()); }
  const std::vector<T>& get() const { return values; }
  mutable std::vector<T> values;
};

using HostServer = Server<HostArray<uint16_t>, HostArray<int64_t>, HostArray<int32_t>, HostArray<uint8_t>>;
using GpuServer = Server<DeviceArray<uint16_t>, DeviceArray<int64_t>, DeviceArray<int32_t>, DeviceArray<uint8_t>>;

}  // namespace folio::cuda_test
