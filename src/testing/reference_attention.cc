#include "testing/reference_attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.hpp"
#include "folio/types/ds_mla.hpp"
#include "folio/types/float_convert.hpp"
#include "testing/nested_sum.hpp"
#include "testing/rotation.hpp"

namespace folio::inline v0::verify {
namespace {

template <typename Real>
constexpr Real kNothing = -std::numeric_limits<Real>::infinity();

float scale_of(const Scale& scale, int32_t request, int32_t kv_head) {
  if (scale.data == nullptr) return scale.value;
  switch (scale.granularity) {
    case ScaleGranularity::kPerTensor: return scale.data[0];
    case ScaleGranularity::kPerHead: return scale.data[kv_head];
    case ScaleGranularity::kPerRequest: return scale.data[request];
    case ScaleGranularity::kPerRequestAndHead: return scale.data[request * scale.request_stride + kv_head];
  }
  core::fail(ErrorCode::kInvalidArgument, "scale granularity is ", static_cast<int32_t>(scale.granularity));
}

/// Row of the segment that holds the request's keys, or -1.
int32_t segment_row(const KvSegment& segment, int32_t request) {
  if (segment.group_indptr == nullptr) return request;
  for (int32_t group = 0; group < segment.num_groups; ++group) {
    if (request >= segment.group_indptr[group] && request < segment.group_indptr[group + 1]) return group;
  }
  return -1;
}

int64_t first_position(const BatchView& batch, size_t s, int32_t request);

/// Where the request's keys in the first `count` segments end.
int64_t end_position(const BatchView& batch, size_t count, int32_t request) {
  for (size_t s = count; s-- > 0;) {
    const int32_t row = segment_row(batch.segments[s], request);
    if (row >= 0) return first_position(batch, s, request) + batch.segments[s].kv_len[row];
  }
  return 0;
}

/// Of a segment that has the request.
int64_t first_position(const BatchView& batch, size_t s, int32_t request) {
  const KvSegment& segment = batch.segments[s];
  if (segment.first_pos == nullptr) return end_position(batch, s, request);
  return segment.first_pos[segment_row(segment, request)];
}

/// Where local token `local` stands in the request's sequence, whose keys in the segment begin at `first`.
int64_t key_position(const KvShard& shard, int64_t first, int64_t local) {
  const int64_t interleave = shard.interleave;
  const int64_t stripe = local / interleave * interleave * shard.world;
  return first + stripe + shard.rank * interleave + local % interleave;
}

/// One row of the attention matrix: who asks, where it stands, what it sees. `Real` is what it computes in.
template <typename Real>
class Row {
 public:
  Row(const AttentionConfig& config, const BatchView& batch, const AttentionArgs& args, Rotation<Real>& rotation,
      int32_t token, int32_t q_head)
      : config_(config), batch_(batch), args_(args), rotation_(rotation), token_(token), q_head_(q_head) {
    core::require(token >= 0 && batch.num_requests > 0 && token < batch.cu_q[batch.num_requests], "token ", token,
                  " belongs to no request");
    core::require(q_head >= 0 && q_head < config.num_q_heads, "q_head is ", q_head, " of ", config.num_q_heads);
    while (batch.cu_q[request_ + 1] <= token) ++request_;
    kv_head_ = q_head / (config.num_q_heads / config.num_kv_heads);
    find_position();
    find_visible();
    const Vector q{args.q.data, args.q.dtype, token * args.q.strides[0] + q_head * args.q.strides[1], 1};
    read(q, scale_of(args.q_scale, request_, kv_head_), position_, query_);
  }

  Real attend(std::span<Real> out) {
    std::vector<Key> keys;
    int64_t keys_before = 0;  // the request's keys in earlier segments: columns of a custom mask
    for (size_t s = 0; s < batch_.segments.size(); ++s) {
      const KvSegment& segment = batch_.segments[s];
      const int32_t row = segment_row(segment, request_);
      if (row < 0) continue;
      const int64_t first = first_position(batch_, s, request_);
      for (int32_t local = 0; local < segment.kv_len[row]; ++local) {
        const int64_t position = key_position(segment.shard, first, local);
        if (!visible(segment, position, keys_before + local)) continue;
        keys.push_back({s, row, local, logit(args_.segments[s], segment.source, row, local, position)});
      }
      keys_before += segment.kv_len[row];
    }
    return softmax(keys, out);
  }

