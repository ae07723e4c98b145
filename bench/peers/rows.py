"""The rows of the comparison: batches of one layer's attention over a paged KV cache."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Requests of q_lens new tokens over kv_lens keys, these included; causal. window counts keys, 0 is none."""

    name: str
    q_lens: tuple
    kv_lens: tuple
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    mla: bool = False  # latent keys of 576 components; values are their first 512
    fp8: bool = False  # keys and values in e4m3, without scales
    in_cache: bool = False  # one layer again and again, so that its pages stay in the processor's caches
    on: tuple = ("cuda", "cpu")

    @property
    def dim_v(self):
        return 512 if self.mla else self.dim

    @property
    def kind(self):
        return "decode" if max(self.q_lens) <= 8 else "prefill"

    def visible_keys(self):
        """(query, key) pairs of one head."""
        pairs = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens):
            for position in range(kv_len - q_len, kv_len):
                pairs += min(position + 1, self.window) if self.window else position + 1
        return pairs

    def flops(self):
        return 2 * self.q_heads * (self.dim + self.dim_v) * self.visible_keys()


def decode(name, requests, kv_len, q_len=1, **more):
    return Row(name, (q_len,) * requests, (kv_len,) * requests, **more)


def prompts(name, requests, length, before=0, **more):
    return Row(name, (length,) * requests, (before + length,) * requests, **more)


def mla(name, requests, kv_len, heads, **more):
    return decode(name, requests, kv_len, q_heads=heads, kv_heads=1, dim=576, page_size=64, mla=True, on=("cuda",),
                  **more)


GPU = {"on": ("cuda",)}
ROWS = (
    decode("decode 64x4096", 64, 4096),
    decode("decode 8x32768", 8, 32768, **GPU),
    decode("decode 8x16384", 8, 16384, on=("cpu",)),
    decode("decode 1x131072", 1, 131072),
    decode("decode 64x512", 64, 512),
    decode("decode 1x4096", 1, 4096, **GPU),
    decode("decode 8x1024", 8, 1024, **GPU),
    decode("decode 256x1024", 256, 1024, **GPU),
    Row("decode skewed", (1,) * 64, (65536,) + (512,) * 63),
    decode("decode 64x4096, 64/8 heads", 64, 4096, q_heads=64),
    decode("decode 64x4096, 64/4 heads", 64, 4096, q_heads=64, kv_heads=4, **GPU),
    decode("decode 16x4096, 32/32 heads", 16, 4096, kv_heads=32),
    decode("decode 64x4096, dim 64", 64, 4096, dim=64, **GPU),
    decode("decode 64x4096, dim 256", 64, 4096, dim=256, **GPU),
    decode("decode 64x4096, pages of 1", 64, 4096, page_size=1, **GPU),
    decode("decode 64x4096, pages of 32", 64, 4096, page_size=32, on=("cpu",)),
    decode("decode 64x4096, window 1024", 64, 4096, window=1024),
    decode("decode 64x4096, e4m3", 64, 4096, fp8=True, on=("cpu",)),
    decode("decode 16x512, e4m3, in cache", 16, 512, fp8=True, in_cache=True, on=("cpu",)),
    decode("decode 1x2048, 4/1 heads, e4m3, in cache", 1, 2048, q_heads=4, kv_heads=1, fp8=True, in_cache=True, on=("cpu",)),
    decode("verify 64x4 on 4096", 64, 4096, q_len=4),
    prompts("prefill 8x4096", 8, 4096, **GPU),
    prompts("prefill 1x16384", 1, 16384),
    prompts("prefill 1x4096", 1, 4096),
    prompts("prefill 1x1024", 1, 1024),
    prompts("prefill 1x512", 1, 512, **GPU),
    prompts("prefill 1x2048", 1, 2048),
    prompts("prefill 32x256", 32, 256, **GPU),
    prompts("prefill 8x256", 8, 256, on=("cpu",)),
    prompts("prefill 8x1024", 8, 1024),
    Row("prefill 64 prompts of about 1000", tuple(range(690, 1330, 10)), tuple(range(690, 1330, 10)), **GPU),
    prompts("prefill 8x512 behind 8192", 8, 512, before=8192),
    prompts("prefill 1x2048, e4m3", 1, 2048, fp8=True, on=("cpu",)),
    prompts("prefill 1x32768, window 1024", 1, 32768, window=1024, **GPU),
    prompts("prefill 1x8192, window 1024", 1, 8192, window=1024, on=("cpu",)),
    prompts("prefill 8x4096, dim 64", 8, 4096, dim=64, **GPU),
    prompts("prefill 8x4096, dim 256", 8, 4096, dim=256, **GPU),
    prompts("prefill 8x4096, 8/1 heads", 8, 4096, q_heads=8, kv_heads=1, **GPU),
    prompts("prefill 8x4096, soft cap", 8, 4096, soft_cap=30.0, **GPU),
    Row("mixed: 4 prompts of 1024, 60 decodes", (1024,) * 4 + (1,) * 60, (1024,) * 4 + (4096,) * 60),
    mla("mla 64x4096, 128 heads", 64, 4096, 128),
    mla("mla 128x8192, 128 heads", 128, 8192, 128),
    mla("mla 64x4096, 16 heads", 64, 4096, 16),
    mla("mla 1x4096, 128 heads", 1, 4096, 128),
    mla("mla 16x4096, 128 heads", 16, 4096, 128),
    mla("mla 1x32768, 128 heads", 1, 32768, 128),
)
