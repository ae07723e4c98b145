"""folio.torch: operators that torch.compile keeps whole, equal to eager attention."""

import copy

import folio
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import folio.torch  # noqa: E402: needs torch

HIDDEN, Q_HEADS, KV_HEADS, DIM, PAGE_SIZE, PAGES = 32, 4, 2, 16, 16, 8


def pick_device():
    """(where tensors lie, context): a GPU if torch and this build of Folio have it."""
    if torch.cuda.is_available():
        try:
            return "cuda", folio.Context.cuda(0)
        except folio.Error:
            pass
    return "cpu", folio.Context.cpu(num_threads=2)


DEVICE, CONTEXT = pick_device()
TABLE = [[5, 2], [7, 0]]  # pages of two requests

CONFIG = folio.AttentionConfig(num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, head_dim_v=DIM,
                               q="float32", kv="float32", page_size=PAGE_SIZE)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Engine:
    """What an engine has for one group of layers: an op, its plan buffer, and each layer's cache."""

    def __init__(self, names=(), bounds=None):
        self.op = folio.prepare(CONTEXT, CONFIG, folio.PrepareOptions(bounds=bounds))
        self.buffer = folio.make_plan_buffer(self.op)
        self.workspace = None
        if DEVICE == "cuda":
            self.workspace = folio.Workspace(torch.zeros(folio.workspace_size(self.op) + 256, dtype=torch.uint8,
                                                         device=DEVICE))
            folio.init_workspace(self.op, self.workspace)
        self.caches = {name: torch.zeros(2, PAGES, PAGE_SIZE, KV_HEADS, DIM, device=DEVICE) for name in names}

    def layer(self, name, **given):
        return folio.Layer(self.op, folio.make_nhd_view(*self.caches[name]), **given)

    def step(self, before, new):
        """A step that adds `new` tokens to requests that have `before`."""
        lengths = [past + count for past, count in zip(before, new)]
        cu_q = torch.tensor([0, *new]).cumsum(0).int()
        batch = folio.BatchView(cu_q, [folio.KvSegment(torch.tensor(lengths, dtype=torch.int32))])
        slots = [TABLE[r][t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE
                 for r, past in enumerate(before) for t in range(past, lengths[r])]
        return folio.Step(folio.plan(self.op, batch, self.buffer), int32(TABLE), self.workspace,
                          slot_mapping=torch.tensor(slots, device=DEVICE))


class Block(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN, (Q_HEADS + 2 * KV_HEADS) * DIM)
        self.out = torch.nn.Linear(Q_HEADS * DIM, HIDDEN)
        self.attention = folio.torch.Attention(name)

    def heads(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, DIM))
        return heads.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=1)

    def forward(self, x):
        return x + self.out(self.attention(*self.heads(x)).flatten(1))


class Decoder(torch.nn.Module):
    """Two layers, with caches that each forward writes to."""

    def __init__(self, prefix, bounds=None):
        super().__init__()
        torch.manual_seed(7)
        self.blocks = torch.nn.ModuleList(Block(f"{prefix}.{i}") for i in range(2))
        self.to(DEVICE)
        self.engine = Engine([block.attention.name for block in self.blocks], bounds)
        for block in self.blocks:
            block.attention.bind(self.engine.layer(block.attention.name))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def eager_attention(q, k, v):
    """Causal attention of the last queries of one request over all its keys."""
    k, v = (half.repeat_interleave(Q_HEADS // KV_HEADS, dim=1) for half in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
    past = k.shape[0] - q.shape[0]
    mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).tril(past)
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(~mask, -torch.inf).softmax(-1), v)


def eager_decoder(decoder, requests):
    """The decoder over whole requests, without caches."""
    results = []
    for x in requests:
        for block in decoder.blocks:
            x = x + block.out(eager_attention(*block.heads(x)).flatten(1))
        results.append(x)
    return results


STEPS = [([0, 0], [19, 7]), ([19, 7], [1, 1]), ([20, 8], [1, 1]), ([21, 9], [4, 1])]


def run_steps(decoder, model, requests):
    """What `model` says over the steps, put together again by request."""
    parts = [[], []]
    for before, new in STEPS:
        x = torch.cat([request[past:past + count] for request, past, count in zip(requests, before, new)])
        with folio.torch.use(decoder.engine.step(before, new)):
            for part, own in zip(parts, model(x).split(new)):
                part.append(own.clone())
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
def test_a_decoder_equals_eager(backend):
    if backend == "inductor":
        pytest.importorskip("torch._inductor", reason="torch has no inductor")
    decoder = Decoder(f"decoder.{backend}").eval()
    torch._dynamo.reset()
    model = decoder if backend is None else torch.compile(decoder, fullgraph=True, backend=backend)
    requests = [torch.randn(count, HIDDEN, device=DEVICE) for count in (25, 10)]
    with torch.no_grad():
        results = run_steps(decoder, model, requests)
        expected = eager_decoder(decoder, requests)
    for result, right in zip(results, expected):
        # Sums of at most 64 products of values around 1, two layers deep: float32 roundings, some of which add up.
        torch.testing.assert_close(result, right, rtol=0, atol=64 * 8 * torch.finfo(torch.float32).eps)