 private:
  struct Key {
    size_t segment;
    int32_t row;
    int32_t local;
    Real logit;
  };

  void find_position() {
    const int64_t index = token_ - batch_.cu_q[request_];
    if (batch_.q_first_pos != nullptr) {
      position_ = batch_.q_first_pos[request_] + index;
      return;
    }
    const int64_t q_len = batch_.cu_q[request_ + 1] - batch_.cu_q[request_];
    position_ = end_position(batch_, batch_.segments.size(), request_) - q_len + index;
  }

  /// Positions [first, last].
  struct Interval {
    int64_t first = std::numeric_limits<int64_t>::min();
    int64_t last = std::numeric_limits<int64_t>::max();
    bool empty() const { return first > last; }
    void cut(int64_t low, int64_t high) {
      first = std::max(first, low);
      last = std::min(last, high);
    }
  };

  /// What the mask shows apart from a custom mask's bits: the keys of the mask and its window, those of the query's
  /// span, and those between. The request's start and the query's chunk cut both.
  void find_visible() {
    constexpr Interval kAll;
    const int64_t start = batch_.kv_start == nullptr ? 0 : batch_.kv_start[request_];
    Interval within;
    if (batch_.kv_start != nullptr) within.cut(start, kAll.last);
    if (config_.attention_chunk > 0) {
      int64_t chunk = (position_ - start) / config_.attention_chunk;
      if (start + chunk * config_.attention_chunk > position_) --chunk;
      const int64_t begin = start + chunk * config_.attention_chunk;
      within.cut(begin, begin + config_.attention_chunk - 1);
    }
    const bool causal = config_.mask == MaskKind::kCausal && (batch_.causal == nullptr || batch_.causal[request_] != 0);
    const int64_t right = config_.window_right < 0 ? kAll.last : position_ + config_.window_right;
    visible_ = within;
    visible_.cut(config_.window_left < 0 ? kAll.first : position_ - config_.window_left,
                 causal ? std::min(position_, right) : right);
    if (batch_.spans == nullptr) return;
    const int32_t* const given = batch_.spans + 2 * int64_t{token_};
    if (given[0] >= given[1]) return;
    Interval span = within;
    span.cut(given[0], int64_t{given[1]} - 1);
    span.cut(config_.span_window_left < 0 ? kAll.first : position_ - config_.span_window_left, right);
    if (span.empty()) return;
    if (visible_.empty()) visible_ = span;
    visible_ = {std::min(visible_.first, span.first), std::max(visible_.last, span.last)};
  }

  bool visible(const KvSegment& segment, int64_t position, int64_t column) const {
    if (segment.mask == SegmentMask::kAllVisible) return true;
    if (position < visible_.first || position > visible_.last) return false;
    return config_.mask != MaskKind::kCustom || mask_bit(column);
  }

  int64_t total_keys(int32_t request) const {
    int64_t keys = 0;
    for (const KvSegment& segment : batch_.segments) {
      const int32_t row = segment_row(segment, request);
      if (row >= 0) keys += segment.kv_len[row];
    }
    return keys;
  }

  int64_t mask_columns(int32_t request) const {
    const bool tail = batch_.custom_mask.scope == CustomMaskScope::kTail;
    return tail ? batch_.custom_mask.tail_len[request] : total_keys(request);
  }

  bool mask_bit(int64_t key) const {
    const int64_t columns = mask_columns(request_);
    const int64_t column = key - (total_keys(request_) - columns);
    if (column < 0) return true;
    int64_t block = 0;
    for (int32_t r = 0; r < request_; ++r) {
      block += ((batch_.cu_q[r + 1] - batch_.cu_q[r]) * mask_columns(r) + 7) / 8;
    }
    const int64_t bit = (token_ - batch_.cu_q[request_]) * columns + column;
    return ((args_.custom_mask[block + bit / 8] >> (bit % 8)) & 1) != 0;
  }

  /// Address of one token's head: data, dtype, index of component 0 and the distance between components.
  struct Vector {
    const void* data;
    DType dtype;
    int64_t index;
    int64_t step;
    bool ds_mla = false;   ///< a row of KvFormat::kFp8DsMla, which begins at byte `index`
    Real token_scale = 1;  ///< of an int8 cache's token

