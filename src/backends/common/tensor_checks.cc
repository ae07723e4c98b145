#include "backends/common/tensor_checks.hpp"

#include <cstring>
#include <string>

#include "backends/common/gpu_memory.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/types/float_convert.hpp"
#include "folio/types/nvfp4.hpp"

namespace folio::inline v0::backends {

void require_shape(const char* name, const ConstTensorView& tensor, int64_t min_tokens, int64_t heads,
                   int64_t head_size) {
  const bool fits =
      tensor.rank == 3 && tensor.shape[0] >= min_tokens && tensor.shape[1] == heads && tensor.shape[2] == head_size;
  if (!fits) {
    std::string shape;
    for (int32_t i = 0; i < tensor.rank; ++i) {
      core::append(shape, i > 0 ? ", " : "");
      core::append(shape, tensor.shape[static_cast<size_t>(i)]);
    }
    core::fail(ErrorCode::kInvalidArgument, name, " has shape [", shape, "]; [tokens, ", heads, ", ", head_size,
               "] with at least ", min_tokens, " tokens is needed");
  }
  core::require(tensor.shape[0] == 0 || tensor.data != nullptr, name, " has no data");
  core::require(tensor.strides[2] == 1, name, " has stride ", tensor.strides[2], " between components; it must be 1");
}

void require_no_scale(const char* name, const Scale& scale, DType dtype) {
  core::require(scale.data == nullptr && scale.value == 1.0f, name, " scale is given for a ", dtype,
                " cache; only fp8 caches have scales");
}

BlockScaleArgs nvfp4_block_scale(const char* name, const TensorView& scale, int64_t first_row, int64_t num_tokens,
                                 int64_t heads, int64_t head_size) {
  core::require(scale.dtype == DType::kFloat8E4M3 || scale.dtype == DType::kUnset, name, " is ", scale.dtype,
                "; it must be fp8_e4m3 or unset");
  const int64_t blocks = heads * head_size / kNvfp4BlockSize;
  const int64_t columns = core::ceil_div<int64_t>(blocks, kNvfp4TileBlocks) * kNvfp4TileBlocks;
  const int64_t rows = core::ceil_div<int64_t>(first_row + num_tokens, kNvfp4TileRows) * kNvfp4TileRows;
  const bool packed = scale.rank == 2 && scale.strides[1] == 1 && scale.strides[0] == columns;
  core::require(packed && scale.shape[1] == columns && scale.shape[0] >= rows, name, " must be packed and at least [",
                rows, ", ", columns, "]");
  return {scale.data, first_row};
}

void fill_with_zeros(const Context& context, const TensorView& output, Stream stream) {
  // An engine's bytes are a quantised output's.
  const auto element_bytes = output.dtype == DType::kUnset ? size_t{1} : static_cast<size_t>(size_of(output.dtype));
  core::require(output.rank == 3 && output.strides[2] == 1 && element_bytes > 0,
                "output must be a tensor [tokens, num_heads, head_size] with contiguous heads");
  auto* bytes = static_cast<std::byte*>(output.data);
  if (context.device().type != DeviceType::kCpu) {
    const auto element = static_cast<int64_t>(element_bytes);
    for (int64_t head = 0; head < output.shape[1]; ++head) {
      gpu::zero_rows(context.device().index, bytes + head * output.strides[1] * element, output.strides[0] * element,
                     output.shape[2] * element, output.shape[0], stream);
    }
    return;
  }
  for (int64_t token = 0; token < output.shape[0]; ++token) {
    for (int64_t head = 0; head < output.shape[1]; ++head) {
      const int64_t at = token * output.strides[0] + head * output.strides[1];
      std::memset(bytes + at * static_cast<int64_t>(element_bytes), 0,
                  static_cast<size_t>(output.shape[2]) * element_bytes);
    }
  }
}

int32_t checked_query_heads(int32_t num_heads, int32_t dcp_query_ranks, const std::vector<float>& alibi_slopes) {
  core::require(dcp_query_ranks >= 1, "dcp_query_ranks is ", dcp_query_ranks, "; it must be 1 or more");
  const int64_t heads = int64_t{num_heads} * dcp_query_ranks;
  core::require(alibi_slopes.empty() || static_cast<int64_t>(alibi_slopes.size()) == heads, "alibi_slopes has ",
                alibi_slopes.size(), " entries; num_heads is ", num_heads,
                dcp_query_ranks == 1 ? "" : core::message(", dcp_query_ranks ", dcp_query_ranks));
  return core::checked_cast<int32_t>(heads);
}

std::vector<float> sinks_as_float(const ConstTensorView& sinks, int32_t num_heads, const std::string& wrong_count) {
  core::require(sinks.rank == 1, "sinks have rank ", sinks.rank, "; it must be 1");
  core::require(sinks.shape[0] == num_heads, wrong_count);
  const bool taken =
      sinks.dtype == DType::kFloat32 || sinks.dtype == DType::kFloat16 || sinks.dtype == DType::kBFloat16;
  core::require(taken, "sinks are ", sinks.dtype, "; float32, float16 and bfloat16 are taken");
  std::vector<float> values(static_cast<size_t>(num_heads));
  for (int32_t head = 0; head < num_heads; ++head) {
    values[static_cast<size_t>(head)] = load_as_float(sinks.data, sinks.dtype, head * sinks.strides[0]);
  }
  return values;
}

}  // namespace folio::inline v0::backends
