"""Attention of a decode batch in one call."""

import folio
import numpy as np

k, v = np.full((2, 5, 16, 2, 64), 2.0, np.float32)   # each [pages, page_size, kv heads, head_dim]
q = np.ones((2, 8, 64), np.float32)                  # [tokens, q heads, head_dim]: two requests generate one token each
page_table, seq_lens = [[4, 1], [2, 0]], [20, 7]    # their keys lie in the pages 4 and 1, and 2
out = folio.paged_attention(q, k, v, page_table, seq_lens)
assert np.all(out == 2.0)                            # all values are 2, so every weighted mean is
