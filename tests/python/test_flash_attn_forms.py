"""folio.flash_attn's forms: the versions' own signatures, names and results, and what is refused."""

import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import folio.flash_attn as flash_attn  # noqa: E402
from folio.flash_attn import v3, v4, vllm  # noqa: E402

Q = torch.randn(2, 3, 4, 32)
K = torch.randn(2, 5, 2, 32)
CU_Q = torch.tensor([0, 3, 6], dtype=torch.int32)
CU_K = torch.tensor([0, 5, 10], dtype=torch.int32)
FLAT_Q, FLAT_K = Q.flatten(0, 1), K.flatten(0, 1)

# Positional arguments in order, with defaults that are not None, of the originals' releases of August 2026.
SIGNATURES = {
    (flash_attn, "flash_attn_func"): "q k v dropout_p=0.0 softmax_scale causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes deterministic=False return_attn_probs=False",
    (flash_attn, "flash_attn_varlen_func"): "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
    "softmax_scale causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes deterministic=False "
    "return_attn_probs=False block_table",
    (flash_attn, "flash_attn_with_kvcache"): "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
    "cache_leftpad block_table softmax_scale causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True "
    "alibi_slopes num_splits=0 return_softmax_lse=False",
    (v3, "flash_attn_func"): "q k v softmax_scale causal=False qv q_descale k_descale v_descale window_size=(-1,-1) "
    "attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa deterministic=False sm_margin=0 return_attn_probs=False",
    (v3, "flash_attn_varlen_func"): "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
    "softmax_scale causal=False qv q_descale k_descale v_descale window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
    "num_splits=1 pack_gqa deterministic=False sm_margin=0 return_attn_probs=False",
    (v3, "flash_attn_with_kvcache"): "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx "
    "cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale "
    "softmax_scale causal=False window_size=(-1,-1) attention_chunk=0 softcap=0.0 rotary_interleaved=True "
    "scheduler_metadata num_splits=0 pack_gqa sm_margin=0 return_softmax_lse=False",
    (v3, "get_scheduler_metadata"): "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
    "qkv_dtype=torch.bfloat16 headdim_v cu_seqlens_q cu_seqlens_k_new cache_leftpad page_size max_seqlen_k_new=0 "
    "causal=False window_size=(-1,-1) attention_chunk=0 has_softcap=False num_splits=0 pack_gqa sm_margin=0",
    (v4, "flash_attn_func"): "q k v qv gather_kv_indices softmax_scale causal=False window_size=(None,None) "
    "learnable_sink softcap=0.0 num_splits=1 pack_gqa deterministic=False score_mod score_mod_bwd mask_mod aux_tensors "
    "aux_scalars block_sparse_tensors block_sparse_tensors_bwd return_lse=False",
    (v4, "flash_attn_varlen_func"): "q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q "
    "seqused_k gather_kv_indices page_table softmax_scale causal=False window_size=(None,None) learnable_sink "
    "softcap=0.0 num_splits=1 pack_gqa deterministic=False score_mod score_mod_bwd mask_mod block_sparse_tensors "
    "aux_tensors aux_scalars return_lse=False scheduler_metadata seqlen_k_per_split disable_scheduler_metadata=False",
    (vllm, "flash_attn_varlen_func"): "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k seqused_k q_v "
    "dropout_p=0.0 softmax_scale causal=False window_size softcap=0.0 alibi_slopes deterministic=False "
    "return_attn_probs=False block_table return_softmax_lse=False out scheduler_metadata q_descale k_descale v_descale "
    "num_splits=0 fa_version=2 s_aux cp_world_size=1 cp_rank=0 cp_tot_seqused_k",
}


