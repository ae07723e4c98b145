#include "fields.hpp"
#include "views.hpp"

namespace folio::python {
namespace {

void bind_attention_config(nb::module_& m) {
  using C = AttentionConfig;
  fields_of<C>(
      "AttentionConfig", "What an attention op is prepared for: everything that picks a kernel. Its fields:",
      required("num_q_heads", &C::num_q_heads, "a multiple of num_kv_heads"),
      required("num_kv_heads", &C::num_kv_heads, "q head h reads KV head h // (num_q_heads // num_kv_heads)"),
      required("head_dim_qk", &C::head_dim_qk, "components of a query and of a key; a multiple of 8"),
      required("head_dim_v", &C::head_dim_v, "components of a value; a multiple of 8"), field("q", &C::q, "dtype of q"),
      field("kv", &C::kv, "dtype of paged keys and values"),
      optional_dtype("ragged_kv", &C::ragged_kv,
                     "dtype of ragged keys and values; None: that of kv, or of q where kv is fp8 or int8"),
      optional_dtype("out", &C::out, "dtype of out; None: that of q, or bfloat16 where q is fp8"),
      field("kv_format", &C::kv_format, "how pages lie in memory, a KvFormat"),
      field("page_size", &C::page_size, "tokens a page"),
      field("mask", &C::mask, "which keys a query sees, before the window: a MaskKind"),
      field("window_left", &C::window_left, "a query at p sees keys from p - window_left on; -1: all before it"),
      field("window_right", &C::window_right, "and keys up to p + window_right; -1: all after it"),
      field("attention_chunk", &C::attention_chunk,
            "positions of an attention chunk (Llama 4): a query sees keys of its own chunk alone; 0: there are none"),
      field("span_window_left", &C::span_window_left,
            "with SPANS, a query sees its span from p - span_window_left on; 0: the window clamps it; -1: all of it"),
      field("features", &C::features, "what arguments may ask for: a Feature, its name, or an iterable of them"),
      field("determinism", &C::determinism, "what must not change a result's bits, a Determinism"))
      .bind(m);
}

void bind_options(nb::module_& m) {
  using B = GraphBounds;
  fields_of<B>("GraphBounds", "Upper bounds of every batch of an op, so that CUDA graphs can capture it. Its fields:",
               required("max_requests", &B::max_requests, "requests of a batch"),
               required("max_tokens", &B::max_tokens, "rows of q"),
               required("max_q_len", &B::max_q_len, "queries of a request"),
               required("max_kv_len", &B::max_kv_len, "keys of a request"),
               field("max_shared_levels", &B::max_shared_levels, "shared segments (KvSegment.group_indptr) of a batch"))
      .bind(m);
  using W = WorkloadMix;
  fields_of<W>(
      "WorkloadMix",
      "The tokens of an engine's work, in any unit, such as means of a request: a CPU's kernels and cache formats are "
      "ranked by what both take together. Both 0: not known; then four of prefill to one of decode. Its fields:",
      field("decode_tokens", &W::decode_tokens, "of decode, where a request has one token a step; 0 or positive"),
      field("prefill_tokens", &W::prefill_tokens, "of prefill; 0 or positive"))
      .bind(m);
  using P = PrepareOptions;
  fields_of<P>(
      "PrepareOptions", "How an op is prepared. Its fields:",
      field("bounds", &P::bounds,
            "GraphBounds or None; given: plan refuses larger batches, and a GPU's op is capturable"),
      field("force_kernel", &P::force_kernel, "the kernel that runs, by name, or prepare fails; empty: the cheapest"),
      field("num_workers", &P::num_workers, "workers to plan for; 0: the context's concurrency"),
      field("allow_fp8_mma", &P::allow_fp8_mma, "a permission, speed before accuracy: fp8 may be multiplied as it is"),
      field("max_kv_splits", &P::max_kv_splits, "most KV splits of a query; 0: as many as the work needs"),
      field("mix", &P::mix,
            "WorkloadMix that a CPU's kernels are ranked by; not known: decode alone where bounds.max_q_len is 1 and "
            "determinism is below BATCH_INVARIANT, else its default. Ops of the same requests take the same mix"))
      .bind(m);
  using R = RopeArgs;
  fields_of<R>(
      "RopeArgs",
      "Rotary embedding inside the kernel (Feature.ROPE_LLAMA): components d and d + head_dim_qk / 2 of queries "
      "and keys are turned by position / scale * theta^(-2 d / head_dim_qk). The cache holds keys that are not "
      "turned. Its fields:",
      field("theta", &R::theta, "finite, positive"), field("scale", &R::scale, "divides positions; positive"))
      .bind(m);
  using S = KvShard;
  fields_of<S>("KvShard", "A token-wise shard of a segment: token g lies on rank g // interleave % world. Its fields:",
               field("world", &S::world, "ranks"), field("rank", &S::rank, "this rank, from 0"),
               field("interleave", &S::interleave, "tokens that lie together"))
      .bind(m);
}

void bind_answers(nb::module_& m) {
  fields_of<Device>("Device", "A device. Its fields:", field("type", &Device::type, "a DeviceType"),
                    field("index", &Device::index, "the CUDA ordinal; 0 for the CPU"))
      .bind_answer(m);
  using P = PlanSummary;
  fields_of<P>("PlanSummary", "What a plan holds. Its fields:", field("num_workers", &P::num_workers, "workers"),
               field("num_work_tiles", &P::num_work_tiles, "work tiles of all of them"),
               field("num_partial_rows", &P::num_partial_rows, "rows of partial results, of split requests"),
               field("num_combine_tiles", &P::num_combine_tiles, "tiles that put partial results together"),
               field("kv_tokens_read", &P::kv_tokens_read, "tokens of KV read, per KV head"),
               field("qk_pairs", &P::qk_pairs, "pairs of a query and a key computed, per q head"))
      .bind_answer(m);
  using F = KvFormatAdvice;
  fields_of<F>("KvFormatAdvice",
               "What an engine should allocate. Its fields:", field("format", &F::format, "a KvFormat"),
               field("page_size", &F::page_size, "tokens a page"))
      .bind_answer(m);
  using K = KernelAnswer;
  fields_of<K>("KernelAnswer", "One kernel's answer to a configuration. Its fields:",
               field("name", &K::name, "the kernel's, as force_kernel takes it"),
               field("available", &K::available, "whether this machine can run it"),
               field("refusal", &K::refusal, "why it cannot take the configuration; empty: it can"))
      .bind_answer(m);
}

}  // namespace

void bind_config(nb::module_& m) {
  bind_attention_config(m);
  bind_options(m);
  bind_answers(m);
}

}  // namespace folio::python
