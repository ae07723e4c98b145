#include "folio/backends/token_pool.hpp"

#include <string>
#include <utility>

#include "capi/backends/step.hpp"

using folio::ConstTensorView;
using folio::Stream;
using folio::backends::ForwardBatch;
using folio::backends::GraphBatchExtras;
using folio::backends::TokenPoolBackend;
using folio::capi::deref;
using folio::capi::guarded;
using folio::capi::to_optional_span;
using folio::capi::to_span;

struct folio_token_pool_backend {
  TokenPoolBackend backend;
  std::string kernel_name;
};

namespace {

/// A dense table, or none: zeros.
folio::PageTableView to_request_table(const folio_page_table_view& table, const char* name) {
  const bool none = table.indices == nullptr && table.num_rows == 0;
  return none ? folio::PageTableView{} : folio::capi::to_table(table, name);
}

folio::backends::TokenPoolConfig to_config(const folio_token_pool_config* config) {
  const folio_token_pool_config given = folio::capi::read_struct(config, "config");
  folio::core::require(given.reserved == 0, "config.reserved is ", given.reserved, "; it is 0");
  folio::backends::TokenPoolConfig converted;
  converted.num_heads = given.num_heads;
  converted.num_kv_heads = given.num_kv_heads;
  converted.head_dim = given.head_dim;
  if (given.v_head_dim != 0) converted.v_head_dim = given.v_head_dim;
  converted.kv_cache_dtype = folio::capi::to_dtype(given.kv_cache_dtype, "config.kv_cache_dtype");
  converted.q_dtype = folio::capi::to_dtype(given.q_dtype, "config.q_dtype");
  converted.kv_format = folio::capi::to_enum(given.kv_format, folio::KvFormat::kFp8DsMla, "config.kv_format");
  if (given.page_size != 0) converted.page_size = given.page_size;
  converted.max_context_len = given.max_context_len;
  converted.req_to_token = to_request_table(given.req_to_token, "config.req_to_token.kind");
  converted.max_req_pool_size = given.max_req_pool_size;
  if (given.sliding_window_size != 0) converted.sliding_window_size = given.sliding_window_size;
  converted.window_req_to_token = to_request_table(given.window_req_to_token, "config.window_req_to_token.kind");
  converted.is_encoder_decoder = given.is_encoder_decoder != 0;
  converted.skip_prefill = given.skip_prefill != 0;
  converted.logit_cap = given.logit_cap != 0;
  converted.extend_path =
      folio::capi::to_enum(given.extend_path, folio::backends::ExtendPath::kPaged, "config.extend_path");
  converted.determinism =
      folio::capi::to_enum(given.determinism, folio::Determinism::kScheduleInvariant, "config.determinism");
  return converted;
}

folio::backends::RadixAttention to_layer(const folio_radix_attention* layer) {
  const folio_radix_attention given = folio::capi::read_struct(layer, "layer");
  folio::core::require(given.reserved == 0, "layer.reserved is ", given.reserved, "; it is 0");
  folio::backends::RadixAttention converted;
  converted.num_heads = given.num_heads;
  converted.head_dim = given.head_dim;
  converted.scaling = given.scaling;
  converted.num_kv_heads = given.num_kv_heads;
  converted.layer_id = given.layer_id;
  converted.logit_cap = given.logit_cap;
  if (given.v_head_dim != 0) converted.v_head_dim = given.v_head_dim;
  if (given.sliding_window_size != 0) converted.sliding_window_size = given.sliding_window_size;
  converted.is_cross_attention = given.is_cross_attention != 0;
  converted.attn_type =
      folio::capi::to_enum(given.attn_type, folio::backends::RadixAttentionType::kEncoderOnly, "layer.attn_type");
  return converted;
}

ForwardBatch to_batch(const folio_forward_batch* batch) {
  const folio_forward_batch given = folio::capi::read_struct(batch, "batch");
  const int64_t requests = given.batch_size;
  folio::core::require(requests >= 0, "batch.batch_size is ", requests);
  const auto per_request = [&](const int32_t* data, const char* name) {
    return to_optional_span(data, requests, name);
  };
  ForwardBatch converted;
  converted.forward_mode = folio::capi::to_enum(given.forward_mode, folio::backends::ForwardMode::kDraftExtend,
                                                "batch.forward_mode", folio::backends::ForwardMode::kExtend);
  converted.batch_size = given.batch_size;
  converted.req_pool_indices = to_span(given.req_pool_indices, requests, "batch.req_pool_indices");
  converted.seq_lens = per_request(given.seq_lens, "batch.seq_lens");
  converted.seq_lens_cpu = per_request(given.seq_lens_cpu, "batch.seq_lens_cpu");
  converted.out_cache_loc = to_span(given.out_cache_loc, given.num_out_cache_loc, "batch.out_cache_loc");
  converted.extend_prefix_lens = per_request(given.extend_prefix_lens, "batch.extend_prefix_lens");
  converted.extend_prefix_lens_cpu = per_request(given.extend_prefix_lens_cpu, "batch.extend_prefix_lens_cpu");
  converted.extend_seq_lens = per_request(given.extend_seq_lens, "batch.extend_seq_lens");
  converted.extend_seq_lens_cpu = per_request(given.extend_seq_lens_cpu, "batch.extend_seq_lens_cpu");
  converted.encoder_lens = per_request(given.encoder_lens, "batch.encoder_lens");
  converted.encoder_lens_cpu = per_request(given.encoder_lens_cpu, "batch.encoder_lens_cpu");
  converted.encoder_out_cache_loc =
      to_span(given.encoder_out_cache_loc, given.num_encoder_out_cache_loc, "batch.encoder_out_cache_loc");
  converted.spec_info.draft_token_num = given.draft_token_num;
  converted.spec_info.tree_mask = to_optional_span(given.tree_mask, given.tree_mask_bytes, "batch.tree_mask");
  converted.spec_info.tree_mask_cpu =
      to_optional_span(given.tree_mask_cpu, given.tree_mask_bytes, "batch.tree_mask_cpu");
  if (given.spec_kv_indptr != nullptr || given.num_branches != 0) {
    folio::core::require(given.num_branches >= 0, "batch.num_branches is ", given.num_branches);
    converted.spec_info.kv_indptr = to_span(given.spec_kv_indptr, given.num_branches + 1, "batch.spec_kv_indptr");
    converted.spec_info.kv_indptr_cpu =
        to_optional_span(given.spec_kv_indptr_cpu, given.num_branches + 1, "batch.spec_kv_indptr_cpu");
  }
  converted.spec_info.kv_indices = to_span(given.spec_kv_indices, given.num_spec_kv_indices, "batch.spec_kv_indices");
  if (given.token_to_kv_pool != nullptr) converted.token_to_kv_pool = &given.token_to_kv_pool->pool;
  if (given.window_token_to_kv_pool != nullptr) {
    converted.window_token_to_kv_pool = &given.window_token_to_kv_pool->pool;
  }
  converted.window_out_cache_loc =
      to_span(given.window_out_cache_loc, given.num_window_out_cache_loc, "batch.window_out_cache_loc");
  return converted;
}

GraphBatchExtras to_extras(const ForwardBatch& batch) {
  return {.encoder_lens = batch.encoder_lens,
          .encoder_lens_cpu = batch.encoder_lens_cpu,
          .spec_info = batch.spec_info,
          .token_to_kv_pool = batch.token_to_kv_pool,
          .window_token_to_kv_pool = batch.window_token_to_kv_pool};
}

/// Keys or values that may be left out.
ConstTensorView to_optional_view(const folio_const_tensor_view* view, const char* name) {
  return view == nullptr ? ConstTensorView{} : folio::capi::to_view(*view, name);
}

}  // namespace

