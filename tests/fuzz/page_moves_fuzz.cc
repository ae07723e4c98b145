// Writes into a paged cache, copies, conversions and gathers of its pages, from arbitrary strides, formats, dtypes,
// scales, slots and lists of pages. An element lies where KvCacheView says; what a call accepts must have put the right
// value into every element that it names and changed no other, and what it refuses changes nothing.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "calls.hpp"
#include "folio/context.hpp"
#include "folio/kv_cache.hpp"
#include "folio/page_table.hpp"
#include "folio/types/float_convert.hpp"
#include "values.hpp"

namespace {

using folio::DType;
using folio::KvCacheView;
using Ints = std::vector<int32_t>;

constexpr int64_t kMostBytes = 1 << 16;  // of one half of a cache
constexpr std::array<DType, 5> kDtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                                          DType::kFloat8E5M2};
/// Of a cache.
DType take_dtype(FuzzInput& input) {
  const auto kind = input.take<uint8_t>();
  return kind >= 235 && kind < 250 ? DType::kInt8 : kDtypes[kind % kDtypes.size()];
}

const folio::Context& shared_context() {
  static const folio::Context context = folio::Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  return context;
}

/// Where an element of K or V lies, by KvCacheView's words.
struct Place {
  bool v = false;
  int64_t page = 0, token = 0, head = 0, d = 0;
};

int64_t index_of(const KvCacheView& view, const Place& at) {
  const folio::KvStrides& strides = at.v ? view.v_strides : view.k_strides;
  const int64_t head = at.page * strides.page + at.head * strides.head;
  if (at.v && view.format == folio::KvFormat::kCpuPacked) {
    return head + at.token / 2 * strides.token + 2 * at.d + at.token % 2;
  }
  return head + at.token * strides.token + at.d;
}

int64_t scale_index(const KvCacheView& view, const Place& at) {
  const folio::KvStrides& strides = (at.v ? view.v_token_scales : view.k_token_scales).strides;
  return at.page * strides.page + at.token * strides.token + at.head * strides.head;
}

/// A cache of exactly the memory that its strides reach, filled with values that follow from where they lie.
struct Cache {
  KvCacheView view;
  std::vector<std::byte> k, v;
  std::vector<float> k_scales, v_scales;  ///< of the tokens of int8
  bool usable = true;

  bool int8() const { return view.dtype == DType::kInt8; }
  float scale(const Place& at) const {
    return int8() ? (at.v ? v_scales : k_scales)[static_cast<size_t>(scale_index(view, at))] : 1.0f;
  }
  /// Its value, the token's scale included.
  float load(const Place& at) const {
    return folio::load_as_float(at.v ? v.data() : k.data(), view.dtype, index_of(view, at)) * scale(at);
  }
  bool holds(const Cache& other) const {
    return k == other.k && v == other.v && k_scales == other.k_scales && v_scales == other.v_scales;
  }
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (int half = 0; half < 2; ++half) {
      for (int64_t page = 0; page < view.num_pages; ++page) {
        for (int64_t token = 0; token < view.page_size; ++token) {
          for (int64_t head = 0; head < view.num_kv_heads; ++head) {
            for (int64_t d = 0; d < (half == 1 ? view.head_dim_v : view.head_dim_qk); ++d) {
              visit(Place{half == 1, page, token, head, d});
            }
          }
        }
      }
    }
  }
};

int32_t take_usual(FuzzInput& input, int32_t low, int32_t high) {
  const auto kind = input.take<uint8_t>();
  return kind < 252 ? low + kind % (high - low + 1) : input.take<int32_t>();
}

folio::KvCacheShape take_shape(FuzzInput& input) {
  folio::KvCacheShape shape;
  shape.num_pages = input.take_between(0, 6);
  shape.page_size = take_usual(input, 1, 6);
  shape.num_kv_heads = take_usual(input, 1, 3);
  shape.head_dim_qk = take_usual(input, 1, 5);
  shape.head_dim_v = input.take<uint8_t>() % 2 == 0 ? shape.head_dim_qk : take_usual(input, 1, 5);
  shape.dtype = take_dtype(input);
  return shape;
}

