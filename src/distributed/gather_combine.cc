// The combines that gather LSEs, weigh and add: cp_lse_ag_out_rs and cp_lse_ag_out_ar.
#include <cmath>
#include <limits>
#include <numbers>

#include "distributed/combine_call.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::distributed {
namespace {

/// One row's LSE over all ranks, and what each of them weighs.
class RowWeights {
 public:
  /// `lses`: rank r's at lses[r * stride], cleaned. Differences are taken in double, so that large LSEs lose nothing.
  RowWeights(const float* lses, int64_t stride, int32_t world, LseBase base)
      : log_base_(base == LseBase::k2 ? std::numbers::ln2 : 1.0) {
    bool nan = false;
    for (int32_t r = 0; r < world; ++r) {
      const double lse = lses[r * stride];
      nan = nan || std::isnan(lse);
      top_ = std::max(top_, lse);
    }
    if (nan) top_ = std::numeric_limits<double>::quiet_NaN();
    if (std::isinf(top_)) return;
    for (int32_t r = 0; r < world; ++r) sum_ += exponential(lses[r * stride]);
  }
  /// 0 for an empty partial, exactly 1 for the only one that is not.
  float weight(float lse) const {
    return std::isinf(lse) && !std::isnan(top_) ? 0.0f : static_cast<float>(exponential(lse) / sum_);
  }
  /// The logarithm of the sum, in `base`.
  float lse(LseBase base) const {
    if (std::isinf(top_)) return static_cast<float>(top_);
    return static_cast<float>((top_ * log_base_ + std::log(sum_)) / (base == LseBase::k2 ? std::numbers::ln2 : 1.0));
  }

 private:
  double exponential(float lse) const { return std::exp((lse - top_) * log_base_); }
  double log_base_;
  double top_ = -std::numeric_limits<double>::infinity();
  double sum_ = 0;
};

struct Memory {
  float* lse;
  float* gathered;
  float* send;
  float* received;
};

Memory carve(const CombineCall& call) {
  const CombineParts parts = combine_parts(call.group.size(), call.num_tokens(), call.num_heads(), call.head_dim());
  auto* base = static_cast<std::byte*>(call.workspace.data);
  Memory memory{};
  memory.lse = reinterpret_cast<float*>(base);
  memory.gathered = reinterpret_cast<float*>(base + parts.lse);
  memory.send = reinterpret_cast<float*>(base + parts.lse + parts.gathered);
  memory.received = reinterpret_cast<float*>(base + parts.lse + parts.gathered + parts.send);
  return memory;
}

/// Cleans and gathers the LSEs.
void gather_lses(const CombineCall& call, const Memory& memory) {
  clean_lses(call, memory.lse);
  const auto bytes = static_cast<size_t>(call.num_tokens()) * static_cast<size_t>(call.num_heads()) * sizeof(float);
  call.group.all_gather(memory.lse, memory.gathered, bytes, call.stream);
}

/// The row's values times its weight. A weight of 0 gives 0, also for the NaN that an empty shard may have left.
void weigh_row(const CombineCall& call, int64_t token, int32_t head, float weight, float* to) {
  const ConstTensorView& in = call.partial.out;
  const int64_t from = token * in.strides[0] + head * in.strides[1];
  const int32_t dim = call.head_dim();
  if (weight == 0.0f) {
    std::fill_n(to, dim, 0.0f);
  } else if (in.dtype == DType::kFloat32) {
    const float* values = static_cast<const float*>(in.data) + from;
    for (int32_t d = 0; d < dim; ++d) to[d] = values[d] * weight;
  } else {
    for (int32_t d = 0; d < dim; ++d) to[d] = load_as_float(in.data, in.dtype, from + d) * weight;
  }
}

/// Weighs this rank's rows on a GPU, sorted by `parts` ranks; the results' LSEs are those of part `own`.
void weigh_on_gpu(const CombineCall& call, const Memory& memory, int32_t parts, int32_t own) {
  const ConstTensorView& in = call.partial.out;
  kernels::cuda::WeighParams params;
  params.gathered = memory.gathered;
  params.world = call.group.size();
  params.rank = call.group.rank();
  params.own = own;
  params.base = call.partial.base;
  params.heads = {parts, call.num_heads() / parts, parts == 1 ? 1 : call.head_groups};
  params.partial = static_cast<const std::byte*>(in.data);
  params.dtype = in.dtype;
  params.token_stride = in.strides[0];
  params.head_stride = in.strides[1];
  params.num_tokens = call.num_tokens();
  params.head_dim = call.head_dim();
  params.send = memory.send;
  params.lse = memory.lse;
  call.gpu()->enqueue(params, call.stream);
}

/// The sums, in whatever dtype and strides were asked for.
void deliver(const CombineCall& call, const float* sums, const float* lses, int64_t heads) {
  const ConstTensorView values(sums, DType::kFloat32, {call.num_tokens(), 1, heads, call.head_dim()});
  merge_states(call.context, {values, lses, heads, heads, 1, LseBase::kE}, call.out, call.lse, {}, call.stream);
}

/// The sums of all ranks' heads, rank 0's first, whatever their order among each KV head's.
void deliver_by_rank(const CombineCall& call, const float* sums, const float* lses) {
  const int64_t heads = call.num_heads();
  const int32_t local = call.local_heads(), per_group = local / call.head_groups;
  for (int32_t r = 0; r < call.group.size(); ++r) {
    for (int32_t h = 0; h < local; h += per_group) {
      const int64_t from = call.head_of(r, h), to = int64_t{r} * local + h;
      ConstTensorView values(sums + from * call.head_dim(), DType::kFloat32,
                             {call.num_tokens(), 1, per_group, call.head_dim()});
      values.strides[0] = values.strides[1] = heads * call.head_dim();
      TensorView out = call.out;
      out.data = static_cast<std::byte*>(out.data) + to * out.strides[1] * size_of(out.dtype);
      out.shape[1] = per_group;
      LseView lse = call.lse;
      if (lse.data != nullptr) lse.data += to * lse.head_stride;
      merge_states(call.context, {values, lses + from, heads, heads, 1, LseBase::kE}, out, lse, {}, call.stream);
    }
  }
}

}  // namespace

