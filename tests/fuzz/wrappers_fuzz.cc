// FlashInfer's wrappers, from arbitrary offsets, page ids, lengths, masks and options. What `plan` and `run` accept
// must be attention over the keys that the arrays name, by the float64 oracle; what they refuse leaves the output
// alone.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention_oracle.hpp"
#include "calls.hpp"
#include "folio/backends/flashinfer/wrappers.hpp"

namespace {

using namespace folio::backends;
using folio::DType;
using Ints = std::vector<int32_t>;

constexpr float kUntouched = -12345.0f;
constexpr int32_t kPages = 12;            // of the cache
constexpr int64_t kMostValues = 1 << 14;  // that an output may have to be run
constexpr int64_t kMostTokens = 1 << 20;  // of a plan, which takes time and memory in proportion to its rows

/// It looks at every page id: arbitrary ones are refused, not read.
const folio::Context& validating_context() {
  static const folio::Context context = [] {
    folio::ContextOptions options;
    options.num_threads = 1;
    options.validate_tables = true;
    return folio::Context::cpu(options);
  }();
  return context;
}

/// Mostly in [low, high], sometimes anything.
int32_t take_usual(FuzzInput& input, int32_t low, int32_t high) {
  const auto kind = input.take<uint8_t>();
  return kind < 250 ? low + kind % (high - low + 1) : input.take<int32_t>();
}

WrapperPlanOptions take_options(FuzzInput& input) {
  WrapperPlanOptions options;
  options.num_kv_heads = take_usual(input, 1, 2);
  const int32_t group = input.take_between(1, 3);
  options.num_qo_heads = options.num_kv_heads >= 1 && options.num_kv_heads <= 2 ? options.num_kv_heads * group : group;
  options.head_dim_qk = input.take<uint8_t>() < 250 ? 8 * input.take_between(1, 2) : input.take<int32_t>();
  if (input.take<uint8_t>() % 4 == 0) options.head_dim_vo = 8 * input.take_between(1, 3);
  options.page_size = take_usual(input, 1, 5);
  options.q_data_type = DType::kFloat32;
  const auto kinds = input.take<uint8_t>();
  options.causal = kinds % 2 != 0;
  if (kinds % 5 == 0) options.window_left = take_usual(input, -1, 9);
  if (kinds % 7 == 0) options.logits_soft_cap = 2.0f;
  options.sinks = kinds % 11 == 0;
  if (kinds % 3 == 0) options.pos_encoding_mode = static_cast<PosEncodingMode>(take_usual(input, 0, 2));
  options.determinism = static_cast<folio::Determinism>(input.take_between(0, 3));
  if (input.take<uint8_t>() == 255) options.sm_scale = input.take<float>();
  if (input.take<uint8_t>() == 255) options.logits_soft_cap = input.take<float>();
  if (input.take<uint8_t>() == 255) options.kv_data_type = static_cast<DType>(input.take_between(-1, 9));
  return options;
}

/// Offsets of `count` ranges: mostly of sensible ones, sometimes anything.
Ints take_indptr(FuzzInput& input, size_t count, int32_t longest) {
  if (input.take<uint8_t>() % 16 == 0) return input.take_lengths(input.take<uint8_t>() % 5, 20);
  Ints indptr = {0};
  for (size_t i = 0; i < count; ++i) indptr.push_back(indptr.back() + input.take_between(0, longest));
  return indptr;
}

/// A level's pages; `arrays` keeps them.
struct PageArrays {
  Ints indptr, indices, last_page_len;
  WrapperPages view() const { return {indptr, indices, last_page_len}; }
};

PageArrays take_pages(FuzzInput& input, size_t rows, int32_t page_size) {
  PageArrays pages;
  pages.indptr = take_indptr(input, rows, 3);
  const int32_t used = pages.indptr.empty() ? 0 : pages.indptr.back();
  const auto more = input.take<uint8_t>();
  for (int32_t i = std::clamp(used, 0, 64) + (more > 250 ? -1 : more > 200 ? 1 : 0); i > 0; --i) {
    pages.indices.push_back(take_usual(input, 0, kPages - 1));
  }
  for (size_t row = 0; row + 1 < pages.indptr.size(); ++row) {
    const bool empty = pages.indptr[row] == pages.indptr[row + 1];
    pages.last_page_len.push_back(empty ? 0 : take_usual(input, 1, std::clamp(page_size, 1, 8)));
  }
  if (input.take<uint8_t>() == 255) pages.last_page_len.resize(input.take<uint8_t>() % 6, 1);
  return pages;
}

/// The rows of the cache that hold a row's tokens: row page * page_size + place.
void append_keys(const PageArrays& pages, size_t row, int32_t page_size, std::vector<int64_t>& keys) {
  for (int32_t entry = pages.indptr[row]; entry < pages.indptr[row + 1]; ++entry) {
    const bool last = entry + 1 == pages.indptr[row + 1];
    for (int32_t place = 0; place < (last ? pages.last_page_len[row] : page_size); ++place) {
      keys.push_back(int64_t{pages.indices[static_cast<size_t>(entry)]} * page_size + place);
    }
  }
}

/// What every `run` is given, and how its results are held against the oracle.
class Layer {
 public:
  Layer(FuzzInput& input, const WrapperPlanOptions& options) : options_(options) {
    config_.num_q_heads = options.num_qo_heads;
    config_.num_kv_heads = options.num_kv_heads;
    config_.head_dim_qk = options.head_dim_qk;
    config_.head_dim_v = options.head_dim_vo == 0 ? options.head_dim_qk : options.head_dim_vo;
    config_.q = config_.kv = DType::kFloat32;
    config_.mask = options.causal ? folio::MaskKind::kCausal : folio::MaskKind::kNone;
    config_.window_left = options.window_left;
    constexpr std::array<float, 3> kUsual = {1.0f, 0.5f, 2.0f};
    const auto scale = [&] {
      const auto kind = input.take<uint8_t>();
      return kind < 250 ? kUsual[kind % kUsual.size()] : -1.0f;
    };
    run_.q_scale = scale();
    run_.k_scale = scale();
    run_.v_scale = scale();
    for (int32_t head = 0; head < std::clamp(options.num_qo_heads, 0, 64); ++head) {
      sinks_.push_back(0.25f * static_cast<float>(head));
      slopes_.push_back(standard_alibi_slope(head, options.num_qo_heads));
    }
    if (options.sinks || input.take<uint8_t>() > 250) run_.sinks = sinks_.data();
    wants_lse_ = input.take<uint8_t>() % 2 == 0;
  }