@pytest.mark.parametrize("module, name", SIGNATURES, ids=lambda one: getattr(one, "__name__", one))
def test_signature(module, name):
    said = []
    for parameter in inspect.signature(getattr(module, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        default = parameter.default
        shown = default is not parameter.empty and default is not None
        said.append(parameter.name + (f"={default}".replace(" ", "") if shown else ""))
    assert said == SIGNATURES[module, name].split()


def test_forms_agree():
    plain, lse = flash_attn.flash_attn_func(Q, K, K, causal=True, window_size=(2, 0), return_softmax_lse=True)
    same = dict(causal=True, window_size=(2, 0))
    assert torch.equal(v3.flash_attn_func(Q, K, K, None, True, window_size=(2, 0), num_splits=0), plain)
    got = v3.flash_attn_func(Q, K, K, **same, num_splits=0, return_attn_probs=True)
    assert len(got) == 2 and torch.equal(got[1], lse)
    got = v4.flash_attn_func(Q, K, K, causal=True, window_size=(2, None), num_splits=0)
    assert got[1] is None and torch.equal(got[0], plain)
    assert torch.equal(v4.flash_attn_func(Q, K, K, **same, num_splits=0, return_lse=True)[1], lse)
    used = torch.full((2,), 3, dtype=torch.int32), torch.full((2,), 5, dtype=torch.int32)
    flat, flat_lse = flash_attn.flash_attn_varlen_func(FLAT_Q, FLAT_K, FLAT_K, CU_Q, CU_K, 3, 5, **same,
                                                       return_softmax_lse=True)
    assert torch.allclose(flat.view_as(plain), plain, atol=1e-6)
    lists = dict(causal=True, window_size=[2, 0])
    ours = vllm.flash_attn_varlen_func(FLAT_Q, FLAT_K, FLAT_K, 3, CU_Q, 5, CU_K, **lists, fa_version=2)
    assert torch.equal(ours, flat)
    apart = torch.randn(2, 4, 3, 32).transpose(1, 2)  # no one stride covers batch and queries
    boxed = torch.empty(2, 3, 4, 32)
    assert flash_attn.flash_attn_func(apart, K, K, out=boxed) is boxed
    assert torch.equal(boxed, flash_attn.flash_attn_func(apart.contiguous(), K, K))
    out = torch.empty_like(FLAT_Q)
    got = vllm.flash_attn_varlen_func(FLAT_Q, FLAT_K, FLAT_K, 3, CU_Q, 5, CU_K, **lists, out=out, return_softmax_lse=True)
    assert got[0] is out and torch.equal(out, flat) and torch.equal(got[1], flat_lse)
    for form in (dict(cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K), dict(cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, max_seqlen_q=3)):
        assert torch.equal(v4.flash_attn_varlen_func(FLAT_Q, FLAT_K, FLAT_K, **form, **same, num_splits=0)[0], flat)
    boxes, boxes_lse = v4.flash_attn_varlen_func(Q, K, K, seqused_q=used[0], seqused_k=used[1], **same, num_splits=0,
                                                 return_lse=True)
    assert torch.allclose(boxes, plain, atol=1e-6) and boxes_lse.shape == lse.shape
    assert torch.allclose(boxes_lse, lse, atol=1e-6)
    twisted = dict(qv=torch.randn(2, 3, 4, 32), return_lse=True)
    assert v4.flash_attn_func(Q, K, K, **twisted)[1].shape == (2, 3, 4)


def test_deterministic_is_what_results_always_are():
    wanted = flash_attn.flash_attn_func(Q, K, K)
    for module in (flash_attn, v3):
        assert torch.equal(module.flash_attn_func(Q, K, K, deterministic=True), wanted)


def test_windows_may_be_tensors_and_lists():
    plain = flash_attn.flash_attn_func(Q, K, K, window_size=(2, 1))
    for window in (torch.tensor([2, 1]), [2, 1]):
        assert torch.equal(flash_attn.flash_attn_func(Q, K, K, window_size=window), plain)


CACHE, V_CACHE = torch.randn(2, 4, 16, 2, 32)
LENS = torch.tensor([3, 9], dtype=torch.int32)
REFUSED = [
    (flash_attn.flash_attn_func, (Q, K, K, 0.1), {}, NotImplementedError, "dropout_p is 0.1; .* pass 0.0"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(softmax_scale=0), ValueError, "softmax_scale is 0"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(softcap=-1.0), ValueError, "softcap is -1.0"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(window_size=(-2, 0)), ValueError, r"window_size is \(-2, 0\)"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(window_size=(1, 0, 2)), ValueError, "window_size has 3 entries"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(num_splits=-1), ValueError, "num_splits is -1"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(sm_margin=10**6), ValueError, "sm_margin is 1000000"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(pack_gqa="yes"), TypeError, "pack_gqa is 'yes'"),
    (flash_attn.flash_attn_func, (Q, K, K[:, :4]), {}, ValueError, r"k is \[2, 5, 2, 32\], v \[2, 4, 2, 32\]"),
    (flash_attn.flash_attn_func, (Q, K, K.view(1, 10, 2, 32)), {}, ValueError, r"k is \[2, 5, 2, 32\], v \[1, 10, 2, 32\]"),
    (flash_attn.flash_attn_func, (Q, K, K.half()), {}, ValueError, "k is torch.float32, v torch.float16"),
    (flash_attn.flash_attn_func, (Q.int(), K, K), {}, ValueError, "q is torch.int32"),
    (flash_attn.flash_attn_func, (Q[:, :, :3], K, K), {}, ValueError, "q has 3 heads; a multiple of k's 2"),
    (flash_attn.flash_attn_func, (Q, K[..., :24], K), {}, ValueError, "q has head_dim 32, k 24"),
    (flash_attn.flash_attn_func, (Q, K[:1], K[:1]), {}, ValueError, "k has 1 sequences, q 2"),
    (flash_attn.flash_attn_func, (FLAT_Q, K, K), {}, ValueError, "they are .batch, seqlen, heads, headdim."),
    (flash_attn.flash_attn_func, (Q, K, K), dict(attention_chunk=-4), ValueError, "attention_chunk is -4"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(attention_chunk=2.5), TypeError, "attention_chunk is 2.5"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(window_size=(1.5, 0)), TypeError, "window_size is 1.5"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(window_size=5), TypeError, "window_size is 5; it is .left, right."),
    (flash_attn.flash_attn_func, (Q, K, K), dict(num_splits=None), TypeError, "num_splits is None"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(alibi_slopes=torch.rand(2, 4)), NotImplementedError, "one slope a head"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(alibi_slopes=torch.rand(3)), ValueError, r"alibi_slopes is .*\[3\]"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(s_aux=torch.rand(4), learnable_sink=torch.rand(4)), ValueError, "two names"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(s_aux=torch.rand(5)), ValueError, r"the sink is .*\[5\]"),
    (flash_attn.flash_attn_func, (Q, K, K), dict(qv=torch.rand(2, 3, 4, 16)), ValueError, r"qv is .*must be .*\[2, 3, 4, 32\]"),
    (v3.flash_attn_func, (Q.to(torch.float8_e4m3fn), K.to(torch.float8_e4m3fn), K.to(torch.float8_e4m3fn)),
     dict(q_descale=torch.rand(2, 4)), ValueError, r"q_descale is .*must be float32 \[2, 2\]"),
    (flash_attn.flash_attn_varlen_func, (FLAT_Q, FLAT_K, FLAT_K, CU_Q, CU_K[:2], 3, 5), {}, ValueError, "cu_seqlens_k"),
    (flash_attn.flash_attn_varlen_func, (FLAT_Q, FLAT_K, FLAT_K, CU_Q.float(), CU_K, 3, 5), {}, ValueError, "int32 .3."),
    (flash_attn.flash_attn_varlen_func, (FLAT_Q, FLAT_K, FLAT_K, CU_Q, CU_K, 2, 5), {}, ValueError, "max_q_len"),
    (flash_attn.flash_attn_varlen_func, (FLAT_Q, FLAT_K, FLAT_K, CU_Q, CU_K, 3, 4), {}, ValueError, "max_kv_len"),
    (flash_attn.flash_attn_varlen_func, (FLAT_Q, CACHE, CACHE, CU_Q), dict(block_table=torch.zeros(2, 1).int()),
     ValueError, "without seqused_k or cu_seqlens_k"),
    (flash_attn.flash_attn_varlen_func, (FLAT_Q, CACHE, CACHE, CU_Q, CU_K, 3, 5), dict(block_table=torch.zeros(3, 1).int()),
     ValueError, r"must be int32 \[2, pages\]"),
    (flash_attn.flash_attn_varlen_func, (FLAT_Q, CACHE, CACHE, CU_Q, CU_K, 3, 5), dict(block_table=torch.full((2, 1), 4).int()),
     ValueError, "page"),
    (flash_attn.flash_attn_varlen_func, (FLAT_Q, FLAT_K, FLAT_K, [0, 3, 6], CU_K, 3, 5), {}, TypeError, "cu_seqlens_q is of type"),
    (flash_attn.flash_attn_varlen_func, (FLAT_Q, FLAT_K, FLAT_K, CU_Q, CU_K, 3, 5.5), {}, TypeError, "max_seqlen_k is 5.5"),
    (flash_attn.flash_attn_varlen_func, (FLAT_Q, FLAT_K, FLAT_K, CU_Q, CU_K, 3, 5), dict(seqused_q=torch.tensor([3, 4])),
     ValueError, r"seqused_q is \[3, 4\]"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE[:1], CACHE[:1]), {}, ValueError, "k_cache has 1 sequences"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE), dict(cache_seqlens=[3, 9]), TypeError, r"cache_seqlens is \[3, 9\]"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE), dict(cache_seqlens=LENS, block_table=[[0], [1]]), TypeError,
     "page table is of type list"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE), dict(cache_seqlens=LENS, cache_leftpad=LENS[:1]), ValueError,
     r"cache_leftpad is .*must be int32 \[2\]"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE), dict(cache_seqlens=LENS, cache_batch_idx=torch.tensor([0, 4])),
     ValueError, r"cache_batch_idx is \[0, 4\]; there are 4 sequences"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE),
     dict(cache_seqlens=LENS, cache_batch_idx=torch.tensor([0, 2]), block_table=torch.zeros(2, 1).int()), ValueError,
     r"cache_batch_idx is \[0, 2\]; there are 2 sequences"),
    (flash_attn.flash_attn_with_kvcache, (FLAT_Q, CACHE, CACHE, K[:1], K[:1]), dict(cache_seqlens=LENS, cu_seqlens_q=CU_Q),
     ValueError, "for 2 requests"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE, FLAT_K, FLAT_K),
     dict(cache_seqlens=LENS, cu_seqlens_k_new=torch.tensor([0, 5, 11])), ValueError, r"cu_seqlens_k_new is \[0, 5, 11\]"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE, FLAT_K, FLAT_K),
     dict(cache_seqlens=LENS, cu_seqlens_k_new=torch.tensor([0, 5, 3])), ValueError, r"cu_seqlens_k_new is \[0, 5, 3\]"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, V_CACHE, Q[:, :, :2], Q[:, :, :2]),
     dict(cache_seqlens=LENS, rotary_cos=torch.rand(16, 8), rotary_sin=torch.rand(16, 8), rotary_seqlens=torch.tensor([3, 14])),
     ValueError, r"rotary_seqlens is \[3, 14\]; rotary_cos has the angles of 16 positions"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE), dict(cache_seqlens=17), ValueError, "17"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE, Q[:, :, :2], Q[:, :, :2]), {}, ValueError, "without cache_seqlens"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE, Q[:, :, :2], None), dict(cache_seqlens=1), ValueError, "together"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE, Q[:, :, :1], Q[:, :, :1]), dict(cache_seqlens=1), ValueError,
     r"k is .*\[2, 3, 1, 32\], its cache"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE), dict(cache_seqlens=1, rotary_cos=K, rotary_sin=K), ValueError,
     "without k and v"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, V_CACHE, Q[:, :, :2], Q[:, :, :2]),
     dict(cache_seqlens=1, rotary_cos=torch.rand(9, 8), rotary_sin=torch.rand(9, 8)), ValueError, "9 positions"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, V_CACHE, Q[:, :, :2], Q[:, :, :2]),
     dict(cache_seqlens=1, rotary_cos=torch.rand(16, 24), rotary_sin=torch.rand(16, 24)), ValueError, "rotates 48"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE, Q[:, :, :2], Q[:, :, 2:]), dict(cache_seqlens=1), ValueError,
     "v_cache is a part of k_cache"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE[..., ::2], CACHE[..., ::2]), dict(cache_seqlens=1), ValueError, "contiguous"),
    (flash_attn.flash_attn_with_kvcache, (Q, CACHE, CACHE), dict(cache_seqlens=LENS, scheduler_metadata=[1]), TypeError,
     "scheduler_metadata"),
    (flash_attn.flash_attn_func, (Q[..., :27], K[..., :27], K[..., :27]), dict(out=torch.empty(7, 2, 3, 4, 27)), ValueError,
     r"out is \[7, 2, 3, 4, 27\]"),
    (flash_attn.flash_attn_qkvpacked_func, (torch.rand(2, 3, 4, 2, 32),), {}, ValueError, r"qkv is .*seqlen, 3, heads"),
    (flash_attn.flash_attn_kvpacked_func, (Q, torch.rand(2, 5, 3, 2, 32)), {}, ValueError, r"kv is .*seqlen, 2, heads"),
    (flash_attn.flash_attn_varlen_qkvpacked_func, (torch.rand(6, 4, 2, 32), CU_Q, 3), {}, ValueError, r"qkv is .*total, 3, heads"),
    (flash_attn.flash_attn_varlen_kvpacked_func, (FLAT_Q, torch.rand(10, 3, 2, 32), CU_Q, CU_K, 3, 5), {}, ValueError,
     r"kv is .*total, 2, heads"),
    (v3.flash_attn_qkvpacked_func, (torch.rand(2, 3, 3, 4, 32),), dict(num_heads_q=2), ValueError, "num_heads_q is 2"),
    (v3.flash_attn_qkvpacked_func, (torch.rand(2, 3, 8, 32),), dict(num_heads_q=10), ValueError, "num_heads_q 10"),
    (flash_attn.flash_attn_combine, (torch.rand(0, 3, 2, 8), torch.rand(0, 3, 2)), {}, ValueError, "no splits"),
    (flash_attn.flash_attn_combine, (torch.ones(2, 3, 2, 8).int(), torch.rand(2, 3, 2)), {}, ValueError, "out_partial is torch.int32"),
    (v4.flash_attn_func, (Q, K, K), dict(score_mod=max), NotImplementedError, "score_mod is given"),
    (v4.flash_attn_func, (Q, K, K), dict(mask_mod=max), NotImplementedError, "mask_mod is given"),
    (v4.flash_attn_varlen_func, (FLAT_Q, FLAT_K, FLAT_K), dict(cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, seqlen_k_per_split=4),
     NotImplementedError, "seqlen_k_per_split is 4"),
    (vllm.flash_attn_varlen_func, (FLAT_Q, FLAT_K, FLAT_K, 3, CU_Q, 5, CU_K), dict(cp_world_size=2), NotImplementedError,
     "cp_world_size is 2"),
    (vllm.flash_attn_varlen_func, (FLAT_Q, FLAT_K, FLAT_K, 3, CU_Q, 5, CU_K), dict(return_attn_probs=True), NotImplementedError,
     "return_attn_probs is True"),
    (vllm.flash_attn_varlen_func, (FLAT_Q, FLAT_K, FLAT_K, 3, CU_Q, 5, CU_K), dict(fa_version=5), ValueError, "fa_version is 5"),
]