void all_gather_reduce_scatter(const CombineCall& call) {
  const Memory memory = carve(call);
  const int32_t world = call.group.size(), mine = call.group.rank();
  const int32_t heads = call.num_heads(), local = call.local_heads(), dim = call.head_dim();
  const int64_t tokens = call.num_tokens(), all = tokens * heads;
  gather_lses(call, memory);
  // Rows in the order of the ranks that they are for. Results' LSEs take the place of this rank's own, which have been
  // gathered.
  const auto weigh = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int32_t r = 0; r < world; ++r) {
        for (int32_t h = 0; h < local; ++h) {
          const int32_t head = call.head_of(r, h);
          const RowWeights weights(memory.gathered + t * heads + head, all, world, call.partial.base);
          const float own = memory.gathered[mine * all + t * heads + head];
          weigh_row(call, t, head, weights.weight(own), memory.send + ((r * tokens + t) * local + h) * dim);
          if (r == mine) memory.lse[t * local + h] = weights.lse(LseBase::kE);
        }
      }
    }
  };
  if (call.gpu() != nullptr) {
    weigh_on_gpu(call, memory, world, mine);
  } else {
    for_rows(call.context, tokens, int64_t{heads} * dim, weigh);
  }
  call.group.reduce_scatter_sum(memory.send, memory.received, static_cast<size_t>(tokens * local * dim), call.stream);
  deliver(call, memory.received, memory.lse, local);
}

void all_gather_all_reduce(const CombineCall& call) {
  const Memory memory = carve(call);
  const int32_t world = call.group.size(), heads = call.num_heads(), dim = call.head_dim();
  const int64_t tokens = call.num_tokens(), all = tokens * heads;
  gather_lses(call, memory);
  const auto weigh = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const RowWeights weights(memory.gathered + row, all, world, call.partial.base);
      const float own = memory.gathered[call.group.rank() * all + row];
      weigh_row(call, row / heads, static_cast<int32_t>(row % heads), weights.weight(own), memory.send + row * dim);
      memory.lse[row] = weights.lse(LseBase::kE);
    }
  };
  if (call.gpu() != nullptr) {
    weigh_on_gpu(call, memory, 1, 0);
  } else {
    for_rows(call.context, all, dim, weigh);
  }
  call.group.all_reduce_sum(memory.send, static_cast<size_t>(all * dim), call.stream);
  if (call.head_groups == 1) {
    deliver(call, memory.send, memory.lse, heads);
  } else {
    deliver_by_rank(call, memory.send, memory.lse);
  }
}

}  // namespace folio::inline v0::distributed
