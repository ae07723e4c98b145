// The declarations of folio/c/folio.h, written by bindings/rust/generate.sh.

pub type folio_status = i32;
pub const FOLIO_OK: i32 = 0;
pub const FOLIO_INVALID_ARGUMENT: i32 = 1;
pub const FOLIO_UNSUPPORTED: i32 = 2;
pub const FOLIO_UNAVAILABLE: i32 = 3;
pub const FOLIO_OUT_OF_MEMORY: i32 = 4;
pub const FOLIO_WORKSPACE_TOO_SMALL: i32 = 5;
pub const FOLIO_STALE_PLAN: i32 = 6;
pub const FOLIO_DEVICE_ERROR: i32 = 7;
pub const FOLIO_INTERNAL: i32 = 8;
extern "C" {
    pub fn folio_status_name(status: folio_status) -> *const std::os::raw::c_char;
}
extern "C" {
    pub fn folio_last_error() -> *const std::os::raw::c_char;
}
extern "C" {
    pub fn folio_set_last_error(message: *const std::os::raw::c_char);
}
extern "C" {
    pub fn folio_version() -> *const std::os::raw::c_char;
}
pub type folio_dtype = i32;
pub const FOLIO_DTYPE_UNSET: i32 = 0;
pub const FOLIO_DTYPE_FLOAT32: i32 = 1;
pub const FOLIO_DTYPE_FLOAT16: i32 = 2;
pub const FOLIO_DTYPE_BFLOAT16: i32 = 3;
pub const FOLIO_DTYPE_FLOAT8_E4M3: i32 = 4;
pub const FOLIO_DTYPE_FLOAT8_E5M2: i32 = 5;
pub const FOLIO_DTYPE_FLOAT4_E2M1X2: i32 = 6;
pub const FOLIO_DTYPE_INT8: i32 = 7;
extern "C" {
    pub fn folio_dtype_name(dtype: folio_dtype) -> *const std::os::raw::c_char;
}
extern "C" {
    pub fn folio_dtype_size(dtype: folio_dtype) -> i32;
}
pub type folio_kv_format = i32;
pub const FOLIO_KV_STRIDED: i32 = 0;
pub const FOLIO_KV_CPU_PACKED: i32 = 1;
pub const FOLIO_KV_FP8_DS_MLA: i32 = 2;
pub type folio_mask_kind = i32;
pub const FOLIO_MASK_NONE: i32 = 0;
pub const FOLIO_MASK_CAUSAL: i32 = 1;
pub const FOLIO_MASK_CUSTOM: i32 = 2;
pub type folio_determinism = i32;
pub const FOLIO_DETERMINISM_NONE: i32 = 0;
pub const FOLIO_DETERMINISM_RUN_TO_RUN: i32 = 1;
pub const FOLIO_DETERMINISM_BATCH_INVARIANT: i32 = 2;
pub const FOLIO_DETERMINISM_SCHEDULE_INVARIANT: i32 = 3;
pub const FOLIO_FEATURE_SOFT_CAP: u32 = 1;
pub const FOLIO_FEATURE_ALIBI: u32 = 2;
pub const FOLIO_FEATURE_SINKS: u32 = 4;
pub const FOLIO_FEATURE_ROPE_LLAMA: u32 = 8;
pub const FOLIO_FEATURE_SPANS: u32 = 16;
pub const FOLIO_FEATURE_REQUEST_CAUSAL: u32 = 32;
pub const FOLIO_FEATURE_KV_START: u32 = 64;
pub type folio_kv_source = i32;
pub const FOLIO_KV_PAGED: i32 = 0;
pub const FOLIO_KV_RAGGED: i32 = 1;
pub type folio_segment_mask = i32;
pub const FOLIO_SEGMENT_AS_CONFIG: i32 = 0;
pub const FOLIO_SEGMENT_ALL_VISIBLE: i32 = 1;
pub type folio_custom_mask_scope = i32;
pub const FOLIO_CUSTOM_MASK_ALL: i32 = 0;
pub const FOLIO_CUSTOM_MASK_TAIL: i32 = 1;
pub type folio_page_table_kind = i32;
pub const FOLIO_TABLE_CSR: i32 = 0;
pub const FOLIO_TABLE_DENSE: i32 = 1;
pub type folio_scale_granularity = i32;
pub const FOLIO_SCALE_PER_TENSOR: i32 = 0;
pub const FOLIO_SCALE_PER_HEAD: i32 = 1;
pub const FOLIO_SCALE_PER_REQUEST: i32 = 2;
pub const FOLIO_SCALE_PER_REQUEST_AND_HEAD: i32 = 3;
pub type folio_lse_base = i32;
pub const FOLIO_LSE_BASE_E: i32 = 0;
pub const FOLIO_LSE_BASE_2: i32 = 1;
pub type folio_where = i32;
pub const FOLIO_ON_HOST: i32 = 0;
pub const FOLIO_ON_DEVICE: i32 = 1;
pub type folio_thread_pinning = i32;
pub const FOLIO_PINNING_AUTOMATIC: i32 = 0;
pub const FOLIO_PINNING_PINNED: i32 = 1;
pub const FOLIO_PINNING_UNPINNED: i32 = 2;
pub const FOLIO_MAX_RANK: i32 = 5;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_tensor_view {
    pub data: *mut std::os::raw::c_void,
    pub dtype: folio_dtype,
    pub rank: i32,
    pub shape: [i64; 5usize],
    pub strides: [i64; 5usize],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_const_tensor_view {
    pub data: *const std::os::raw::c_void,
    pub dtype: folio_dtype,
    pub rank: i32,
    pub shape: [i64; 5usize],
    pub strides: [i64; 5usize],
}
extern "C" {
    pub fn folio_make_tensor_view(
        data: *mut std::os::raw::c_void,
        dtype: folio_dtype,
        rank: i32,
        shape: *const i64,
        view: *mut folio_tensor_view,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_make_const_tensor_view(
        data: *const std::os::raw::c_void,
        dtype: folio_dtype,
        rank: i32,
        shape: *const i64,
        view: *mut folio_const_tensor_view,
    ) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_kv_strides {
    pub page: i64,
    pub token: i64,
    pub head: i64,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_kv_cache_view {
    pub format: folio_kv_format,
    pub dtype: folio_dtype,
    pub k: *mut std::os::raw::c_void,
    pub v: *mut std::os::raw::c_void,
    pub num_pages: i64,
    pub page_size: i32,
    pub num_kv_heads: i32,
    pub head_dim_qk: i32,
    pub head_dim_v: i32,
    pub k_strides: folio_kv_strides,
    pub v_strides: folio_kv_strides,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_token_scales {
    pub data: *mut f32,
    pub strides: folio_kv_strides,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_kv_cache {
    pub view: folio_kv_cache_view,
    pub k_token_scales: folio_token_scales,
    pub v_token_scales: folio_token_scales,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_kv_cache_shape {
    pub num_pages: i64,
    pub page_size: i32,
    pub num_kv_heads: i32,
    pub head_dim_qk: i32,
    pub head_dim_v: i32,
    pub dtype: folio_dtype,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_ragged_kv_view {
    pub k: folio_const_tensor_view,
    pub v: folio_const_tensor_view,
    pub indptr: *const i32,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_page_table_view {
    pub kind: folio_page_table_kind,
    pub indices: *const i32,
    pub num_indices: i64,
    pub indptr: *const i32,
    pub row_stride: i64,
    pub first_column: i32,
    pub num_rows: i32,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_scale {
    pub value: f32,
    pub data: *const f32,
    pub granularity: folio_scale_granularity,
    pub request_stride: i64,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_lse_view {
    pub data: *mut f32,
    pub token_stride: i64,
    pub head_stride: i64,
    pub base: folio_lse_base,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_kv_shard {
    pub world: i32,
    pub rank: i32,
    pub interleave: i32,
}
pub type folio_parallel_body =
    ::std::option::Option<unsafe extern "C" fn(context: *mut std::os::raw::c_void, index: i64)>;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_executor {
    pub self_: *mut std::os::raw::c_void,
    pub concurrency: i32,
    pub parallel_for: ::std::option::Option<
        unsafe extern "C" fn(
            self_: *mut std::os::raw::c_void,
            n: i64,
            body: folio_parallel_body,
            context: *mut std::os::raw::c_void,
        ),
    >,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_plan {
    pub buffer: *const std::os::raw::c_void,
    pub generation: u64,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_workload_mix {
    pub decode_tokens: f64,
    pub prefill_tokens: f64,
}
extern "C" {
    pub fn folio_scale_init(scale: *mut folio_scale) -> folio_status;
}
extern "C" {
    pub fn folio_kv_shard_init(shard: *mut folio_kv_shard) -> folio_status;
}
extern "C" {
    pub fn folio_token_scales_init(scales: *mut folio_token_scales) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_context {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_context_options {
    pub struct_size: u32,
    pub num_threads: i32,
    pub executor: folio_executor,
    pub force_kernel: *const std::os::raw::c_char,
    pub allow_fp8_mma: i32,
    pub validate_tables: i32,
    pub pinning: folio_thread_pinning,
    pub reserved: i32,
}
extern "C" {
    pub fn folio_context_options_init(options: *mut folio_context_options, struct_size: usize) -> folio_status;
}
extern "C" {
    pub fn folio_create_cpu_context(
        options: *const folio_context_options,
        context: *mut *mut folio_context,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_create_cuda_context(
        index: i32,
        options: *const folio_context_options,
        context: *mut *mut folio_context,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_free_context(context: *mut folio_context);
}
pub type folio_device_type = i32;
pub const FOLIO_DEVICE_CPU: i32 = 0;
pub const FOLIO_DEVICE_CUDA: i32 = 1;
extern "C" {
    pub fn folio_get_device(
        context: *const folio_context,
        type_: *mut folio_device_type,
        index: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_concurrency(context: *const folio_context, concurrency: *mut i32) -> folio_status;
}
extern "C" {
    pub fn folio_synchronize(context: *const folio_context, stream: *mut std::os::raw::c_void) -> folio_status;
}
extern "C" {
    pub fn folio_map_host_memory(
        context: *const folio_context,
        data: *mut std::os::raw::c_void,
        bytes: usize,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_unmap_host_memory(context: *const folio_context, data: *mut std::os::raw::c_void) -> folio_status;
}
extern "C" {
    pub fn folio_cpu_features(features: *mut *const std::os::raw::c_char) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_op {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_plan_buffer {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_explanation {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_attention_config {
    pub struct_size: u32,
    pub num_q_heads: i32,
    pub num_kv_heads: i32,
    pub head_dim_qk: i32,
    pub head_dim_v: i32,
    pub q: folio_dtype,
    pub kv: folio_dtype,
    pub ragged_kv: folio_dtype,
    pub out: folio_dtype,
    pub kv_format: folio_kv_format,
    pub page_size: i32,
    pub mask: folio_mask_kind,
    pub window_left: i32,
    pub window_right: i32,
    pub features: u32,
    pub determinism: folio_determinism,
    pub attention_chunk: i32,
    pub span_window_left: i32,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_prepare_options {
    pub struct_size: u32,
    pub num_workers: i32,
    pub force_kernel: *const std::os::raw::c_char,
    pub has_bounds: i32,
    pub max_requests: i32,
    pub max_tokens: i32,
    pub max_q_len: i32,
    pub max_kv_len: i32,
    pub max_shared_levels: i32,
    pub allow_fp8_mma: i32,
    pub mix: folio_workload_mix,
    pub max_kv_splits: i32,
    pub reserved: i32,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_kv_segment {
    pub struct_size: u32,
    pub source: folio_kv_source,
    pub kv_len: *const i32,
    pub first_pos: *const i32,
    pub group_indptr: *const i32,
    pub num_groups: i32,
    pub mask: folio_segment_mask,
    pub shard: folio_kv_shard,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_batch {
    pub struct_size: u32,
    pub where_: folio_where,
    pub num_requests: i32,
    pub num_tokens: i32,
    pub max_q_len: i32,
    pub max_kv_len: i32,
    pub cu_q: *const i32,
    pub q_first_pos: *const i32,
    pub segments: *const folio_kv_segment,
    pub num_segments: i32,
    pub custom_mask_scope: folio_custom_mask_scope,
    pub custom_mask_tail_len: *const i32,
    pub kv_start: *const i32,
    pub causal: *const u8,
    pub spans: *const i32,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_segment_args {
    pub struct_size: u32,
    pub cache: folio_kv_cache_view,
    pub table: folio_page_table_view,
    pub ragged: folio_ragged_kv_view,
    pub k_scale: folio_scale,
    pub v_scale: folio_scale,
    pub k_token_scales: folio_token_scales,
    pub v_token_scales: folio_token_scales,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_attention_args {
    pub struct_size: u32,
    pub num_segments: i32,
    pub segments: *const folio_segment_args,
    pub q: folio_const_tensor_view,
    pub out: folio_tensor_view,
    pub lse: folio_lse_view,
    pub sm_scale: f32,
    pub logits_soft_cap: f32,
    pub alibi_slopes: *const f32,
    pub sinks: *const f32,
    pub q_scale: folio_scale,
    pub out_scale: folio_scale,
    pub custom_mask: *const u8,
    pub custom_mask_bytes: i64,
    pub rope_theta: f32,
    pub rope_scale: f32,
    pub out_block_scale: *mut std::os::raw::c_void,
    pub out_block_scale_first_row: i64,
}
extern "C" {
    pub fn folio_attention_config_init(config: *mut folio_attention_config, struct_size: usize) -> folio_status;
}
extern "C" {
    pub fn folio_prepare_options_init(options: *mut folio_prepare_options, struct_size: usize) -> folio_status;
}
extern "C" {
    pub fn folio_kv_segment_init(segment: *mut folio_kv_segment, struct_size: usize) -> folio_status;
}
extern "C" {
    pub fn folio_batch_init(batch: *mut folio_batch, struct_size: usize) -> folio_status;
}
extern "C" {
    pub fn folio_segment_args_init(args: *mut folio_segment_args, struct_size: usize) -> folio_status;
}
extern "C" {
    pub fn folio_attention_args_init(args: *mut folio_attention_args, struct_size: usize) -> folio_status;
}
extern "C" {
    pub fn folio_free_op(op: *mut folio_op);
}
extern "C" {
    pub fn folio_free_plan_buffer(buffer: *mut folio_plan_buffer);
}
extern "C" {
    pub fn folio_prepare(
        context: *const folio_context,
        config: *const folio_attention_config,
        options: *const folio_prepare_options,
        op: *mut *mut folio_op,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_kernel_name(op: *const folio_op, name: *mut *const std::os::raw::c_char) -> folio_status;
}
extern "C" {
    pub fn folio_fp8_mma(op: *const folio_op, fp8_mma: *mut i32) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_op_info {
    pub struct_size: u32,
    pub fp8_mma: i32,
    pub q: folio_dtype,
    pub kv: folio_dtype,
    pub ragged_kv: folio_dtype,
    pub out: folio_dtype,
    pub p_dtype: folio_dtype,
    pub kv_dtype: folio_dtype,
    pub kernel_name: *const std::os::raw::c_char,
}
extern "C" {
    pub fn folio_op_info_init(info: *mut folio_op_info, struct_size: usize) -> folio_status;
}
extern "C" {
    pub fn folio_get_op_info(op: *const folio_op, info: *mut folio_op_info) -> folio_status;
}
extern "C" {
    pub fn folio_explain(
        context: *const folio_context,
        config: *const folio_attention_config,
        mix: *const folio_workload_mix,
        explanation: *mut *mut folio_explanation,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_explanation_size(explanation: *const folio_explanation, kernels: *mut i32) -> folio_status;
}
extern "C" {
    pub fn folio_explanation_at(
        explanation: *const folio_explanation,
        index: i32,
        name: *mut *const std::os::raw::c_char,
        available: *mut i32,
        refusal: *mut *const std::os::raw::c_char,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_free_explanation(explanation: *mut folio_explanation);
}
extern "C" {
    pub fn folio_create_plan_buffer(op: *const folio_op, buffer: *mut *mut folio_plan_buffer) -> folio_status;
}
extern "C" {
    pub fn folio_make_plan(
        op: *const folio_op,
        batch: *const folio_batch,
        buffer: *mut folio_plan_buffer,
        stream: *mut std::os::raw::c_void,
        plan: *mut folio_plan,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_check_plans(buffer: *mut folio_plan_buffer) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_plan_summary {
    pub struct_size: u32,
    pub num_workers: i32,
    pub num_work_tiles: i32,
    pub num_partial_rows: i32,
    pub num_combine_tiles: i32,
    pub reserved: i32,
    pub kv_tokens_read: i64,
    pub qk_pairs: i64,
}
extern "C" {
    pub fn folio_plan_summary_init(summary: *mut folio_plan_summary, struct_size: usize) -> folio_status;
}
extern "C" {
    pub fn folio_get_plan_summary(plan: *const folio_plan, summary: *mut folio_plan_summary) -> folio_status;
}
extern "C" {
    pub fn folio_workspace_size(op: *const folio_op, bytes: *mut usize) -> folio_status;
}
extern "C" {
    pub fn folio_plan_workspace_size(plan: *const folio_plan, bytes: *mut usize) -> folio_status;
}
extern "C" {
    pub fn folio_init_workspace(
        op: *const folio_op,
        workspace: *mut std::os::raw::c_void,
        workspace_bytes: usize,
        stream: *mut std::os::raw::c_void,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_run(
        plan: *const folio_plan,
        args: *const folio_attention_args,
        workspace: *mut std::os::raw::c_void,
        workspace_bytes: usize,
        stream: *mut std::os::raw::c_void,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_validate(plan: *const folio_plan, args: *const folio_attention_args) -> folio_status;
}
extern "C" {
    pub fn folio_recommended_kv_format(
        config: *const folio_attention_config,
        context: *const folio_context,
        format: *mut folio_kv_format,
        page_size: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_recommended_kv_format_for_mix(
        config: *const folio_attention_config,
        context: *const folio_context,
        mix: *const folio_workload_mix,
        format: *mut folio_kv_format,
        page_size: *mut i32,
    ) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_cache_write_args {
    pub struct_size: u32,
    pub k: folio_const_tensor_view,
    pub v: folio_const_tensor_view,
    pub slot_mapping: *const i64,
    pub num_slots: i64,
    pub cache: folio_kv_cache_view,
    pub k_scale: folio_scale,
    pub v_scale: folio_scale,
    pub k_token_scales: folio_token_scales,
    pub v_token_scales: folio_token_scales,
    pub status: *mut i32,
}
extern "C" {
    pub fn folio_cache_write_args_init(args: *mut folio_cache_write_args, struct_size: usize) -> folio_status;
}
extern "C" {
    pub fn folio_kv_cache_elements(
        shape: *const folio_kv_cache_shape,
        k_elements: *mut i64,
        v_elements: *mut i64,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_make_nhd_view(
        shape: *const folio_kv_cache_shape,
        k: *mut std::os::raw::c_void,
        v: *mut std::os::raw::c_void,
        view: *mut folio_kv_cache_view,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_make_hnd_view(
        shape: *const folio_kv_cache_shape,
        k: *mut std::os::raw::c_void,
        v: *mut std::os::raw::c_void,
        view: *mut folio_kv_cache_view,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_make_cpu_packed_view(
        shape: *const folio_kv_cache_shape,
        k: *mut std::os::raw::c_void,
        v: *mut std::os::raw::c_void,
        view: *mut folio_kv_cache_view,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_make_fp8_ds_mla_view(
        num_pages: i64,
        page_size: i32,
        data: *mut std::os::raw::c_void,
        view: *mut folio_kv_cache_view,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_make_nhd_cache(
        shape: *const folio_kv_cache_shape,
        k: *mut std::os::raw::c_void,
        v: *mut std::os::raw::c_void,
        k_token_scales: *mut f32,
        v_token_scales: *mut f32,
        cache: *mut folio_kv_cache,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_make_hnd_cache(
        shape: *const folio_kv_cache_shape,
        k: *mut std::os::raw::c_void,
        v: *mut std::os::raw::c_void,
        k_token_scales: *mut f32,
        v_token_scales: *mut f32,
        cache: *mut folio_kv_cache,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_make_cpu_packed_cache(
        shape: *const folio_kv_cache_shape,
        k: *mut std::os::raw::c_void,
        v: *mut std::os::raw::c_void,
        k_token_scales: *mut f32,
        v_token_scales: *mut f32,
        cache: *mut folio_kv_cache,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_token_scale_elements(shape: *const folio_kv_cache_shape, elements: *mut i64) -> folio_status;
}
extern "C" {
    pub fn folio_validate_kv_cache(cache: *const folio_kv_cache) -> folio_status;
}
extern "C" {
    pub fn folio_write_kv_cache(
        context: *const folio_context,
        args: *const folio_cache_write_args,
        stream: *mut std::os::raw::c_void,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_copy_pages(
        context: *const folio_context,
        from: *const folio_kv_cache,
        to: *const folio_kv_cache,
        source: *const i32,
        destination: *const i32,
        num_pages: i64,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_cache_convert_scales {
    pub from_k: *const folio_scale,
    pub from_v: *const folio_scale,
    pub to_k: *const folio_scale,
    pub to_v: *const folio_scale,
}
extern "C" {
    pub fn folio_convert_pages(
        context: *const folio_context,
        from: *const folio_kv_cache,
        to: *const folio_kv_cache,
        source: *const i32,
        destination: *const i32,
        num_pages: i64,
        scales: *const folio_cache_convert_scales,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_gather_kv(
        context: *const folio_context,
        cache: *const folio_kv_cache,
        table: *const folio_page_table_view,
        kv_len: *const i32,
        num_rows: i32,
        k_out: *const folio_tensor_view,
        v_out: *const folio_tensor_view,
        k_scale: *const folio_scale,
        v_scale: *const folio_scale,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_num_dequantized_pages(
        seq_lens: *const i32,
        num_requests: i32,
        page_size: i32,
        pages: *mut i64,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_dequantize_pages(
        context: *const folio_context,
        from: *const folio_kv_cache,
        table: *const folio_page_table_view,
        columns: i32,
        seq_lens: *const i32,
        num_requests: i32,
        k_scale: f32,
        v_scale: f32,
        to: *const folio_kv_cache,
        new_table: *mut i32,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_concat_mla_k(
        context: *const folio_context,
        k: *const folio_tensor_view,
        k_nope: *const folio_const_tensor_view,
        k_pe: *const folio_const_tensor_view,
        stream: *mut std::os::raw::c_void,
    ) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_attention_state {
    pub out: folio_const_tensor_view,
    pub lse: *const f32,
    pub lse_token_stride: i64,
    pub lse_head_stride: i64,
    pub base: folio_lse_base,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_attention_states {
    pub out: folio_const_tensor_view,
    pub lse: *const f32,
    pub lse_token_stride: i64,
    pub lse_state_stride: i64,
    pub lse_head_stride: i64,
    pub base: folio_lse_base,
}
extern "C" {
    pub fn folio_merge_state(
        context: *const folio_context,
        a: *const folio_attention_state,
        b: *const folio_attention_state,
        out: *const folio_tensor_view,
        lse: *const folio_lse_view,
        out_scale: *const folio_scale,
        stream: *mut std::os::raw::c_void,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_merge_state_in_place(
        context: *const folio_context,
        a_out: *const folio_tensor_view,
        a_lse: *const folio_lse_view,
        b: *const folio_attention_state,
        mask: *const u8,
        stream: *mut std::os::raw::c_void,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_merge_states(
        context: *const folio_context,
        states: *const folio_attention_states,
        out: *const folio_tensor_view,
        lse: *const folio_lse_view,
        out_scale: *const folio_scale,
        stream: *mut std::os::raw::c_void,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_shift_alibi_lse(
        context: *const folio_context,
        lse: *mut f32,
        cu_q: *const i32,
        first_pos: *const i32,
        num_requests: i32,
        slopes: *const f32,
        num_heads: i32,
        stream: *mut std::os::raw::c_void,
    ) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_kv_pool {
    _unused: [u8; 0],
}
pub type folio_kv_pool_layout = i32;
pub const FOLIO_POOL_TOKEN_MAJOR: i32 = 0;
pub const FOLIO_POOL_HEAD_MAJOR: i32 = 1;
pub const FOLIO_POOL_CPU_PACKED: i32 = 2;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_kv_pool_config {
    pub struct_size: u32,
    pub num_slots: i32,
    pub page_size: i32,
    pub num_layers: i32,
    pub num_kv_heads: i32,
    pub head_dim_qk: i32,
    pub head_dim_v: i32,
    pub dtype: folio_dtype,
    pub layout: folio_kv_pool_layout,
    pub reserved: i32,
}
extern "C" {
    pub fn folio_kv_pool_config_init(config: *mut folio_kv_pool_config, struct_size: usize) -> folio_status;
}
extern "C" {
    pub fn folio_kv_pool_bytes_per_layer(
        config: *const folio_kv_pool_config,
        k_bytes: *mut usize,
        v_bytes: *mut usize,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_create_kv_pool(config: *const folio_kv_pool_config, pool: *mut *mut folio_kv_pool) -> folio_status;
}
extern "C" {
    pub fn folio_create_kv_pool_over(
        config: *const folio_kv_pool_config,
        k: *const *mut std::os::raw::c_void,
        v: *const *mut std::os::raw::c_void,
        pool: *mut *mut folio_kv_pool,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_free_kv_pool(pool: *mut folio_kv_pool);
}
extern "C" {
    pub fn folio_kv_pool_view(
        pool: *const folio_kv_pool,
        layer: i32,
        page_size: i32,
        view: *mut folio_kv_cache_view,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_kv_pool_buffers(
        pool: *const folio_kv_pool,
        layer: i32,
        k: *mut folio_tensor_view,
        v: *mut folio_tensor_view,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_kv_pool_set_scales(
        pool: *mut folio_kv_pool,
        layer: i32,
        k: *const folio_scale,
        v: *const folio_scale,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_kv_pool_scales(
        pool: *const folio_kv_pool,
        layer: i32,
        k: *mut folio_scale,
        v: *mut folio_scale,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_kv_pool_write(
        pool: *const folio_kv_pool,
        context: *const folio_context,
        layer: i32,
        k: *const folio_const_tensor_view,
        v: *const folio_const_tensor_view,
        slots: *const i64,
        num_slots: i64,
        stream: *mut std::os::raw::c_void,
    ) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_token_allocator {
    _unused: [u8; 0],
}
extern "C" {
    pub fn folio_create_token_allocator(
        num_slots: i32,
        page_size: i32,
        allocator: *mut *mut folio_token_allocator,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_free_token_allocator(allocator: *mut folio_token_allocator);
}
extern "C" {
    pub fn folio_token_allocator_available(allocator: *const folio_token_allocator, slots: *mut i32) -> folio_status;
}
extern "C" {
    pub fn folio_token_allocator_alloc(
        allocator: *mut folio_token_allocator,
        slots: *mut i32,
        num_slots: i64,
        allocated: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_token_allocator_alloc_extend(
        allocator: *mut folio_token_allocator,
        prefix_lens: *const i32,
        seq_lens: *const i32,
        last_slots: *const i32,
        num_requests: i32,
        slots: *mut i32,
        num_slots: i64,
        allocated: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_token_allocator_alloc_decode(
        allocator: *mut folio_token_allocator,
        seq_lens: *const i32,
        last_slots: *const i32,
        num_requests: i32,
        slots: *mut i32,
        allocated: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_token_allocator_free(
        allocator: *mut folio_token_allocator,
        slots: *const i32,
        num_slots: i64,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_token_allocator_open_group(allocator: *mut folio_token_allocator) -> folio_status;
}
extern "C" {
    pub fn folio_token_allocator_close_group(allocator: *mut folio_token_allocator) -> folio_status;
}
extern "C" {
    pub fn folio_token_allocator_clear(allocator: *mut folio_token_allocator) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_req_to_token_pool {
    _unused: [u8; 0],
}
extern "C" {
    pub fn folio_create_req_to_token_pool(
        max_reqs: i32,
        max_context_len: i32,
        pool: *mut *mut folio_req_to_token_pool,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_free_req_to_token_pool(pool: *mut folio_req_to_token_pool);
}
extern "C" {
    pub fn folio_req_to_token_pool_available(pool: *const folio_req_to_token_pool, rows: *mut i32) -> folio_status;
}
extern "C" {
    pub fn folio_req_to_token_pool_alloc(
        pool: *mut folio_req_to_token_pool,
        rows: *mut i32,
        num_rows: i32,
        allocated: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_req_to_token_pool_free_row(pool: *mut folio_req_to_token_pool, row: i32) -> folio_status;
}
extern "C" {
    pub fn folio_req_to_token_pool_write(
        pool: *mut folio_req_to_token_pool,
        row: i32,
        first: i32,
        slots: *const i32,
        num_slots: i64,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_req_to_token_pool_table(
        pool: *const folio_req_to_token_pool,
        table: *mut folio_page_table_view,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_req_to_token_pool_clear(pool: *mut folio_req_to_token_pool) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_slot_changes {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_slot_move {
    pub from: i32,
    pub to: i32,
}
extern "C" {
    pub fn folio_create_slot_changes(changes: *mut *mut folio_slot_changes) -> folio_status;
}
extern "C" {
    pub fn folio_free_slot_changes(changes: *mut folio_slot_changes);
}
extern "C" {
    pub fn folio_slot_changes_clear(changes: *mut folio_slot_changes) -> folio_status;
}
extern "C" {
    pub fn folio_slot_changes_freed(
        changes: *const folio_slot_changes,
        slots: *mut *const i32,
        num_slots: *mut i64,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_slot_changes_window_freed(
        changes: *const folio_slot_changes,
        slots: *mut *const i32,
        num_slots: *mut i64,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_slot_changes_moved(
        changes: *const folio_slot_changes,
        moves: *mut *const folio_slot_move,
        num_moves: *mut i64,
    ) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_prefix_cache {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_prefix_lock {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_prefix_cache_options {
    pub struct_size: u32,
    pub page_size: i32,
    pub window_left: i32,
    pub partial_leaves: i32,
}
extern "C" {
    pub fn folio_prefix_cache_options_init(
        options: *mut folio_prefix_cache_options,
        struct_size: usize,
    ) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_prefix_key {
    pub tokens: *const i32,
    pub num_tokens: i64,
    pub extra_key: *const std::os::raw::c_char,
    pub extra_key_bytes: usize,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_prefix_cache_sizes {
    pub struct_size: u32,
    pub reserved: i32,
    pub size: i64,
    pub evictable: i64,
    pub protected_slots: i64,
    pub window_size: i64,
    pub window_evictable: i64,
    pub window_protected: i64,
    pub num_nodes: i64,
}
extern "C" {
    pub fn folio_prefix_cache_sizes_init(sizes: *mut folio_prefix_cache_sizes, struct_size: usize) -> folio_status;
}
extern "C" {
    pub fn folio_create_prefix_cache(
        options: *const folio_prefix_cache_options,
        cache: *mut *mut folio_prefix_cache,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_free_prefix_cache(cache: *mut folio_prefix_cache);
}
extern "C" {
    pub fn folio_prefix_cache_get_sizes(
        cache: *const folio_prefix_cache,
        sizes: *mut folio_prefix_cache_sizes,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_prefix_cache_match(
        cache: *const folio_prefix_cache,
        key: *const folio_prefix_key,
        num_tokens: *mut i64,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_prefix_cache_acquire(
        cache: *mut folio_prefix_cache,
        key: *const folio_prefix_key,
        slots: *mut i32,
        lock: *mut *mut folio_prefix_lock,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_prefix_cache_insert(
        cache: *mut folio_prefix_cache,
        key: *const folio_prefix_key,
        slots: *const i32,
        window_begin: i64,
        changes: *mut folio_slot_changes,
        present: *mut i64,
        inserted: *mut i64,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_prefix_cache_extend(
        cache: *mut folio_prefix_cache,
        lock: *mut folio_prefix_lock,
        key: *const folio_prefix_key,
        slots: *mut i32,
        window_begin: i64,
        changes: *mut folio_slot_changes,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_prefix_cache_finish(
        cache: *mut folio_prefix_cache,
        lock: *mut folio_prefix_lock,
        key: *const folio_prefix_key,
        slots: *const i32,
        window_begin: i64,
        changes: *mut folio_slot_changes,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_prefix_cache_evict(
        cache: *mut folio_prefix_cache,
        slots: i64,
        window_copies: i64,
        changes: *mut folio_slot_changes,
        evicted_slots: *mut i64,
        evicted_window_copies: *mut i64,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_prefix_cache_clear(cache: *mut folio_prefix_cache) -> folio_status;
}
extern "C" {
    pub fn folio_prefix_lock_length(lock: *const folio_prefix_lock, num_tokens: *mut i64) -> folio_status;
}
extern "C" {
    pub fn folio_free_prefix_lock(lock: *mut folio_prefix_lock);
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_window_token_allocator {
    _unused: [u8; 0],
}
extern "C" {
    pub fn folio_create_window_token_allocator(
        num_slots: i32,
        num_window_slots: i32,
        page_size: i32,
        allocator: *mut *mut folio_window_token_allocator,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_free_window_token_allocator(allocator: *mut folio_window_token_allocator);
}
extern "C" {
    pub fn folio_window_token_allocator_available(
        allocator: *const folio_window_token_allocator,
        slots: *mut i32,
        window: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_window_token_allocator_alloc(
        allocator: *mut folio_window_token_allocator,
        slots: *mut i32,
        num_slots: i64,
        allocated: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_window_token_allocator_alloc_extend(
        allocator: *mut folio_window_token_allocator,
        prefix_lens: *const i32,
        seq_lens: *const i32,
        last_slots: *const i32,
        num_requests: i32,
        slots: *mut i32,
        num_slots: i64,
        allocated: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_window_token_allocator_alloc_decode(
        allocator: *mut folio_window_token_allocator,
        seq_lens: *const i32,
        last_slots: *const i32,
        num_requests: i32,
        slots: *mut i32,
        allocated: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_window_token_allocator_free(
        allocator: *mut folio_window_token_allocator,
        slots: *const i32,
        num_slots: i64,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_window_token_allocator_free_window(
        allocator: *mut folio_window_token_allocator,
        slots: *const i32,
        num_slots: i64,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_window_token_allocator_apply(
        allocator: *mut folio_window_token_allocator,
        changes: *const folio_slot_changes,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_window_token_allocator_to_window(
        allocator: *const folio_window_token_allocator,
        slots: *const i32,
        num_slots: i64,
        window: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_window_token_allocator_clear(allocator: *mut folio_window_token_allocator) -> folio_status;
}
extern "C" {
    pub fn folio_nvfp4_scale_bytes(rows: i64, blocks_per_row: i64, bytes: *mut i64) -> folio_status;
}
extern "C" {
    pub fn folio_quantize_fp8(
        context: *const folio_context,
        in_: *const folio_const_tensor_view,
        out: *const folio_tensor_view,
        scale: *const folio_scale,
        stream: *mut std::os::raw::c_void,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_quantize_nvfp4(
        context: *const folio_context,
        in_: *const folio_const_tensor_view,
        out: *const folio_tensor_view,
        block_scale: *mut std::os::raw::c_void,
        first_row: i64,
        global_scale: f32,
        stream: *mut std::os::raw::c_void,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_dequantize_nvfp4(
        context: *const folio_context,
        in_: *const folio_const_tensor_view,
        block_scale: *const std::os::raw::c_void,
        first_row: i64,
        global_scale: f32,
        out: *const folio_tensor_view,
        stream: *mut std::os::raw::c_void,
    ) -> folio_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct folio_kv_scale_constants {
    pub q: f32,
    pub k: f32,
    pub v: f32,
}
extern "C" {
    pub fn folio_calculate_kv_scales(
        context: *const folio_context,
        q: *const folio_const_tensor_view,
        k: *const folio_const_tensor_view,
        v: *const folio_const_tensor_view,
        constants: *const folio_kv_scale_constants,
        scales: *mut f32,
        stream: *mut std::os::raw::c_void,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_pages_for(tokens: i32, page_size: i32, pages: *mut i32) -> folio_status;
}
extern "C" {
    pub fn folio_paged_indptr(
        context: *const folio_context,
        seq_lens: *const i32,
        num_requests: i32,
        page_size: i32,
        indptr: *mut i32,
        last_page_len: *mut i32,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_seq_lens_from_paged(
        context: *const folio_context,
        indptr: *const i32,
        last_page_len: *const i32,
        num_requests: i32,
        page_size: i32,
        seq_lens: *mut i32,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_table_to_csr(
        context: *const folio_context,
        table: *const folio_page_table_view,
        seq_lens: *const i32,
        num_requests: i32,
        page_size: i32,
        indptr: *mut i32,
        indices: *mut i32,
        num_indices: i64,
        last_page_len: *mut i32,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_table_to_dense(
        context: *const folio_context,
        table: *const folio_page_table_view,
        seq_lens: *const i32,
        num_requests: i32,
        page_size: i32,
        columns: i32,
        fill: i32,
        dense: *mut i32,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_token_indices(
        context: *const folio_context,
        table: *const folio_page_table_view,
        seq_lens: *const i32,
        num_requests: i32,
        page_size: i32,
        indptr: *mut i32,
        indices: *mut i32,
        num_indices: i64,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_token_offsets(
        context: *const folio_context,
        table: *const folio_page_table_view,
        seq_lens: *const i32,
        num_requests: i32,
        page_size: i32,
        page_stride: i64,
        token_stride: i64,
        indptr: *mut i32,
        offsets: *mut i64,
        num_offsets: i64,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_slot_mapping(
        context: *const folio_context,
        table: *const folio_page_table_view,
        token_row: *const i32,
        positions: *const i32,
        num_tokens: i64,
        page_size: i32,
        shard: *const folio_kv_shard,
        slots: *mut i64,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_expand_pages(
        context: *const folio_context,
        pages: *const i32,
        num_pages: i64,
        ratio: i32,
        expanded: *mut i32,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_shard_lens(
        context: *const folio_context,
        lens: *const i32,
        num_requests: i32,
        shard: *const folio_kv_shard,
        local: *mut i32,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
extern "C" {
    pub fn folio_validate_page_table(
        context: *const folio_context,
        table: *const folio_page_table_view,
        seq_lens: *const i32,
        num_requests: i32,
        page_size: i32,
        num_pages: i64,
        stream: *mut std::os::raw::c_void,
        status: *mut i32,
    ) -> folio_status;
}