/// Scales for exactly what their strides reach.
void take_token_scales(FuzzInput& input, Cache& cache) {
  KvCacheView& view = cache.view;
  for (const bool v : {false, true}) {
    folio::TokenScales& scales = v ? view.v_token_scales : view.k_token_scales;
    if (input.take<uint8_t>() % 4 == 0) scales.strides.page += input.take<uint8_t>() % 16;
    std::vector<float>& memory = v ? cache.v_scales : cache.k_scales;
    if (view.num_pages == 0 || view.page_size > 64 || view.num_kv_heads > 64) continue;
    const Place last = {v, view.num_pages - 1, view.page_size - 1, view.num_kv_heads - 1, 0};
    memory.resize(static_cast<size_t>(scale_index(view, last) + 1));
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = 0.25f * static_cast<float>(i % 9);
    scales.data = memory.data();
  }
}

void take_cache(FuzzInput& input, const folio::KvCacheShape& shape, Cache& cache) {
  const auto kind = input.take<uint8_t>();
  cache.usable = accepted([&] {
    std::byte* const nowhere = nullptr;
    const folio::KvCacheShape no_pages = {
        0, shape.page_size, shape.num_kv_heads, shape.head_dim_qk, shape.head_dim_v, shape.dtype};
    const auto make = [&](auto... scales) {
      return kind % 4 == 0   ? folio::make_cpu_packed_view(no_pages, nowhere, nowhere, scales...)
             : kind % 4 == 1 ? folio::make_hnd_view(no_pages, nowhere, nowhere, scales...)
                             : folio::make_nhd_view(no_pages, nowhere, nowhere, scales...);
    };
    float* const no_scales = nullptr;
    cache.view = shape.dtype == DType::kInt8 ? make(no_scales, no_scales) : make();
  });
  if (!cache.usable) return;
  KvCacheView& view = cache.view;
  view.num_pages = shape.num_pages;
  for (folio::KvStrides* strides : {&view.k_strides, &view.v_strides}) {
    if (input.take<uint8_t>() % 4 == 0) strides->page += input.take<uint8_t>() % 64;
    if (kind < 250) continue;
    for (int64_t* stride : {&strides->page, &strides->token, &strides->head}) {
      if (input.take<uint8_t>() % 2 == 0) *stride = input.take<uint8_t>() - 8;
    }
  }
  // What the largest index reaches, from non-negative strides; views with others are refused by every call.
  const auto bytes = [&](bool v, int64_t dim) -> int64_t {
    if (view.num_pages == 0 || view.page_size > 64 || view.num_kv_heads > 64 || dim > 64) return 0;
    const Place last = {v, view.num_pages - 1, view.page_size - 1, view.num_kv_heads - 1, dim - 1};
    return std::max<int64_t>(0, index_of(view, last) + 1) * folio::size_of(view.dtype);
  };
  const int64_t k_bytes = bytes(false, view.head_dim_qk), v_bytes = bytes(true, view.head_dim_v);
  cache.usable =
      k_bytes <= kMostBytes && v_bytes <= kMostBytes && (view.num_pages == 0 || (k_bytes > 0 && v_bytes > 0));
  if (!cache.usable) return;
  cache.k.resize(static_cast<size_t>(k_bytes));
  cache.v.resize(static_cast<size_t>(v_bytes));
  view.k = cache.k.data();
  view.v = cache.v.data();
  if (cache.int8()) take_token_scales(input, cache);
  if (!accepted([&] { folio::validate(view); })) return;
  const auto seed = input.take<uint8_t>();
  cache.for_each([&](const Place& at) {
    const auto place = static_cast<uint32_t>((at.token * 64 + at.head) * 64 + at.d) * 2 + (at.v ? 1 : 0);
    folio::store_from_float(at.v ? view.v : view.k, view.dtype, index_of(view, at),
                            value_of(seed, static_cast<uint32_t>(at.page), place));
  });
}

folio::Scale take_scale(FuzzInput& input, bool fp8) {
  folio::Scale scale;
  const auto kind = input.take<uint8_t>();
  if (kind > 252)
    scale.value = input.take<float>();
  else if (fp8 && kind % 2 == 0)
    scale.value = 0.25f * static_cast<float>(1 + kind % 7);
  return scale;
}

