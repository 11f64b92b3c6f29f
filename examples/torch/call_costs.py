"""What calls cost on the host: the look-up of a planned view, and a replay with and without sessile.

    python examples/torch/call_costs.py
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Callable, Dict, List

import torch

from sessile.torch import GraphStorage


class Alternating:
    """The alternating-arena strategy in pure Python, as a comparison: a bump offset per domain and dtype, views made when
    asked for, totals checked at the end."""

    def __init__(self, device: str, capacity: int, generations: int = 2) -> None:
        self.arenas = [torch.empty(capacity, dtype=torch.float32, device=device) for _ in range(generations)]
        self.offsets: Dict[torch.dtype, int] = {}
        self.generation = 0

    def begin(self, generation: int) -> None:
        """Begins a runner of the generation."""
        self.generation, self.offsets = generation, {torch.float32: 0}

    def empty(self, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
        """The next view."""
        count = 1
        for extent in shape:
            count *= extent
        aligned = (count + 63) // 64 * 64
        start = self.offsets[dtype]
        arena = self.arenas[self.generation]
        if start + aligned > arena.numel():
            raise RuntimeError("capacity exceeded")
        self.offsets[dtype] = start + aligned
        return arena[start : start + count].view(shape)


def microseconds(run: Callable[[], object], calls: int, rounds: int = 15) -> float:
    """Median over rounds of the time of one call."""
    run()
    times: List[float] = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - begin) / calls)
    return statistics.median(times)


def look_ups(count: int = 1000) -> Dict[str, float]:
    """Of planned views, against a pure-Python plan. On the CPU, where nothing is added to a graph."""
    storage = GraphStorage(device="cpu")

    def ask() -> None:
        for _ in range(count):
            storage.empty((8, 8), torch.float32, role="wgrad_input", weight="w")

    with storage.discover("r"):
        ask()
    storage.seal()
    with storage.capture("r"):
        ask()

    def replay() -> None:
        with storage.replay("r"):
            ask()

    other = Alternating("cpu", 64 * count)

    def alternate() -> None:
        other.begin(0)
        for _ in range(count):
            other.empty((8, 8), torch.float32)

    return {"sessile_us": microseconds(replay, count), "pure_python_us": microseconds(alternate, count)}


def in_capture(count: int = 500) -> Dict[str, float]:
    """Of planned views inside a capture, where each also becomes a node of the graph."""
    times = []
    for _ in range(5):
        storage = GraphStorage()

        def ask(scope: Callable) -> None:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                with scope("r"):
                    begin = time.perf_counter()
                    for _ in range(count):
                        storage.empty((8, 8), torch.float32, role="wgrad_input", weight="w")
                    times.append(1e6 * (time.perf_counter() - begin) / count)

        with storage.discover("r"):
            for _ in range(count):
                storage.empty((8, 8), torch.float32, role="wgrad_input", weight="w")
        storage.seal()
        ask(storage.capture)
        storage.free()
    return {"with_node_us": statistics.median(times)}


def replays(fences: int) -> Dict[str, float]:
    """Of a graph of ten kernels, alone, with this many fences around it, and beside the next one."""
    result = {}
    for beside in (False, True):
        storage = GraphStorage(depth=2)
        stream = torch.cuda.Stream()
        x = torch.zeros(1024, device="cuda")
        names = [f"r{at}" for at in range(4)]

        def capture(scope: Callable) -> List[torch.cuda.CUDAGraph]:
            made = []
            for name in names:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    with scope(name):
                        views = [storage.empty((256,), torch.float32, weight=f"{at}") for at in range(fences)]
                        for _ in range(10):
                            x.add_(1)
                        if beside:
                            storage.complete()
                        for view in views:
                            storage.release(view)
                made.append(graph)
            return made

        capture(storage.discover)
        plan = storage.seal()
        graphs = capture(storage.capture)
        launchers = [storage.launcher(name, graph) for name, graph in zip(names, graphs)]
        direct = [storage.launcher(name, graph, random=False) for name, graph in zip(names, graphs)]
        plain = []
        for _ in range(4):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(10):
                    x.add_(1)
            plain.append(graph)

        def time_of(calls: List[Callable[[], None]]) -> float:
            times = []
            for _ in range(60):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for call in calls:
                    call()
                times.append(1e6 * (time.perf_counter() - begin) / len(calls))
            return statistics.median(times)

        base = time_of([graph.replay for graph in plain])
        mine, without = time_of(launchers), time_of(direct)
        storage.join()
        name = "beside" if beside else "in_turn"
        result[name] = {"replay_us": base, "sessile_us": mine, "direct_us": without, "fences": len(plan.fences)}
    return result


def main() -> None:
    figures = {"look_up": look_ups()}
    figures["look_up"]["ratio"] = figures["look_up"]["sessile_us"] / figures["look_up"]["pure_python_us"]
    if torch.cuda.is_available():
        figures["capture"] = in_capture()
        figures["launch"] = replays(4)
    json.dump(figures, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
