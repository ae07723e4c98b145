#pragma once

// The C API's structures, drawn from a fuzzer's bytes: mostly sensible, sometimes anything at all. What C cannot know
// is never lied about: an array has at least as many elements as the fields say, and strides stay within their tensor's
// memory.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "folio/c/folio.h"
#include "input.hpp"

inline constexpr int32_t kMaxRequests = 5;
inline constexpr int32_t kMaxSegments = 3;
inline constexpr int32_t kMaxTokens = 48;
inline constexpr int64_t kMaxMemory = int64_t{1} << 24;

/// A structure with memory behind it, for struct_size fields that claim more than there is.
template <typename Struct>
struct Padded {
  Struct value;
  unsigned char extra[64];
};

/// A status that the header names, with a message exactly when it is a failure's.
inline bool ok(folio_status status) {
  FUZZ_CHECK(status >= FOLIO_OK && status <= FOLIO_INTERNAL);
  FUZZ_CHECK(status != FOLIO_INTERNAL);
  if (status != FOLIO_OK) FUZZ_CHECK(std::strlen(folio_last_error()) > 0);
  return status == FOLIO_OK;
}

/// One time in sixteen, replaces a sensible value by any.
template <typename T>
void disturb(FuzzInput& input, T& field) {
  if (input.take<uint8_t>() % 16 == 0) field = input.take<T>();
}

template <typename T>
void disturb_pointer(FuzzInput& input, T*& pointer) {
  if (input.take<uint8_t>() % 32 == 0) pointer = nullptr;
}

/// A stride may become shorter, never longer or negative: the library does not know where memory ends.
inline void disturb_stride(FuzzInput& input, int64_t& stride) {
  if (input.take<uint8_t>() % 32 == 0) stride = std::min<int64_t>(stride, input.take<uint8_t>());
}

template <typename Struct>
void disturb_size(FuzzInput& input, Padded<Struct>& given) {
  const auto kind = input.take<uint8_t>();
  if (kind % 16 == 0) given.value.struct_size = static_cast<uint32_t>(input.take<uint8_t>() % (sizeof(given) + 1));
  if (kind % 64 == 1) given.value.struct_size = UINT32_MAX;
  if (kind % 32 == 2) given.extra[input.take<uint8_t>() % sizeof(given.extra)] = 1;
}

inline folio_dtype take_dtype(FuzzInput& input, folio_dtype usual) {
  const auto kind = input.take<uint8_t>();
  if (kind < 160) return usual;
  if (kind >= 244 && kind < 250) return FOLIO_DTYPE_INT8;
  return kind < 244 ? kind % 7 : input.take<int32_t>();
}

inline int64_t dtype_size(folio_dtype dtype) {
  constexpr int64_t kSizes[] = {1, 4, 2, 2, 1, 1, 1, 1};
  return dtype >= 0 && dtype < 8 ? kSizes[dtype] : 8;
}

inline folio_attention_config take_config(FuzzInput& input) {
  folio_attention_config config = FOLIO_ATTENTION_CONFIG_INIT;
  config.num_kv_heads = input.take_between(1, 3);
  config.num_q_heads = config.num_kv_heads * input.take_between(1, 4);
  config.head_dim_qk = 8 * input.take_between(1, 4);
  config.head_dim_v = 8 * input.take_between(1, 4);
  config.q = take_dtype(input, FOLIO_DTYPE_FLOAT32);
  config.kv = take_dtype(input, FOLIO_DTYPE_FLOAT32);
  config.ragged_kv = take_dtype(input, FOLIO_DTYPE_UNSET);
  config.out = take_dtype(input, FOLIO_DTYPE_UNSET);
  config.page_size = 1 << input.take_between(0, 5);
  config.mask = input.take_between(0, 2);
  config.window_left = input.take_between(-1, 20);
  config.window_right = input.take_between(-1, 3);
  config.features = input.take<uint8_t>() % 128;
  config.attention_chunk = input.take_between(0, 20);
  config.determinism = input.take_between(0, 3);
  const auto format = input.take<uint8_t>();
  if (format % 8 == 0) config.kv_format = FOLIO_KV_CPU_PACKED;
  if (format % 16 == 1) {
    config.kv_format = FOLIO_KV_FP8_DS_MLA;
    config.kv = FOLIO_DTYPE_FLOAT8_E4M3;
    config.num_q_heads /= config.num_kv_heads;
    config.num_kv_heads = 1;
    config.head_dim_qk = 576;
    config.head_dim_v = 512;
  }
  for (int32_t* field : {&config.num_q_heads, &config.num_kv_heads, &config.head_dim_qk, &config.head_dim_v,
                         &config.kv_format, &config.page_size, &config.mask, &config.window_left, &config.window_right,
                         &config.determinism, &config.attention_chunk, &config.span_window_left}) {
    disturb(input, *field);
  }
  disturb(input, config.features);
  return config;
}

