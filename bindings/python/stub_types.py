#!/usr/bin/env python3
"""Writes the types of arrays into the stub: stubgen knows an argument that takes several kinds of things as `object`.

    stub_types.py GENERATED STUB

An argument's type follows from its name, everywhere the same; PLACES has the few that mean something else in one class
or function. A name that stands in no table fails the build: give a new argument its type here.
"""

import ast
import pathlib
import sys

NAMES = {
    "Array": """alibi_slopes array arrays data handed input k k_cache k_nope k_out k_pe k_token_scales key kv_cache memory
        output output_lse prefix_lse prefix_output q query recv scales scores send sinks slopes status suffix_lse
        suffix_output v v_cache v_out v_token_scales value out packed_custom_mask output_block_scale tree_mask tree_mask_cpu
        kv_indptr_buf kv_indices_buf kv_last_page_len_buf device_indices offsets local expanded dense""",
    "IntArray": """bonus_tokens capture_sizes cu_q dcp_local_seq_lens destination encoder_lens encoder_lens_cpu encoder_out_cache_loc
        encoder_seq_lens encoder_seq_lens_host ends extend_prefix_lens extend_prefix_lens_cpu extend_seq_lens
        extend_seq_lens_cpu first first_pos freed full_pages group_indptr indices indptr kv_indices kv_indptr kv_indptr_cpu
        kv_len kv_start kv_start_idx last_page_len last_slots lens local_seq_lens logits_indices_padded num_computed_tokens
        num_scheduled_tokens out_cache_loc page_kernel_lens paged_kernel_lens pages parent_list parents positions
        prefix_lens q_first_pos qo_indptr query_lens query_start_loc query_start_loc_cpu query_start_loc_host
        req_pool_indices rows selected_index seq_lens seq_lens_cpu seq_lens_host seq_lens_host_upper_bound
        slot_mapping slots source tail_len token_row tokens window_freed window_out_cache_loc""",
    "IntMatrix": """blk_table page_table block_table block_table_host block_table_tensor entries new_table req_to_token spans
        window_req_to_token""",
    "Flags": "causal causal_per_request is_prefilling",
    "Lse": "lse",
    "Mask": "custom_mask mask",
    "ScaleValue": """from_k from_v k_scale out_scale output_scale q_scale ragged_k_scale ragged_v_scale scale to_k to_v
        v_scale""",
    "ProcessGroup | None": "dcp_group",
    "Stream": "stream",
    "Tables": "tables",
    "CacheHalves": "paged_kv_cache",
}
PLACES = {
    **{f"AttentionLayerScales.__init__.{name}": "ScaleValue" for name in "qkv"},
    **{f"KvPool.set_scales.{name}": "ScaleValue" for name in "kv"},
    **{f"PrefixCache.{name}.key": "PrefixTokens" for name in ("match", "acquire", "insert", "extend", "finish")},
    "FlashAttentionImpl.__init__.alibi_slopes": "Array | list[float]",
    "FlashInferImpl.__init__.alibi_slopes": "Array | list[float]",
    "Layer.__call__.ragged": "Array",
    "Workspace.__init__.memory": "Array | int",
    **{f"draft_tree_links.{name}": "Array" for name in ("next_sibling", "next_token", "retrieve_index")},
    "select_draft_tokens.draft_tokens": "Array",
    "merge_attn_states.output_scale": "Array | float",
    "merge_state_in_place.mask": "Array",
    **{f"{impl}.forward.output_scale": "Array | float" for impl in ("FlashAttentionImpl", "FlashInferImpl")},
}
# Arrays of integers that a call writes, where it has a context; without one it returns them.
WRITTEN = {"create_kv_indices": "kv_indices", "generate_draft_decode_kv_indices": "kv_indices kv_indptr",
           "paged_indptr": "indptr last_page_len", "seq_lens_from_paged": "seq_lens", "slot_mapping": "slots",
           "to_csr": "indices indptr last_page_len", "token_indices": "indices indptr", "token_offsets": "indptr"}
# What engines pass along, functions, and what Python itself says.
OBJECTS = set("""attn_metadata backend common_attn_metadata extra_key forward_batch has_attribute has_module has_nvcc
    implementation layer layers log mm_req_doc_ranges other probe_artifactory swap_states threads
    token_to_kv_pool wanted window_token_to_kv_pool""".split())
TYPES = {name: alias for alias, names in NAMES.items() for name in names.split()}


def functions(body, prefix=""):
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def replacements(tree):
    """((line, first column, last column), type) of every `object` that becomes a type; arguments that stand in no table;
    names of the tables that no argument has."""
    found, unknown, met = [], set(), set()
    for place, function in functions(tree.body):
        arguments = function.args
        special = function.name.startswith("__") and function.name not in ("__init__", "__call__")
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            objects = [node for node in ast.walk(one.annotation or one) if isinstance(node, ast.Name) and node.id == "object"]
            if not objects or special:
                continue
            alias = PLACES.get(f"{place}.{one.arg}") or TYPES.get(one.arg)
            if arguments.args[0].arg == "context" and one.arg in WRITTEN.get(place, "").split():
                alias = "Array"
            met.add(one.arg)
            if alias is None and one.arg not in OBJECTS and one.arg != "arg":
                unknown.add(f"{place}.{one.arg}")
            if alias is not None:
                found += [((node.lineno, node.col_offset, node.end_col_offset), alias) for node in objects]
    return found, unknown, (TYPES.keys() | OBJECTS) - met - {"other"}


def main(generated, stub):
    text = pathlib.Path(generated).read_text()
    found, unknown, unused = replacements(ast.parse(text))
    if unknown or unused:
        sys.exit(f"stub_types.py: give these arguments a type: {sorted(unknown)}; no argument has these names: {sorted(unused)}")
    lines = text.encode().split(b"\n")
    for (line, first, last), alias in sorted(found, reverse=True):
        lines[line - 1] = lines[line - 1][:first] + alias.encode() + lines[line - 1][last:]
    used = sorted({word for _, alias in found for word in alias.split() if word in NAMES or word == "PrefixTokens"})
    last_import = max(i for i, line in enumerate(lines) if line.startswith((b"import ", b"from ")))
    lines.insert(last_import + 1, f"\nfrom .typing import ({', '.join(used)})".encode())
    pathlib.Path(stub).write_bytes(b"\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
