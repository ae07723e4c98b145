#include "folio/quantize.hpp"

#include <algorithm>
#include <cmath>

#include "attention/aliasing.hpp"
#include "attention/cache_args.hpp"
#include "attention/split_work.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "kernels/cpu/generic/combine/row_convert.hpp"

namespace folio::inline v0 {
namespace {

using core::require;
using kernels::generic::Nvfp4Place;

constexpr int32_t kChunk = 256;  // values of a head held at a time: whole blocks

void check_stream(const char* function, const Context& context, Stream stream) {
  require(context.state().gpu != nullptr || stream.handle == nullptr, function,
          " on a CPU context takes no stream; pass a default-constructed Stream");
}

/// CPUs read elements wherever they lie; a GPU's errors for misaligned ones would be its context's end.
void check_gpu_tensors(const ConstTensorView& wide, const ConstTensorView& narrow) {
  attention::check_gpu_aligned("the wide tensor", wide.data, size_of(wide.dtype));
  attention::check_gpu_aligned("the quantised tensor", narrow.data, size_of(narrow.dtype));
}

kernels::cuda::TensorRows gpu_rows(const ConstTensorView& tensor) {
  const kernels::cuda::MoveSide side = attention::move_side(tensor);
  return {side.data, side.dtype, side.token_stride, side.head_stride};
}

kernels::cuda::QuantizeSizes gpu_sizes(const ConstTensorView& wide) {
  kernels::cuda::QuantizeSizes sizes;
  sizes.num_tokens = wide.shape[0];
  sizes.num_heads = core::checked_cast<int32_t>(wide.shape[1]);
  sizes.head_dim = core::checked_cast<int32_t>(wide.shape[2]);
  return sizes;
}

void gpu_nvfp4(const attention::GpuKernels& gpu, const ConstTensorView& wide, const ConstTensorView& fp4,
               const BlockScaleArgs& block_scale, float global_scale, bool inverse, Stream stream) {
  check_gpu_tensors(wide, fp4);
  kernels::cuda::Nvfp4Params params;
  params.wide = gpu_rows(wide);
  params.codes = gpu_rows(fp4);
  params.sizes = gpu_sizes(wide);
  params.scales = static_cast<uint8_t*>(block_scale.data);
  params.first_row = block_scale.first_row;
  params.global_scale = global_scale;
  params.inverse = inverse;
  gpu.enqueue(params, stream);
}

/// [tokens, heads, head_dim] with contiguous heads.
template <typename Tensor>
void check_rows(const char* name, const Tensor& tensor) {
  require(tensor.rank == 3, name, " has rank ", tensor.rank, "; it must be [tokens, heads, head_dim]");
  require(tensor.shape[0] >= 0 && tensor.shape[1] >= 1 && tensor.shape[2] >= 1, name, " is [", tensor.shape[0], ", ",
          tensor.shape[1], ", ", tensor.shape[2], "]; heads and head_dim must be at least 1");
  require(tensor.strides[2] == 1 || tensor.shape[2] == 1, name, "'s innermost stride is ", tensor.strides[2],
          "; it must be 1");
  require(tensor.data != nullptr || tensor.shape[0] == 0, name, ".data is null");
}

void check_shape(const char* name, const ConstTensorView& tensor, int64_t tokens, int64_t heads, int64_t dim) {
  check_rows(name, tensor);
  require(tensor.shape[0] == tokens && tensor.shape[1] == heads && tensor.shape[2] == dim, name, " is [",
          tensor.shape[0], ", ", tensor.shape[1], ", ", tensor.shape[2], "]; it must be [", tokens, ", ", heads, ", ",
          dim, "]");
}

/// Several threads write rows at once: every one lies apart from every other.
kvcache::StridedSet output_set(const char* name, const ConstTensorView& out) {
  const kvcache::StridedSet set = attention::tensor_set(name, out);
  require(set.distinct, name, "'s rows overlap: token stride ", out.strides[0], ", head stride ", out.strides[1]);
  return set;
}

void check_apart(const char* out_name, const kvcache::StridedSet& out, const char* in_name,
                 const kvcache::StridedSet& in) {
  require(kvcache::lie_apart(out, in), out_name, " overlaps ", in_name);
}

/// The block scales of a matrix whose rows are the tokens of a tensor of values.
kvcache::StridedSet block_scales_of(const BlockScaleArgs& block_scale, const ConstTensorView& wide) {
  const int64_t blocks = core::checked_mul(wide.shape[1], wide.shape[2] / kNvfp4BlockSize);
  return attention::block_scale_set(block_scale, wide.shape[0], blocks);
}

void check_wide(const char* name, DType dtype) {
  require(dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16, name, " is ", dtype,
          "; float32, float16 and bfloat16 are taken");
}

void check_nvfp4(const ConstTensorView& wide, const ConstTensorView& fp4, const char* fp4_name,
                 const BlockScaleArgs& block_scale, float global_scale) {
  require(wide.shape[2] % kNvfp4BlockSize == 0, "head_dim is ", wide.shape[2], "; NVFP4 takes multiples of ",
          kNvfp4BlockSize);
  require(fp4.dtype == DType::kFloat4E2M1x2, fp4_name, " is ", fp4.dtype, "; it must be fp4_e2m1x2");
  check_shape(fp4_name, fp4, wide.shape[0], wide.shape[1], wide.shape[2] / 2);
  require(block_scale.data != nullptr || wide.shape[0] == 0, "block_scale.data is null");
  require(block_scale.first_row >= 0, "block_scale.first_row is ", block_scale.first_row, "; it must not be negative");
  require(std::isfinite(global_scale) && global_scale > 0.0f, "global_scale is ", global_scale,
          "; it must be finite and positive");
}

unsigned char* at(void* data, int64_t offset, DType dtype) {
  return static_cast<unsigned char*>(data) + offset * size_of(dtype);
}
const unsigned char* at(const void* data, int64_t offset, DType dtype) {
  return static_cast<const unsigned char*>(data) + offset * size_of(dtype);
}

template <typename Tensor>
int64_t offset_of(const Tensor& tensor, int64_t token, int64_t head) {
  return token * tensor.strides[0] + head * tensor.strides[1];
}

/// Calls body(token, head, first, n) for pieces of every head, on the context's executor.
template <typename Body>
void for_pieces(const Context& context, const ConstTensorView& wide, const Body& body) {
  const int64_t heads = wide.shape[1];
  const int64_t dim = wide.shape[2];
  const int64_t rows = wide.shape[0] * heads;
  const auto bytes = static_cast<double>(rows * dim * 2);
  attention::for_ranges(context, rows, attention::wanted_ranges(context, bytes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t first = 0; first < dim; first += kChunk) {
        body(row / heads, row % heads, first, static_cast<int32_t>(std::min<int64_t>(kChunk, dim - first)));
      }
    }
  });
}

