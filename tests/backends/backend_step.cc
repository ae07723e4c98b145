#include "backend_step.hpp"

#include <algorithm>
#include <cmath>

#include "folio/backends/flash_attn.hpp"
#include "folio/backends/flashinfer.hpp"

namespace folio::backends::testing {
namespace {

std::string cache_name(const DcpSetup& setup) {
  if (setup.cache == DType::kFloat8E4M3) return "fp8_e4m3";
  return setup.cache == DType::kFloat8E5M2 ? "fp8_e5m2" : "auto";
}

EngineConfig engine_config(const DcpSetup& setup, distributed::ProcessGroup& group) {
  EngineConfig engine;
  engine.model.dtype = setup.model;
  engine.model.num_attention_heads = setup.heads;
  engine.model.num_kv_heads = setup.kv_heads;
  engine.cache.cache_dtype = cache_name(setup);
  engine.cache.layout = setup.hnd ? KvCacheLayout::kHnd : KvCacheLayout::kNhd;
  engine.parallel.decode_context_parallel_size = group.size();
  engine.parallel.decode_context_parallel_rank = group.rank();
  engine.parallel.cp_kv_cache_interleave_size = setup.interleave;
  engine.parallel.dcp_comm_backend = group.size() == 1 ? "ag_rs" : to_string(setup.combine);
  engine.parallel.dcp_group = &group;
  engine.parallel.dcp_replicated_queries = setup.replicated_queries;
  engine.parallel.dcp_all_heads_out = setup.all_heads_out;
  engine.parallel.dcp_partial_dtype = setup.partial;
  engine.determinism = setup.determinism;
  return engine;
}

/// The cache as a tensor whose dimension `half_dim` counts K and V, [.., page_size, kv_heads, head_size].
TensorView cache_tensor(const KvCacheView& view, size_t half_dim) {
  const int64_t half = (static_cast<std::byte*>(view.v) - static_cast<std::byte*>(view.k)) / size_of(view.dtype);
  TensorView tensor(view.k, view.dtype, {2, 2, view.page_size, view.num_kv_heads, view.head_dim_qk});
  tensor.shape[1 - half_dim] = view.num_pages;
  tensor.strides = {0, 0, view.k_strides.token, view.k_strides.head, 1};
  tensor.strides[half_dim] = half;
  tensor.strides[1 - half_dim] = view.k_strides.page;
  return tensor;
}

template <typename Config>
Config layer_config(const DcpCase& whole, const distributed::DcpArgs& args) {
  const DcpSetup& setup = whole.setup;
  Config layer;
  layer.num_heads = setup.heads;
  layer.num_kv_heads = setup.kv_heads;
  layer.head_size = setup.dim_qk;
  layer.dcp_query_ranks = setup.replicated_queries ? setup.world : 1;
  layer.scale = 1.0f / std::sqrt(static_cast<float>(setup.dim_qk));
  layer.model_dtype = setup.model;
  layer.kv_cache_dtype = cache_name(setup);
  if (setup.window_left >= 0) layer.sliding_window = setup.window_left + 1;
  if (setup.soft_cap > 0.0f) layer.logits_soft_cap = setup.soft_cap;
  const int32_t query_heads = setup.heads * layer.dcp_query_ranks;
  if (args.alibi_slopes != nullptr) layer.alibi_slopes = {args.alibi_slopes, static_cast<size_t>(query_heads)};
  const float* const sinks = setup.replicated_queries ? whole.all_sinks().data() : args.sinks;
  if (args.sinks != nullptr) layer.sinks = ConstTensorView(sinks, DType::kFloat32, {query_heads});
  return layer;
}

/// Encoders have no cache and read whole keys and values on every rank.
void run_encoder(DcpCase& whole, const distributed::DcpArgs& args, int32_t rank, const EngineConfig& engine,
                 const AttentionSpec& spec, const Context& context, CommonAttentionMetadata batch) {
  FlashAttentionLayerConfig layer = layer_config<FlashAttentionLayerConfig>(whole, args);
  layer.attn_type = rank % 2 == 0 ? AttentionType::kEncoderOnly : AttentionType::kEncoder;
  batch.block_table = {};
  batch.slot_mapping = {};
  // Encoders' keys are their queries: on the host no lengths are needed for that.
  if (batch.where == Where::kHost) batch.seq_lens = {};
  batch.max_seq_len = 0;
  batch.dcp_local_seq_lens = {};
  const FlashAttentionImpl impl(context, layer);
  const std::vector<AttentionLayer<FlashAttentionImpl>> layers{{"layer", &impl}};
  FlashAttentionMetadataBuilder builder(context, spec, layers, engine);
  const FlashAttentionMetadata metadata = builder.build(0, batch);
  impl.forward({}, args.q, args.k, args.v, {}, &metadata, args.out);
}

}  // namespace

DcpSetup for_backend(DcpSetup setup, BackendKind kind) {
  setup.dim_v = setup.dim_qk;
  setup.write_new_tokens = false;
  setup.num_cached = 0;
  setup.lse = false;
  if (setup.encoder) return setup;
  if (setup.cross) {
    setup.mask = MaskKind::kNone;
    if (setup.window_left >= 0) setup.window_right = 0;
  }
  if (setup.determinism == Determinism::kScheduleInvariant || is_fp8(setup.query) || setup.cross) {
    setup.num_cached = static_cast<int32_t>(setup.requests.size());
  } else if (kind == BackendKind::kFlashInfer || setup.world == 1) {
    const auto first_prefill = std::ranges::find_if(setup.requests, [](const auto& r) { return r.q_len != 1; });
    setup.num_cached = static_cast<int32_t>(first_prefill - setup.requests.begin());
  }
  if (setup.world == 1) setup.num_cached = static_cast<int32_t>(setup.requests.size());  // one pass over the cache
  return setup;
}

void run_backend(DcpCase& whole, BackendKind kind, distributed::ProcessGroup& group, const Context& context,
                 const Change& change, Home* elsewhere, const FlashAttentionHooks& hooks) {
  Home here;
  Home& home = elsewhere != nullptr ? *elsewhere : here;
  const DcpSetup& setup = whole.setup;
  const auto rank = static_cast<size_t>(group.rank());
  distributed::DcpArgs args = whole.args(group.rank());
  DcpCase::Rank& mine = whole.ranks[rank];
  const int64_t key_rows = whole.key_rows();
  const ConstTensorView key(home.move_in(mine.k).data(), setup.model, {key_rows, setup.kv_heads, setup.dim_qk});
  const ConstTensorView value(home.move_in(mine.v).data(), setup.model, {key_rows, setup.kv_heads, setup.dim_qk});
  args.q.data = home.move_in(mine.q).data();
  args.out.data = home.move_in(mine.out).data();
  const std::ptrdiff_t v_half = static_cast<std::byte*>(args.cache.v) - static_cast<std::byte*>(args.cache.k);
  std::byte* const cache_memory = home.move_in(mine.cache).data();
  args.cache.k = cache_memory;
  args.cache.v = cache_memory + v_half;
  if (args.k.data != nullptr) {
    args.k.data = key.data;
    args.v.data = value.data;
  }
  EngineConfig engine = engine_config(setup, group);
  const AttentionSpec spec{setup.page_size, setup.kv_heads, setup.dim_qk, setup.cache};

  std::vector<int32_t> local(whole.seq_lens.size());
  distributed::get_dcp_local_seq_lens(whole.seq_lens, group.size(), group.rank(), setup.interleave, local);
  CommonAttentionMetadata batch;
  batch.where = home.where();
  batch.query_start_loc = home.move_in(whole.cu_q);
  batch.seq_lens = home.move_in(whole.seq_lens);
  if (home.where() == Where::kDevice) {
    batch.query_start_loc_host = whole.cu_q;
    batch.seq_lens_host = whole.seq_lens;
  }
  batch.num_reqs = static_cast<int32_t>(setup.requests.size());
  batch.num_actual_tokens = whole.tokens() + setup.padding_slots;
  for (const auto& request : setup.requests) {
    batch.max_query_len = std::max(batch.max_query_len, request.q_len);
    batch.max_seq_len = std::max(batch.max_seq_len, request.seq_len);
  }
  // The decoder's own tokens, which attend to those of the encoder.
  std::vector<int32_t> decoder_lens;
  if (setup.cross) {
    for (const auto& request : setup.requests) decoder_lens.push_back(request.q_len + 7);
    batch.encoder_seq_lens = batch.seq_lens;
    batch.encoder_seq_lens_host = batch.seq_lens_host;
    batch.seq_lens = home.move_in(decoder_lens);
    if (home.where() == Where::kDevice) batch.seq_lens_host = decoder_lens;
    for (const int32_t len : decoder_lens) batch.max_seq_len = std::max(batch.max_seq_len, len);
    distributed::get_dcp_local_seq_lens(decoder_lens, group.size(), group.rank(), setup.interleave, local);
  }
  batch.block_table = {home.move_in(mine.table).data(), batch.num_reqs, mine.columns, mine.columns};
  batch.slot_mapping = home.move_in(mine.new_slots);
  if (group.size() > 1) batch.dcp_local_seq_lens = local;
  if (change) change(engine, batch);
  // Results may be rounded as the model is: kernels of some machines multiply probabilities p in its dtype.
  if (setup.model != DType::kFloat32) mine.p_dtype = setup.model;
  if (setup.encoder) {
    run_encoder(whole, args, group.rank(), engine, spec, context, batch);
    home.finish();
    return;
  }
  AttentionLayerScales scales;
  scales.k.value = setup.k_scale;
  scales.v.value = setup.v_scale;
  scales.q = whole.q_scale();
  if (scales.q.data != nullptr) scales.q.data = home.move_in(whole.setup.q_scales).data();
  const bool quantized = is_fp8(whole.query_dtype());

  if (kind == BackendKind::kFlashInfer) {
    const FlashInferImpl impl(context, layer_config<FlashInferLayerConfig>(whole, args));
    const std::vector<AttentionLayer<FlashInferImpl>> layers{{"layer", &impl}};
    FlashInferOptions options;
    options.quantize_query = quantized;
    FlashInferMetadataBuilder builder(context, spec, layers, engine, options);
    const FlashInferMetadata metadata = builder.build(0, batch, home.stream());
    home.run_layers([&] {
      impl.forward(scales, args.q, key, value, cache_tensor(args.cache, 1), &metadata, args.out, {}, home.stream());
    });
  } else {
    FlashAttentionLayerConfig layer = layer_config<FlashAttentionLayerConfig>(whole, args);
    if (setup.cross) layer.attn_type = AttentionType::kEncoderDecoder;
    const FlashAttentionImpl impl(context, layer);
    const std::vector<AttentionLayer<FlashAttentionImpl>> layers{{"layer", &impl}};
    FlashAttentionOptions options;
    options.quantize_query = quantized;
    if (hooks.options) hooks.options(options);
    FlashAttentionMetadataBuilder builder(context, spec, layers, engine, options);
    FlashAttentionMetadata metadata = builder.build(0, batch, /*fast_build=*/false, home.stream());
    if (hooks.built) hooks.built(metadata);
    const TensorView cache = cache_tensor(args.cache, 0);
    home.run_layers([&] {
      if (hooks.builds_with_layers) metadata = builder.build(0, batch, /*fast_build=*/false, home.stream());
      impl.do_kv_cache_update(scales, key, value, cache, metadata.slot_mapping, home.stream());
      impl.forward(scales, args.q, key, value, cache, &metadata, args.out, {}, home.stream());
    });
  }
  home.finish();
}

}  // namespace folio::backends::testing
