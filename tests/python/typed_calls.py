"""What type checkers must accept and what they must not: read by mypy in test_stub.py, never run.

A line that ends in `# error` must be refused, every other one accepted.
"""

import folio
import numpy as np
from folio.typing import Array, IntArray

context = folio.Context.cpu(num_threads=2)
config = folio.AttentionConfig(num_q_heads=8, num_kv_heads=2, head_dim_qk=64, head_dim_v=64, q=folio.bfloat16, kv="float16")
op = folio.prepare(context, config)
q: Array = np.zeros((2, 8, 64), np.float32)
out = np.empty((2, 8, 64), np.float32)
lengths: IntArray = [20, 7]
flags = np.ones(3, bool)

folio.KvSegment(lengths)
folio.KvSegment(np.array([20, 7]))
folio.KvSegment(range(3))
folio.KvSegment((20, 7))
folio.KvSegment("20, 7")  # error
folio.KvSegment(["20", "7"])  # error
folio.KvSegment(20)  # error
folio.KvSegment([20.0])  # error

folio.dense_table([[1, 2], [3, 4]])
folio.dense_table(np.array([[1, 2]]))
folio.dense_table([1, 2])  # error
folio.csr_table([1, 2], np.array([0, 2], np.int32))

cache = folio.make_nhd_view(np.zeros((1, 16, 2, 64), np.float32), memoryview(bytes(1)))
folio.make_nhd_view(cache, cache)  # error
folio.make_nhd_view([1.0], [1.0])  # error
folio.make_nhd_view(folio.TensorView(q, "bfloat16"), q)

plan = folio.plan(op, folio.BatchView([0, 1, 2], [folio.KvSegment(lengths)]), folio.make_plan_buffer(op))
step = folio.Step(plan, folio.dense_table([[1], [2]]), slot_mapping=[1, 2])
folio.Step(plan, np.array([[1], [2]]), stream=3)
folio.Step(plan, [[[1], [2]]])
folio.Step(plan, 3)  # error
folio.Step(plan, [[[1], [2]]], stream="legacy")  # error
layer = folio.Layer(op, cache, sinks=np.zeros(8, np.float32), k_scale=0.5, v_scale=folio.Scale(0.5))
folio.Layer(op, cache, k_scale="0.5")  # error
layer(step, q, out)
layer(step, q, out, folio.LseView(q), ragged=(q, q))
layer(step, q, 3)  # error
layer.write(step, q, q)
layer.write([1, 2], q, None)
folio.Workspace(1024)
folio.Workspace(np.zeros(1024, np.uint8))
folio.Workspace("1024")  # error
folio.pack_custom_mask([flags.reshape(1, 3)])
folio.PrefixKey([1, 2, 3])
folio.to_csr(folio.dense_table([[1]]), [5], 16)