inline folio_prepare_options take_options(FuzzInput& input) {
  folio_prepare_options options = FOLIO_PREPARE_OPTIONS_INIT;
  options.num_workers = input.take_between(-1, 6);
  if (input.take<uint8_t>() % 4 == 0) {
    options.has_bounds = 1;
    options.max_requests = input.take_length(kMaxRequests);
    options.max_tokens = input.take_length(kMaxTokens);
    options.max_q_len = input.take_length(kMaxTokens);
    options.max_kv_len = input.take_length(512);
    options.max_shared_levels = input.take_length(kMaxSegments);
  }
  if (input.take<uint8_t>() % 16 == 0) options.force_kernel = "no such kernel";
  return options;
}

/// A batch and the arrays that it points to.
struct Batch {
  std::vector<int32_t> cu_q, first_pos, tail_len, kv_start, spans;
  std::vector<uint8_t> causal;
  std::vector<int32_t> kv_len[kMaxSegments], segment_first_pos[kMaxSegments], group_indptr[kMaxSegments];
  std::vector<folio_kv_segment> segments;
  Padded<folio_batch> view{};
};

inline folio_kv_segment take_segment(FuzzInput& input, Batch& batch, size_t index, int32_t requests) {
  folio_kv_segment segment = FOLIO_KV_SEGMENT_INIT;
  segment.source = input.take<uint8_t>() % 4 == 0 ? FOLIO_KV_RAGGED : FOLIO_KV_PAGED;
  segment.mask = input.take<uint8_t>() % 4 == 0 ? FOLIO_SEGMENT_ALL_VISIBLE : FOLIO_SEGMENT_AS_CONFIG;
  auto rows = static_cast<size_t>(requests);
  if (input.take<uint8_t>() % 4 == 0) {
    segment.num_groups = input.take_between(0, requests);
    rows = static_cast<size_t>(segment.num_groups);
    batch.group_indptr[index] = input.take_lengths(rows + 1, requests);
    if (input.take<uint8_t>() % 8 != 0) std::sort(batch.group_indptr[index].begin(), batch.group_indptr[index].end());
    segment.group_indptr = batch.group_indptr[index].data();
  }
  batch.kv_len[index] = input.take_lengths(rows, 100);
  segment.kv_len = batch.kv_len[index].data();
  if (input.take<uint8_t>() % 4 == 0) {
    batch.segment_first_pos[index] = input.take_lengths(rows, 100);
    segment.first_pos = batch.segment_first_pos[index].data();
  }
  if (input.take<uint8_t>() % 8 == 0) {
    segment.shard = {input.take_length(4), input.take_length(4), input.take_length(4)};
  }
  disturb(input, segment.source);
  disturb(input, segment.mask);
  disturb_pointer(input, segment.kv_len);
  return segment;
}

inline void take_batch(FuzzInput& input, Batch& batch) {
  const int32_t requests = input.take_between(0, kMaxRequests);
  const auto rows = static_cast<size_t>(requests);
  batch.cu_q.assign(1, 0);
  for (size_t r = 0; r < rows; ++r) batch.cu_q.push_back(batch.cu_q.back() + input.take_between(0, 9));
  const int32_t tokens = batch.cu_q.back() + input.take_between(0, 2);
  for (int32_t& offset : batch.cu_q) disturb(input, offset);

  batch.view.value = FOLIO_BATCH_INIT;
  folio_batch& view = batch.view.value;
  view.num_requests = requests;
  view.num_tokens = tokens;
  view.cu_q = batch.cu_q.data();
  const auto segments = static_cast<size_t>(input.take_between(0, kMaxSegments));
  for (size_t i = 0; i < segments; ++i) batch.segments.push_back(take_segment(input, batch, i, requests));
  view.segments = batch.segments.data();
  view.num_segments = static_cast<int32_t>(segments);
  if (input.take<uint8_t>() % 4 == 0) {
    batch.first_pos = input.take_lengths(rows, 100);
    view.q_first_pos = batch.first_pos.data();
  }
  if (input.take<uint8_t>() % 4 == 0) {
    batch.tail_len = input.take_lengths(rows, 20);
    view.custom_mask_scope = FOLIO_CUSTOM_MASK_TAIL;
    view.custom_mask_tail_len = batch.tail_len.data();
  }
  disturb(input, view.where);
  disturb(input, view.num_tokens);
  // A plan has a row tile for every few rows: a batch of 2^31 tokens is planned, but takes seconds and gigabytes.
  view.num_tokens = std::min(view.num_tokens, 1 << 20);
  const uint8_t rules = input.take<uint8_t>();
  if (rules % 4 == 1) {
    batch.kv_start = input.take_lengths(rows, 100);
    view.kv_start = batch.kv_start.data();
  }
  if (rules / 4 % 4 == 1) {
    for (size_t r = 0; r < rows; ++r) batch.causal.push_back(input.take<uint8_t>() % 2);
    view.causal = batch.causal.data();
  }
  if (rules / 16 % 4 == 1) {
    batch.spans.resize(2 * static_cast<size_t>(std::max(view.num_tokens, 1)), 7);
    for (int32_t i = 0; i < std::min(tokens, view.num_tokens); ++i)
      batch.spans[2 * static_cast<size_t>(i) + 1] = input.take_length(60);
    view.spans = batch.spans.data();
  }
  disturb(input, view.max_q_len);
  disturb(input, view.max_kv_len);
  disturb(input, view.custom_mask_scope);
  disturb_pointer(input, view.cu_q);
  disturb_pointer(input, view.segments);
  disturb_size(input, batch.view);
}