def test_one_graph_serves_many_steps_and_layers_rebound():
    decoder = Decoder("decoder.rebound").eval()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = torch.compile(decoder, fullgraph=True, backend=counter)
    requests = [torch.randn(count, HIDDEN, device=DEVICE) for count in (25, 10)]
    x = torch.cat([request[:1] for request in requests])
    with torch.no_grad():
        for _ in range(2):  # the second time over caches that are new
            with folio.torch.use(decoder.engine.step([0, 0], [1, 1])):
                first = model(x)
            with folio.torch.use(decoder.engine.step([1, 1], [1, 1])):
                model(x)
            for name in decoder.engine.caches:
                decoder.engine.caches[name] = torch.zeros_like(decoder.engine.caches[name])
            for block in decoder.blocks:
                block.attention.bind(decoder.engine.layer(block.attention.name))
        expected = [result[0] for result in eager_decoder(decoder, [request[:1] for request in requests])]
    assert counter.frame_count == 1
    torch.testing.assert_close(first, torch.stack(expected))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_cuda_graph_replays_new_lengths(compiled):
    """Plan, writes and attention are captured once; each replay reads the lengths and slots of its step."""
    bounds = folio.GraphBounds(max_requests=2, max_tokens=2, max_q_len=1, max_kv_len=32)
    decoder = Decoder(f"decoder.graph.{compiled}", bounds).eval()
    engine = decoder.engine
    torch._dynamo.reset()
    model = torch.compile(decoder, fullgraph=True) if compiled else decoder
    x, lengths = torch.zeros(2, HIDDEN, device=DEVICE), int32([1, 1])
    slots = torch.tensor([0, PAGE_SIZE], device=DEVICE)
    batch = folio.BatchView(int32([0, 1, 2]), [folio.KvSegment(lengths)], num_tokens=2, max_q_len=1, max_kv_len=32)
    table = int32(TABLE)

    def run():
        plan = folio.plan(engine.op, batch, engine.buffer)
        with folio.torch.use(folio.Step(plan, table, engine.workspace, slot_mapping=slots)):
            return model(x)

    requests = [torch.randn(5, HIDDEN, device=DEVICE) for _ in range(2)]
    results = []
    with torch.no_grad():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for t in range(5):
            x.copy_(torch.stack([request[t] for request in requests]))
            lengths.fill_(t + 1)
            slots.copy_(torch.tensor([own[0] * PAGE_SIZE + t for own in TABLE]))
            graph.replay()
            results.append(out.clone())
        expected = torch.stack(eager_decoder(decoder, requests), dim=1)
    torch.testing.assert_close(torch.stack(results), expected, rtol=0, atol=64 * 8 * torch.finfo(torch.float32).eps)


def bound_module(**given):
    """A module of its own name with a layer of zeros, and a decode step for it."""
    module = folio.torch.Attention(**given).to(DEVICE)
    engine = Engine([module.name])
    module.bind(engine.layer(module.name))
    return module, engine


def heads(count, tokens=2):
    return torch.randn(tokens, count, DIM, device=DEVICE)


def test_operators_pass_torchs_checks():
    module, engine = bound_module()
    q, k, v = heads(Q_HEADS), heads(KV_HEADS), heads(KV_HEADS)
    lse = torch.zeros(2, Q_HEADS, device=DEVICE)
    with folio.torch.use(engine.step([3, 4], [1, 1])):
        torch.library.opcheck(torch.ops.folio.write.default, (k, v, module.token, module.name))
        torch.library.opcheck(torch.ops.folio.attention.default, (q, torch.empty_like(q), module.token, module.name))
        torch.library.opcheck(torch.ops.folio.attention.default, (q, torch.empty_like(q), module.token, module.name),
                              {"lse": lse})


def test_writes_survive_a_graph_that_reads_nothing():
    module, engine = bound_module()
    k, v = heads(KV_HEADS), heads(KV_HEADS)

    def write_alone(k, v):
        torch.ops.folio.write(k, v, module.token, module.name)
        return k + 1

    torch._dynamo.reset()
    for backend in ("aot_eager", "inductor"):
        engine.caches[module.name].zero_()
        with torch.no_grad(), folio.torch.use(engine.step([0, 0], [1, 1])):
            torch.compile(write_alone, fullgraph=True, backend=backend)(k, v)
        assert torch.equal(engine.caches[module.name][0, TABLE[0][0], 0], k[0])
        assert torch.equal(engine.caches[module.name][1, TABLE[1][0], 0], v[1])


def test_outputs_of_the_callers():
    module, engine = bound_module()
    q, k, v = heads(Q_HEADS), heads(KV_HEADS), heads(KV_HEADS)
    out, lse = torch.empty_like(q), torch.zeros(2, Q_HEADS, device=DEVICE)
    with folio.torch.use(engine.step([0, 0], [1, 1])):
        assert module(q, k, v, out=out, lse=lse) is out
    torch.testing.assert_close(out, v.repeat_interleave(2, dim=1))  # one key: its value
    torch.testing.assert_close(lse, (q * k.repeat_interleave(2, dim=1)).sum(-1) / DIM**0.5)


