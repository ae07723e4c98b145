"""One layer of continuous batching, called as transformers calls it: slots, windows, padding, and steps told apart.

Device steps, whose lengths transformers keeps on a GPU, run here over CPU tensors too: the same tables and bounds. With
FOLIO_TEST_DEVICE=cuda all is on a GPU.
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: scripts/install_deps.sh python-engines")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import folio.integrations.transformers as integration  # noqa: E402: after the skips
import tiny_models  # noqa: E402
from folio.integrations.transformers import paged  # noqa: E402
from folio.integrations.transformers.paged_steps import DeviceStep, HostStep  # noqa: E402

integration.register()

DEVICE = tiny_models.DEVICE
BLOCK, SLOTS, KV_HEADS, HEADS, DIM = 4, 64, 2, 4, 16
READ_TRASH, SENTINEL, WRITE_TRASH = SLOTS, SLOTS + 1, SLOTS + BLOCK


class Cache:
    """The part of transformers' PagedAttentionCache that attention sees: one group of two layers."""

    def __init__(self, window):
        generator = torch.Generator(DEVICE).manual_seed(1)
        shape = SLOTS + 2 * BLOCK, KV_HEADS, DIM
        halves = [torch.randn(shape, generator=generator, device=DEVICE) for _ in range(4)]
        self.key_cache, self.value_cache = halves[:2], halves[2:]
        self.layer_index_to_group_indices = {0: (0, 0), 1: (0, 1)}
        self.sliding_windows = {0: window or 1, 1: window or 1}
        self.block_size = BLOCK


class Module(torch.nn.Module):
    is_causal = True

    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx


class Step:
    """Requests (tokens held, new tokens), each in slots of its own, and the arguments of its layer call."""

    def __init__(self, requests, window=None, padded=False, seed=2):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self.requests, self.window = requests, window
        self.order = torch.randperm(SLOTS // BLOCK, generator=generator, device=DEVICE)
        tokens = sum(new for _, new in requests)
        q_len, k_len, read, write = [], [], [], []
        for index, (past, new) in enumerate(requests):
            slots = self.slots(index)
            if window:
                held = min(past, window - 1)
                kept = [int(slots[at % window]) for at in range(past - held, past)]
                trash = max(new - window, 0)
                read += kept + [SENTINEL] * new
                write += [WRITE_TRASH] * trash + [int(slots[at % window]) for at in range(past + trash, past + new)]
                k_len.append(held + new)
            else:
                read += slots[: past + new].tolist()
                write += slots[past : past + new].tolist()
                k_len.append(past + new)
            q_len.append(new)
        if padded:
            tokens, q_len, k_len = tokens + 5, q_len + [0, 0], k_len + [0, 0]
            read, write = read + [READ_TRASH] * 9, write + [WRITE_TRASH] * 5
        self.q = torch.randn(1, HEADS, tokens, DIM, generator=generator, device=DEVICE)
        self.k, self.v = (torch.randn(1, KV_HEADS, tokens, DIM, generator=generator, device=DEVICE) for _ in range(2))
        self.arguments = dict(
            cu_seq_lens_q=torch.tensor([0, *q_len], device=DEVICE).cumsum(0, dtype=torch.int32),
            cu_seq_lens_k=torch.tensor([0, *k_len], device=DEVICE).cumsum(0, dtype=torch.int32),
            max_seqlen_q=tokens if padded else max(q_len),
            max_seqlen_k=max(k_len),
            read_index=[torch.tensor(read if any(past for past, _ in requests) else [], dtype=torch.int64, device=DEVICE)],
            write_index=[torch.tensor(write, device=DEVICE)],
        )

    def slots(self, index):
        """Three blocks a request."""
        blocks = self.order[3 * index : 3 * index + 3]
        return (blocks[:, None] * BLOCK + torch.arange(BLOCK, device=DEVICE)).reshape(-1)

    def run(self, cache, layer=0, **changes):
        given = {**self.arguments, "cache": cache, "attention_mask": None, "scaling": 0.25, **changes}
        return paged.paged_attention(Module(layer), self.q, self.k, self.v, **given)[0]

    def expected(self, cache, layer=0):
        """Of the cache before the call: one request and head at a time."""
        out, first = [], 0
        for index, (past, new) in enumerate(self.requests):
            slots = self.slots(index)
            held = [int(slots[at % self.window if self.window else at]) for at in range(past)]
            rows = slice(first, first + new)
            first += new
            halves = []
            for store, given in ((cache.key_cache[layer], self.k), (cache.value_cache[layer], self.v)):
                whole = torch.cat([store[held], given[0, :, rows].transpose(0, 1)])
                halves.append(whole.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1).double())
            at = torch.arange(past + new, device=DEVICE)
            hidden = at > past + torch.arange(new, device=DEVICE)[:, None]
            if self.window:
                hidden |= at <= past + torch.arange(new, device=DEVICE)[:, None] - self.window
            scores = self.q[0, :, rows].double() @ halves[0].transpose(1, 2) * 0.25
            out.append((scores.masked_fill(hidden, -torch.inf).softmax(2) @ halves[1]).transpose(0, 1))
        return torch.cat(out)


