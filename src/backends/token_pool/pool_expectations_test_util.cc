#include <algorithm>
#include <cmath>
#include <sstream>

#include "backends/token_pool/pool_test_util.hpp"
#include "folio/reference.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends::testing {
namespace {

/// Relative error of rounding to nearest: 2^-p for p bits of significand.
double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return 0x1p-8;
    case DType::kFloat16: return 0x1p-11;
    default: return 0x1p-24;
  }
}

}  // namespace

/// The rule, from the definitions. Keys: decoder tokens by position, drafts behind them; or the encoder's.
bool PoolFixture::sees(const RadixAttention& layer, size_t request, int32_t query, int32_t key) const {
  if (layer.is_cross_attention) return true;
  const int32_t prefix = lengths.prefix[request];
  const bool tree = !lengths.parents.empty();
  const int32_t position = prefix + (tree ? depth(query) : query);
  const bool draft = tree && key >= prefix;
  const int32_t key_position = draft ? prefix + depth(key - prefix) : key;
  const int32_t window = layer.sliding_window_size;
  if (window >= 0 && key_position < position - window) return false;
  if (layer.attn_type != RadixAttentionType::kDecoder) return true;
  if (!draft) return key_position <= position;
  for (int32_t at = query; at >= 0; at = lengths.parents[static_cast<size_t>(at)]) {
    if (at == key - prefix) return true;
  }
  return false;
}

std::string PoolFixture::wrong_output(const RadixAttention& layer, bool fresh_from_k) const {
  const double unit = unit_roundoff(setup.q_dtype);
  const double partial = setup.partial == DType::kUnset ? 0.0 : unit_roundoff(setup.partial);
  constexpr double kFloat32Work = 0x1p-24 * 128;  // exponentials, sums and logits of up to 2^7 roundings each
  AttentionConfig config;
  config.num_q_heads = setup.num_heads;
  config.num_kv_heads = setup.num_kv_heads;
  config.head_dim_qk = setup.head_dim;
  config.head_dim_v = setup.v_head_dim;
  config.mask = MaskKind::kCustom;
  std::vector<double> expected(static_cast<size_t>(setup.v_head_dim)), magnitude(expected.size());
  for (size_t r = 0; r < num_requests(); ++r) {
    const int32_t q_len = cu_q[r + 1] - cu_q[r];
    const History& history = layer.is_cross_attention ? encoder_history_[r] : history_[r];
    const int32_t keys = layer.is_cross_attention ? lengths.encoder[r] : lengths.prefix[r] + lengths.fresh[r];
    const int32_t kv_heads = setup.num_kv_heads;
    const auto k_row = static_cast<size_t>(kv_heads * setup.head_dim);
    const auto v_row = static_cast<size_t>(kv_heads * setup.v_head_dim);
    std::vector<float> keys_k = history.cached_k, keys_v = history.cached_v;
    if (fresh_from_k && !layer.is_cross_attention) {
      const auto prefix = static_cast<size_t>(lengths.prefix[r]);
      std::copy(history.k.begin() + static_cast<std::ptrdiff_t>(prefix * k_row), history.k.end(),
                keys_k.begin() + static_cast<std::ptrdiff_t>(prefix * k_row));
      std::copy(history.v.begin() + static_cast<std::ptrdiff_t>(prefix * v_row), history.v.end(),
                keys_v.begin() + static_cast<std::ptrdiff_t>(prefix * v_row));
    }
    std::vector<float> magnitudes;
    for (const float value : keys_v) magnitudes.push_back(std::abs(value));
    std::vector<uint8_t> visible((static_cast<size_t>(q_len) * static_cast<size_t>(keys) + 7) / 8, 0);
    for (int32_t query = 0; query < q_len; ++query) {
      for (int32_t key = 0; key < keys; ++key) {
        const auto bit = static_cast<size_t>(query) * static_cast<size_t>(keys) + static_cast<size_t>(key);
        if (sees(layer, r, query, key)) visible[bit / 8] = static_cast<uint8_t>(visible[bit / 8] | (1u << (bit % 8)));
      }
    }
    const std::vector<int32_t> request_cu_q{0, q_len}, kv_len{keys}, indptr{0, keys};
    KvSegment segment;
    segment.source = KvSource::kRagged;
    segment.kv_len = kv_len.data();
    BatchView view;
    view.num_requests = 1;
    view.num_tokens = q_len;
    view.cu_q = request_cu_q.data();
    view.segments = {&segment, 1};
    AttentionArgs args;
    // Of all ranks' heads, where q has them, this rank's; or all, one rank's after the other's, where `out` has.
    const int32_t q_ranks = ranks_of(setup.replicated_queries), out_ranks = ranks_of(setup.all_heads_out);
    const int64_t q_heads = int64_t{setup.num_heads} * q_ranks;
    const int64_t q_row = q_heads * setup.head_dim * size_of(setup.q_dtype);
    args.q = ConstTensorView(q_memory.data() + cu_q[r] * q_row, setup.q_dtype, {q_len, q_heads, setup.head_dim});
    args.q.shape[1] = setup.num_heads;
    const std::byte* const first_head = static_cast<const std::byte*>(args.q.data);
    args.sm_scale = layer.scaling;
    args.logits_soft_cap = layer.logit_cap;
    args.custom_mask = visible.data();
    args.custom_mask_bytes = static_cast<int64_t>(visible.size());
    const auto row_of = [&](int32_t token, int32_t head, const std::vector<float>& values, std::vector<double>& row) {
      SegmentArgs ragged;
      ragged.ragged.k = ConstTensorView(keys_k.data(), DType::kFloat32, {keys, kv_heads, setup.head_dim});
      ragged.ragged.v = ConstTensorView(values.data(), DType::kFloat32, {keys, kv_heads, setup.v_head_dim});
      ragged.ragged.indptr = indptr.data();
      args.segments = {&ragged, 1};
      verify::reference_row(config, view, args, token, head, row);
    };
    for (int32_t token = 0; token < q_len; ++token) {
      for (int32_t out_head = 0; out_head < setup.num_heads * out_ranks; ++out_head) {
        const int32_t head = out_head % setup.num_heads;
        int32_t rank = out_head / setup.num_heads;
        if (q_ranks > out_ranks) rank = setup.group->rank();
        args.q.data = first_head + int64_t{rank} * setup.num_heads * setup.head_dim * size_of(setup.q_dtype);
        row_of(token, head, keys_v, expected);
        row_of(token, head, magnitudes, magnitude);
        for (size_t d = 0; d < expected.size(); ++d) {
          const double allowed = unit * std::abs(expected[d]) + (unit + partial + kFloat32Work) * magnitude[d];
          const int64_t at = (int64_t{cu_q[r] + token} * setup.num_heads * out_ranks + out_head) * setup.v_head_dim;
          const float actual = load_as_float(out_memory.data(), setup.q_dtype, at + static_cast<int64_t>(d));
          if (std::abs(actual - expected[d]) <= allowed) continue;  // NaN is wrong too
          std::ostringstream text;
          text << "request " << r << ", token " << token << ", head " << out_head << ", component " << d << ": "
               << actual << " instead of " << expected[d] << ", allowed " << allowed;
          return text.str();
        }
      }
    }
  }
  return {};
}

