"""Folio's paged attention as SGLang's attention backend `folio`.

SGLang calls `register` in each of its processes, through the entry point `sglang.srt.plugins`. `--attention-backend
folio` then selects it.
"""

__all__ = ["register"]
__version__ = "0.1.0"

NAME = "folio"


def create_backend(runner):
    """The backend of a ModelRunner, as SGLang's published configuration wants it."""
    from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

    from .backend import FolioAttentionBackend
    from .threads import bound_cpus

    deterministic = get_exec().deterministic.enable_deterministic_inference
    return FolioAttentionBackend(runner, determinism="batch_invariant" if deterministic else "run_to_run",
                                 draft_tree_width=get_spec().speculative_eagle_topk or 0,
                                 context_parallel_size=get_parallel().attn_dcp_size, cpus=bound_cpus(runner))


def register():
    """Adds `folio` to the names that `--attention-backend` takes, for deterministic inference too. May be called
    several times."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    for names in (choices.ATTENTION_BACKEND_CHOICES, choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
                  choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND):
        if NAME not in names:
            names.append(NAME)
    register_attention_backend(NAME)(create_backend)