Nvfp4Place place_of(const BlockScaleArgs& block_scale, const ConstTensorView& wide, int64_t token, int64_t head,
                    int64_t first) {
  const int64_t blocks_per_head = wide.shape[2] / kNvfp4BlockSize;
  return {static_cast<uint8_t*>(block_scale.data), block_scale.first_row + token,
          head * blocks_per_head + first / kNvfp4BlockSize, wide.shape[1] * blocks_per_head};
}

}  // namespace

void quantize_fp8(const Context& context, const ConstTensorView& in, const TensorView& out, const Scale& scale,
                  Stream stream) {
  check_stream("quantize_fp8", context, stream);
  check_rows("in", in);
  check_wide("in", in.dtype);
  require(is_fp8(out.dtype), "out is ", out.dtype, "; it must be fp8_e4m3 or fp8_e5m2");
  check_shape("out", out, in.shape[0], in.shape[1], in.shape[2]);
  check_apart("out", output_set("out", out), "in", attention::tensor_set("in", in));
  require(scale.granularity == ScaleGranularity::kPerTensor, "scale must be per tensor");
  require(scale.request_stride == 0, "scale.request_stride is ", scale.request_stride, ", but the scale is per tensor");
  require(scale.data == nullptr || scale.value == 1.0f, "scale has data and a value of ", scale.value,
          "; leave one of them");
  const attention::GpuBackend* const gpu = context.state().gpu.get();
  const bool readable = scale.data == nullptr || gpu == nullptr;
  const float value = scale.data == nullptr || !readable ? scale.value : scale.data[0];
  require(std::isfinite(value) && value > 0.0f, "scale is ", value, "; it must be finite and positive");
  if (gpu != nullptr) {
    check_gpu_tensors(in, out);
    attention::check_gpu_aligned("scale.data", scale.data, sizeof(float));
    gpu->enqueue(kernels::cuda::QuantizeFp8Params{gpu_rows(in), gpu_rows(out), gpu_sizes(in), scale}, stream);
    return;
  }
  for_pieces(context, in, [&](int64_t token, int64_t head, int64_t first, int32_t n) {
    alignas(64) float values[kChunk];
    kernels::generic::load_row(at(in.data, offset_of(in, token, head) + first, in.dtype), in.dtype, n, values);
    kernels::generic::store_row(values, value, out.dtype, n,
                                at(out.data, offset_of(out, token, head) + first, out.dtype));
  });
}