std::string PoolFixture::wrong_cache(int32_t layer_id) const {
  const KvCacheView& view = pool->view(layer_id);
  if (setup.pool_layout == KvPoolLayout::kCpuPacked) return {};  // its element order is write_kv_cache's affair
  std::vector<bool> owned(static_cast<size_t>(pool->buffer_len()));
  const auto loaded = [&](const void* data, const KvStrides& strides, int64_t slot, int32_t head, int32_t d) {
    return load_as_float(
        data, view.dtype,
        slot / view.page_size * strides.page + slot % view.page_size * strides.token + head * strides.head + d);
  };
  for (size_t r = 0; r < num_requests(); ++r) {
    for (int32_t position = 0; position < lengths.prefix[r] + lengths.fresh[r]; ++position) {
      const int32_t at_slot = slot(r, position);
      if (at_slot < 0) continue;
      owned[static_cast<size_t>(at_slot)] = true;
      for (int32_t head = 0; head < setup.num_kv_heads; ++head) {
        for (int32_t d = 0; d < setup.head_dim; ++d) {
          const auto at = static_cast<size_t>((position * setup.num_kv_heads + head) * setup.head_dim + d);
          const float found = loaded(view.k, view.k_strides, at_slot, head, d) * setup.k_scale;
          if (found != history_[r].cached_k[at]) return "a key of request " + std::to_string(r) + " is wrong";
        }
        for (int32_t d = 0; d < setup.v_head_dim; ++d) {
          const auto at = static_cast<size_t>((position * setup.num_kv_heads + head) * setup.v_head_dim + d);
          const float found = loaded(view.v, view.v_strides, at_slot, head, d) * setup.v_scale;
          if (found != history_[r].cached_v[at]) return "a value of request " + std::to_string(r) + " is wrong";
        }
      }
    }
  }
  for (size_t at_slot = 0; at_slot < owned.size(); ++at_slot) {
    for (int32_t d = 0; !owned[at_slot] && d < setup.head_dim; ++d) {
      if (!std::isnan(loaded(view.k, view.k_strides, static_cast<int64_t>(at_slot), 0, d))) {
        return "slot " + std::to_string(at_slot) + ", which nobody owns, was written";
      }
    }
  }
  return {};
}

}  // namespace folio::inline v0::backends::testing
