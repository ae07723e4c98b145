#!/usr/bin/env python3
"""Runs another library's own tests on Folio: its module's name is mapped to Folio's drop-in, and nothing else is changed.

    scripts/peers_tests.py flash_attn /path/to/a/checkout [--groups forward,kvcache] [--one-in 50] [-- pytest arguments]

Nothing of the checkout is copied or installed. What a test needs besides (calls that compile kernels, questions about the
GPU) is answered by scripts/peers/<peer>_module.py. scripts/peers/<peer>_skips.txt lists the tests that are left out, with
the reasons. The exit status is pytest's.

--device cpu runs the same tests on CPU tensors: scripts/peers/cpu_devices.py replaces CUDA devices. References are slow
there, so choose --one-in accordingly. Tests of streams and CUDA graphs, and those that need much memory or time, are
skipped.
"""

import argparse
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent / "peers"

# A peer's test files by what they are about, relative to its checkout. The plugin maps its module's name.
PEERS = {
    "flash_attn": {
        "plugin": "flash_attn_module",
        "skips": "flash_attn_skips.txt",
        "directory": "hopper",  # its test files import each other from there
        "groups": {
            "forward": ["test_flash_attn.py::test_flash_attn_output"],
            "varlen": ["test_flash_attn.py::test_flash_attn_varlen_output",
                       "test_flash_attn.py::test_flash_attn_varlen_combine_linearize"],
            "kvcache": ["test_flash_attn.py::test_flash_attn_kvcache"],
            "cluster": ["test_flash_attn.py::test_flash_attn_cluster"],
            "combine": ["test_flash_attn.py::test_flash_attn_combine"],
            "training": ["test_flash_attn.py::test_flash_attn_race_condition",
                         "test_flash_attn.py::test_flash3_bw_compatibility"],
        },
    },
    "flashinfer": {
        "plugin": "flashinfer_module",
        "skips": "flashinfer_skips.txt",
        "groups": {
            "decode": ["tests/attention/test_batch_decode_kernels.py", "tests/attention/test_decode_prefill_lse.py",
                       "tests/attention/test_decode_fp8_calibration_scale.py"],
            "prefill": ["tests/attention/test_batch_prefill_kernels.py", "tests/attention/test_batch_prefill.py"],
            "single": ["tests/attention/test_single_prefill.py"],
            "cascade": ["tests/attention/test_shared_prefix_kernels.py"],
            "window": ["tests/attention/test_sliding_window.py"],
            "cap": ["tests/attention/test_logits_cap.py"],
            "alibi": ["tests/attention/test_alibi.py"],
            "mla": ["tests/attention/test_deepseek_mla.py", "tests/attention/test_mla_page.py"],
            "sinks": ["tests/attention/test_attention_sink.py"],
            "rope": ["tests/attention/test_rope.py"],
            "page": ["tests/attention/test_page.py"],
            "block_sparse": ["tests/attention/test_block_sparse.py"],
            "strides": ["tests/attention/test_non_contiguous_decode.py",
                        "tests/attention/test_non_contiguous_prefill.py"],
            "tensor_cores": ["tests/attention/test_tensor_cores_decode.py"],
            "hopper": ["tests/attention/test_hopper.py"],
            "batch_attention": ["tests/attention/test_batch_attention.py"],
            "fp8": ["tests/attention/test_fp8_prefill.py", "tests/attention/test_hopper_fp8_attention.py",
                    "tests/attention/test_hopper_fp8_sliding_window.py"],
            "invariant": ["tests/attention/test_batch_invariant_fa2.py"],
            "xqa": ["tests/attention/test_xqa_batch_decode.py", "tests/attention/test_xqa.py",
                    "tests/attention/test_xqa_mla_batch_decode.py"],
            # Most of these are for compute capability 10.0 (see --capability).
            "trtllm": ["tests/attention/test_trtllm_gen_attention_decode.py",
                       "tests/attention/test_trtllm_gen_attention_prefill.py", "tests/attention/test_trtllm_gen_mla.py",
                       "tests/attention/test_trtllm_ragged_kv_stride.py"],
            "pod": ["tests/utils/test_pod_kernels.py"],
            "packbits": ["tests/utils/test_quantization.py"],
        },
    },
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=sorted(PEERS))
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--groups", help="of test files, with commas between; all of them")
    parser.add_argument("--one-in", type=int, default=1, metavar="N",
                        help="run one case in N, chosen by its name, and at least one of each test: some have 100,000")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="where tensors lie that the tests put on a GPU; cuda")
    parser.add_argument("--capability", default="9.0", metavar="M.N",
                        help="with --device cpu: the compute capability that tests are told; 9.0")
    parser.add_argument("--test-seconds", type=float, default=60, metavar="S",
                        help="with --device cpu: skip a test that takes longer; 60")
    parser.add_argument("--memory", type=float, default=6, metavar="GIB",
                        help="with --device cpu: skip a test that needs more; 6")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    peer = PEERS[options.peer]
    groups = options.groups.split(",") if options.groups else list(peer["groups"])
    unknown = [group for group in groups if group not in peer["groups"]]
    if unknown:
        parser.error(f"no group {unknown[0]!r}; there are {', '.join(peer['groups'])}")
    files = [file for group in groups for file in peer["groups"][group]]
    directory = options.checkout / peer.get("directory", ".")
    missing = [file for file in files if not (directory / file.partition("::")[0]).is_file()]
    if missing:
        parser.error(f"{options.checkout} has no {missing[0]}: is it a checkout of {options.peer}?")
    # The CPU's plugin comes first: the other one may ask about the GPU.
    plugins = (["cpu_devices"] if options.device == "cpu" else []) + [peer["plugin"]]
    # --noconftest: the peers' hooks compile kernels.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest",
               *(argument for plugin in plugins for argument in ("-p", plugin)), *sys.argv[split + 1:], *files]
    paths = [str(HERE), *(entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry),
             str(directory.resolve())]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths)),
        "PYTHONHASHSEED": "0",  # some tests choose what they do by a hash
        "FOLIO_PEER_SKIPS": str(HERE / peer["skips"]),
        "FOLIO_PEER_ONE_IN": str(options.one_in),
        "FOLIO_PEER_CHECKOUT": str(options.checkout.resolve()),
        "FOLIO_PEER_DEVICE": options.device,
        "FOLIO_PEER_CAPABILITY": options.capability,
        "FOLIO_PEER_TEST_SECONDS": str(options.test_seconds),
        "FOLIO_PEER_MEMORY_GIB": str(options.memory),
    }
    sys.exit(subprocess.run(command, cwd=directory, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