void quantize_nvfp4(const Context& context, const ConstTensorView& in, const TensorView& out,
                    const BlockScaleArgs& block_scale, float global_scale, Stream stream) {
  check_stream("quantize_nvfp4", context, stream);
  check_rows("in", in);
  check_wide("in", in.dtype);
  check_nvfp4(in, out, "out", block_scale, global_scale);
  const kvcache::StridedSet to = output_set("out", out);
  const kvcache::StridedSet from = attention::tensor_set("in", in);
  const kvcache::StridedSet scales = block_scales_of(block_scale, in);
  check_apart("out", to, "in", from);
  check_apart("block_scale", scales, "in", from);
  check_apart("block_scale", scales, "out", to);
  if (context.state().gpu != nullptr) {
    gpu_nvfp4(*context.state().gpu, in, out, block_scale, global_scale, false, stream);
    return;
  }
  for_pieces(context, in, [&](int64_t token, int64_t head, int64_t first, int32_t n) {
    alignas(64) float values[kChunk];
    kernels::generic::load_row(at(in.data, offset_of(in, token, head) + first, in.dtype), in.dtype, n, values);
    kernels::generic::store_nvfp4(values, global_scale, n,
                                  at(out.data, offset_of(out, token, head) + first / 2, out.dtype),
                                  place_of(block_scale, in, token, head, first));
  });
}

void dequantize_nvfp4(const Context& context, const ConstTensorView& in, const BlockScaleArgs& block_scale,
                      float global_scale, const TensorView& out, Stream stream) {
  check_stream("dequantize_nvfp4", context, stream);
  check_rows("out", out);
  require(out.dtype == DType::kFloat32, "out is ", out.dtype, "; it must be float32");
  check_nvfp4(out, in, "in", block_scale, global_scale);
  const kvcache::StridedSet to = output_set("out", out);
  check_apart("out", to, "in", attention::tensor_set("in", in));
  check_apart("out", to, "block_scale", block_scales_of(block_scale, out));
  if (context.state().gpu != nullptr) {
    gpu_nvfp4(*context.state().gpu, out, in, block_scale, global_scale, true, stream);
    return;
  }
  for_pieces(context, out, [&](int64_t token, int64_t head, int64_t first, int32_t n) {
    kernels::generic::load_nvfp4(
        at(in.data, offset_of(in, token, head) + first / 2, in.dtype), global_scale, n,
        place_of(block_scale, out, token, head, first),
        reinterpret_cast<float*>(at(out.data, offset_of(out, token, head) + first, out.dtype)));
  });
}

}  // namespace folio::inline v0
