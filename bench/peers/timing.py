"""Time of a call of run(layer), in microseconds."""

import time

import torch

CPU_SECONDS = 0.2


class GpuTimer:
    """A CUDA graph of calls over all layers, from event to event."""

    def __init__(self, run, layers):
        self.run = run  # the graph has the addresses of what it holds
        self.calls = max(4, layers)
        run(0)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in range(self.calls):
                run(call % layers)
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def __call__(self):
        self.events[0].record()
        self.graph.replay()
        self.events[1].record()
        torch.cuda.synchronize()
        return self.events[0].elapsed_time(self.events[1]) * 1000 / self.calls


class CpuTimer:
    """Calls for CPU_SECONDS at least. clock: wall, or the CPU time of all threads of the process, for busy machines."""

    def __init__(self, run, layers, clock):
        self.run, self.layers, self.next = run, layers, 0
        self.clock = time.perf_counter if clock == "wall" else time.process_time

    def __call__(self):
        calls, begin = 0, self.clock()
        while True:
            self.run(self.next)
            self.next = (self.next + 1) % self.layers
            calls += 1
            seconds = self.clock() - begin
            if seconds >= CPU_SECONDS:
                return seconds * 1e6 / calls
