"""What folio.flash_attn remembers between calls: shared where nothing has changed, never stale."""

import ctypes
import gc
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import flash_attn_reference as reference  # noqa: E402
import folio  # noqa: E402
from folio.flash_attn import (  # noqa: E402
    check_plans,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    forget_plans,
    plans,
    v3,
)

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture
def planned(monkeypatch):
    """How many plans were made: a list with one entry a plan."""
    made = []
    plan = folio.plan

    def counting(*args, **kwargs):
        made.append(args)
        return plan(*args, **kwargs)

    monkeypatch.setattr(folio, "plan", counting)
    return made


class Model:
    """Layers over pages, whose attention is compared with the reference's."""

    def __init__(self, device, layers=3, seed=0, dtype=torch.float32):
        torch.manual_seed(seed)
        self.caches = [torch.randn(2, 12, 16, 2, 32, device=device, dtype=dtype) for _ in range(layers)]
        self.halves = [tuple(cache.unbind(0)) for cache in self.caches]
        self.q = torch.randn(2, 1, 4, 32, device=device, dtype=dtype)
        self.table = torch.tensor([[3, 7, 1], [0, 11, 5]], dtype=torch.int32, device=device)

    def attend(self, layer, lens):
        k, v = self.halves[layer]
        return flash_attn_with_kvcache(self.q, k, v, cache_seqlens=lens, block_table=self.table, causal=True)

    def exact(self, layer, lens, table=None):
        k, v = self.halves[layer]
        found = []
        for r, n in enumerate(lens):
            pages = (self.table if table is None else table)[r].long()
            rows = k[pages].flatten(0, 1)[:n], v[pages].flatten(0, 1)[:n]
            found.append(reference.attention(self.q[r], *rows, causal=True)[0])
        return torch.stack(found)

    def check(self, layer, lens, expected):
        self.require(self.attend(layer, lens), layer, expected)

    def require(self, out, layer, expected):
        tolerance = reference.tolerances(self.q.dtype, out.dtype, 32, 48, self.halves[layer][1])[0]
        reference.require_close(out, self.exact(layer, expected), tolerance)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_layers_of_a_step_share_a_plan(planned, device):
    model = Model(device)
    for step in range(3):
        lens = int32([20 + step, 3], device)
        for layer in range(3):
            model.check(layer, lens, [20 + step, 3])
        assert len(planned) == step + 1


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_written_into_lengths_is_seen(planned, device):
    model = Model(device)
    lens = int32([20, 3], device)
    writes = [
        lambda: lens.add_(1),
        lambda: lens[1:].add_(5),
        lambda: lens.copy_(int32([40, 1], device)),
        lambda: lens.view(-1, 1).fill_(17),
        lambda: lens.index_fill_(0, torch.tensor([0], device=device), 33),
        lambda: lens.__setitem__(1, 2),
        lambda: setattr(lens, "data", int32([9, 8], device)),
        lambda: lens.set_(int32([30, 31], device)),
    ]
    for number, write in enumerate(writes):
        model.check(0, lens, lens.tolist())
        model.check(1, lens, lens.tolist())
        assert len(planned) == number + 1
        write()
    model.check(1, lens, [30, 31])


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_written_into_a_table_is_seen(device):
    model = Model(device)
    lens = int32([40, 40], device)
    for pages in ([[3, 7, 1], [0, 11, 5]], [[4, 7, 2], [0, 10, 5]], [[9, 9, 9], [8, 6, 4]]):
        model.table.copy_(int32(pages, device))
        for layer in range(2):
            model.check(layer, lens, [40, 40])


def test_lengths_at_an_address_used_before():
    """Another tensor of the same address, shape and version."""
    model = Model("cpu")
    memory = (ctypes.c_int32 * 2)()
    for n in range(1, 41):
        memory[:] = [n, 41 - n]
        lens = torch.frombuffer(memory, dtype=torch.int32)
        assert lens.data_ptr() == ctypes.addressof(memory) and lens._version == 0
        model.check(n % 3, lens, [n, 41 - n])
        model.check((n + 1) % 3, lens, [n, 41 - n])
        del lens