/// Memory of a run: zeroed blocks of exactly the size asked for. Null once a run would need too much.
class Memory {
 public:
  void* get(int64_t elements, int64_t size) {
    int64_t bytes = 0;
    if (elements < 0 || __builtin_mul_overflow(elements, size, &bytes) || (used_ += bytes) > kMaxMemory) {
      exhausted_ = true;
      return nullptr;
    }
    blocks_.emplace_back(static_cast<size_t>(bytes > 0 ? bytes : 1));
    return blocks_.back().data();
  }
  bool exhausted() const { return exhausted_; }

 private:
  std::vector<std::vector<unsigned char>> blocks_;
  int64_t used_ = 0;
  bool exhausted_ = false;
};

template <typename View>
View take_tensor(FuzzInput& input, Memory& memory, folio_dtype dtype, int64_t tokens, int64_t heads, int64_t dim) {
  View view{};
  view.dtype = dtype;
  view.rank = 3;
  const int64_t shape[3] = {tokens, heads, dim};
  std::copy(shape, shape + 3, view.shape);
  view.strides[2] = 1;
  view.strides[1] = dim;
  view.strides[0] = dim * heads;
  if (input.take<uint8_t>() % 32 == 0) view.dtype = input.take_between(-1, 8);
  view.data = memory.get(tokens * heads * dim, std::max(dtype_size(dtype), dtype_size(view.dtype)));
  disturb_pointer(input, view.data);
  if (input.take<uint8_t>() % 32 == 0) view.rank = input.take_between(-1, FOLIO_MAX_RANK + 1);
  for (int i = 0; i < 3; ++i) {
    if (input.take<uint8_t>() % 32 == 0) view.shape[i] = std::min<int64_t>(view.shape[i], input.take<int8_t>());
    disturb_stride(input, view.strides[i]);
  }
  return view;
}

inline folio_scale take_scale(FuzzInput& input, Memory& memory) {
  folio_scale scale = FOLIO_SCALE_INIT;
  const auto kind = input.take<uint8_t>();
  if (kind % 8 == 0) scale.value = input.take<float>();
  if (kind % 8 == 1) {
    scale.granularity = input.take_between(0, 3);
    scale.data = static_cast<const float*>(memory.get(kMaxRequests * 16, 4));
    scale.request_stride = input.take_between(0, 12);
  }
  if (kind % 32 == 2) scale.granularity = input.take<int32_t>();
  return scale;
}

inline folio_kv_cache_view take_cache(FuzzInput& input, Memory& memory, const folio_attention_config& config) {
  const folio_kv_cache_shape shape{input.take_between(1, 12), config.page_size,  config.num_kv_heads,
                                   config.head_dim_qk,        config.head_dim_v, config.kv};
  folio_kv_cache_view view{};
  if (config.kv_format == FOLIO_KV_FP8_DS_MLA) {
    constexpr int64_t kRowBytes = 656;
    void* rows = memory.get(shape.num_pages * std::max(config.page_size, 1), kRowBytes);
    ok(folio_make_fp8_ds_mla_view(shape.num_pages, config.page_size, rows, &view));
    return view;
  }
  int64_t k = 0;
  int64_t v = 0;
  if (!ok(folio_kv_cache_elements(&shape, &k, &v))) return view;
  const folio_dtype dtype = input.take<uint8_t>() % 64 == 0 ? input.take<int8_t>() : config.kv;
  const int64_t element = std::max(dtype_size(config.kv), dtype_size(dtype));
  void* k_data = memory.get(k, element);
  void* v_data = memory.get(v, element);
  if (config.kv_format == FOLIO_KV_CPU_PACKED) {
    ok(folio_make_cpu_packed_view(&shape, k_data, v_data, &view));
  } else if (input.take<uint8_t>() % 2 == 0) {
    ok(folio_make_nhd_view(&shape, k_data, v_data, &view));
  } else {
    ok(folio_make_hnd_view(&shape, k_data, v_data, &view));
  }
  disturb_pointer(input, view.k);
  disturb_pointer(input, view.v);
  if (input.take<uint8_t>() % 32 == 0) view.num_pages = std::min<int64_t>(view.num_pages, input.take<int8_t>());
  for (int64_t* stride : {&view.k_strides.page, &view.k_strides.token, &view.k_strides.head, &view.v_strides.page,
                          &view.v_strides.token, &view.v_strides.head}) {
    disturb_stride(input, *stride);
  }
  view.dtype = dtype;
  // Sizes may become smaller, never larger, and strides of token pairs are not to be read as those of tokens: as with
  // strides, the library does not know where memory ends.
  for (int32_t* field : {&view.page_size, &view.num_kv_heads, &view.head_dim_qk, &view.head_dim_v}) {
    if (input.take<uint8_t>() % 64 == 0) *field = std::min<int32_t>(*field, input.take<int8_t>());
  }
  // Nor has this memory the rows of another format.
  const auto format =
      static_cast<folio_kv_format>(input.take<uint8_t>() % 64 == 0 ? input.take<int8_t>() : view.format);
  if (view.format == FOLIO_KV_STRIDED && format != FOLIO_KV_FP8_DS_MLA) view.format = format;
  return view;
}