@pytest.mark.parametrize("function, args, given, error, text", REFUSED, ids=range(len(REFUSED)))
def test_refused(function, args, given, error, text):
    before = CACHE.clone()
    flash_attn.flash_attn_func(Q, K, K)  # what is remembered of a call that fits must not let others through
    flash_attn.flash_attn_varlen_func(FLAT_Q, FLAT_K, FLAT_K, CU_Q, CU_K, 3, 5)
    with pytest.raises(error, match=text):
        function(*args, **given)
    assert torch.equal(CACHE, before)


def test_numbers_beyond_int32_are_unbounded():
    plain = flash_attn.flash_attn_func(Q, K, K)
    assert torch.equal(flash_attn.flash_attn_func(Q, K, K, attention_chunk=2**40), plain)
    assert torch.equal(flash_attn.flash_attn_func(Q, K, K, window_size=(2**31 - 1, 2**40), num_splits=2**40), plain)


def test_gradients():
    partial = torch.rand(2, 3, 4, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="out_partial requires a gradient"):
        flash_attn.flash_attn_combine(partial, torch.rand(2, 3, 4))
    needing = Q.clone().requires_grad_()
    for args in ((needing, K, K), (Q, K.clone().requires_grad_(), K)):
        plain = flash_attn.flash_attn_func(Q, K, K)
        with pytest.raises(NotImplementedError, match="requires a gradient"):
            flash_attn.flash_attn_func(*args)
        with torch.no_grad():
            assert torch.equal(flash_attn.flash_attn_func(*args), plain)