def test_ragged_keys():
    engine = Engine()
    batch = folio.BatchView(torch.tensor([0, 3, 5], dtype=torch.int32),
                            [folio.KvSegment(torch.tensor([3, 2], dtype=torch.int32), source="ragged")])
    step = folio.Step(folio.plan(engine.op, batch, engine.buffer), int32([0, 3, 5]), engine.workspace)
    module = folio.torch.Attention()
    module.bind(folio.Layer(engine.op))
    q, k, v = heads(Q_HEADS, 5), heads(KV_HEADS, 5), heads(KV_HEADS, 5)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), folio.torch.use(step):
        out = compiled(q, ragged=[k, v])
        with pytest.raises(ValueError, match="ragged has 1 tensors"):
            module(q, ragged=[k])
    expected = torch.cat([eager_attention(q[a:b], k[a:b], v[a:b]) for a, b in ((0, 3), (3, 5))])
    torch.testing.assert_close(out, expected)


def test_layers_that_share_a_cache():
    """The second module reads what the first writes; both are ordered by the first one's token."""
    writer, engine = bound_module()
    reader = folio.torch.Attention(kv_from=writer).to(DEVICE)
    reader.bind(folio.Layer(engine.op, folio.make_nhd_view(*engine.caches[writer.name])))
    q, k, v = heads(Q_HEADS), heads(KV_HEADS), heads(KV_HEADS)

    def both(q, k, v):
        return writer(q, k, v) + 2 * reader(q * 0.5)

    torch._dynamo.reset()
    with torch.no_grad(), folio.torch.use(engine.step([0, 0], [1, 1])):
        out = torch.compile(both, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(out, 3 * v.repeat_interleave(2, dim=1))


def test_gradients_are_refused():
    module, engine = bound_module()
    q, k, v = heads(Q_HEADS), heads(KV_HEADS), heads(KV_HEADS)
    with folio.torch.use(engine.step([0, 0], [1, 1])):
        with pytest.raises(RuntimeError, match="q requires a gradient, which Folio does not compute"):
            module(q.clone().requires_grad_(), k, v)
        with pytest.raises(RuntimeError, match="v requires a gradient"):
            module(q, k, v.clone().requires_grad_())
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match="requires a gradient, which Folio does not compute"):
            compiled(q.clone().requires_grad_(), k, v)
        with torch.no_grad():  # a parameter is then a tensor as any other
            out = module(torch.nn.Parameter(q), torch.nn.Parameter(k), v)
    assert not out.requires_grad
    torch.testing.assert_close(out, v.repeat_interleave(2, dim=1))


def test_what_is_missing_is_named():
    module = folio.torch.Attention("lonely")
    q = heads(Q_HEADS)
    with pytest.raises(RuntimeError, match="'lonely' is not bound"):
        module(q)
    engine = Engine(["lonely"])
    module.bind(engine.layer("lonely"))
    with pytest.raises(RuntimeError, match="no step is in use for attention layer 'lonely'"):
        module(q)
    other = Engine()
    with folio.torch.use(other.step([0, 0], [1, 1])), pytest.raises(RuntimeError, match="no step is in use"):
        module(q)
    with folio.torch.use(engine.step([0, 0], [1, 1])):
        with pytest.raises(ValueError, match="v is given without k"):
            module(q, v=q)
        with pytest.raises(folio.InvalidArgument, match="q is float64"):
            module(q.double())
    with pytest.raises(TypeError, match="expected a folio.Layer, got Attention"):
        module.bind(module)


def test_names():
    module = folio.torch.Attention("twice")
    with pytest.raises(ValueError, match="there is an attention layer 'twice' already"):
        folio.torch.Attention("twice")
    assert repr(module) == "Attention('twice', not bound)"
    with pytest.raises(TypeError, match="'twice' cannot be copied or pickled"):
        copy.deepcopy(module)
    del module
    folio.torch.Attention("twice")
    assert folio.torch.Attention().name != folio.torch.Attention().name


def test_steps_of_several_ops():
    """One step for each group of layers; an inner block replaces that of its op alone."""
    first, engine = bound_module()
    second, other = bound_module()
    q, k, v = heads(Q_HEADS), heads(KV_HEADS), heads(KV_HEADS)
    with folio.torch.use(engine.step([0, 0], [1, 1]), other.step([0, 0], [1, 1])):
        first(q, k, v)
        second(q, k, v)
        with folio.torch.use(engine.step([1, 1], [1, 1])):
            first(q, k, 3 * v)
            second(q, k, v)
    assert torch.equal(engine.caches[first.name][1, TABLE[0][0], 1], 3 * v[0])
    assert torch.equal(other.caches[second.name][1, TABLE[0][0], 0], v[0])
    with pytest.raises(ValueError, match="two of them belong to one op"):
        with folio.torch.use(engine.step([0, 0], [1, 1]), engine.step([0, 0], [1, 1])):
            pass
