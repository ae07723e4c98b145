#include "kernels/cuda/common/merge_states/shard_batch.hpp"

#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/merge_states/gather_header.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kShardThreads = 1024;

/// One CTA, since requests are few and their digest is one sum.
__global__ void __launch_bounds__(kShardThreads) shard_kernel(const __grid_constant__ ShardBatchParams params) {
  uint64_t sum = 0;
  for (int32_t r = static_cast<int32_t>(threadIdx.x); r < params.num_requests; r += kShardThreads) {
    const int64_t q_len = int64_t{params.cu_q[r + 1]} - params.cu_q[r];
    const int32_t seq_len = params.seq_lens[r];
    const RequestShard shard =
        request_shard(q_len, seq_len, r < params.num_cached, params.cross_attention, params.max_seq_len, params.shard);
    params.first_pos[r] = shard.first_pos;
    params.cached_len[r] = shard.cached_len;
    params.fresh_len[r] = shard.fresh_len;
    const uint64_t lengths = (static_cast<uint64_t>(q_len) << 32) ^ static_cast<uint32_t>(seq_len);
    sum += scheduler::checksum_term(lengths, static_cast<uint64_t>(r) + 1);
  }
  sum = sum_of_cta<kShardThreads>(sum);
  if (threadIdx.x > 0) return;
  GatherHeader header;
  header.digest = params.digest + sum;
  *params.header = header;
}

__global__ void __launch_bounds__(32) compare_kernel(const __grid_constant__ CompareHeadersParams params) {
  compare_headers(params.gathered);
}

}  // namespace

void enqueue(const ShardBatchParams& params, Stream stream) {
  shard_kernel<<<1, kShardThreads, 0, native(stream)>>>(params);
  check_launch("a shard's lengths");
}

void enqueue(const CompareHeadersParams& params, Stream stream) {
  compare_kernel<<<1, 32, 0, native(stream)>>>(params);
  check_launch("the comparison of ranks");
}

}  // namespace folio::inline v0::kernels::cuda