def test_scheduler_metadata():
    given = (2, 1, 32, 4, 2, 64)
    metadata = flash_attn.get_scheduler_metadata(*given, LENS, causal=True, num_splits=3)
    assert metadata.dtype == torch.int32 and metadata.tolist() == [1, 2, 1, 32, 4, 2, 64, 64]
    plain = flash_attn.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=LENS)
    got = flash_attn.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=LENS, scheduler_metadata=metadata)
    assert torch.equal(got, plain)
    assert vllm.get_scheduler_metadata(*given, LENS).tolist() == metadata.tolist()
    assert v4.get_scheduler_metadata(1, 32, 4, 2, 64, 3, seqused_k=LENS).tolist() == metadata.tolist()
    assert v4.get_scheduler_metadata(1, 30, 4, 2, 64, 3, seqlen_k_new=2, seqused_k=LENS, leftpad_k=LENS).tolist()[3] == 32
    assert flash_attn.get_scheduler_metadata(*given, LENS, max_seqlen_k_new=2, cache_leftpad=LENS,
                                             attention_chunk=4).tolist()[3] == 34
    for name, value in (("cache_leftpad", CU_Q), ("cu_seqlens_q", LENS), ("cu_seqlens_k_new", LENS), ("page_size", 0)):
        with pytest.raises(ValueError, match=name):
            flash_attn.get_scheduler_metadata(*given, LENS, **{name: value})
    with pytest.raises(ValueError, match="leftpad_k"):
        v4.get_scheduler_metadata(1, 32, 4, 2, 64, 3, seqused_k=LENS, leftpad_k=CU_Q)
    with pytest.raises(ValueError, match=r"cache_seqlens is .*\[3\]"):
        flash_attn.get_scheduler_metadata(3, 1, 32, 4, 2, 64, LENS)
    with pytest.raises(ValueError, match="at least one"):
        v4.get_scheduler_metadata(1, 32, 4, 2, 64, 3)


