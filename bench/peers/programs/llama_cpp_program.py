"""llama.cpp's attention on a CPU: ggml_flash_attn_ext, from whichever package has ggml's shared libraries."""

import ctypes
import importlib.util
import itertools
import pathlib

import torch

from programs import Refused

PACKAGES = "llama_cpp", "llama_cpp_py_sync"  # llama-cpp-python, llama-cpp-py-sync
F32, F16, Q8_0 = 0, 1, 8  # enum ggml_type
CPU_DEVICE = 0  # enum ggml_backend_dev_type


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


SIZE, POINTER, INT, LONG, FLOAT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "ggml_backend_load_all_from_path": (None, ctypes.c_char_p),
    "ggml_backend_init_by_type": (POINTER, INT, ctypes.c_char_p),
    "ggml_backend_get_device": (POINTER, POINTER),
    "ggml_backend_dev_backend_reg": (POINTER, POINTER),
    "ggml_backend_reg_get_proc_address": (POINTER, POINTER, ctypes.c_char_p),
    "ggml_backend_cpu_buffer_from_ptr": (POINTER, POINTER, SIZE),
    "ggml_backend_buffer_free": (None, POINTER),
    "ggml_backend_tensor_alloc": (INT, POINTER, POINTER, POINTER),
    "ggml_backend_view_init": (INT, POINTER),
    "ggml_backend_graph_compute": (INT, POINTER, POINTER),
    "ggml_init": (POINTER, InitParams),
    "ggml_free": (None, POINTER),
    "ggml_tensor_overhead": (SIZE,),
    "ggml_graph_overhead": (SIZE,),
    "ggml_row_size": (SIZE, INT, LONG),
    "ggml_new_tensor_4d": (POINTER, POINTER, INT, LONG, LONG, LONG, LONG),
    "ggml_permute": (POINTER, POINTER, POINTER, INT, INT, INT, INT),
    "ggml_flash_attn_ext": (POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, FLOAT, FLOAT, FLOAT),
    "ggml_quantize_chunk": (SIZE, INT, POINTER, POINTER, LONG, LONG, LONG, POINTER),
    "ggml_new_graph": (POINTER, POINTER),
    "ggml_build_forward_expand": (None, POINTER, POINTER),
}


def load_ggml():
    """The library with every function of SIGNATURES; its CPU backend is loaded too, the best one for this machine."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations if spec else ():
            for path in sorted(pathlib.Path(folder).rglob("libggml.so*")):
                library = ctypes.CDLL(str(path))
                for name, (result, *arguments) in SIGNATURES.items():
                    function = getattr(library, name)
                    function.restype, function.argtypes = result, arguments
                library.ggml_backend_load_all_from_path(str(path.parent).encode())  # where backends are plugins
                return library
    raise RuntimeError(f"no package of {', '.join(PACKAGES)} has ggml's libraries")


class Memory:
    """Tensors of ggml over torch's memory, and what they live in."""

    def __init__(self, ggml, tensors):
        self.ggml, self.kept = ggml, []
        size = tensors * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead()
        self.context = ggml.ggml_init(InitParams(size, None, True))

    def __del__(self):
        for buffer, _ in self.kept:
            self.ggml.ggml_backend_buffer_free(buffer)
        self.ggml.ggml_free(self.context)

    def place(self, tensor, data):
        buffer = self.ggml.ggml_backend_cpu_buffer_from_ptr(data.data_ptr(), data.nbytes)
        self.kept.append((buffer, data))
        self.ggml.ggml_backend_tensor_alloc(buffer, tensor, data.data_ptr())
        return tensor

    def tensor(self, data, kind, shape):
        """shape: the innermost dimension first."""
        return self.place(self.ggml.ggml_new_tensor_4d(self.context, kind, *shape), data)

    def heads_outside(self, data, kind, shape):
        """A view [dim, tokens, heads, requests] of data [requests, tokens, heads, dim]."""
        view = self.ggml.ggml_permute(self.context, self.tensor(data, kind, shape), 0, 2, 1, 3)
        self.ggml.ggml_backend_view_init(view)
        return view


