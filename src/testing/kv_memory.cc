#include "testing/kv_memory.hpp"

#include <algorithm>
#include <limits>
#include <set>

#include "folio/types/ds_mla.hpp"
#include "folio/types/float_convert.hpp"
#include "testing/factors.hpp"

namespace folio::inline v0::verify {
namespace {

/// Elements from the first to the last that strides reach.
int64_t extent(const KvStrides& strides, int64_t pages, int64_t tokens, int64_t heads, int64_t inner) {
  return (pages - 1) * strides.page + (tokens - 1) * strides.token + (heads - 1) * strides.head + inner;
}

GuardedBuffer elements(int64_t count, DType dtype, GuardedEnd end) {
  return GuardedBuffer(static_cast<size_t>(count * size_of(dtype)), end, kNanByte);
}

void* advance(void* data, int64_t elements_count, DType dtype) {
  return static_cast<std::byte*>(data) + elements_count * size_of(dtype);
}

/// Element index of K's or V's component 0.
int64_t k_index(const KvCacheView& cache, int64_t page, int64_t slot, int64_t head) {
  return page * cache.k_strides.page + slot * cache.k_strides.token + head * cache.k_strides.head;
}

int64_t v_index(const KvCacheView& cache, int64_t page, int64_t slot, int64_t head, int64_t d) {
  const int64_t base = page * cache.v_strides.page + head * cache.v_strides.head;
  if (cache.format == KvFormat::kCpuPacked) return base + slot / 2 * cache.v_strides.token + 2 * d + slot % 2;
  return base + slot * cache.v_strides.token + d;
}

/// Element index of a token's scale.
int64_t scale_index(const TokenScales& scales, int64_t page, int64_t slot, int64_t head) {
  return page * scales.strides.page + slot * scales.strides.token + head * scales.strides.head;
}

}  // namespace

KvMemory::KvMemory(const ConformanceCase& c, const Problem& problem) {
  Random random(c.seed ^ 0x6b76u);
  lay_out_cache(c, problem, random);
  if (cache_.dtype == DType::kInt8) lay_out_token_scales(level<FormatLevel>(c, kFormat) == FormatLevel::kAlias, random);
  write_paged(problem);
  protect();
  for (const SegmentModel& segment : problem.segments) add_ragged(problem, segment, random);
}

void KvMemory::lay_out_cache(const ConformanceCase& c, const Problem& problem, Random& random) {
  const AttentionConfig& config = problem.config;
  const int64_t pages = problem.num_pages;
  const int64_t tokens = config.page_size;
  const int64_t heads = config.num_kv_heads;
  const int64_t dk = config.head_dim_qk;
  const int64_t dv = config.head_dim_v;
  const GuardedEnd end = random.one_in(3) ? GuardedEnd::kFront : GuardedEnd::kBack;
  cache_.format = config.kv_format;
  cache_.dtype = config.kv;
  cache_.num_pages = pages;
  cache_.page_size = config.page_size;
  cache_.num_kv_heads = config.num_kv_heads;
  cache_.head_dim_qk = config.head_dim_qk;
  cache_.head_dim_v = config.head_dim_v;
  KvStrides& k = cache_.k_strides;
  KvStrides& v = cache_.v_strides;
  int64_t v_inner = dv;
  int64_t v_tokens = tokens;
  int64_t v_begin = -1;  // where V starts in K's memory; -1: in its own
  switch (level<FormatLevel>(c, kFormat)) {
    case FormatLevel::kNhd:
      k = {tokens * heads * dk, heads * dk, dk};
      v = {tokens * heads * dv, heads * dv, dv};
      break;
    case FormatLevel::kHnd:
      k = {heads * tokens * dk, dk, tokens * dk};
      v = {heads * tokens * dv, dv, tokens * dv};
      break;
    case FormatLevel::kInterleaved:  // [pages, 2, tokens, heads, dim], or with the heads outside
      if (random.one_in(2)) {
        k = {tokens * heads * (dk + dv), heads * dk, dk};
        v = {tokens * heads * (dk + dv), heads * dv, dv};
      } else {
        k = {tokens * heads * (dk + dv), dk, tokens * dk};
        v = {tokens * heads * (dk + dv), dv, tokens * dv};
      }
      v_begin = tokens * heads * dk;
      break;
    case FormatLevel::kConcatenated:  // [pages, tokens, heads, K then V]
      k = v = {tokens * heads * (dk + dv), heads * (dk + dv), dk + dv};
      v_begin = dk;
      break;
    case FormatLevel::kPadded:  // gaps of odd sizes everywhere
      k = {(tokens * (heads * (dk + 3) + 5)) + 7, heads * (dk + 3) + 5, dk + 3};
      v = {(tokens * (heads * (dv + 1) + 2)) + 11, heads * (dv + 1) + 2, dv + 1};
      break;
    case FormatLevel::kAlias:
      if (random.one_in(2)) {
        k = v = {tokens * heads * dk, heads * dk, dk};
      } else {
        k = v = {heads * tokens * dk, dk, tokens * dk};
      }
      v_begin = problem.alias_offset;
      break;
    case FormatLevel::kPacked:
      k = {heads * tokens * dk, dk, tokens * dk};
      v = {heads * tokens * dv, 2 * dv, tokens * dv};
      v_inner = 2 * dv;
      v_tokens = tokens / 2;
      break;
    case FormatLevel::kDsMla: {  // tokens, or pages, beside those of other layers
      const int64_t token = kDsMlaRowBytes * random.between(1, 2);
      k = v = {tokens * token + kDsMlaAlignment * random.between(0, 3), token, kDsMlaRowBytes};
      const int64_t bytes = extent(k, pages, tokens, 1, kDsMlaRowBytes);
      first_ = GuardedBuffer(static_cast<size_t>(bytes), end, kNanByte);
      cache_.k = cache_.v = first_.data();
      return;
    }
    case FormatLevel::kFar: {  // half of the pages more than 2^31 elements from the first
      const int64_t stride = std::max((int64_t{1} << 32) / pages + 3, tokens * heads * std::max(dk, dv));
      k = {stride, heads * dk, dk};
      v = {stride, heads * dv, dv};
      first_ = far_pages(k, tokens * heads * dk);
      second_ = far_pages(v, tokens * heads * dv);
      cache_.k = first_.data();
      cache_.v = second_.data();
      return;
    }
  }
  const int64_t k_count = extent(k, pages, tokens, heads, dk);
  const int64_t v_count = extent(v, pages, v_tokens, heads, v_inner);
  first_ = elements(v_begin < 0 ? k_count : std::max(k_count, v_begin + v_count), config.kv, end);
  cache_.k = first_.data();
  if (v_begin < 0) second_ = elements(v_count, config.kv, end);
  cache_.v = v_begin < 0 ? second_.data() : advance(first_.data(), v_begin, config.kv);
}

GuardedBuffer KvMemory::far_pages(const KvStrides& strides, int64_t page_elements) const {
  const int64_t bytes_each = size_of(cache_.dtype);
  const int64_t count = (cache_.num_pages - 1) * strides.page + page_elements;
  GuardedBuffer memory = GuardedBuffer::sparse(static_cast<size_t>(count * bytes_each));
  for (int64_t page = 0; page < cache_.num_pages; ++page) {
    memory.open(static_cast<size_t>(page * strides.page * bytes_each), static_cast<size_t>(page_elements * bytes_each),
                kNanByte);
  }
  return memory;
}

namespace {

/// `k`: real values of a token; `scales`: of its blocks. NaN values make a row of NaN.
void store_ds_mla(std::byte* row, const float* k, const float* scales) {
  for (int64_t d = 0; d < kDsMlaLatentDim; ++d) {
    store_from_float(row, DType::kFloat8E4M3, d, k[d] / scales[d / kDsMlaBlockDim]);
  }
  for (int64_t block = 0; block < kDsMlaBlocks; ++block) {
    store_from_float(row + kDsMlaScalesOffset, DType::kFloat32, block, scales[block]);
  }
  for (int64_t d = 0; d < kDsMlaRopeDim; ++d) {
    store_from_float(row + kDsMlaRopeOffset, DType::kBFloat16, d, k[kDsMlaLatentDim + d]);
  }
}

}  // namespace

/// [pages, tokens, heads], [pages, heads, tokens], or with gaps.
void KvMemory::lay_out_token_scales(bool alias, Random& random) {
  const int64_t tokens = cache_.page_size;
  const int64_t heads = cache_.num_kv_heads;
  const auto lay_out = [&](TokenScales& scales, GuardedBuffer& memory) {
    switch (random.below(3)) {
      case 0: scales.strides = {tokens * heads, heads, 1}; break;
      case 1: scales.strides = {tokens * heads, 1, tokens}; break;
      default: scales.strides = {tokens * (heads + 2) + 3, heads + 2, 1}; break;
    }
    memory = elements(extent(scales.strides, cache_.num_pages, tokens, heads, 1), DType::kFloat32, GuardedEnd::kBack);
    scales.data = memory.as<float>();
  };
  lay_out(cache_.k_token_scales, k_token_scales_);
  if (alias) {
    cache_.v_token_scales = cache_.k_token_scales;
  } else {
    lay_out(cache_.v_token_scales, v_token_scales_);
  }
}

void KvMemory::protect() {
  for (GuardedBuffer* buffer : {&first_, &second_, &k_token_scales_, &v_token_scales_}) {
    if (buffer->data() != nullptr) buffer->protect();
  }
}

void KvMemory::unprotect() {
  for (GuardedBuffer* buffer : {&first_, &second_, &k_token_scales_, &v_token_scales_}) {
    if (buffer->data() != nullptr) buffer->unprotect();
  }
}

std::byte* KvMemory::ds_mla_row(int64_t page, int64_t slot) const {
  return static_cast<std::byte*>(cache_.k) + k_index(cache_, page, slot, 0);
}

void KvMemory::write_paged(const Problem& problem) {
  const AttentionConfig& config = problem.config;
  for (const SegmentModel& segment : problem.segments) {
    if (segment.source != KvSource::kPaged) continue;
    for (const KvRowModel& row : segment.rows) {
      size_t k_at = 0;
      size_t v_at = 0;
      size_t scale_at = 0;
      const bool int8 = config.kv == DType::kInt8;
      for (int32_t j = 0; j < row.kv_len; ++j) {
        const int64_t page = row.pages[static_cast<size_t>(j / config.page_size)];
        const int64_t slot = j % config.page_size;
        if (config.kv_format == KvFormat::kFp8DsMla) {
          store_ds_mla(ds_mla_row(page, slot), row.k.data() + int64_t{j} * kDsMlaHeadDimQk,
                       row.block_scales.data() + int64_t{j} * kDsMlaBlocks);
          continue;
        }
        for (int64_t h = 0; h < config.num_kv_heads; ++h) {
          const float k_scale = int8 ? row.k_token_scales[scale_at] : 1.0f;
          const float v_scale = int8 ? row.v_token_scales[scale_at] : 1.0f;
          const int64_t k0 = k_index(cache_, page, slot, h);
          for (int64_t d = 0; d < config.head_dim_qk; ++d) {
            store_from_float(cache_.k, config.kv, k0 + d, row.k[k_at++] / k_scale);
          }
          for (int64_t d = 0; d < config.head_dim_v; ++d) {
            store_from_float(cache_.v, config.kv, v_index(cache_, page, slot, h, d), row.v[v_at++] / v_scale);
          }
          if (!int8) continue;
          cache_.k_token_scales.data[scale_index(cache_.k_token_scales, page, slot, h)] = k_scale;
          cache_.v_token_scales.data[scale_index(cache_.v_token_scales, page, slot, h)] = v_scale;
          ++scale_at;
        }
      }
    }
  }
}

void KvMemory::add_ragged(const Problem& problem, const SegmentModel& segment, Random& random) {
  RaggedKvView& view = ragged_.emplace_back();
  std::vector<int32_t>& begins = ragged_begin_.emplace_back();
  if (segment.source != KvSource::kRagged) return;
  const AttentionConfig& config = problem.config;
  const DType dtype = config.ragged_kv;
  int32_t tokens = random.below(3);  // rows need not begin at token 0
  for (const KvRowModel& row : segment.rows) {
    begins.push_back(tokens);
    tokens += row.kv_len;
  }
  begins.push_back(tokens);
  const bool fused = random.one_in(2);  // K and V beside each other in one wide row, as a QKV projection leaves them
  const int64_t heads = config.num_kv_heads;
  const int64_t dims[2] = {config.head_dim_qk, config.head_dim_v};
  for (size_t i = 0; i < 2; ++i) {
    const int64_t head_stride = dims[i] + (fused ? 0 : random.below(3));
    const int64_t token_stride = heads * head_stride + (fused ? random.between(1, 9) : 0);
    const int64_t count = tokens == 0 ? 0 : (tokens - 1) * token_stride + (heads - 1) * head_stride + dims[i];
    GuardedBuffer memory = elements(count, dtype, GuardedEnd::kBack);
    for (size_t r = 0; r < segment.rows.size(); ++r) {
      const std::vector<float>& values = i == 0 ? segment.rows[r].k : segment.rows[r].v;
      size_t at = 0;
      for (int64_t t = begins[r]; t < begins[r] + segment.rows[r].kv_len; ++t) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t d = 0; d < dims[i]; ++d) {
            store_from_float(memory.data(), dtype, t * token_stride + h * head_stride + d, values[at++]);
          }
        }
      }
    }
    memory.protect();
    ConstTensorView& tensor = i == 0 ? view.k : view.v;
    tensor = ConstTensorView(memory.data(), dtype, {tokens, heads, dims[i]});
    tensor.strides = {token_stride, head_stride, 1};
    ragged_memory_.push_back(std::move(memory));
  }
}

