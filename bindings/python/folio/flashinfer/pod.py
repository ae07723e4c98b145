"""A prefill beside a batch of decodes (flashinfer.pod): two launches on one stream here.

Prefills and decodes of one cache go into one plan with BatchAttention.
"""

from .. import _folio as folio
from . import arguments
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper
from .single import single_prefill_with_kv_cache
from .wrapper import check_jit


class PODWithPagedKVCacheWrapper:
    """A prefill over tensors k and v beside decodes over a paged cache. The form for graphs is the decode wrapper's."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, paged_kv_indptr_buffer=None,
                 paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, jit_args=None):
        check_jit(jit_args)
        self._kv_layout = kv_layout
        self._planned = None
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, True, paged_kv_indptr_buffer, paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer)

    @property
    def is_cuda_graph_enabled(self):
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer=None):
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def end_forward(self):
        """Nothing to do; earlier versions of FlashInfer wanted it."""

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             pos_encoding_mode="NONE", window_left=-1, q_data_type="float16", kv_data_type=None, data_type=None,
             sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True):
        """Plans the decodes, as the decode wrapper does."""
        self._planned = dict(pos_encoding_mode_d=pos_encoding_mode, sm_scale_d=sm_scale, window_left_d=window_left,
                             rope_scale_d=rope_scale, rope_theta_d=rope_theta, kv_layout_d=self._kv_layout)
        self._decode.plan(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
                          pos_encoding_mode, window_left, None, q_data_type, kv_data_type, None, data_type, sm_scale,
                          rope_scale, rope_theta, non_blocking)

    begin_forward = plan

    def run(self, q_p, k_p, v_p, q_d, paged_kv_cache_d, custom_mask_p=None, packed_custom_mask_p=None, causal_p=False,
            kv_layout_p="NHD", pos_encoding_mode_p="NONE", sm_scale_p=None, window_left_p=-1, rope_scale_p=None,
            rope_theta_p=None, return_lse_p=False, custom_mask_d=None, packed_custom_mask_d=None, causal_d=False,
            kv_layout_d="NHD", pos_encoding_mode_d="NONE", sm_scale_d=None, window_left_d=-1, rope_scale_d=None,
            rope_theta_d=None, q_scale=None, k_scale=None, v_scale=None, return_lse_d=False,
            use_fp16_qk_reduction=False, enable_pdl=None):
        """(out of the prefill, out of the decodes); with return_lse_p or return_lse_d that one is (out, lse).

        Arguments with _p are single_prefill_with_kv_cache's. Those with _d repeat plan's and must agree with it where
        they are given; causal_d says nothing, as a decode has one query. Scales are the decodes'. use_fp16_qk_reduction
        is a permission that nothing here needs, enable_pdl a hint.
        """
        if self._planned is None:
            raise folio.InvalidArgument("there is no plan: call plan before run")
        arguments.refuse("decodes have no mask", custom_mask_d=custom_mask_d, packed_custom_mask_d=packed_custom_mask_d)
        defaults = dict(pos_encoding_mode_d="NONE", sm_scale_d=None, window_left_d=-1, rope_scale_d=None,
                        rope_theta_d=None, kv_layout_d="NHD")
        given = dict(pos_encoding_mode_d=pos_encoding_mode_d, sm_scale_d=sm_scale_d, window_left_d=window_left_d,
                     rope_scale_d=rope_scale_d, rope_theta_d=rope_theta_d, kv_layout_d=kv_layout_d)
        for name, value in given.items():
            if value != defaults[name] and value != self._planned[name]:
                raise ValueError(f"{name} is {value}; the wrapper was planned with {self._planned[name]}")
        prefill = single_prefill_with_kv_cache(
            q_p, k_p, v_p, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p, causal=causal_p,
            kv_layout=kv_layout_p, pos_encoding_mode=pos_encoding_mode_p, sm_scale=sm_scale_p,
            window_left=window_left_p, rope_scale=rope_scale_p, rope_theta=rope_theta_p, return_lse=return_lse_p)
        decode = self._decode.run(q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
                                  return_lse=return_lse_d)
        return prefill, decode


class BatchPODWithPagedKVCacheWrapper:
    """A batch of prefills beside a batch of decodes, each over a paged cache."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._decode = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._plans = None
        self._causal = None  # that the prefills are planned with; None: with a custom mask

    @property
    def is_cuda_graph_enabled(self):
        return False

    def end_forward(self):
        """Nothing to do; earlier versions of FlashInfer wanted it."""

    def plan(self, qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, qo_indptr_d, kv_indptr_d, kv_indices_d,
             last_page_len_d, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE", window_left=-1,
             q_data_type="float16", kv_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None,
             non_blocking=True):
        """Takes both batches; what the prefills' mask is, run says."""
        self._plans = [(qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p),
                       (qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d)]
        self._shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        if data_type is not None:
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        self._rest = dict(pos_encoding_mode=pos_encoding_mode, window_left=window_left, q_data_type=q_data_type,
                          kv_data_type=kv_data_type, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta)
        self._decode.plan(*self._plans[1], *self._shape, **self._rest)
        self._causal = None
        self._plan_prefill(False, None, None)

    begin_forward = plan

    def _plan_prefill(self, causal, custom_mask, packed_custom_mask):
        masked = custom_mask is not None or packed_custom_mask is not None  # its bits may have changed
        if masked or self._causal != causal:
            self._prefill.plan(*self._plans[0], *self._shape, causal=causal, custom_mask=custom_mask,
                               packed_custom_mask=packed_custom_mask, **self._rest)
            self._causal = None if masked else causal

    def run(self, q_p, paged_kv_cache_p, q_d, paged_kv_cache_d, custom_mask_p=None, packed_custom_mask_p=None,
            causal_p=False, q_scale=None, k_scale=None, v_scale=None, return_lse=False, use_fp16_qk_reduction=False,
            enable_pdl=None):
        """(out_p, out_d); with return_lse ((out_p, out_d), (lse_p, lse_d)). A run with another causal_p than the last
        one's plans the prefills again, and so does each one with a custom mask. Scales are the decodes'.
        use_fp16_qk_reduction is a permission that nothing here needs, enable_pdl a hint."""
        if self._plans is None:
            raise folio.InvalidArgument("there is no plan: call plan before run")
        self._plan_prefill(bool(causal_p), custom_mask_p, packed_custom_mask_p)
        prefill = self._prefill.run(q_p, paged_kv_cache_p, return_lse=return_lse)
        decode = self._decode.run(q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
                                  return_lse=return_lse)
        return tuple(zip(prefill, decode)) if return_lse else (prefill, decode)