class LlamaCpp:
    """Each request's keys lie densely in a stream of its own, as llama.cpp's unshared caches have them. One operation takes
    neighbouring requests of equal lengths; a mask says what is causal. As in a cache of a window, keys that no query sees
    are left out."""

    name = "llama_cpp"
    kv_type = F16  # llama.cpp's own choice
    largest_error = 5e-2  # decode adds weighted V in 16 bits: 1.9e-2 over 16,384 keys on one thread

    def __init__(self, device):
        if device != "cpu":
            raise RuntimeError("its kernels are timed on the CPU")
        self.ggml = load_ggml()
        self.backend = self.ggml.ggml_backend_init_by_type(CPU_DEVICE, None)
        if not self.backend:
            raise RuntimeError("ggml has no CPU backend for this machine")
        registry = self.ggml.ggml_backend_dev_backend_reg(self.ggml.ggml_backend_get_device(self.backend))
        set_threads = self.ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, POINTER, INT)(set_threads)(self.backend, torch.get_num_threads())

    def prepare(self, problem):
        if problem.row.mla:
            raise Refused("MLA is not timed with it")
        q = problem.q.float()
        out = torch.full(problem.out.shape, torch.nan, dtype=torch.float32)
        graphs = [self._graph(problem, layer, q, out) for layer in range(len(problem.caches))]

        def run(layer):
            status = self.ggml.ggml_backend_graph_compute(self.backend, graphs[layer][0])
            if status != 0:
                raise RuntimeError(f"ggml_backend_graph_compute answers {status}")
            return out

        return run

    def _graph(self, problem, layer, q, out):
        row = problem.row
        groups = [(lengths, [request for request, _ in each]) for lengths, each in itertools.groupby(
            enumerate(zip(row.q_lens, row.kv_lens)), key=lambda request: request[1])]
        memory = Memory(self.ggml, 8 * len(groups))
        graph = self.ggml.ggml_new_graph(memory.context)
        for (q_len, kv_len), requests in groups:
            first = max(0, kv_len - q_len + 1 - row.window) if row.window else 0
            tokens = slice(int(problem.cu_q[requests[0]]), int(problem.cu_q[requests[-1] + 1]))
            caches = zip(*(problem.keys_and_values(request, layer) for request in requests))
            k, v = (self._kv(memory, torch.stack(each)[:, first:]) for each in caches)
            mask = memory.tensor(hidden_keys(q_len, kv_len, first, row.window), F16, (kv_len - first, q_len, 1, 1))
            queries = memory.heads_outside(q[tokens], F32, (row.dim, row.q_heads, q_len, len(requests)))
            node = self.ggml.ggml_flash_attn_ext(memory.context, queries, k, v, mask, problem.sm_scale, 0.0, row.soft_cap)
            self.ggml.ggml_build_forward_expand(graph, memory.place(node, out[tokens]))
        return graph, memory

    def _kv(self, memory, rows):
        requests, keys, heads, dim = rows.shape
        return memory.heads_outside(self._converted(rows), self.kv_type, (dim, heads, keys, requests))

    def _converted(self, rows):
        return rows.half(memory_format=torch.contiguous_format)


class LlamaCppQ8(LlamaCpp):
    """Over a cache of 8-bit integers, a scale for every 32 of them. Queries are rounded likewise."""

    name = "llama_cpp_q8_0"
    kv_type = Q8_0  # the error of Q, K and V alone is about 1e-2

    def prepare(self, problem):
        if problem.row.dim % 32:
            raise Refused("blocks have 32 components")
        return super().prepare(problem)

    def _converted(self, rows):
        values = rows.float(memory_format=torch.contiguous_format)
        dim, vectors = rows.shape[-1], rows.shape[:-1].numel()
        data = torch.empty(vectors * self.ggml.ggml_row_size(Q8_0, dim), dtype=torch.uint8)
        self.ggml.ggml_quantize_chunk(Q8_0, values.data_ptr(), data.data_ptr(), 0, vectors, dim, None)
        return data


def hidden_keys(q_len, kv_len, first, window):
    """[queries, keys from `first` on]: minus infinity where a query sees no key, else 0."""
    query = torch.arange(kv_len - q_len, kv_len)[:, None]
    key = torch.arange(first, kv_len)
    hidden = key > query
    if window:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape, dtype=torch.float16).masked_fill_(hidden, -torch.inf)
