"""A program is a class with a name, a constructor that takes the device and raises where the program cannot run there,
and prepare(problem), which returns run(layer) -> out or raises Refused. Its largest_error, where it has one, is the
relative norm of the error that it may have. With takes_fp8 it gets rows of fp8 caches too, of
which largest_fp8_error says the same."""


class Refused(Exception):
    """This program does not take this row, and why."""


def programs():
    """By name. Modules of peers are imported in their own process alone."""
    return {
        "folio": ("folio_program", "Folio"),
        "folio_packed": ("folio_program", "FolioPacked"),
        "folio_device_lengths": ("folio_program", "FolioDeviceLengths"),
        "folio_flashinfer": ("drop_in_program", "FolioFlashInfer"),
        "folio_flash_attn": ("drop_in_program", "FolioFlashAttn"),
        "flashinfer_fa2": ("flashinfer_program", "FlashInferFa2"),
        "flashinfer_fa3": ("flashinfer_program", "FlashInferFa3"),
        "flashinfer_xqa": ("flashinfer_program", "FlashInferXqa"),
        "flashinfer_mla": ("flashinfer_program", "FlashInferMla"),
        "flashinfer_cudnn": ("flashinfer_program", "FlashInferCudnn"),
        "flash_attn_3": ("flash_attn_3_program", "FlashAttn3"),
        "flash_attn_3_dense": ("flash_attn_3_program", "FlashAttn3Dense"),
        "flash_mla": ("flash_mla_program", "FlashMla"),
        "vllm_cpu": ("vllm_cpu_program", "VllmCpu"),
        "llama_cpp": ("llama_cpp_program", "LlamaCpp"),
        "llama_cpp_q8_0": ("llama_cpp_program", "LlamaCppQ8"),
        "torch_sdpa": ("torch_program", "TorchSdpa"),
        "read": ("torch_program", "Read"),
        "gemm": ("torch_program", "Gemm"),
    }
