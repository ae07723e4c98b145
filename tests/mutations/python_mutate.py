#!/usr/bin/env python3
"""Plants one mistake at a time in a copy of the Python package and checks that a test fails, as mutate.py does for C++.

    tests/mutations/python_mutate.py [PACKAGE_DIR] [--list | --applies] [--only NAME ...]

PACKAGE_DIR has the built package `folio`: build/release/bindings/python by default. Its extension module is used, with
the Python files of the sources. Each mistake is tried on its one test file.
Exit status: 0 if all are caught, 1 if one is missed or does not apply.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ROOT / "bindings" / "python" / "folio"
# name: (file below folio/, the exact text, the new text, the test file)
MUTATIONS = {
    "k_scale_left_out": ("flashinfer/plans.py", "k_scale, v_scale = _scale(scales.k), _scale(scales.v)",
                         "k_scale, v_scale = 1.0, _scale(scales.v)", "test_flashinfer_decode.py"),
    "q_scale_twice": ("flashinfer/wrapper.py", "sm=sm * q, k=k", "sm=sm * q * q, k=k", "test_flashinfer_decode.py"),
    "cache_found_by_address_alone_of_k": ("flashinfer/plans.py", "return rest, cache.data_ptr(), cache.shape, cache.stride(), cache.requires_grad",
                                          "return (rest,)", "test_flashinfer_decode.py"),
    "sinks_of_the_first_run": ("flashinfer/plans.py", "hash_of(scales), _key(sinks), _key(slopes))", "hash_of(scales), 0, _key(slopes))",
                               "test_flashinfer_decode.py"),
    "plain_run_of_the_plan_before": ("flashinfer/plans.py", """        self._plain = None
        self._old_layers""", "        self._old_layers", "test_flashinfer_decode.py"),
    "plain_run_of_other_strides": ("flashinfer/plans.py", "k.shape, v.shape, k.stride(), v.stride(),", "k.shape, v.shape,",
                                   "test_flashinfer_decode.py"),
    "plain_run_of_other_scales": ("flashinfer/plans.py", "= next(self._counter)", "= 0",
                                  "test_flashinfer_decode.py"),
    "alibi_lse_of_folio": ("flashinfer/wrapper.py", "wanted += self._shift[:, None] * slopes", "pass", "test_flashinfer_decode.py"),
    "alibi_without_far_queries": ("flashinfer/wrapper.py",
                                  "return batch._replace(q_first_pos=first.astype(np.int32)) if problem.far_queries else batch",
                                  "return batch", "test_flashinfer_prefill.py"),
    "natural_lse": ("flashinfer/arguments.py", '"log2": "two"', '"log2": "e"', "test_flashinfer_decode.py"),
    "window_of_plan_dropped": ("flashinfer/wrapper.py", 'mask, int(window_left),', 'mask, -1,', "test_flashinfer_decode.py"),
    "mask_from_the_high_bit": ("flashinfer/arguments.py", "torch.arange(8, dtype=torch.uint8, device=x.device)).sum",
                               "torch.arange(7, -1, -1, dtype=torch.uint8, device=x.device)).sum", "test_flashinfer_cache.py"),
    "range_window_one_wider": ("flashinfer/attention.py", "span_window_left=reach - 1", "span_window_left=reach",
                               "test_flashinfer_ranges.py"),
    "range_window_of_bits_one_wider": ("flashinfer/masks.py", "q - k < range_window_left", "q - k <= range_window_left",
                                       "test_flashinfer_ranges.py"),
    "range_without_its_last_key": ("flashinfer/masks.py", "spans[:, 1] += 1", "spans[:, 1] += 0", "test_flashinfer_ranges.py"),
    "ranges_beyond_the_keys": ("flashinfer/masks.py", "np.repeat(kv_lens - 1, q_lens)", "np.repeat(kv_lens, q_lens)",
                               "test_flashinfer_ranges.py"),
    "gap_of_one_key_shown": ("flashinfer/masks.py", "apart = begin > ahead\n", "apart = begin > ahead + 1\n",
                             "test_flashinfer_ranges.py"),
    "ranges_of_the_first_run": ("flashinfer/attention.py", "self._ranges is None or not torch.equal(ranges, self._ranges)",
                                "self._ranges is None", "test_flashinfer_ranges.py"),
    "mask_of_the_step_before": ("flashinfer/plans.py", "(mask is not None or not custom)", "not custom",
                                "test_flashinfer_prefill.py"),
    "sinks_of_another_output": ("flashinfer/wrapper.py", "if self._sink_problem[0] is not problem:",
                                "if self._sink_problem[0] is None:", "test_flashinfer_more.py"),
    "custom_mask_packed_once": ("flashinfer/pod.py", "if masked or self._causal != causal:", "if self._causal != causal:",
                                "test_flashinfer_more.py"),
    "items_see_one_another": ("flashinfer/masks.py", "(k < prefix) | (q < k + place)", "(k < prefix) | (q <= k + place)",
                              "test_flashinfer_prefill.py"),
    "shared_levels_as_config": ("flashinfer/cascade.py", 'mask="as_config" if own else "all_visible"', 'mask="as_config"',
                                "test_flashinfer_more.py"),
    "kpe_scale_dropped": ("flashinfer/mla.py", "q_pe.to(torch.float32) * (kpe_scale / (1.0 if ckv_scale is None else ckv_scale))",
                          "q_pe", "test_flashinfer_more.py"),
    "halves_of_other_memory_joined": ("flashinfer/mla.py",
                                      "second.data_ptr() != first.data_ptr() + first.shape[-1] * first.element_size()", "False",
                                      "test_flashinfer_more.py"),
    "xqa_window_one_wider": ("flashinfer/xqa.py", "sliding_win_size - 1 if", "sliding_win_size if", "test_flashinfer_more.py"),
    "draft_rows_of_16_bits": ("flashinfer/dense.py", "torch.arange(16, dtype=torch.int32, device=mask.device)",
                              "torch.arange(15, -1, -1, dtype=torch.int32, device=mask.device)", "test_flashinfer_more.py"),
    "rope_backwards": ("flashinfer/rope.py", "first * cos - second * sin", "first * cos + second * sin", "test_flashinfer_cache.py"),
    "padding_has_a_position": ("flashinfer/page.py", "places = torch.where(real, places, -1)", "places = torch.where(real, places, 0)",
                               "test_flashinfer_cache.py"),
    "last_row_of_blocks_too_long": ("flashinfer/sparse.py", "np.minimum(np.arange(rows + 1) * R, M)", "(np.arange(rows + 1) * R)",
                                    "test_flashinfer_more.py"),
    "default_of_plan": ("flashinfer/prefill.py", 'packed_custom_mask=None, causal=False,\n             pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None,',
                        'packed_custom_mask=None, causal=True,\n             pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None,',
                        "test_flashinfer_signatures.py"),
    # folio.flash_attn
    "chunk_dropped": ("flash_attn/plans.py", "attention_chunk=self.attention_chunk,", "attention_chunk=0,", "test_flash_attn.py"),
    "left_padding_dropped": ("flash_attn/plans.py", "kv_start=self.kv_start,", "kv_start=None,", "test_flash_attn.py"),
    "chunk_turns_no_query": ("flash_attn/lengths.py", " or rules.attention_chunk > 0)", ")", "test_flash_attn.py"),
    "all_queries_turn": ("flash_attn/new_tokens.py", "at = self._base[row] + offset if moves else self._base[row]",
                         "at = self._base[row] + offset", "test_flash_attn.py"),
    "unused_queries_see_keys": ("flash_attn/lengths.py", "torch.stack([found.kv_len, torch.zeros_like(found.kv_len)], 1)",
                                "torch.stack([torch.zeros_like(found.kv_len), found.kv_len], 1)", "test_flash_attn.py"),
    "scale_of_q_alone": ("flash_attn/calls.py", "softmax_scale=(q.shape[-1] + qv.shape[-1]) ** -0.5",
                         "softmax_scale=q.shape[-1] ** -0.5", "test_flash_attn.py"),
    "lse_with_qv_as_without": ("flash_attn/v4.py", "lse.transpose(-1, -2)", "lse", "test_flash_attn_forms.py"),
    "hints_of_ranks_ignored": ("flash_attn/vllm.py", "if cp_world_size != 1:", "if cp_world_size < 1:", "test_flash_attn_forms.py"),
    "versions_not_compared": ("flash_attn/attend.py", "if tensor._version != version or tensor.data_ptr() != address:",
                              "if tensor.data_ptr() != address:", "test_flash_attn_plans.py"),
    "number_found_by_its_id": ("flash_attn/__init__.py", "(type(cache_seqlens) is _Tensor or cache_seqlens is None)",
                               "type(cache_seqlens) is not int", "test_flash_attn_plans.py"),
    "pages_given_to_ragged_calls": ("flash_attn/attend.py", " or layer.family.paged != paged:", ":", "test_flash_attn_plans.py"),
    "layer_of_another_device": ("flash_attn/attend.py", "layer_key = (cache, q.device, q.dtype,", "layer_key = (cache, q.dtype,",
                                "test_flash_attn_plans.py"),
    "descales_copied_once": ("flash_attn/attend.py", "planner.captured or self._copies_descales(lengths.rows):",
                             "planner.captured:", "test_flash_attn_plans.py"),
    "cache_of_other_strides": ("flash_attn/attend.py", "layer.v() is not v or layer.memory != memory or",
                               "layer.v() is not v or layer.memory[:2] != memory[:2] or", "test_flash_attn_plans.py"),
}


def applies(name):
    file, old, _, _ = MUTATIONS[name]
    count = (SOURCES / file).read_text().count(old)
    if count != 1:
        print(f"{name}: the text occurs {count} times in {file}")
    return count == 1


def is_caught(name, package):
    file, old, new, test = MUTATIONS[name]
    with tempfile.TemporaryDirectory() as directory:
        copy = pathlib.Path(directory) / "folio"
        shutil.copytree(package / "folio", copy, symlinks=False)
        shutil.copytree(SOURCES, copy, dirs_exist_ok=True)  # as they are now, not as they were built
        target = copy / file
        target.write_text((SOURCES / file).read_text().replace(old, new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(ROOT / "tests" / "python" / test)]
        environment = {**os.environ, "PYTHONPATH": directory, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode == 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=pathlib.Path, nargs="?",
                        default=ROOT / "build" / "release" / "bindings" / "python")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--applies", action="store_true", help="only whether each text occurs once")
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    names = options.only or list(MUTATIONS)
    if options.list:
        print("\n".join(names))
        return 0
    good = [applies(name) for name in names]
    if options.applies or not all(good):
        return 0 if all(good) else 1
    missed = []
    for name in names:
        caught = is_caught(name, options.package)
        print(f"{name}: {'caught' if caught else 'MISSED'}", flush=True)
        missed += [] if caught else [name]
    print(f"{len(names) - len(missed)} of {len(names)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
