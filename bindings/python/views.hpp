#pragma once

#include <initializer_list>
#include <optional>
#include <vector>

#include "array.hpp"
#include "folio/attention.hpp"
#include "folio/kv_cache.hpp"
#include "folio/merge.hpp"
#include "folio/types/error.hpp"

/// What Python's objects are made of: the C++ views, with the arrays they point into. Immutable once made, so that they
/// can be read without the GIL.
namespace folio::python {

/// TensorView: an array with its float type.
struct Tensor {
  TensorView view;
  Array array;
};

/// An array, or a TensorView of it, as a tensor argument. Throws Error(kInvalidArgument).
Tensor to_tensor(nb::handle source, const std::string& name, Access access);
Tensor make_tensor(nb::handle source, DType dtype, const std::string& name, Access access);

/// LseView: [tokens, heads].
struct Lse {
  LseView view;
  std::optional<Array> array;
};
Lse to_lse(nb::handle source, const std::string& name);
/// Throws Error(kInvalidArgument) unless the LSE, if there is one, is [num_tokens, heads].
void require_lse(const std::optional<Array>& lse, int64_t num_tokens, int64_t heads);
/// Throws Error(kInvalidArgument) unless the vector, if there is one, has an entry a q head.
void require_heads(const std::optional<Array>& vector, int64_t heads);

/// Scale, with how many heads and requests its data has; 1 where it has one for all.
struct ScaleArg {
  Scale scale;
  std::optional<Array> array;
  int64_t heads = 1;
  int64_t requests = 1;
};
/// A number or a Scale.
ScaleArg to_scale(nb::handle source, const std::string& name);
/// Throws Error(kInvalidArgument) where its data is too short. Negative requests: not per request.
void require_extent(const ScaleArg& scale, const std::string& name, int64_t heads, int64_t requests);

struct Cache {
  KvCacheView view;
  std::vector<Array> arrays;
};
/// Of arrays [pages, page_size, heads, head_dim].
Cache make_nhd_cache(nb::handle k, nb::handle v);
/// Throws Error(kInvalidArgument) where the cache's memory is read-only.
void require_writable(const Cache& cache);

struct Table {
  PageTableView view;
  int64_t columns = 0;  ///< of a dense one
  std::vector<Array> arrays;
};
/// A PageTableView, or an array [rows, columns] of page ids.
Table to_table(nb::handle source, const std::string& name);

struct Ragged {
  RaggedKvView view;
  std::vector<Array> arrays;
};

struct Segment {
  KvSegment view;
  std::vector<Array> arrays;
};

struct Batch {
  BatchView view;
  std::vector<KvSegment> segment_views;
  std::vector<Array> arrays;

  /// The view with its segments: to be used while this object is.
  BatchView with_segments() const {
    BatchView whole = view;
    whole.segments = segment_views;
    return whole;
  }
};

struct SegmentArg {
  SegmentArgs view;
  int64_t table_columns = 0;   ///< of a dense table
  int64_t ragged_offsets = 0;  ///< entries of ragged.indptr
  ScaleArg k_scale, v_scale;
  std::vector<Array> arrays;
};

/// What one request's custom mask says: a bool for each query and column.
struct MaskShape {
  int64_t queries = 0;
  int64_t columns = 0;
  friend bool operator==(const MaskShape&, const MaskShape&) = default;
};

struct Args {
  AttentionArgs view;
  std::vector<SegmentArg> segments;
  std::vector<SegmentArgs> segment_views;
  ScaleArg q_scale, out_scale;
  std::optional<Array> alibi_slopes, sinks, lse;
  std::vector<MaskShape> mask_shapes;  ///< of masks that were packed here; none where the caller gave bits
  std::vector<Array> arrays;           ///< all of them, the segments' too

  AttentionArgs with_segments() const {
    AttentionArgs whole = view;
    whole.segments = segment_views;
    return whole;
  }
};

struct WriteArgs {
  CacheWriteArgs view;
  ScaleArg k_scale, v_scale;
  std::vector<Array> arrays;
};

struct State {
  AttentionStateView view;
  std::vector<Array> arrays;
};

struct States {
  AttentionStatesView view;
  std::vector<Array> arrays;
};

using ArrayLists = std::initializer_list<const std::vector<Array>*>;

/// What a stream left out is on CUDA device `index`: the current stream of the library that the arrays come from.
Stream current_stream(int32_t index, ArrayLists lists);

/// A stream: None (the current one of `lists`), an integer (cudaStream_t) or an object with `cuda_stream`
/// (torch.cuda.Stream).
Stream to_stream(nb::handle source, const Device& device, ArrayLists lists);

/// Sets what Folio's own errors are in Python: folio.Error or folio.InvalidArgument, with the code.
void set_python_error(const Error& error);

void bind_enums(nb::module_& m);
void bind_config(nb::module_& m);
void bind_context(nb::module_& m);
void bind_tensors(nb::module_& m);
void bind_cache(nb::module_& m);
void bind_batch(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_step(nb::module_& m);
void bind_layer(nb::module_& m);
void bind_masks(nb::module_& m);
void bind_paged_attention(nb::module_& m);
void bind_merge(nb::module_& m);
void bind_errors(nb::module_& m);
void bind_stream(nb::module_& m);
void bind_kv_cache(nb::module_& m);
void bind_tables(nb::module_& m);
void bind_pools(nb::module_& m);
void bind_prefix_cache(nb::module_& m);
void bind_quantize(nb::module_& m);
void bind_cascade(nb::module_& m);
void bind_sealed_plan(nb::module_& m);
void bind_process_groups(nb::module_& m);
void bind_nccl_groups(nb::module_& m);
void bind_distributed(nb::module_& m);
void bind_dcp(nb::module_& m);
void bind_pcp(nb::module_& m);
void bind_verify(nb::module_& m);

}  // namespace folio::python
