#!/usr/bin/env python3
"""What a divided layer's exchange costs beside other work, in microseconds: `run` and then a matrix product, or the product
between `start` and `finish`.

Each rank is a process with a GPU of its own. A layer is decode attention over a divided KV cache (DcpAttention); the
product is torch's, of the batch's tokens and a square bfloat16 weight. Both are captured, 8 layers a graph. The ranks'
graphs run in step, since every layer's exchange waits for all ranks. Figures are rank 0's: medians of rounds in turn.

    dcp_overlap_call.py [--ranks 2] [--batch 64] [--kv-len 4096] [--weight 8192] [--partial-dtype bfloat16]
"""

import argparse
import statistics

import folio
import folio.nccl
import torch
import torch.multiprocessing

Q_HEADS, KV_HEADS, DIM, PAGE = 64, 8, 128, 16
LAYERS, REPLAYS, ROUNDS = 8, 20, 7


class Layer:
    """Attention of this rank's share of the heads over its share of the tokens, and a product."""

    def __init__(self, options, group, rank, transport, combine):
        heads = Q_HEADS // options.ranks
        batch, length = options.batch, options.kv_len
        config = folio.AttentionConfig(num_q_heads=heads, num_kv_heads=KV_HEADS, head_dim_qk=DIM, head_dim_v=DIM,
                                       q="bfloat16", kv="bfloat16", mask="causal", page_size=PAGE)
        bounds = folio.GraphBounds(max_requests=batch, max_tokens=batch, max_q_len=1, max_kv_len=length)
        self.attention = folio.DcpAttention(
            folio.Context.cuda(rank), group,
            folio.DcpConfig(attention=config, interleave=PAGE, transport=folio.dcp_transport_from_name(transport),
                            combine=folio.dcp_combine_from_name(combine, options.ranks),
                            partial_dtype=options.partial_dtype, bounds=bounds))
        lengths = folio.get_dcp_local_seq_lens([length] * batch, options.ranks, rank, PAGE)
        pages = [-(-int(local) // PAGE) for local in lengths]
        offsets = torch.tensor([0, *pages]).cumsum(0).to(torch.int32).cuda()
        k, v = torch.randn(2, max(sum(pages), 1), PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self.cache = folio.make_nhd_view(k, v)
        self.q = torch.randn(batch, heads, DIM, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.q)
        table = folio.csr_table(torch.arange(sum(pages), dtype=torch.int32, device="cuda"), offsets)
        self.arguments = folio.DcpArgs(self.q, self.out, self.cache, table)
        size = self.attention.workspace_size(None)
        self.workspace = folio.Workspace(torch.empty(size + 256, dtype=torch.uint8, device="cuda"))
        self.plan = self.attention.plan(folio.DcpBatch(list(range(batch + 1)), [length] * batch, num_cached=batch))
        self.x = torch.randn(batch, options.weight, dtype=torch.bfloat16, device="cuda")
        self.weight = torch.randn(options.weight, options.weight, dtype=torch.bfloat16, device="cuda")
        self.y = torch.empty_like(self.x)

    def product(self):
        torch.mm(self.x, self.weight, out=self.y)

    def run(self):
        self.attention.run(self.plan, self.arguments, self.workspace)

    def in_turn(self):
        self.run()
        self.product()

    def beside(self):
        self.attention.start(self.plan, self.arguments, self.workspace)
        self.product()
        self.attention.finish()


def captured(function):
    """A graph of LAYERS calls. Whatever allocates does so in the two calls before."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        function()
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(LAYERS):
            function()
    return graph


def one_call(graph):
    """Microseconds of a call in the graph."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / (REPLAYS * LAYERS) * 1000


def body(rank, identity, options):
    torch.cuda.set_device(rank)
    group = folio.nccl.make_group(folio.Context.cuda(rank), id=identity, rank=rank, size=options.ranks, timeout=60.0)
    if rank == 0:
        print(f"{'exchange':<14}{'attention':>10}{'product':>10}{'in turn':>10}{'beside':>10}{'hidden':>10}")
    for transport, combine in (("peer", "a2a"), ("group", "a2a"), ("group", "ag_rs")):
        layer = Layer(options, group, rank, transport, combine)
        graphs = [captured(function) for function in (layer.run, layer.product, layer.in_turn, layer.beside)]
        times = [[one_call(graph) for graph in graphs] for _ in range(ROUNDS)]
        attention, product, in_turn, beside = (statistics.median(column) for column in zip(*times))
        if rank == 0:
            name = "peer memory" if transport == "peer" else f"NCCL, {combine}"
            print(f"{name:<14}{attention:>10.1f}{product:>10.1f}{in_turn:>10.1f}{beside:>10.1f}{in_turn - beside:>10.1f}",
                  flush=True)
        del graphs, layer
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="requests of one new token each")
    parser.add_argument("--kv-len", type=int, default=4096, help="tokens of a request, over all ranks")
    parser.add_argument("--weight", type=int, default=8192, help="rows and columns of the product's weight")
    parser.add_argument("--partial-dtype", help="what partial results travel in; left out: float32")
    options = parser.parse_args()
    torch.multiprocessing.spawn(body, args=(folio.nccl.unique_id(), options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