@pytest.mark.parametrize("device", DEVICES)
def test_lengths_that_are_freed(device):
    model = Model(device)
    seen = set()
    for n in range(200):
        lens = int32([n % 40 + 1, 3], device)
        seen.add((lens.data_ptr() if device == "cuda" else id(lens)))
        model.check(n % 3, lens, [n % 40 + 1, 3])
        del lens
    assert len(seen) < 200  # what was freed came again


@pytest.mark.parametrize("device", DEVICES)
def test_more_steps_than_are_kept(planned, device):
    model = Model(device)
    many = plans.Planner.KEPT_STEPS + 3
    steps = [int32([n + 1, 48 - n], device) for n in range(many)]
    for _ in range(2):
        for n, lens in enumerate(steps):
            for layer in range(2):
                model.check(layer, lens, [n + 1, 48 - n])
    assert len(planned) == 2 * many
    family = next(iter(f for f in plans._families.of.values() if f.steps))
    assert len(family.steps) <= plans.Planner.KEPT_STEPS and len(family.short) <= plans.Planner.KEPT_STEPS


@pytest.mark.parametrize("device", DEVICES)
def test_lengths_of_inference_mode_have_no_version(device):
    model = Model(device)
    with torch.inference_mode():
        lens = int32([20, 3], device)
        for step in range(4):
            for layer in range(3):
                model.check(layer, lens, [20 + step, 3 + 2 * step])
            lens += int32([1, 2], device)
    kept = int32([5, 6], device)
    with torch.inference_mode():
        for step in range(3):  # these have one, in inference mode too
            model.check(step, kept, [5 + step, 6])
            kept[0] += 1
        model.attend(0, kept)
        kept.data = int32([7, 1], device)  # from now on it has none
        for layer in (0, 0, 1):
            model.check(layer, kept, [7, 1])