    /// The components, as many as `out` has.
    void copy_to(std::span<Real> out) const {
      if (ds_mla) {
        const auto* const row = static_cast<const std::byte*>(data) + index;
        for (size_t d = 0; d < out.size(); ++d) out[d] = load_ds_mla(row, static_cast<int64_t>(d));
        return;
      }
      switch (dtype) {  // here, not for each component: tests spend much of their time in this function
        case DType::kFloat32: return copy<DType::kFloat32>(out);
        case DType::kFloat16: return copy<DType::kFloat16>(out);
        case DType::kBFloat16: return copy<DType::kBFloat16>(out);
        case DType::kFloat8E4M3: return copy<DType::kFloat8E4M3>(out);
        case DType::kFloat8E5M2: return copy<DType::kFloat8E5M2>(out);
        case DType::kInt8: return copy<DType::kInt8>(out);
        case DType::kFloat4E2M1x2:
        case DType::kUnset: return copy<DType::kUnset>(out);
      }
    }

   private:
    template <DType kType>
    void copy(std::span<Real> out) const {
      for (size_t d = 0; d < out.size(); ++d) {
        out[d] = static_cast<Real>(load_as_float(data, kType, index + static_cast<int64_t>(d) * step)) * token_scale;
      }
    }
    static Real load_ds_mla(const std::byte* row, int64_t d) {
      if (d >= kDsMlaLatentDim) {
        return static_cast<Real>(load_as_float(row + kDsMlaRopeOffset, DType::kBFloat16, d - kDsMlaLatentDim));
      }
      return static_cast<Real>(load_as_float(row, DType::kFloat8E4M3, d)) *
             static_cast<Real>(load_as_float(row + kDsMlaScalesOffset, DType::kFloat32, d / kDsMlaBlockDim));
    }
  };

  Vector locate(const SegmentArgs& args, KvSource source, int32_t row, int32_t local, bool value) const {
    if (source == KvSource::kRagged) {
      const ConstTensorView& tensor = value ? args.ragged.v : args.ragged.k;
      const int64_t token = args.ragged.indptr[row] + local;
      return {tensor.data, tensor.dtype, token * tensor.strides[0] + kv_head_ * tensor.strides[1], 1};
    }
    const PageTableView& table = args.table;
    const int64_t first =
        table.kind == PageTableKind::kCsr ? table.indptr[row] : row * table.row_stride + table.first_column;
    const int64_t page = table.indices[first + local / args.cache.page_size];
    const int64_t slot = local % args.cache.page_size;
    const KvStrides& strides = value ? args.cache.v_strides : args.cache.k_strides;
    const int64_t head = page * strides.page + kv_head_ * strides.head;
    const void* data = value ? args.cache.v : args.cache.k;
    const TokenScales& scales = value ? args.cache.v_token_scales : args.cache.k_token_scales;
    const Real token_scale = scales.data == nullptr ? Real{1} : static_cast<Real>(scale_at(scales, page, slot));
    if (value && args.cache.format == KvFormat::kCpuPacked) {
      return {data, args.cache.dtype, head + slot / 2 * strides.token + slot % 2, 2, false, token_scale};
    }
    const bool ds_mla = args.cache.format == KvFormat::kFp8DsMla;
    return {data, args.cache.dtype, head + slot * strides.token, 1, ds_mla, token_scale};
  }

  float scale_at(const TokenScales& scales, int64_t page, int64_t slot) const {
    return scales.data[page * scales.strides.page + slot * scales.strides.token + kv_head_ * scales.strides.head];
  }

  /// A query or key as the logits take it: scaled, and rotated where the op asks for it.
  void read(const Vector& stored, Real scale, int64_t position, std::vector<Real>& vector) const {
    vector.resize(static_cast<size_t>(config_.head_dim_qk));
    stored.copy_to(vector);
    for (Real& component : vector) component *= scale;
    if (config_.features.has(Feature::kRopeLlama)) rotation_.rotate(position, vector);
  }