  void replace_causal(folio::MaskKind mask) { config_.mask = mask; }

  /// Tokens of more values than are worth computing, or sizes that no memory has, are not run.
  bool is_small(int64_t tokens) const {
    const auto within = [](int32_t value, int32_t most) { return value >= 1 && value <= most; };
    return within(config_.num_q_heads, 64) && within(config_.head_dim_qk, 512) && within(config_.head_dim_v, 512) &&
           tokens >= 0 &&
           tokens <= kMostValues / (int64_t{config_.num_q_heads} * (config_.head_dim_qk + config_.head_dim_v));
  }

  /// Calls `run(q, out, args)` and checks the requests' rows; `masks` has their bits under custom masks.
  template <typename Run>
  void check(const Run& run, bool planned, int64_t tokens, const std::vector<oracle::Request>& requests,
             const std::vector<std::vector<uint8_t>>& masks = {}) {
    const int64_t heads = config_.num_q_heads;
    const std::vector<float> q = oracle::rows(oracle::kQuery, tokens, heads * config_.head_dim_qk);
    std::vector<float> out(static_cast<size_t>(tokens * heads * config_.head_dim_v), kUntouched);
    std::vector<float> lse(static_cast<size_t>(tokens * heads), kUntouched);
    if (wants_lse_) run_.lse = lse.data();
    const folio::TensorView output(out.data(), DType::kFloat32, {tokens, heads, config_.head_dim_v});
    const bool done = accepted([&] {
      run({q.data(), DType::kFloat32, {tokens, heads, config_.head_dim_qk}}, output, run_);
    });
    if (!done) {
      const auto untouched = [](const std::vector<float>& values) {
        return std::all_of(values.begin(), values.end(), [](float x) { return x == kUntouched; });
      };
      FUZZ_CHECK(untouched(out) && untouched(lse));
      return;
    }
    FUZZ_CHECK(planned && run_.q_scale > 0.0f && run_.k_scale > 0.0f && run_.v_scale > 0.0f);
    folio::SegmentArgs keys;
    keys.k_scale.value = run_.k_scale;
    keys.v_scale.value = run_.v_scale;
    folio::AttentionArgs args;
    args.segments = {&keys, 1};
    args.sm_scale =
        options_.sm_scale > 0.0f ? options_.sm_scale : 1.0f / std::sqrt(static_cast<float>(options_.head_dim_qk));
    args.sm_scale *= run_.q_scale;
    if (!(std::abs(args.sm_scale) <= 2.0f)) return;  // float32 cannot be near float64 then
    args.logits_soft_cap = options_.logits_soft_cap;
    if (!(args.logits_soft_cap == 0.0f || args.logits_soft_cap > 0.1f)) return;
    args.sinks = run_.sinks;
    args.rope = {options_.rope_theta, options_.rope_scale};
    const bool alibi = options_.pos_encoding_mode == PosEncodingMode::kAlibi;
    if (alibi) args.alibi_slopes = slopes_.data();
    if (options_.pos_encoding_mode == PosEncodingMode::kRopeLlama) config_.features = folio::Feature::kRopeLlama;
    for (size_t r = 0; r < requests.size(); ++r) {
      if (!masks.empty()) {
        args.custom_mask = masks[r].data();
        args.custom_mask_bytes = static_cast<int64_t>(masks[r].size());
      }
      // FlashInfer's log-sum-exps with ALiBi are others.
      oracle::check(config_, args, requests[r], out, wants_lse_ && !alibi ? lse.data() : nullptr, folio::LseBase::k2);
    }
  }

