"""What calls cost on the host: the look-up of a planned view, and a replay: torch's own, through sessile in turn, and beside
the next one with 0, 1, 2 and 4 fences. Each says how many calls of the driver a launch makes, and how many nodes the graph got.

    python examples/torch/call_costs.py
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Callable, Dict, List, Optional

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
    """Of planned views inside a capture: each look-up also asks where the capture stands, and adds no node."""
    times: List[float] = []
    x = torch.zeros(64, device="cuda")
    x.add_(1)
    for _ in range(5):
        storage = GraphStorage()

        def ask(scope: Callable, note: bool) -> None:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                with scope("r"):
                    x.add_(1)
                    begin = time.perf_counter()
                    for _ in range(count):
                        storage.empty((8, 8), torch.float32, role="wgrad_input", weight="w")
                    if note:
                        times.append(1e6 * (time.perf_counter() - begin) / count)

        ask(storage.discover, False)
        storage.seal()
        ask(storage.capture, True)
        storage.free()
    return {"sessile_us": statistics.median(times)}


RUNNERS = 8


def replays(waits: Optional[int]) -> Dict[str, object]:
    """Of graphs of ten kernels: bare; through sessile in turn (``waits`` is None); or each beside the next one, with this many
    fences from the graph before the last."""
    storage = GraphStorage(depth=2, step_cut="wrap")
    stream = torch.cuda.Stream()
    x, y = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
    names = [f"r{at}" for at in range(RUNNERS)]

    def capture(body: Callable[[str], None]) -> List[torch.cuda.CUDAGraph]:
        made = []
        for name in names:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                body(name)
            made.append(graph)
        return made

    def runner(scope: Callable) -> Callable[[str], None]:
        def body(name: str) -> None:
            with scope(name):
                views = []
                for at in range(waits or 0):
                    # A kernel between two of them, else one wait does for both.
                    views.append(storage.empty((256,), torch.float32, weight=f"{at}"))
                    x.add_(1)
                for _ in range(10 - 2 * (waits or 0)):
                    x.add_(1)
                if waits is not None:
                    storage.complete()
                for view in views:
                    y.add_(1)
                    storage.release(view)

        return body

    def plain(name: str) -> None:
        for _ in range(10):
            x.add_(1)

    x.add_(1)
    capture(runner(storage.discover))
    plan = storage.seal()
    graphs = capture(runner(storage.capture))
    bare = capture(plain)

    def time_of(calls: List[Callable[[], object]]) -> float:
        times = []
        for _ in range(200):
            storage.join()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for call in calls:
                call()
            times.append(1e6 * (time.perf_counter() - begin) / len(calls))
        return statistics.median(times)

    def join_of(calls: List[Callable[[], object]]) -> float:
        times = []
        for _ in range(50):
            for call in calls:
                call()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            storage.join()
            times.append(1e6 * (time.perf_counter() - begin))
        return statistics.median(times)

    by_torch = [storage.launcher(name, graph, random=True) for name, graph in zip(names, graphs)]
    found_out = [storage.launcher(name, graph) for name, graph in zip(names, graphs)]
    fixed = [storage.launcher(name, graph, random=False, stream=torch.cuda.current_stream()) for name, graph in zip(names, graphs)]
    for launch in found_out:
        launch()
    records, nodes = storage._core.event_nodes(RUNNERS - 1)
    result = {
        # torch's replay of ten kernels and nothing else: one call of the driver.
        "bare_us": time_of([graph.replay for graph in bare]),
        # torch's replay of sessile's graphs, on one stream: what the nodes of fences cost.
        "bare_with_nodes_us": time_of([graph.replay for graph in graphs]),
        "sessile_us": time_of(found_out),
        # Always behind one stream: torch is not asked for the current one.
        "fixed_stream_us": time_of(fixed),
        # By torch's replay, as for graphs that draw random numbers.
        "by_torch_us": time_of(by_torch),
        "join_us": join_of(found_out),
        "driver_calls": found_out[0].driver_calls,
        "direct": all(launch.direct for launch in found_out),
        "record_nodes": records,
        "wait_nodes": nodes,
        "fences": len(plan.fences),
    }
    result["above_bare_us"] = result["sessile_us"] - result["bare_us"]
    result["above_same_graph_us"] = result["sessile_us"] - result["bare_with_nodes_us"]
    return result


def main() -> None:
    figures = {"look_up": look_ups()}
    figures["look_up"]["ratio"] = figures["look_up"]["sessile_us"] / figures["look_up"]["pure_python_us"]
    if torch.cuda.is_available():
        figures["capture"] = in_capture()
        figures["launch"] = {"in_turn": replays(None)}
        for waits in (0, 1, 2, 4):
            figures["launch"][f"beside, {waits} waits"] = replays(waits)
    json.dump(figures, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
