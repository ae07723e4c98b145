#include "kernels/cuda/common/kv_cache_views.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/tables/tables.cuh"
#include "kernels/cuda/common/tables/tables.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kRowThreads = 128;

/// A CTA copies a row at a time.
__global__ void __launch_bounds__(kRowThreads) table_rows_kernel(const __grid_constant__ TableRowsParams params) {
  for (int32_t n = static_cast<int32_t>(blockIdx.x); n < params.num_rows; n += static_cast<int32_t>(gridDim.x)) {
    const int32_t begin = params.indptr[n], pages = params.indptr[n + 1] - begin;
    if (pages <= 0) continue;
    const RowEntries entries(params.table, params.row[n]);
    const int64_t first = params.first_column[n];
    for (int32_t j = static_cast<int32_t>(threadIdx.x); j < pages; j += kRowThreads) {
      params.out[begin + j] = first + j < entries.count ? entries.first[first + j] : 0;
    }
  }
}

}  // namespace

void enqueue(const TableRowsParams& params, Stream stream) {
  if (params.num_rows == 0) return;
  table_rows_kernel<<<grid_for(params.num_rows, 1), kRowThreads, 0, native(stream)>>>(params);
  check_launch("a table's rows");
}

}  // namespace folio::inline v0::kernels::cuda
