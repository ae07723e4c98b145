"""What a user may choose: `additional_config={"folio": {...}}` of vLLM's engine arguments."""

from dataclasses import dataclass, fields

import vllm.envs as envs

DETERMINISM = ("none", "run_to_run", "batch_invariant", "schedule_invariant")


@dataclass(frozen=True)
class Options:
    """Fields left out have the value that makes the common case right.

    determinism: what must not change a result's bits, folio.Determinism in lower case. VLLM_BATCH_INVARIANT=1 makes it
        "batch_invariant" at least.
    cascade: whether each step looks for pages that all of its requests share, and reads them once. CPU only.
    kv_format: "strided", "cpu_packed", or None for the one that is fastest here. "cpu_packed" is for CPUs.
    force_kernel: a kernel's name; it runs, or the engine does not start.
    num_threads: Folio's threads on a CPU; 0 means as many as vLLM gave torch.
    """

    determinism: str = "run_to_run"
    cascade: bool = False
    kv_format: str | None = None
    force_kernel: str = ""
    num_threads: int = 0

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "kv_format":
                if value not in (None, "strided", "cpu_packed"):
                    raise ValueError(f"folio: kv_format is {value!r}; it takes None, 'strided' and 'cpu_packed'")
            elif type(value) is not type(field.default):
                raise ValueError(f"folio: {field.name} is {value!r}; it takes {type(field.default).__name__}")
        if self.determinism not in DETERMINISM:
            raise ValueError(f"folio: determinism is {self.determinism!r}; it takes {', '.join(DETERMINISM)}")
        if self.num_threads < 0:
            raise ValueError(f"folio: num_threads is {self.num_threads}; it is 0 or more")
        if self.cascade and DETERMINISM.index(self.determinism) >= DETERMINISM.index("batch_invariant"):
            raise ValueError(f"folio: cascade with determinism {self.determinism!r} is not offered, because a prefix "
                             "that other requests share changes where sums are divided")


def options_of(vllm_config):
    """The options of a VllmConfig. Raises ValueError for a name or a value that is not known."""
    additional = vllm_config.additional_config
    given = additional.get("folio", {}) if isinstance(additional, dict) else {}
    if not isinstance(given, dict):
        raise ValueError(f"additional_config['folio'] is {given!r}; it takes a dictionary")
    known = {field.name for field in fields(Options)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"additional_config['folio'] has {', '.join(unknown)}; it takes {', '.join(sorted(known))}")
    given = dict(given)
    if envs.VLLM_BATCH_INVARIANT and given.get("determinism", "run_to_run") in ("none", "run_to_run"):
        given["determinism"] = "batch_invariant"
    return Options(**given)