BATCHES = {"decodes": [(7, 1), (4, 1), (11, 1)], "mixed": [(5, 3), (0, 6), (8, 1)], "prompts": [(0, 9), (0, 4)]}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("where", ["host", "device", "padded"] if DEVICE.type == "cpu" else ["device", "padded"])
def test_attention_over_slots(batch, window, where, monkeypatch):
    if where != "host" and DEVICE.type == "cpu":
        monkeypatch.setattr(paged, "HostStep", DeviceStep)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cache, step = Cache(window), Step(BATCHES[batch], window, padded=where == "padded")
    expected = step.expected(cache)
    before = cache.key_cache[0].clone()
    out = step.run(cache)
    tokens = len(expected)
    # float32: 16 products of a logit and at most 12 keys, each of size up to 5
    assert (out[:tokens] - expected).abs().max() < 4 * (16 + 12) * 25 * 2.0**-24
    assert not out[tokens:].any()
    written = step.arguments["write_index"][0][:tokens]
    kept = written < SLOTS
    assert torch.equal(cache.key_cache[0][written[kept]], step.k[0].transpose(0, 1)[:tokens][kept])
    others = torch.ones(SLOTS, dtype=torch.bool, device=DEVICE)
    others[written[kept]] = False
    assert torch.equal(cache.key_cache[0][:SLOTS][others], before[:SLOTS][others])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="device steps are recognised by their objects, not by what they hold")
@pytest.mark.parametrize("window", [None, 6])
def test_buffers_written_in_place_are_a_new_step(window):
    """transformers' buffers are static: what was planned for one step must not serve the next."""
    cache, first = Cache(window), Step([(7, 1), (4, 1)], window)
    second = Step([(4, 1), (7, 1)], window, seed=3)
    first.run(cache)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        first.arguments[name].copy_(second.arguments[name])
    for name in ("read_index", "write_index"):
        first.arguments[name][0].copy_(second.arguments[name][0])
    first.q, first.k, first.v = second.q, second.k, second.v
    for layer in (1, 0):
        expected = second.expected(cache, layer)
        assert (first.run(cache, layer) - expected).abs().max() < 1e-4


def one_decode():
    """Lengths and slots of a request's eighth token."""
    lengths = (torch.tensor([0, length], dtype=torch.int32) for length in (1, 8))
    return [*lengths, torch.arange(8), torch.tensor([7])]


def test_layers_of_a_group_share_a_step():
    given = one_decode()
    host = HostStep(given, (1, 8), 1, BLOCK, windowed=False)
    assert host.writes_first and host.page_size == BLOCK
    assert host.is_that_of([array.clone() for array in given], again=True)
    given[2][3] += 1  # slots that are no whole blocks are pages of one token
    assert not host.is_that_of(given, again=False)
    assert HostStep(given, (1, 8), 1, BLOCK, windowed=False).page_size == 1


def test_device_steps_are_told_apart_by_their_objects(monkeypatch):
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    given = one_decode()
    step = DeviceStep(given, (1, 8), 1, BLOCK, windowed=False)
    assert step.is_that_of(given, again=False)
    assert not step.is_that_of(given, again=True)  # a forward run again with the same arguments
    assert not step.is_that_of([array[:] for array in given], again=False)
    capturing = True
    assert not step.is_that_of(given, again=False)


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(attention_mask=torch.zeros(1)), "takes no attention_mask"),
        (dict(block_table=torch.zeros(1)), "takes no block_table"),
        (dict(is_causal=False), "for causal attention"),
        (dict(dropout=0.5), "for inference"),
    ],
)
def test_refusals_write_nothing(changes, message):
    cache = Cache(None)
    before = cache.key_cache[0].clone()
    with pytest.raises(NotImplementedError, match=message):
        Step([(3, 1)]).run(cache, **changes)
    assert torch.equal(cache.key_cache[0], before)