@pytest.mark.parametrize("device", DEVICES)
def test_another_cache_or_shape_takes_no_other_ones_plan(device):
    model = Model(device)
    lens = int32([20, 3], device)
    model.check(0, lens, [20, 3])
    other = torch.randn_like(model.caches[0])
    model.halves[0][0].data, model.halves[0][1].data = other[0], other[1]
    model.check(0, lens, [20, 3])
    model.q = torch.randn(2, 3, 4, 32, device=device)
    model.check(0, lens, [20, 3])
    model.q = model.q[:, :2].double().float()
    model.check(0, lens, [20, 3])
    k, v = model.halves[0]
    rules = [dict(window=(4, 0)), dict(window=(2, 0)), dict(), dict(causal=True), dict(softcap=1.0), dict(scale=0.5)]
    for rule in rules * 2:
        given = {{"window": "window_size", "scale": "softmax_scale"}.get(name, name): rule[name] for name in rule}
        out = flash_attn_with_kvcache(model.q, k, v, cache_seqlens=lens, block_table=model.table, **given)
        for r, n in enumerate((20, 3)):
            pages = model.table[r].long()
            rows = k[pages].flatten(0, 1)[:n], v[pages].flatten(0, 1)[:n]
            exact, _ = reference.attention(model.q[r], *rows, **rule)
            reference.require_close(out[r], exact, reference.tolerances(torch.float32, torch.float32, 32, 48, v)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_slopes_and_sinks_that_change_are_seen(device):
    q, k = torch.randn(1, 2, 2, 32, device=device), torch.randn(1, 5, 2, 32, device=device)
    sinks, slopes = torch.zeros(2, device=device, dtype=torch.bfloat16), torch.ones(1, 2, device=device)
    for _ in range(3):
        out = flash_attn_func(q, k, k, learnable_sink=sinks, alibi_slopes=slopes)
        exact, _ = reference.attention(q[0], k[0], k[0], sinks=sinks.float(), slopes=slopes[0])
        reference.require_close(out[0], exact, reference.tolerances(q.dtype, q.dtype, 32, 5, k)[0])
        sinks += 1
        slopes *= 0.5


def test_a_cache_is_not_kept_alive():
    from folio.flash_attn import attend

    before = set(map(id, attend._layers.found.values()))
    model = Model("cpu", layers=2)
    model.halves[1] = tuple(half.clone() for half in model.halves[1])  # not views of another tensor
    lens = int32([20, 3], "cpu")
    for layer in range(2):
        model.check(layer, lens, [20, 3])
        model.check(layer, lens, [20, 3])
    ends = [weakref.ref(half) for pair in model.halves for half in pair]
    del model
    gc.collect()
    assert [end() for end in ends] == [None] * 4
    assert not [layer for layer in attend._layers.found.values() if layer.view is not None and id(layer) not in before]


def test_numbers_are_not_found_by_their_ids():
    """numpy's are objects that end, and the next one has their address."""
    model = Model("cpu")
    cache = torch.randn(2, 16, 2, 32)
    for n in list(range(1, 17)) * 3:
        out = flash_attn_with_kvcache(model.q, cache, cache, cache_seqlens=np.int64(n))
        exact = flash_attn_with_kvcache(model.q, cache, cache, cache_seqlens=int32([n, n], "cpu"))
        assert torch.equal(out, exact), n


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_in_place_of_numbers(device):
    """A scale and a window of tensors, written in place; and bounds."""
    q, k = torch.randn(1, 4, 2, 32, device=device), torch.randn(1, 9, 2, 32, device=device)
    scale, left = torch.tensor(0.25), torch.tensor(1)
    cu, bound = int32([0, 4], device), torch.tensor(4)
    for _ in range(2):
        for _ in range(2):
            out = flash_attn_func(q, k, k, softmax_scale=scale, window_size=(left, 0))
            exact, _ = reference.attention(q[0], k[0], k[0], scale=float(scale), window=(int(left), 0))
            reference.require_close(out[0], exact, reference.tolerances(q.dtype, q.dtype, 32, 9, k)[0])
            flash_attn_varlen_func(q[0], k[0], k[0], cu, int32([0, 9], device), bound, 9)
        scale *= 3
        left += 2
    bound -= 1
    if device == "cpu":
        with pytest.raises(folio.InvalidArgument, match="max_q_len"):
            flash_attn_varlen_func(q[0], k[0], k[0], cu, int32([0, 9], device), bound, 9)


@pytest.mark.parametrize("device", DEVICES)
def test_keys_with_and_without_one_stride(device):
    """Calls that differ in strides alone alternate: pages and ragged keys."""
    q = torch.randn(2, 3, 4, 32, device=device)
    joined, apart = torch.randn(2, 5, 2, 32, device=device), torch.randn(2, 2, 5, 32, device=device).transpose(1, 2)
    for k in (apart, joined, apart, joined):
        for _ in range(2):
            out = flash_attn_func(q, k, k)
            for r in range(2):
                exact, _ = reference.attention(q[r], k[r], k[r])
                reference.require_close(out[r], exact, reference.tolerances(q.dtype, q.dtype, 32, 5, k)[0])


def test_another_device_takes_no_other_ones_layer():
    q, k = torch.randn(2, 3, 4, 32), torch.randn(2, 5, 2, 32)
    for _ in range(2):
        flash_attn_func(q, k, k)
        flash_attn_func(q, k, k, softcap=2.0, return_softmax_lse=True)
    for given in ({}, dict(softcap=2.0, return_softmax_lse=True)):
        with pytest.raises(ValueError, match="q lies on meta"):
            flash_attn_func(q.to("meta"), k.to("meta"), k.to("meta"), **given)


@needs_gpu
def test_devices_take_turns():
    q, k = torch.randn(2, 3, 4, 32), torch.randn(2, 5, 2, 32)
    for _ in range(3):
        outs = [flash_attn_func(q.to(device), k.to(device), k.to(device)).cpu() for device in ("cpu", "cuda")]
        assert torch.allclose(*outs, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_descales_that_change_are_seen(device):
    """Those whose strides are read in place, and those that are copied; with requests that seqused_q divides too."""
    q, k = (torch.randn(6, h, 64, device=device).to(torch.float8_e4m3fn) for h in (4, 2))
    cu, used = int32([0, 3, 6], device), int32([2, 3], device)
    forms = [torch.rand(2, 2, device=device), torch.rand(2, 2, device=device).t(), torch.rand(2, 4, device=device)[:, ::2],
             torch.rand(2, 1, device=device).expand(2, 2), torch.rand(1, device=device).expand(2, 2)]
    for scale in forms:
        for given in ({}, dict(seqused_q=used)):
            for _ in range(3):
                out = v3.flash_attn_varlen_func(q, k, k, cu, cu, 3, 3, v_descale=scale, k_descale=scale, **given)
                fresh = scale.clone(memory_format=torch.contiguous_format)
                exact = v3.flash_attn_varlen_func(q, k, k, cu, cu, 3, 3, v_descale=fresh, k_descale=fresh, **given)
                assert torch.equal(out, exact)
                (scale._base if scale._base is not None else scale).mul_(1.5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_that_is_transposed_in_place(device):
    q, lens = torch.randn(2, 1, 2, 32, device=device), int32([2, 1], device)
    cache = torch.randn(2, 2, 2, 32, device=device)  # as many KV heads as tokens
    for _ in range(4):
        for _ in range(2):
            out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lens)
            for r, n in enumerate((2, 1)):
                exact, _ = reference.attention(q[r], cache[r, :n], cache[r, :n])
                reference.require_close(out[r], exact, reference.tolerances(q.dtype, q.dtype, 32, 2, cache)[0])
        cache.transpose_(1, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_fits_each_layers_cache(device):
    """A cache without a table has a sequence for each request; another layer's may have fewer."""
    q, lens = torch.randn(2, 1, 4, 32, device=device), int32([7, 3], device)
    one, two = torch.randn(1, 16, 2, 32, device=device), torch.randn(2, 16, 2, 32, device=device)
    flash_attn_with_kvcache(q[:1], one, one, cache_seqlens=lens[:1])
    for _ in range(2):
        flash_attn_with_kvcache(q, two, two, cache_seqlens=lens)
        with pytest.raises(ValueError, match="k_cache has 1 sequences; this batch needs 2"):
            flash_attn_with_kvcache(q, one, one, cache_seqlens=lens)


def test_sinks_of_inference_mode_do_not_pile_up():
    from folio.flash_attn import attend

    q, k = torch.randn(1, 2, 2, 32), torch.randn(1, 5, 2, 32)
    before = len(attend._layers.found)
    with torch.inference_mode():
        sinks = torch.zeros(2)
        for n in range(3):
            out = flash_attn_func(q, k, k, learnable_sink=sinks)
            exact, _ = reference.attention(q[0], k[0], k[0], sinks=sinks)
            reference.require_close(out[0], exact, reference.tolerances(q.dtype, q.dtype, 32, 5, k)[0])
            sinks += 1
    assert len(attend._layers.found) <= before


def test_what_is_written_behind_torchs_back():
    model = Model("cpu")
    lens = int32([20, 3], "cpu")
    model.check(0, lens, [20, 3])
    (ctypes.c_int32 * 2).from_address(lens.data_ptr())[:] = [7, 30]
    forget_plans()
    model.check(0, lens, [7, 30])


def test_threads_share_nothing():
    errors = []

    def work(seed):
        try:
            model = Model("cpu", seed=seed)
            lens = int32([1, 1], "cpu")
            for n in range(1, 30):
                for layer in range(3):
                    model.check(layer, lens, [n, n])
                lens += 1
        except Exception as error:  # noqa: BLE001: reported below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


@pytest.mark.parametrize("device", DEVICES)
def test_varlen_steps(planned, device):
    torch.manual_seed(1)
    q, k, v = (torch.randn(12, h, 32, device=device) for h in (4, 2, 2))
    cu = int32([0, 5, 12], device)
    for step, begin in enumerate((5, 8, 1)):
        cu[1] = begin
        for _ in range(3):
            out = flash_attn_varlen_func(q, k, v, cu, cu, 11, 11, causal=True)
            for rows in (slice(0, begin), slice(begin, 12)):
                exact, _ = reference.attention(q[rows], k[rows], v[rows], causal=True)
                reference.require_close(out[rows], exact, reference.tolerances(q.dtype, q.dtype, 32, 12, v)[0])
        assert len(planned) == step + 1


def test_lengths_that_do_not_fit_are_named_and_nothing_is_written():
    model = Model("cpu")
    k, v = model.halves[0]
    before = model.caches[0].clone()
    new = torch.ones(2, 1, 2, 32)
    for lens in ([48, 3], [3, -1], [3, 49]):
        with pytest.raises(ValueError):
            flash_attn_with_kvcache(model.q, k, v, new, new, cache_seqlens=int32(lens, "cpu"), block_table=model.table)
        assert torch.equal(model.caches[0], before)
    model.check(0, int32([20, 3], "cpu"), [20, 3])


@needs_gpu
def test_a_gpu_reports_lengths_beyond_the_cache():
    model = Model("cuda")
    lens = int32([20, 49], "cuda")
    out = model.attend(0, lens)
    torch.cuda.synchronize()
    assert not out[1].any() and out[0].any()
    with pytest.raises(folio.InvalidArgument, match="49"):
        check_plans()
    check_plans()


@needs_gpu
def test_a_graph_plans_the_lengths_of_its_replay():
    model = Model("cuda", dtype=torch.bfloat16)
    lens = int32([20, 3], "cuda")
    for layer in range(3):
        model.check(layer, lens, [20, 3])
    graphs, outs = [], []
    for _ in range(2):  # the second one finds no plan of the first, though lengths have not changed
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append([model.attend(layer, lens) for layer in range(3)])
        graphs.append(graph)
    for values in ([20, 3], [41, 48], [1, 0]):
        for graph, out in zip(graphs, outs):
            lens.copy_(int32([7, 7], "cuda"))
            model.check(0, lens, [7, 7])
            lens.copy_(int32(values, "cuda"))
            graph.replay()
            for layer in range(3):
                model.require(out[layer], layer, values)
    lens.copy_(int32([11, 12], "cuda"))
    model.check(0, lens, [11, 12])
    check_plans()


@needs_gpu
def test_a_graph_of_inference_mode_with_appended_tokens():
    """As engines do it: static inputs of inference mode, a warm-up run, a capture, replays."""
    with torch.inference_mode():
        model = Model("cuda", dtype=torch.bfloat16)
        lens, new = int32([20, 3], "cuda"), torch.zeros(2, 1, 2, 32, device="cuda", dtype=torch.bfloat16)

        def step():
            return [
                flash_attn_with_kvcache(model.q, *model.halves[layer], new, new, cache_seqlens=lens,
                                        block_table=model.table, causal=True)
                for layer in range(3)
            ]

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = step()
        for values in ([20, 3], [30, 47], [0, 1]):
            lens.copy_(int32(values, "cuda"))
            new.copy_(torch.randn_like(new))
            graph.replay()
            for layer in range(3):
                k = model.halves[layer][0]
                for r, n in enumerate(values):
                    page = int(model.table[r, n // 16])
                    assert torch.equal(k[page, n % 16], new[r, 0])
                model.require(outs[layer], layer, [n + 1 for n in values])


@needs_gpu
def test_a_capture_without_a_run_before_it_is_refused():
    q = torch.randn(3, 1, 6, 64, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(2, 7, 16, 6, 64, device="cuda", dtype=torch.bfloat16)
    lens = int32([1, 2, 3], "cuda")
    table = torch.zeros(3, 5, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match="must run once before it is captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            flash_attn_with_kvcache(q, cache[0], cache[1], cache_seqlens=lens, block_table=table)