folio_status folio_create_token_pool_backend(const folio_context* context, const folio_token_pool_config* config,
                                             folio_token_pool_backend** backend) noexcept {
  return guarded([&] {
    deref(backend, "backend") = nullptr;
    const folio::Context& device = deref(context, "context").context;
    TokenPoolBackend made(device, to_config(config));
    std::string name = made.kernel_name();
    *backend = new folio_token_pool_backend{std::move(made), std::move(name)};
  });
}

void folio_free_token_pool_backend(folio_token_pool_backend* backend) noexcept {
  delete backend;
}

folio_status folio_token_pool_kernel_name(const folio_token_pool_backend* backend, const char** name) noexcept {
  return guarded([&] {
    deref(backend, "backend");
    deref(name, "name") = backend->kernel_name.c_str();
  });
}

folio_status folio_token_pool_init_forward_metadata(folio_token_pool_backend* backend, const folio_forward_batch* batch,
                                                    void* stream) noexcept {
  return guarded([&] { deref(backend, "backend").backend.init_forward_metadata(to_batch(batch), Stream{stream}); });
}

folio_status folio_token_pool_forward(folio_token_pool_backend* backend, const folio_radix_attention* layer,
                                      const folio_forward_batch* batch, const folio_const_tensor_view* q,
                                      const folio_const_tensor_view* k, const folio_const_tensor_view* v,
                                      const folio_tensor_view* out, int32_t keep_kv_cache, void* stream) noexcept {
  return guarded([&] {
    TokenPoolBackend& pool = deref(backend, "backend").backend;
    const folio::backends::RadixAttention converted = to_layer(layer);
    const ForwardBatch given = to_batch(batch);
    pool.forward(folio::capi::to_view(deref(q, "q"), "q.dtype"), to_optional_view(k, "k.dtype"),
                 to_optional_view(v, "v.dtype"), converted, given, folio::capi::to_view(deref(out, "out"), "out.dtype"),
                 keep_kv_cache == 0, Stream{stream});
  });
}

folio_status folio_token_pool_check_plans(folio_token_pool_backend* backend) noexcept {
  return guarded([&] { deref(backend, "backend").backend.check_plans(); });
}

folio_status folio_token_pool_init_cuda_graph_state(folio_token_pool_backend* backend, int32_t max_bs,
                                                    int32_t max_num_tokens) noexcept {
  return guarded([&] { deref(backend, "backend").backend.init_cuda_graph_state(max_bs, max_num_tokens); });
}

folio_status folio_token_pool_capture_metadata(folio_token_pool_backend* backend, const folio_forward_batch* batch,
                                               int32_t num_tokens, void* stream) noexcept {
  return guarded([&] {
    TokenPoolBackend& pool = deref(backend, "backend").backend;
    const ForwardBatch given = to_batch(batch);
    pool.init_forward_metadata_capture_cuda_graph(given.batch_size, num_tokens, given.req_pool_indices, given.seq_lens,
                                                  given.forward_mode, to_extras(given), given.seq_lens_cpu,
                                                  Stream{stream});
  });
}

folio_status folio_token_pool_replay_metadata(folio_token_pool_backend* backend, const folio_forward_batch* batch,
                                              int64_t seq_lens_sum, void* stream) noexcept {
  return guarded([&] {
    TokenPoolBackend& pool = deref(backend, "backend").backend;
    const ForwardBatch given = to_batch(batch);
    pool.init_forward_metadata_replay_cuda_graph(given.batch_size, given.req_pool_indices, given.seq_lens, seq_lens_sum,
                                                 given.forward_mode, given.seq_lens_cpu, to_extras(given),
                                                 Stream{stream});
  });
}