/// What an fp8 or 16-bit element makes of a value, in the library's own rounding, which tests of their own look at.
float stored(DType dtype, float value) {
  std::array<std::byte, 4> memory{};
  folio::store_from_float(memory.data(), dtype, 0, value);
  return folio::load_as_float(memory.data(), dtype, 0);
}

/// What an int8 cache holds of component `d` of a token, whose `dim` values `value(d)` gives.
template <typename Value>
float quantized(int64_t d, int64_t dim, const Value& value) {
  float most = 0.0f;
  for (int64_t i = 0; i < dim; ++i) {
    if (std::isfinite(value(i))) most = std::max(most, std::abs(value(i)));
  }
  const float scale = most / 127.0f;
  return scale > 0.0f ? static_cast<float>(folio::float_to_int8(value(d) / scale)) * scale : 0.0f;
}

bool same(float a, float b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

/// Copies or conversions of pages, within a cache or between two.
void check_moves(FuzzInput& input) {
  folio::KvCacheShape shape = take_shape(input);
  Cache from, other;
  take_cache(input, shape, from);
  const bool within = input.take<uint8_t>() % 4 == 0, convert = input.take<uint8_t>() % 2 == 0;
  if (!within) {
    if (convert) shape.dtype = take_dtype(input);
    if (input.take<uint8_t>() > 250) shape = take_shape(input);
    if (input.take<uint8_t>() % 4 == 0) shape.num_pages = input.take_between(0, 6);
    take_cache(input, shape, other);
  }
  Cache& to = within ? from : other;
  if (!from.usable || !to.usable) return;
  Ints source, destination;
  for (int32_t i = input.take_between(0, 5); i > 0; --i) {
    source.push_back(take_usual(input, 0, std::max(0, static_cast<int32_t>(from.view.num_pages) - 1)));
    destination.push_back(take_usual(input, 0, std::max(0, static_cast<int32_t>(to.view.num_pages) - 1)));
  }
  if (input.take<uint8_t>() > 250) destination.push_back(0);
  folio::CacheConvertScales scales;
  if (convert) {
    scales.from_k = take_scale(input, folio::is_fp8(from.view.dtype));
    scales.from_v = take_scale(input, folio::is_fp8(from.view.dtype));
    scales.to_k = take_scale(input, folio::is_fp8(to.view.dtype));
    scales.to_v = take_scale(input, folio::is_fp8(to.view.dtype));
  }
  const Cache from_before = from;
  const Cache to_before = to;
  const std::vector<std::byte>&k_before = to_before.k, &v_before = to_before.v;
  const bool done = accepted([&] {
    if (convert) {
      folio::convert_pages(shared_context(), from.view, to.view, source, destination, scales);
    } else {
      folio::copy_pages(shared_context(), from.view, to.view, source, destination);
    }
  });
  if (!done) {
    FUZZ_CHECK(to.holds(to_before));
    return;
  }
  std::map<int64_t, int64_t> source_of;
  FUZZ_CHECK(source.size() == destination.size());
  for (size_t i = 0; i < source.size(); ++i) FUZZ_CHECK(source_of.emplace(destination[i], source[i]).second);
  std::vector<bool> k_written(to.k.size()), v_written(to.v.size());
  const auto element = static_cast<size_t>(folio::size_of(to.view.dtype));
  to.for_each([&](const Place& at) {
    const auto moved = source_of.find(at.page);
    if (moved == source_of.end()) {
      FUZZ_CHECK(to.scale(at) == to_before.scale(at));
      return;
    }
    std::vector<bool>& written = at.v ? v_written : k_written;
    const size_t first = static_cast<size_t>(index_of(to.view, at)) * element;
    std::fill_n(written.begin() + static_cast<std::ptrdiff_t>(first), element, true);
    Place origin = at;
    origin.page = moved->second;
    const float from_scale = at.v ? scales.from_v.value : scales.from_k.value;
    const float to_scale = at.v ? scales.to_v.value : scales.to_k.value;
    const float value = from_before.load(origin);
    if (to.int8() && !from.int8()) {
      const int64_t dim = at.v ? to.view.head_dim_v : to.view.head_dim_qk;
      const auto of_token = [&](int64_t d) {
        Place place = origin;
        place.d = d;
        return from_before.load(place) * from_scale;
      };
      FUZZ_CHECK(same(to.load(at), quantized(at.d, dim, of_token)));
      return;
    }
    const bool keeps_bits = from.view.dtype == to.view.dtype && from_scale == to_scale;
    FUZZ_CHECK(same(to.load(at), keeps_bits ? value : stored(to.view.dtype, value * from_scale / to_scale)));
  });
  const auto others_kept = [](const std::vector<std::byte>& now, const std::vector<std::byte>& before,
                              const std::vector<bool>& written) {
    for (size_t i = 0; i < now.size(); ++i) {
      if (!written[i] && now[i] != before[i]) return false;
    }
    return true;
  };
  FUZZ_CHECK(others_kept(to.k, k_before, k_written) && others_kept(to.v, v_before, v_written));
}

/// A page table of either kind that mostly names pages of the cache.
struct Table {
  Ints entries, indptr;
  folio::PageTableView view;
};

void take_table(FuzzInput& input, int32_t rows, int64_t num_pages, Table& table) {
  const bool dense = input.take<uint8_t>() % 2 == 0;
  for (int32_t i = input.take_between(0, 24); i > 0; --i) {
    table.entries.push_back(take_usual(input, 0, std::max(0, static_cast<int32_t>(num_pages) - 1)));
  }
  const auto entries = static_cast<int32_t>(table.entries.size());
  accepted([&] {
    if (dense) {
      table.view = folio::dense_table(table.entries, take_usual(input, std::min(rows, 3), rows + 1),
                                      take_usual(input, 0, rows > 0 ? entries / rows : 4), take_usual(input, 0, 1));
      return;
    }
    table.indptr = {0};
    for (int32_t r = 0; r < rows; ++r) {
      table.indptr.push_back(table.indptr.back() + input.take_between(0, rows > 0 ? entries / rows : 0));
    }
    if (input.take<uint8_t>() > 250) table.indptr.back() = input.take_length(30);
    table.view = folio::csr_table(table.entries, table.indptr);
  });
}

void check_gather(FuzzInput& input) {
  const folio::KvCacheShape shape = take_shape(input);
  Cache cache;
  take_cache(input, shape, cache);
  if (!cache.usable) return;
  const int32_t rows = input.take_between(0, 3);
  Table table;
  take_table(input, rows, cache.view.num_pages, table);
  const Ints lens = [&] {
    Ints values;
    for (int32_t r = 0; r < rows; ++r) values.push_back(take_usual(input, 0, 12));
    return values;
  }();
  int64_t tokens = 0;
  for (const int32_t len : lens) tokens += std::clamp(len, 0, 64);
  if (input.take<uint8_t>() > 240) tokens += input.take<uint8_t>() % 3 - 1;
  tokens = std::max<int64_t>(tokens, 0);
  const DType dtype = input.take<uint8_t>() % 4 == 0 ? cache.view.dtype : kDtypes[input.take<uint8_t>() % 3];
  const folio::Scale k_scale = take_scale(input, folio::is_fp8(cache.view.dtype) && !folio::is_fp8(dtype));
  const folio::Scale v_scale = take_scale(input, folio::is_fp8(cache.view.dtype) && !folio::is_fp8(dtype));
  const KvCacheView& view = cache.view;
  if (view.num_kv_heads > 64 || view.head_dim_qk > 64 || view.head_dim_v > 64) return;
  const auto bytes = [&](int64_t dim) {
    return static_cast<size_t>(tokens * view.num_kv_heads * dim * folio::size_of(dtype));
  };
  constexpr std::byte kFill{0xa5};
  std::vector<std::byte> k(bytes(view.head_dim_qk), kFill), v(bytes(view.head_dim_v), kFill);
  const folio::TensorView k_out(k.data(), dtype, {tokens, view.num_kv_heads, view.head_dim_qk});
  const folio::TensorView v_out(v.data(), dtype, {tokens, view.num_kv_heads, view.head_dim_v});
  if (!accepted([&] { folio::gather_kv(shared_context(), view, table.view, lens, k_out, v_out, k_scale, v_scale); })) {
    const auto untouched = [&](const std::vector<std::byte>& values) {
      return std::all_of(values.begin(), values.end(), [&](std::byte value) { return value == kFill; });
    };
    FUZZ_CHECK(untouched(k) && untouched(v));
    return;
  }
  int64_t row = 0;
  for (int32_t r = 0; r < rows; ++r) {
    for (int32_t t = 0; t < lens[static_cast<size_t>(r)]; ++t, ++row) {
      const int64_t first = table.view.kind == folio::PageTableKind::kCsr
                                ? table.view.indptr[r]
                                : r * table.view.row_stride + table.view.first_column;
      const int32_t page = table.view.indices[first + t / view.page_size];
      FUZZ_CHECK(row < tokens && page >= 0 && page < view.num_pages);
      for (int64_t head = 0; head < view.num_kv_heads; ++head) {
        for (int half = 0; half < 2; ++half) {
          const int64_t dim = half == 1 ? view.head_dim_v : view.head_dim_qk;
          const float scale = folio::is_fp8(dtype) ? 1.0f : half == 1 ? v_scale.value : k_scale.value;
          for (int64_t d = 0; d < dim; ++d) {
            const float value = cache.load({half == 1, page, t % view.page_size, head, d});
            const float got = folio::load_as_float(half == 1 ? v.data() : k.data(), dtype,
                                                   (row * view.num_kv_heads + head) * dim + d);
            FUZZ_CHECK(same(got, stored(dtype, value * scale)));
          }
        }
      }
    }
  }
}

void check_write(FuzzInput& input) {
  const folio::KvCacheShape shape = take_shape(input);
  Cache cache;
  take_cache(input, shape, cache);
  const KvCacheView& view = cache.view;
  if (!cache.usable || view.num_kv_heads > 64 || view.head_dim_qk > 64 || view.head_dim_v > 64) return;
  const int64_t tokens = input.take_between(0, 6);
  const bool fp8 = folio::is_fp8(view.dtype);
  const DType dtype = fp8 && input.take<uint8_t>() % 4 == 0 ? view.dtype : kDtypes[input.take<uint8_t>() % 3];
  const auto rows = [&](uint32_t half, int64_t dim) {
    std::vector<std::byte> values(static_cast<size_t>(tokens * view.num_kv_heads * dim * folio::size_of(dtype)));
    for (int64_t i = 0; i < tokens * view.num_kv_heads * dim; ++i) {
      folio::store_from_float(values.data(), dtype, i, value_of(7, half, static_cast<uint32_t>(i)));
    }
    return values;
  };
  const std::vector<std::byte> k = rows(0, view.head_dim_qk), v = rows(1, view.head_dim_v);
  std::vector<int64_t> slots;
  const auto num_slots = static_cast<int32_t>(std::min<int64_t>(view.num_pages * view.page_size, 1000));
  for (int64_t i = 0; i < tokens; ++i) slots.push_back(take_usual(input, -1, std::min(num_slots, 200) - 1));
  folio::CacheWriteArgs args;
  args.k = {k.data(), dtype, {tokens, view.num_kv_heads, view.head_dim_qk}};
  args.v = {v.data(), dtype, {tokens, view.num_kv_heads, view.head_dim_v}};
  args.slot_mapping = slots.data();
  args.num_slots = input.take<uint8_t>() < 250 ? tokens : tokens - 1;
  args.cache = view;
  args.k_scale = take_scale(input, fp8 && dtype != view.dtype);
  args.v_scale = take_scale(input, fp8 && dtype != view.dtype);
  const Cache before = cache;
  if (!accepted([&] { folio::write_kv_cache(shared_context(), args); })) {
    FUZZ_CHECK(cache.holds(before));
    return;
  }
  std::map<int64_t, int64_t> token_of;  // of several tokens with one slot the last wins
  for (int64_t i = 0; i < args.num_slots; ++i) {
    const int64_t slot = slots[static_cast<size_t>(i)];
    FUZZ_CHECK(slot < view.num_pages * view.page_size);
    if (slot >= 0) token_of[slot] = i;
  }
  cache.for_each([&](const Place& at) {
    const auto token = token_of.find(at.page * view.page_size + at.token);
    if (token == token_of.end()) {
      FUZZ_CHECK(same(cache.load(at), before.load(at)));
      return;
    }
    const int64_t dim = at.v ? view.head_dim_v : view.head_dim_qk;
    const auto of_token = [&](int64_t d) {
      return folio::load_as_float(at.v ? v.data() : k.data(), dtype,
                                  (token->second * view.num_kv_heads + at.head) * dim + d);
    };
    const float value = of_token(at.d);
    if (cache.int8()) {
      FUZZ_CHECK(same(cache.load(at), quantized(at.d, dim, of_token)));
      return;
    }
    const float scale = dtype == view.dtype ? 1.0f : at.v ? args.v_scale.value : args.k_scale.value;
    FUZZ_CHECK(same(cache.load(at), stored(view.dtype, value / scale)));
  });
}

/// Pages of an fp8 cache into a 16-bit one, with a table of their own.
void check_dequantize(FuzzInput& input) {
  folio::KvCacheShape shape = take_shape(input);
  if (input.take<uint8_t>() < 250) shape.dtype = kDtypes[3 + input.take<uint8_t>() % 2];
  Cache from, to;
  take_cache(input, shape, from);
  const int32_t rows = input.take_between(0, 3), columns = take_usual(input, 0, 4);
  Ints lens, entries;
  for (int32_t r = 0; r < rows; ++r) lens.push_back(take_usual(input, 0, 8));
  shape.dtype = kDtypes[1 + input.take<uint8_t>() % 2];
  shape.num_pages = input.take_between(0, 14);
  take_cache(input, shape, to);
  if (!from.usable || !to.usable || columns < 0 || columns > 16) return;
  for (int32_t i = 0; i < rows * columns; ++i) {
    entries.push_back(take_usual(input, 0, std::max(0, static_cast<int32_t>(from.view.num_pages) - 1)));
  }
  folio::PageTableView table;
  if (!accepted([&] { table = folio::dense_table(entries, rows, columns); })) return;
  const float k_scale = take_scale(input, true).value, v_scale = take_scale(input, true).value;
  Ints made(entries.size() + (input.take<uint8_t>() > 250 ? 1 : 0), -1);
  const std::vector<std::byte> k_before = to.k, v_before = to.v;
  if (!accepted([&] {
        folio::dequantize_pages(shared_context(), from.view, table, columns, lens, k_scale, v_scale, to.view, made);
      })) {
    FUZZ_CHECK(to.k == k_before && to.v == v_before);
    FUZZ_CHECK(std::all_of(made.begin(), made.end(), [](int32_t page) { return page == -1; }));
    return;
  }
  int32_t next = 1;
  for (int32_t r = 0; r < rows; ++r) {
    const int32_t len = lens[static_cast<size_t>(r)];
    for (int32_t column = 0; column < columns; ++column) {
      const auto at = static_cast<size_t>(r * columns + column);
      const bool used = column * from.view.page_size < len;
      FUZZ_CHECK(made[at] == (used ? next++ : 0));
      for (int32_t t = column * from.view.page_size; used && t < std::min(len, (column + 1) * from.view.page_size);
           ++t) {
        for (int half = 0; half < 2; ++half) {
          const int64_t dim = half == 1 ? from.view.head_dim_v : from.view.head_dim_qk;
          for (int64_t i = 0; i < from.view.num_kv_heads * dim; ++i) {
            Place place = {half == 1, entries[at], t % from.view.page_size, i / dim, i % dim};
            const float value = from.load(place) * (half == 1 ? v_scale : k_scale);
            place.page = made[at];
            FUZZ_CHECK(same(to.load(place), stored(to.view.dtype, value)));
          }
        }
      }
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  switch (input.take<uint8_t>() % 4) {
    case 0: check_moves(input); break;
    case 1: check_gather(input); break;
    case 2: check_write(input); break;
    default: check_dequantize(input);
  }
  return 0;
}