 private:
  WrapperPlanOptions options_;
  folio::AttentionConfig config_;
  WrapperRunArgs run_;
  std::vector<float> sinks_, slopes_;
  bool wants_lse_ = false;
};

/// A cache in which slot s is row s of the oracle, in either layout.
struct Cache {
  Cache(const WrapperPlanOptions& options, KvCacheLayout layout) {
    const int64_t page = options.page_size, heads = options.num_kv_heads;
    const int64_t dim_v = options.head_dim_vo == 0 ? options.head_dim_qk : options.head_dim_vo;
    if (page < 1 || page > 8 || heads < 1 || heads > 2 || dim_v < 1 || dim_v > 512) return;
    if (options.head_dim_qk < 1 || options.head_dim_qk > 512) return;
    k = fill(oracle::kKey, page, heads, options.head_dim_qk, layout, k_values);
    v = fill(oracle::kValue, page, heads, dim_v, layout, v_values);
  }
  static folio::ConstTensorView fill(oracle::Part part, int64_t page, int64_t heads, int64_t dim, KvCacheLayout layout,
                                     std::vector<float>& values) {
    const bool nhd = layout == KvCacheLayout::kNhd;
    values.resize(static_cast<size_t>(kPages * page * heads * dim));
    for (int64_t slot = 0; slot < kPages * page; ++slot) {
      for (int64_t i = 0; i < heads * dim; ++i) {
        const int64_t hnd_at = ((slot / page * heads + i / dim) * page + slot % page) * dim + i % dim;
        values[static_cast<size_t>(nhd ? slot * heads * dim + i : hnd_at)] = oracle::component(part, slot, i);
      }
    }
    if (nhd) return {values.data(), DType::kFloat32, {kPages, page, heads, dim}};
    return {values.data(), DType::kFloat32, {kPages, heads, page, dim}};
  }
  std::vector<float> k_values, v_values;
  folio::ConstTensorView k, v;
};

std::vector<oracle::Request> requests_of(const Ints& qo_indptr, const PageArrays& pages, int32_t page_size) {
  std::vector<oracle::Request> requests;
  for (size_t r = 0; r + 1 < qo_indptr.size(); ++r) {
    oracle::Request& request = requests.emplace_back();
    request.first_row = qo_indptr[r];
    request.q_len = qo_indptr[r + 1] - qo_indptr[r];
    append_keys(pages, r, page_size, request.keys);
  }
  return requests;
}

/// Bits for every (row, key), given as bools or packed; `blocks` has them by request.
struct Mask {
  std::vector<uint8_t> bools, packed;
  std::vector<std::vector<uint8_t>> blocks;
  WrapperMask view() const { return {bools, packed}; }
};

Mask take_mask(FuzzInput& input, const Ints& qo_indptr, const Ints& kv_lens) {
  Mask mask;
  const auto kind = input.take<uint8_t>();
  if (kind % 3 != 0) return mask;
  for (size_t r = 0; r + 1 < qo_indptr.size() && r < kv_lens.size(); ++r) {
    const int64_t bits = int64_t{qo_indptr[r + 1]} - qo_indptr[r] > 64 || kv_lens[r] > 64
                             ? 0
                             : std::max<int64_t>(0, int64_t{qo_indptr[r + 1] - qo_indptr[r]} * kv_lens[r]);
    std::vector<uint8_t>& block = mask.blocks.emplace_back(static_cast<size_t>((bits + 7) / 8), uint8_t{0});
    for (int64_t i = 0; i < bits; ++i) {
      const bool visible = value_of(kind, static_cast<uint32_t>(r), static_cast<uint32_t>(i)) < 0.25f;
      mask.bools.push_back(visible ? 1 : 0);
      if (visible) block[static_cast<size_t>(i / 8)] |= static_cast<uint8_t>(1u << (i % 8));
    }
    mask.packed.insert(mask.packed.end(), block.begin(), block.end());
  }
  if (input.take<uint8_t>() > 250) mask.bools.push_back(1);
  if (input.take<uint8_t>() > 250) mask.packed.push_back(1);
  if (input.take<uint8_t>() > 250) return mask;  // both
  (kind % 2 == 0 ? mask.bools : mask.packed).clear();
  return mask;
}

int64_t end_of(const Ints& indptr) {
  return indptr.empty() ? 0 : indptr.back();
}

/// Offsets that may be planned and are quick to plan, or that every plan refuses.
bool is_quick_to_plan(const Ints& indptr) {
  return end_of(indptr) <= kMostTokens || indptr.front() != 0 || !std::is_sorted(indptr.begin(), indptr.end());
}

void check_prefill(FuzzInput& input) {
  const auto layout = static_cast<KvCacheLayout>(input.take_between(0, 1));
  BatchPrefillWithPagedKVCacheWrapper wrapper(validating_context(), layout);
  for (int calls = input.take_between(1, 3); calls > 0; --calls) {
    const WrapperPlanOptions options = take_options(input);
    const auto rows = static_cast<size_t>(input.take_between(0, 3));
    const Ints qo_indptr = take_indptr(input, rows, 5);
    if (!is_quick_to_plan(qo_indptr)) continue;
    const PageArrays pages = take_pages(input, rows, options.page_size);
    Ints kv_lens;
    for (size_t r = 0; r < std::min(pages.last_page_len.size(), rows) && r + 1 < pages.indptr.size(); ++r) {
      const int64_t full = int64_t{pages.indptr[r + 1]} - pages.indptr[r] - 1;
      kv_lens.push_back(full < 0 || full > 8 || options.page_size < 1 || options.page_size > 8
                            ? 0
                            : static_cast<int32_t>(full * options.page_size) +
                                  std::clamp(pages.last_page_len[r], 0, 8));
    }
    const Mask mask = take_mask(input, qo_indptr, kv_lens);
    const bool planned = accepted([&] { wrapper.plan(qo_indptr, pages.view(), options, mask.view()); });
    Layer layer(input, options);
    const Cache cache(options, layout);
    const bool custom = !mask.bools.empty() || !mask.packed.empty();
    if (custom) layer.replace_causal(folio::MaskKind::kCustom);
    const int64_t tokens = planned ? end_of(qo_indptr) : 1;
    if (!layer.is_small(tokens)) continue;
    const auto requests = planned ? requests_of(qo_indptr, pages, options.page_size) : std::vector<oracle::Request>();
    layer.check([&](const folio::ConstTensorView& q, const folio::TensorView& out,
                    const WrapperRunArgs& args) { wrapper.run(q, WrapperKvCache(cache.k, cache.v), out, args); },
                planned, tokens, requests, custom ? mask.blocks : std::vector<std::vector<uint8_t>>());
  }
}

void check_ragged(FuzzInput& input) {
  BatchPrefillWithRaggedKVCacheWrapper wrapper(validating_context());
  for (int calls = input.take_between(1, 3); calls > 0; --calls) {
    const WrapperPlanOptions options = take_options(input);
    const auto rows = static_cast<size_t>(input.take_between(0, 3));
    const Ints qo_indptr = take_indptr(input, rows, 5), kv_indptr = take_indptr(input, rows, 12);
    if (!is_quick_to_plan(qo_indptr)) continue;
    Ints kv_lens;
    for (size_t r = 0; r + 1 < kv_indptr.size(); ++r) {
      kv_lens.push_back(static_cast<int32_t>(std::clamp<int64_t>(int64_t{kv_indptr[r + 1]} - kv_indptr[r], 0, 65)));
    }
    const Mask mask = take_mask(input, qo_indptr, kv_lens);
    const bool planned = accepted([&] { wrapper.plan(qo_indptr, kv_indptr, options, mask.view()); });
    Layer layer(input, options);
    const bool custom = !mask.bools.empty() || !mask.packed.empty();
    if (custom) layer.replace_causal(folio::MaskKind::kCustom);
    const int64_t tokens = planned ? end_of(qo_indptr) : 1;
    const int64_t num_keys = std::max<int64_t>(0, end_of(kv_indptr) - (input.take<uint8_t>() > 240 ? 1 : 0));
    if (!layer.is_small(tokens) || num_keys > 256 || options.num_kv_heads < 0 || options.num_kv_heads > 64) continue;
    const int64_t dim_v = options.head_dim_vo == 0 ? options.head_dim_qk : options.head_dim_vo;
    const std::vector<float> k =
        oracle::rows(oracle::kKey, num_keys, int64_t{options.num_kv_heads} * options.head_dim_qk);
    const std::vector<float> v = oracle::rows(oracle::kValue, num_keys, options.num_kv_heads * dim_v);
    std::vector<oracle::Request> requests;
    for (size_t r = 0; planned && r + 1 < qo_indptr.size(); ++r) {
      oracle::Request& request = requests.emplace_back();
      request.first_row = qo_indptr[r];
      request.q_len = qo_indptr[r + 1] - qo_indptr[r];
      for (int32_t key = kv_indptr[r]; key < kv_indptr[r + 1]; ++key) request.keys.push_back(key);
    }
    layer.check(
        [&](const folio::ConstTensorView& q, const folio::TensorView& out, const WrapperRunArgs& args) {
          wrapper.run(q, {k.data(), DType::kFloat32, {num_keys, options.num_kv_heads, options.head_dim_qk}},
                      {v.data(), DType::kFloat32, {num_keys, options.num_kv_heads, dim_v}}, out, args);
        },
        planned, tokens, requests, custom ? mask.blocks : std::vector<std::vector<uint8_t>>());
  }
}

void check_decode(FuzzInput& input) {
  const auto layout = static_cast<KvCacheLayout>(input.take_between(0, 1));
  const bool fixed = input.take<uint8_t>() % 2 == 0;
  const int32_t fixed_size = take_usual(input, 1, 3), max_pages = take_usual(input, 0, 9);
  std::optional<BatchDecodeWithPagedKVCacheWrapper> wrapper;
  if (!accepted([&] {
        if (fixed) {
          wrapper.emplace(validating_context(), layout, fixed_size, max_pages);
        } else {
          wrapper.emplace(validating_context(), layout);
        }
      })) {
    FUZZ_CHECK(fixed && (fixed_size < 1 || max_pages < 0));
    return;
  }
  for (int calls = input.take_between(1, 3); calls > 0; --calls) {
    const WrapperPlanOptions options = take_options(input);
    const auto rows = static_cast<size_t>(fixed && fixed_size < 4 ? fixed_size : input.take_between(0, 3));
    const PageArrays pages = take_pages(input, rows, options.page_size);
    int32_t q_len = take_usual(input, 1, 3);
    const int64_t q_tokens = int64_t{q_len} * static_cast<int64_t>(pages.last_page_len.size());
    if (q_tokens > kMostTokens && q_tokens <= std::numeric_limits<int32_t>::max()) continue;
    bool planned = false;
    if (input.take<uint8_t>() % 4 == 0) {
      q_len = 1;
      planned = accepted([&] { fast_plan_decode(*wrapper, pages.view(), options); });
    } else {
      planned = accepted([&] { wrapper->plan(pages.view(), options, q_len); });
    }
    if (planned && fixed) FUZZ_CHECK(static_cast<int32_t>(pages.last_page_len.size()) == fixed_size);
    Layer layer(input, options);
    layer.replace_causal(folio::MaskKind::kCausal);
    const Cache cache(options, layout);
    const int64_t tokens = planned ? static_cast<int64_t>(pages.last_page_len.size()) * q_len : 1;
    if (!layer.is_small(tokens)) continue;
    Ints qo_indptr;
    for (size_t r = 0; planned && r <= pages.last_page_len.size(); ++r) {
      qo_indptr.push_back(static_cast<int32_t>(r) * q_len);
    }
    layer.check([&](const folio::ConstTensorView& q, const folio::TensorView& out,
                    const WrapperRunArgs& args) { wrapper->run(q, WrapperKvCache(cache.k, cache.v), out, args); },
                planned, tokens, requests_of(qo_indptr, pages, options.page_size));
  }
}

/// Some of `fine`'s bounds, its ends among them: rows that whole requests share.
Ints take_coarser(FuzzInput& input, const Ints& fine) {
  if (fine.empty() || input.take<uint8_t>() % 16 == 0) return input.take_lengths(input.take<uint8_t>() % 4, 8);
  Ints coarse = {fine.front()};
  for (size_t i = 1; i + 1 < fine.size(); ++i) {
    if (input.take<uint8_t>() % 2 == 0) coarse.push_back(fine[i]);
  }
  if (fine.size() > 1) coarse.push_back(fine.back());
  return coarse;
}

void check_cascade(FuzzInput& input) {
  const auto layout = static_cast<KvCacheLayout>(input.take_between(0, 1));
  const int32_t num_levels = input.take_between(1, 4);
  MultiLevelCascadeAttentionWrapper wrapper(validating_context(), num_levels, layout);
  const auto levels = static_cast<size_t>(num_levels);
  for (int calls = input.take_between(1, 2); calls > 0; --calls) {
    const WrapperPlanOptions options = take_options(input);
    std::vector<Ints> bounds(levels);
    std::vector<PageArrays> pages(levels);
    std::vector<std::span<const int32_t>> bound_spans(levels);
    std::vector<WrapperPages> page_views;
    bounds[levels - 1] = take_indptr(input, static_cast<size_t>(input.take_between(0, 4)), 3);
    if (!is_quick_to_plan(bounds[levels - 1])) continue;
    for (size_t l = levels - 1; l > 0; --l) bounds[l - 1] = take_coarser(input, bounds[l]);
    for (size_t l = 0; l < levels; ++l) {
      pages[l] = take_pages(input, std::max<size_t>(bounds[l].size(), 1) - 1, options.page_size);
      bound_spans[l] = bounds[l];
      page_views.push_back(pages[l].view());
    }
    const bool planned = accepted([&] { wrapper.plan(bound_spans, page_views, options); });
    Layer layer(input, options);
    const Cache cache(options, layout);
    const int64_t tokens = planned ? end_of(bounds[levels - 1]) : 1;
    if (!layer.is_small(tokens)) continue;
    std::vector<oracle::Request> requests;
    for (size_t r = 0; planned && r + 1 < bounds[levels - 1].size(); ++r) {
      oracle::Request request;
      request.first_row = bounds[levels - 1][r];
      request.q_len = bounds[levels - 1][r + 1] - bounds[levels - 1][r];
      if (request.q_len == 0) continue;
      for (size_t l = 0; l < levels; ++l) {
        const auto after = std::upper_bound(bounds[l].begin(), bounds[l].end(), request.first_row);
        const auto row = static_cast<size_t>(after - bounds[l].begin()) - 1;
        append_keys(pages[l], row, options.page_size, request.keys);
      }
      requests.push_back(request);
    }
    layer.check([&](const folio::ConstTensorView& q, const folio::TensorView& out,
                    const WrapperRunArgs& args) { wrapper.run(q, WrapperKvCache(cache.k, cache.v), out, args); },
                planned, tokens, requests);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  switch (input.take<uint8_t>() % 4) {
    case 0: check_prefill(input); break;
    case 1: check_ragged(input); break;
    case 2: check_decode(input); break;
    default: check_cascade(input);
  }
  return 0;
}
