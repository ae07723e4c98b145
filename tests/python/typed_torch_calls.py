"""As typed_calls.py, with torch's tensors."""

import folio
import torch

tensor = torch.zeros(2, 8, 64)
folio.TensorView(tensor, folio.float32)
folio.KvSegment(torch.tensor([1, 2]))
folio.make_nhd_view(tensor, tensor)
folio.AttentionArgs(tensor, tensor, [folio.SegmentArgs(folio.make_nhd_view(tensor, tensor), folio.dense_table(tensor))])
folio.KvSegment([tensor])  # error
folio.synchronize(folio.Context.cpu(), torch.cuda.current_stream())