std::vector<const GuardedBuffer*> KvMemory::buffers() const {
  std::vector<const GuardedBuffer*> all{&first_, &second_, &k_token_scales_, &v_token_scales_};
  for (const GuardedBuffer& buffer : ragged_memory_) all.push_back(&buffer);
  return all;
}

void KvMemory::poison_row(const Problem& problem, size_t segment, size_t row) {
  std::set<int32_t> others;
  for (size_t s = 0; s < problem.segments.size(); ++s) {
    for (size_t r = 0; r < problem.segments[s].rows.size(); ++r) {
      if (s == segment && r == row) continue;
      others.insert(problem.segments[s].rows[r].pages.begin(), problem.segments[s].rows[r].pages.end());
    }
  }
  const KvRowModel& model = problem.segments[segment].rows[row];
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  unprotect();
  for (int32_t j = 0; j < model.kv_len; ++j) {
    const int32_t page = model.pages[static_cast<size_t>(j / cache_.page_size)];
    if (others.count(page) != 0) continue;
    if (cache_.format == KvFormat::kFp8DsMla) {
      const std::vector<float> nans(kDsMlaHeadDimQk, kNan);
      store_ds_mla(ds_mla_row(page, j % cache_.page_size), nans.data(), nans.data());
      continue;
    }
    for (int64_t h = 0; h < cache_.num_kv_heads; ++h) {
      const int64_t slot = j % cache_.page_size;
      for (int64_t d = 0; d < cache_.head_dim_qk; ++d)
        store_from_float(cache_.k, cache_.dtype, k_index(cache_, page, slot, h) + d, kNan);
      for (int64_t d = 0; d < cache_.head_dim_v; ++d)
        store_from_float(cache_.v, cache_.dtype, v_index(cache_, page, slot, h, d), kNan);
      if (cache_.dtype != DType::kInt8) continue;
      cache_.k_token_scales.data[scale_index(cache_.k_token_scales, page, slot, h)] = kNan;
      cache_.v_token_scales.data[scale_index(cache_.v_token_scales, page, slot, h)] = kNan;
    }
  }
  protect();
}

}  // namespace folio::inline v0::verify