/// What an int8 cache has beside it.
inline folio_token_scales take_token_scales(FuzzInput& input, Memory& memory, const folio_kv_cache_view& view) {
  folio_token_scales scales = FOLIO_TOKEN_SCALES_INIT;
  if (view.dtype != FOLIO_DTYPE_INT8) return scales;
  const int64_t heads = std::max(view.num_kv_heads, 0);
  const int64_t page = std::max(view.page_size, 0) * heads;
  scales.data = static_cast<float*>(memory.get(std::max<int64_t>(view.num_pages, 0) * page, 4));
  scales.strides = {page, heads, 1};
  disturb_pointer(input, scales.data);
  for (int64_t* stride : {&scales.strides.page, &scales.strides.token, &scales.strides.head}) {
    disturb_stride(input, *stride);
  }
  return scales;
}

/// The page table of a segment, and its ragged tensors: one of them is used.
struct SegmentMemory {
  std::vector<int32_t> entries, indptr, ragged_indptr;
};

inline folio_segment_args take_segment_args(FuzzInput& input, Memory& memory, SegmentMemory& arrays,
                                            const folio_attention_config& config, const folio_kv_segment& segment,
                                            int32_t requests) {
  folio_segment_args args = FOLIO_SEGMENT_ARGS_INIT;
  const auto rows = static_cast<size_t>(segment.group_indptr != nullptr ? segment.num_groups : requests);
  if (segment.source != FOLIO_KV_RAGGED) {
    args.cache = take_cache(input, memory, config);
    args.k_token_scales = take_token_scales(input, memory, args.cache);
    args.v_token_scales = take_token_scales(input, memory, args.cache);
    arrays.entries = input.take_lengths(input.take<uint8_t>(), 12);
    args.table.indices = arrays.entries.data();
    args.table.num_indices = static_cast<int64_t>(arrays.entries.size());
    args.table.num_rows = static_cast<int32_t>(rows);
    if (input.take<uint8_t>() % 2 == 0) {
      arrays.indptr = input.take_lengths(rows + 1, 40);
      if (input.take<uint8_t>() % 8 != 0) std::sort(arrays.indptr.begin(), arrays.indptr.end());
      args.table.indptr = arrays.indptr.data();
    } else {
      args.table.kind = FOLIO_TABLE_DENSE;
      args.table.row_stride = input.take_length(16);
      args.table.first_column = input.take_length(2);
    }
    disturb(input, args.table.kind);
    if (args.table.kind == FOLIO_TABLE_CSR && args.table.indptr == nullptr) args.table.num_rows = 0;
    disturb_pointer(input, args.table.indices);
  } else {
    const int64_t tokens = input.take_between(0, 200);
    const folio_dtype dtype = config.ragged_kv != FOLIO_DTYPE_UNSET ? config.ragged_kv : config.kv;
    args.ragged.k =
        take_tensor<folio_const_tensor_view>(input, memory, dtype, tokens, config.num_kv_heads, config.head_dim_qk);
    args.ragged.v =
        take_tensor<folio_const_tensor_view>(input, memory, dtype, tokens, config.num_kv_heads, config.head_dim_v);
    arrays.ragged_indptr = input.take_lengths(rows + 1, 200);
    if (input.take<uint8_t>() % 8 != 0) std::sort(arrays.ragged_indptr.begin(), arrays.ragged_indptr.end());
    args.ragged.indptr = arrays.ragged_indptr.data();
    disturb_pointer(input, args.ragged.indptr);
  }
  args.k_scale = take_scale(input, memory);
  args.v_scale = take_scale(input, memory);
  return args;
}