  Real logit(const SegmentArgs& segment, KvSource source, int32_t row, int32_t local, int64_t position) {
    read(locate(segment, source, row, local, false), scale_of(segment.k_scale, request_, kv_head_), position, key_);
    Real sums[4] = {};  // one sum would wait for each of its additions
    for (size_t d = 0; d < query_.size(); ++d) sums[d % 4] += query_[d] * key_[d];
    const Real dot = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    const Real sm_scale = args_.sm_scale != 0.0f ? static_cast<Real>(args_.sm_scale)
                                                 : Real{1} / std::sqrt(static_cast<Real>(config_.head_dim_qk));
    Real logit = dot * sm_scale;
    if (args_.logits_soft_cap != 0.0f) {
      const Real cap = args_.logits_soft_cap;
      logit = cap * std::tanh(logit / cap);
    }
    if (args_.alibi_slopes != nullptr) {
      logit -= static_cast<Real>(args_.alibi_slopes[q_head_]) *
               static_cast<Real>(position > position_ ? position - position_ : position_ - position);
    }
    return logit;
  }

  Real softmax(const std::vector<Key>& keys, std::span<Real> out) {
    const auto dim_v = static_cast<size_t>(config_.head_dim_v);
    std::fill_n(out.begin(), dim_v, Real{0});
    const Real sink = args_.sinks == nullptr ? kNothing<Real> : static_cast<Real>(args_.sinks[q_head_]);
    Real most = sink;
    for (const Key& key : keys) {
      if (!std::isnan(most) && !(key.logit <= most)) most = key.logit;  // the largest; a NaN, once seen, stays
    }
    if (most == kNothing<Real>) return kNothing<Real>;
    NestedSum<Real> sums;
    sums.reset(dim_v + 1);  // of p v, of p
    value_.resize(dim_v);
    for (const Key& key : keys) {
      const Real weight = std::exp(key.logit - most);
      const std::span<Real> term = sums.next_term();
      term[dim_v] += weight;
      const SegmentArgs& segment = args_.segments[key.segment];
      const Vector v = locate(segment, batch_.segments[key.segment].source, key.row, key.local, true);
      const Real v_scale = scale_of(segment.v_scale, request_, kv_head_);
      v.copy_to(value_);
      for (size_t d = 0; d < dim_v; ++d) term[d] += weight * (value_[d] * v_scale);
    }
    const Real sum = std::exp(sink - most) + sums.total(dim_v);
    for (size_t d = 0; d < dim_v; ++d) out[d] = sums.total(d) / sum;
    return most + std::log(sum);
  }

  const AttentionConfig& config_;
  const BatchView& batch_;
  const AttentionArgs& args_;
  Rotation<Real>& rotation_;
  int32_t token_;
  int32_t q_head_;
  int32_t kv_head_ = 0;
  int32_t request_ = 0;
  int64_t position_ = 0;  ///< of the query in the request's sequence
  Interval visible_;
  std::vector<Real> query_;
  std::vector<Real> key_, value_;  ///< those that are being looked at
};

template <typename Real>
void attend_all(const AttentionConfig& config, const BatchView& batch, const AttentionArgs& args, std::span<Real> out,
                std::span<Real> lse) {
  const int32_t tokens = batch.num_requests > 0 ? batch.cu_q[batch.num_requests] : 0;
  const auto dim = static_cast<size_t>(config.head_dim_v);
  Rotation<Real> rotation(args.rope, config.head_dim_qk);
  size_t row = 0;
  for (int32_t token = 0; token < tokens; ++token) {
    for (int32_t head = 0; head < config.num_q_heads; ++head, ++row) {
      const Real value = Row<Real>(config, batch, args, rotation, token, head).attend(out.subspan(row * dim, dim));
      if (!lse.empty()) lse[row] = value;
    }
  }
}

}  // namespace

double reference_row(const AttentionConfig& config, const BatchView& batch, const AttentionArgs& args, int32_t token,
                     int32_t q_head, std::span<double> out) {
  Rotation<double> rotation(args.rope, config.head_dim_qk);
  return Row<double>(config, batch, args, rotation, token, q_head).attend(out);
}

void reference_attention(const AttentionConfig& config, const BatchView& batch, const AttentionArgs& args,
                         std::span<double> out, std::span<double> lse) {
  attend_all<double>(config, batch, args, out, lse);
}

void plain_attention(const AttentionConfig& config, const BatchView& batch, const AttentionArgs& args,
                     std::span<float> out, std::span<float> lse) {
  attend_all<float>(config, batch, args, out, lse);
}

}  // namespace folio::inline v0::verify