def test_sm_margin_leaves_workers(monkeypatch):
    import folio
    from folio.flash_attn import plans

    context = plans.context_of(Q.device, torch.get_num_threads())
    asked = []
    prepare = folio.prepare

    def watched(given, config, options):
        asked.append((options.num_workers, options.max_kv_splits))
        return prepare(given, config, options)

    monkeypatch.setattr(folio, "prepare", watched)
    margin = context.concurrency - 1
    flash_attn.flash_attn_func(Q, K, K, softcap=9.0, sm_margin=margin, num_splits=5)
    assert asked == [(1 if margin else 0, 5)]


def test_install():
    code = """
import folio.flash_attn
folio.flash_attn.install()
folio.flash_attn.install()
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import flash_attn_func
import flash_attn, flash_attn_interface
from flash_attn.cute import flash_attn_func as version_4
from flash_attn_interface import get_scheduler_metadata, flash_attn_combine
assert flash_attn is folio.flash_attn and flash_attn_func is folio.flash_attn.flash_attn_func
assert flash_attn_interface is folio.flash_attn.v3 and version_4 is folio.flash_attn.v4.flash_attn_func
import flash_attn.cute.interface, flash_attn_3.flash_attn_interface
from flash_attn import flash_attn_interface as version_2
assert flash_attn.cute.interface is folio.flash_attn.v4 and version_2 is flash_attn
assert flash_attn_3.flash_attn_interface is folio.flash_attn.v3
import sys, types
sys.modules["flash_attn"] = types.ModuleType("flash_attn")
try:
    folio.flash_attn.install()
except RuntimeError as error:
    assert "flash_attn is imported already" in str(error)
else:
    raise SystemExit("taken")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_that_are_offered():
    for module in (flash_attn, v3, v4, vllm):
        for name in module.__all__:
            assert callable(getattr(module, name)), name
